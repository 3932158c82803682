"""A run's sessions: each has a higher epoch than the one before, so that what is left of that is told apart."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import PeerError
from hetero.run import Run
from hetero.spec import RecoverySpec
from hetero.stopping import Stop


def test_every_session_has_a_higher_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """Kills do not show it, since each session has connections of its own."""
    epochs: list[int] = []

    def session(epoch: int, *_: Any) -> None:
        epochs.append(epoch)
        if len(epochs) < 4:
            raise PeerError("is gone", stage=1, lost=True)

    run = types.SimpleNamespace(
        resolved=types.SimpleNamespace(config=types.SimpleNamespace(recovery=RecoverySpec(wait_s=60))),
        start=types.SimpleNamespace(step=0, state={}),
        launched=None,
        spec=None,
        result=types.SimpleNamespace(adapter_dir=Path("run/adapter")),
        _tracing=types.SimpleNamespace(write=lambda *_: None),
        stop=Stop(),
        _joined=True,
        _session=session,
        _last_step=lambda: len(epochs),
        _go_back=lambda: (0, {}),
    )
    run._through_all_sessions = lambda: Run._through_all_sessions(run)  # type: ignore[arg-type]
    Run.through_all_sessions(run)  # type: ignore[arg-type]
    assert epochs == [1, 2, 3, 4]

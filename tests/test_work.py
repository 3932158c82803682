"""What a worker keeps between sessions."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from conftest import Tiny
from pipeline import make_spec

from hetero.member import Member
from hetero.spec import WorkerSpec
from hetero.watchdog import Progress
from hetero.work import StageBuilder


def built(spec_of: Path, builder: StageBuilder) -> weakref.ref[object]:
    """Leaves a stage with a builder as a session does; gives a weak reference to its model."""
    spec = make_spec(spec_of, (3,))
    member = Member(spec, 1, model_path=spec_of, device_name="cpu", progress=Progress(step_s=60.0))
    builder._kept = ("run", spec.digest(), 1), member
    return weakref.ref(member.stage.model)


def test_a_stage_is_kept_for_the_runs_next_session_and_gone_after_the_run(tiny: Tiny) -> None:
    """Its modules and their hooks refer to each other: it would stay until Python looks for such circles."""
    builder = StageBuilder(WorkerSpec(port=0), ())
    gc.disable()
    try:
        model = built(tiny("llama"), builder)
        builder.ended(over=False)
        assert model() is not None and builder._kept is not None
        builder.ended(over=True)
        assert model() is None
    finally:
        gc.enable()


def test_a_stage_of_another_run_is_gone_before_the_next_is_built(tiny: Tiny) -> None:
    builder = StageBuilder(WorkerSpec(port=0), ())
    gc.disable()
    try:
        model = built(tiny("llama"), builder)
        builder._kept = None
        assert model() is not None  # in circles
        built(tiny("llama"), builder)
        assert model() is None
    finally:
        gc.enable()

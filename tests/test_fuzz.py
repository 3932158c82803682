"""The fuzz target of tests/fuzz, for a moment; by hand it runs for as long as one likes."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hetero.wire.headers import FrameType as T


@pytest.fixture(scope="module")
def frames() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_frames", Path(__file__).parent / "fuzz" / "frames.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.path[:]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def test_mutated_inputs_raise_the_protocol_s_error_alone_and_leave_no_memory(frames: ModuleType) -> None:
    accepted, held = frames.loop(3_000, seed=1)
    assert 60 < accepted < 2_850  # both ways are taken, so the mutations reach deep
    assert held < 1 << 20


def test_every_seed_is_accepted_somewhere(frames: ModuleType) -> None:
    settings = range(len(frames.SETTINGS))
    accepted = {t for t in frames.FrameType if any(frames.parse(bytes([s]) + frames.raw_frame(t)) for s in settings)}
    follow = {T.FORWARD: T.STEP, T.HIDDEN: T.PROMPT, T.ENDED: T.PROMPT}
    assert set(T) - accepted == follow.keys()
    for type_, before in follow.items():
        both = b"".join(frames.raw_frame(t) for t in (before, type_))
        assert any(frames.parse(bytes([s]) + both) for s in settings)


def test_finding_would_be_seen(frames: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exec"), frames.nothing_is_run():
        eval("1")
    with pytest.raises(AssertionError, match="open"), frames.nothing_is_run():
        (tmp_path / "file").write_text("x")
    with pytest.raises(AssertionError, match="open"), frames.nothing_is_run():
        os.close(os.open(tmp_path / "file", os.O_WRONLY))
    with frames.nothing_is_run():
        (tmp_path / "file").read_text()
    with pytest.raises(AssertionError, match="open"), frames.nothing_is_run(may_read=False):
        (tmp_path / "file").read_text()
    held: list[bytes] = []

    def leak(raw: bytes) -> bool:
        held.append(bytes(2000))
        return True

    monkeypatch.setattr(frames, "parse", leak)
    with pytest.raises(AssertionError, match="bytes are held"):
        frames.loop(1_000)

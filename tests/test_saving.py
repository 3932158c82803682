"""When checkpoints are written, and what becomes of a run whose checkpoints cannot be."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import metrics, run_here, train_here
from resuming import COMMON, SINGLE, assert_equal
from safetensors.torch import load_file, save_file
from threads import hardware_of, worker_threads

from hetero import saving
from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.errors import CheckpointError
from hetero.saving import Saver
from hetero.spec import CheckpointSpec

KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class RefusingStore(CheckpointStore):
    """A disk that refuses some saves, counted from 1."""

    def __init__(self, folder: Path, refused: set[int]) -> None:
        super().__init__(folder)
        self.refused, self.calls = refused, 0

    def save(self, snapshot: Snapshot) -> Path:
        self.calls += 1
        if self.calls in self.refused:
            raise CheckpointError(f"the checkpoint of step {snapshot.step} could not be written: the disk is full")
        return super().save(snapshot)


@contextlib.contextmanager
def saver_of(store: CheckpointStore | None, **spec: Any) -> Iterator[Saver]:
    saver = Saver(store, CheckpointSpec(**spec), {})
    try:
        yield saver
    finally:
        saver.close()


def save(saver: Saver, step: int, value: float = 1.0) -> None:
    """Everything of a run of one stage comes in and is written."""
    saver.begin(step, {0: {KEY: [2]}}).part(0, {f"adapter:{KEY}": torch.full((2,), value)})
    saver.settle()


def test_checkpoint_is_due_by_steps_or_by_time_whichever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(saving, "time", clock)
    with saver_of(CheckpointStore(tmp_path), every_steps=5, every_minutes=2) as saver:
        due = []
        for step in range(1, 21):
            clock.now += 50 if step > 10 else 1
            if saver.due(step):
                due.append(step)
                save(saver, step)
        assert due == [5, 10, 13, 15, 18, 20]
    with saver_of(CheckpointStore(tmp_path), every_minutes=0.5) as saver:
        assert not saver.due(7)
        clock.now += 30
        assert saver.due(7) and saver.due(8)
        save(saver, 8)
        assert not saver.due(9)


def test_without_a_store_nothing_is_ever_due() -> None:
    with saver_of(None, every_steps=1) as saver:
        assert not any(saver.due(step) for step in range(5))


def test_three_failures_in_a_row_end_the_run_and_a_success_between_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RefusingStore(tmp_path, {1, 2, 4, 5, 6})
    with saver_of(store, every_steps=1) as saver:
        for step in range(1, 7):
            assert saver.due(step)
            save(saver, step)
        assert saver.last_saved == 3 and store.steps() == [3]
        with pytest.raises(CheckpointError, match=r"^3 checkpoints in a row could not be written, see the warnings"):
            saver.due(7)
    assert len(caplog.messages) == 5 and all("the disk is full" in line for line in caplog.messages)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_saved(tmp_path: Path, value: float, caplog: pytest.LogCaptureFixture) -> None:
    with saver_of(CheckpointStore(tmp_path), every_steps=1) as saver:
        save(saver, 1)
        save(saver, 2, value)
        assert saver.last_saved == 1
    assert CheckpointStore(tmp_path).steps() == [1]
    assert caplog.messages == [f"step 2 is not saved: {KEY} is not finite"]


# ---- whole runs


@pytest.fixture
def args(rows_file: Path, tmp_path: Path) -> list[str]:
    return [
        *COMMON,
        f"data.path={rows_file}",
        "lr_schedule=constant",
        "~lr_schedule.warmup_steps",
        f"outputs={tmp_path}",
    ]


def test_run_without_checkpoints_leaves_no_folder(tmp_path: Path, args: list[str]) -> None:
    off = ["checkpoint=none", "checkpoint.every_steps=null", "loop.steps=2"]
    train_here(tmp_path / "run", *args, SINGLE, *off)
    assert not (tmp_path / "run" / "checkpoints").exists() and (tmp_path / "run" / "adapter").is_dir()


def test_fewer_than_two_checkpoints_are_refused(tmp_path: Path, args: list[str]) -> None:
    outcome = run_here("train", *args, "checkpoint.keep_last=1")
    assert outcome.code == 2 and outcome.one_line().startswith("error: checkpoint.keep_last must be ")


def test_folder_with_checkpoints_of_another_run_is_refused_and_left_alone(tmp_path: Path, args: list[str]) -> None:
    own = tmp_path / "own"
    CheckpointStore(own).save(Snapshot(1, {f"adapter:{KEY}": torch.ones(2)}, {}))
    (own / "step-00000002.tmp").mkdir()
    before = sorted(own.rglob("*"))
    run_dir = tmp_path / "run"
    outcome = run_here("train", *args, f"checkpoint.dir={own}", f"hydra.run.dir={run_dir}")
    assert outcome.code == 2 and outcome.one_line() == (
        f"error: checkpoint.dir must not hold another run's checkpoints, got {own}; go on with that run "
        "(checkpoint.resume=latest), or name another folder"
    )
    assert sorted(own.rglob("*")) == before
    assert not (run_dir / "worker-1.log").exists() and not (run_dir / "run.json").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB; the tiny model's state has 2."""
    folder = tmp_path / "small"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small disk needs Linux and root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_is_said_and_the_run_goes_on(tmp_path: Path, args: list[str], small_disk: Path) -> None:
    """Promise G16; the same adapter as on a disk with room."""
    run_dir, checkpoints = tmp_path / "run", small_disk / "checkpoints"
    where = [SINGLE, f"checkpoint.dir={checkpoints}", "checkpoint.every_steps=4", "loop.steps=6"]
    outcome = run_here("train", *args, *where, f"hydra.run.dir={run_dir}")
    assert outcome.code == 0 and "Traceback" not in outcome.text, outcome.text
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, 7))
    for step in (4, 6):
        assert f"the checkpoint of step {step} could not be written: {checkpoints}" in outcome.text
    assert "No space left on device; the previous checkpoint is untouched" in outcome.text
    assert not checkpoints.exists()
    train_here(tmp_path / "room", *args, SINGLE, "loop.steps=6")
    adapters = [load_file(run / "adapter" / "adapter_model.safetensors") for run in (run_dir, tmp_path / "room")]
    assert_equal(*adapters)


def test_disk_that_stays_full_ends_the_run(tmp_path: Path, args: list[str], small_disk: Path) -> None:
    run_dir = tmp_path / "run"
    where = [SINGLE, f"checkpoint.dir={small_disk}", "checkpoint.every_steps=1", "loop.steps=500"]
    outcome = run_here("train", *args, *where, f"hydra.run.dir={run_dir}")
    assert outcome.code == 1 and "Traceback" not in outcome.text, outcome.text
    assert "error: 3 checkpoints in a row could not be written, see the warnings above" in outcome.text
    assert outcome.text.count("could not be written: ") == 3
    assert 3 <= len(metrics(run_dir)) < 500 and list(small_disk.iterdir()) == []


# ---- numbers that are not finite


def assert_no_checkpoint_after(run_dir: Path, step: int) -> None:
    store = CheckpointStore(run_dir / "checkpoints")
    assert store.steps() == ([step] if step else [])
    for value in store.load(step).tensors.values() if step else ():
        assert value.isfinite().all()
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, step + 1))
    assert not (run_dir / "adapter").exists()


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_poisoned_stage_is_the_same_decision_everywhere(tmp_path: Path, args: list[str], layer: int) -> None:
    """One value of one stage is not a number: no stage takes the step, and nothing of it is saved."""
    train_here(tmp_path / "first", *args, SINGLE, "loop.steps=0")
    file = tmp_path / "first" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if f"layers.{layer}." in name and "lora_B" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    with worker_threads(2, tmp_path / "workers") as ports:
        outcome = run_here(
            "train",
            *args,
            *hardware_of(ports),
            f"adapter.init_from={file.parent}",
            "checkpoint.every_steps=1",
            f"hydra.run.dir={tmp_path / 'run'}",
        )
    assert outcome.code == 1 and "Traceback" not in outcome.text
    assert "that is not finite in step 1; no stage took the step" in outcome.text
    assert_no_checkpoint_after(tmp_path / "run", 0)


def test_huge_rate_ends_the_run_with_a_finite_checkpoint(tmp_path: Path, args: list[str]) -> None:
    huge = ["optimizer.lr=1e30", "checkpoint.every_steps=1", "loop.steps=5"]
    with worker_threads(2, tmp_path / "workers") as ports:
        outcome = run_here("train", *args, *huge, *hardware_of(ports), f"hydra.run.dir={tmp_path / 'run'}")
    assert outcome.code == 1 and "that is not finite in step 2" in outcome.text
    assert_no_checkpoint_after(tmp_path / "run", 1)


@pytest.mark.parametrize("steps", [1, 3])
def test_step_that_leaves_numbers_that_are_not_finite_is_not_saved(tmp_path: Path, args: list[str], steps: int) -> None:
    """The gradients are finite and the weights are not, in the last step or before."""
    huge = [
        "optimizer=sgd",
        "optimizer.lr=1e30",
        "optimizer.weight_decay=1e30",
        "checkpoint.every_steps=1",
        f"loop.steps={steps}",
        SINGLE,
    ]
    run_dir = tmp_path / "run"
    outcome = run_here("train", *args, *huge, f"hydra.run.dir={run_dir}")
    assert outcome.code == 1 and "Traceback" not in outcome.text, outcome.text
    assert "is not finite" in outcome.text and "optimizer.lr" in outcome.text
    assert CheckpointStore(run_dir / "checkpoints").steps() == [] and not (run_dir / "adapter").exists()

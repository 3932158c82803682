"""Two runs and one folder of checkpoints: each has it for itself, one after the other only where it goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from fleet import Fleet, Process, adapter_of, run_dir
from processes import metrics, run_here
from resuming import COMMON, SINGLE, STOPS

from hetero.checkpoint import CheckpointStore
from hetero.folder_lock import LOCK_FILE, only_one


def line_of(train: Process) -> str:
    """The one line with which it was refused."""
    assert train.wait() == 2, train.text
    (line,) = [line for line in train.text.splitlines() if "error: " in line]
    return line.partition("error: ")[2]


def test_second_run_is_refused_as_long_as_the_first_one_lives(ships: Fleet, undisturbed: bytes) -> None:
    """However it would begin; the first one stands still meanwhile, and ends as if nothing had been."""
    own = ships.folder / "own"
    workers = [ships.worker(), ships.worker()]
    args = [f"checkpoint.dir={own}"]
    first = ships.train("one", workers, *args, failpoint="coordinator.step_begun@5@SIGSTOP")
    first.wait_stopped()
    for resume in (False, True):
        second = ships.train(f"two-{resume}", workers, *args, resume=resume)
        assert line_of(second) == (
            f"checkpoint.dir must not be a folder that another run saves in, got {own}, which is in use (process "
            f"{first.child.pid} on {os.uname().nodename}, run {run_dir(first.outputs)}); wait for that run or end it, "
            "or name another folder"
        )
        assert not run_dir(second.outputs, resume).exists()
    first.send(signal.SIGCONT)
    assert first.wait() == 0, first.text
    assert adapter_of(first.outputs) == undisturbed
    assert sorted(path.name for path in own.iterdir()) == ["step-00000006", "step-00000008"]


def test_killed_run_leaves_its_folder_to_the_one_that_goes_on(ships: Fleet, undisturbed: bytes) -> None:
    """That one is thrown back before it has saved: to where it began, and not to what the first one left."""
    own = ships.folder / "own"
    first_worker, last_worker = ships.worker(), ships.worker()
    args = [f"checkpoint.dir={own}"]
    first = ships.train("one", [first_worker, last_worker], *args, failpoint="coordinator.step_begun@5")
    assert first.wait() == -signal.SIGKILL
    assert (own / LOCK_FILE).is_file()
    last_worker.child.kill()
    last_worker = ships.worker("worker.backward_done@3", port=last_worker.port)
    second = ships.train("two", [first_worker, last_worker], *args, resume=True)
    second.wait_for("everyone goes back from step 4 to step 3")
    ships.worker(port=last_worker.port)
    assert second.wait() == 0, second.text
    assert "another run's" not in second.text
    assert adapter_of(second.outputs, resumed=True) == undisturbed
    about = CheckpointStore(own).load(8).about
    assert len(about["runs_before"]) == 1 and about["run_id"] not in about["runs_before"]
    assert sorted(path.name for path in own.iterdir()) == ["step-00000006", "step-00000008"]


# ---- in this process, on one stage


@pytest.fixture
def args(rows_file: Path, tmp_path: Path) -> list[str]:
    return [*COMMON, f"data.path={rows_file}", SINGLE, f"outputs={tmp_path}"]


def refusal(tmp_path: Path, *args: str) -> str:
    outcome = run_here("train", *args, f"hydra.run.dir={tmp_path / 'refused'}")
    assert outcome.code == 2 and not (tmp_path / "refused").exists(), outcome.text
    return outcome.one_line().removeprefix("error: ")


def test_earlier_step_of_the_folder_is_taken_into_another_one_alone(tmp_path: Path, args: list[str]) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    assert run_here("train", *args, *STOPS, f"checkpoint.dir={own}", f"hydra.run.dir={tmp_path / '1'}").code == 0
    before = sorted(own.rglob("*"))
    said = refusal(tmp_path, *args, f"checkpoint.dir={own}", "checkpoint.resume=3")
    assert re.match(r"checkpoint\.resume=3 must be the last step .* \(4\); name another checkpoint\.dir with ", said)
    step = re.search(r"with (checkpoint\.resume=\S+),", said)
    assert step and sorted(own.rglob("*")) == before
    again = [f"checkpoint.dir={other}", step[1], f"hydra.run.dir={tmp_path / '2'}"]
    outcome = run_here("train", *args, *again)
    assert outcome.code == 0 and f"going on after step 3 of {own}\n" in outcome.text, outcome.text
    assert [record["step"] for record in metrics(tmp_path / "2")] == list(range(1, 11))
    assert sorted(own.rglob("*")) == before and CheckpointStore(other).steps() == [10, 9]


def test_folder_that_is_a_file_or_in_one_is_refused(tmp_path: Path, args: list[str]) -> None:
    (tmp_path / "file").touch()
    for own in (tmp_path / "file", tmp_path / "file" / "in"):
        said = refusal(tmp_path, *args, f"checkpoint.dir={own}")
        assert said.startswith(f"checkpoint.dir must be a folder that can be written, got {own} (")
        assert said.endswith("; name another folder")


def test_unfinished_save_of_a_run_that_lives_is_left_alone(tmp_path: Path, args: list[str]) -> None:
    """A run that branches off it cleans up only where nobody writes."""
    assert run_here("train", *args, *STOPS, f"hydra.run.dir={tmp_path / '1'}").code == 0
    source = tmp_path / "1" / "checkpoints"
    shutil.copytree(source / "step-00000003", source / "step-00000006.tmp")
    with only_one(source, "run 1"):
        outcome = run_here("train", *args, f"checkpoint.resume={source}", f"hydra.run.dir={tmp_path / '2'}")
        assert outcome.code == 0 and "is still being written" in outcome.text, outcome.text
        assert (source / "step-00000006.tmp" / "manifest.json").is_file()
    outcome = run_here("train", *args, f"checkpoint.resume={source}", f"hydra.run.dir={tmp_path / '3'}")
    assert outcome.code == 0 and "is still being written" not in outcome.text
    assert sorted(path.name for path in source.iterdir()) == ["step-00000003", "step-00000004"]

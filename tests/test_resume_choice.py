"""Which checkpoint a run goes on from: what was asked for, the newest that is whole, or one line that says why not."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import metrics, run_here, train_here
from resuming import COMMON, SINGLE, STOPS, Whole, assert_equal, assert_same_run, make_whole

from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.errors import ConfigError
from hetero.folder_lock import only_one
from hetero.resume_choice import Choice, find_checkpoints, read_checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Whole:
    """On one stage; it stopped with the checkpoints of steps 3 and 4."""
    return make_whole(tmp_path_factory.mktemp("whole"), [*COMMON, f"data.path={rows_file}", SINGLE], [])


@pytest.fixture
def outputs(tmp_path: Path, whole: Whole) -> Path:
    """A folder of outputs with the stopped run in it, as it would lie there."""
    shutil.copytree(whole.stopped, tmp_path / "out" / "2026-12-01" / "10-00-00")
    return tmp_path / "out"


def stopped_in(outputs: Path) -> Path:
    return outputs / "2026-12-01" / "10-00-00"


def refusal(outputs: Path, whole: Whole, *args: str) -> str:
    """The one line with which a run is refused; it has taken no step."""
    run_dir = outputs / "refused"
    outcome = run_here("train", f"outputs={outputs}", f"hydra.run.dir={run_dir}", *whole.args, *args)
    assert outcome.code == 2 and "Traceback" not in outcome.text, outcome.text
    assert not (run_dir / "run.json").exists() and not (run_dir / "metrics.jsonl").exists()
    return [line for line in outcome.text.splitlines() if line.startswith("error: ")][-1]


def go_on(outputs: Path, whole: Whole, *args: str) -> str:
    """What a run that must equal the uninterrupted one prints."""
    run_dir = outputs / "2026-12-02" / "10-00-00"
    outcome = run_here("train", f"outputs={outputs}", f"hydra.run.dir={run_dir}", *whole.args, *args)
    assert outcome.code == 0, outcome.text
    assert_same_run(run_dir, whole)
    return outcome.text


def add_run(outputs: Path, name: str, *steps: int, age_s: float = 0.0) -> Path:
    """A run's folder with checkpoints that were written some time ago; gives the checkpoints' folder."""
    folder = outputs / name / "checkpoints"
    store = CheckpointStore(folder, keep_last=9)
    for step in steps:
        path = store.save(Snapshot(step, {"adapter:a": torch.full((2,), float(step))}, {})) / "manifest.json"
        when = path.stat().st_mtime - age_s
        os.utime(path, (when, when))
    return folder


def taken(folder: Path, resume: int | str) -> Snapshot:
    """What a run with that folder of its own goes on from."""
    return read_checkpoint(find_checkpoints(resume, str(folder), folder))


# ---- where


def test_latest_is_the_run_that_wrote_last(tmp_path: Path) -> None:
    older, newer = add_run(tmp_path, "z/1", 3, 9, age_s=60), add_run(tmp_path, "a/1", 3)
    add_run(tmp_path, "none")
    (tmp_path / "just-started").mkdir()
    assert find_checkpoints("latest", None, tmp_path) == Choice(newer, None, "latest")
    assert find_checkpoints(3, None, tmp_path) == Choice(newer, 3, 3)
    manifest = older / "step-00000009" / "manifest.json"
    os.utime(manifest, (manifest.stat().st_mtime + 120,) * 2)
    assert find_checkpoints("latest", None, tmp_path).folder == older


def test_run_that_was_killed_in_its_first_save_is_not_the_latest(tmp_path: Path) -> None:
    """What was never committed is nothing to go on from."""
    older = add_run(tmp_path, "older", 3, age_s=60)
    torn = add_run(tmp_path, "newer", 3)
    (torn / "step-00000003").rename(torn / "step-00000003.tmp")
    assert find_checkpoints("latest", None, tmp_path).folder == older


def test_run_or_its_checkpoints_or_a_folder_of_ones_own_can_be_named(tmp_path: Path) -> None:
    folder = add_run(tmp_path, "run", 3, 6)
    add_run(tmp_path, "newer", 9)
    for given in (folder, folder.parent):
        assert find_checkpoints(str(given), None, tmp_path).folder == folder
    own = folder.rename(tmp_path / "own")
    for resume in ("latest", 3):
        assert find_checkpoints(resume, str(own), tmp_path).folder == own
    assert find_checkpoints(str(own), str(own), tmp_path).folder == own


@pytest.mark.parametrize("resume", ["latest", 7, "FOLDER"])
@pytest.mark.parametrize("own", [None, "OWN"])
def test_nothing_to_go_on_from_is_refused(tmp_path: Path, resume: int | str, own: str | None) -> None:
    empty = tmp_path / "out" / "run" / "checkpoints" / "step-00000003"
    empty.mkdir(parents=True)
    where = tmp_path / (own or "out")
    resume = str(tmp_path / "folder") if resume == "FOLDER" else resume
    with pytest.raises(ConfigError, match=r"^checkpoint\.resume(=| must be )") as caught:
        find_checkpoints(resume, str(where) if own else None, tmp_path / "out")
    assert (str(resume) if "folder" in str(resume) else str(where)) in str(caught.value)


def test_folder_of_a_step_is_exactly_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_run(tmp_path, "run", 3, 6)
    given = str(folder / "step-00000003")
    assert find_checkpoints(given, None, tmp_path) == Choice(folder, 3, given)
    assert read_checkpoint(find_checkpoints(given + "/", str(tmp_path / "own"), tmp_path)).step == 3
    monkeypatch.chdir(folder / "step-00000006")
    assert find_checkpoints(".", None, tmp_path) == Choice(folder, 6, ".")
    (folder / "step-00000003" / "manifest.json").unlink()
    with pytest.raises(
        ConfigError, match=r"step-00000003: has no manifest\.json, so it was never complete \(steps there: 6"
    ):
        read_checkpoint(find_checkpoints(given, None, tmp_path))
    (folder / "step-00000003").rename(folder / "step-00000009.tmp")
    with pytest.raises(ConfigError, match=r"it is a save that was interrupted before it was complete$"):
        find_checkpoints(str(folder / "step-00000009.tmp"), None, tmp_path)


@pytest.mark.parametrize(
    ("resume", "own", "said"),
    [
        ("FILE", None, "checkpoint.resume must be latest, a step number, a run's folder .* got FILE: it is a file"),
        ("latest", "FILE", "checkpoint.dir=FILE must be a folder that can be read: FILE: Not a directory"),
        ("l" * 299, None, "checkpoint.resume=l+ cannot be read: File name too long"),
    ],
    ids=["file", "dir", "long"],
)
def test_what_is_no_folder_of_a_run_is_named(tmp_path: Path, resume: str, own: str | None, said: str) -> None:
    file = str(tmp_path / "notes.txt")
    Path(file).touch()
    with pytest.raises(ConfigError) as caught:
        find_checkpoints(resume.replace("FILE", file), own and own.replace("FILE", file), tmp_path)
    assert re.search(said.replace("FILE", re.escape(file)), str(caught.value)), caught.value


def test_run_that_still_goes_on_is_not_the_latest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newer = add_run(tmp_path, "older", 3, age_s=60), add_run(tmp_path, "newer", 6)
    with only_one(newer, "run here"):
        assert find_checkpoints("latest", None, tmp_path).folder == older
        assert caplog.messages == [
            f"not the latest, since it still goes on: {newer.parent} (process {os.getpid()} on {os.uname().nodename}, "
            "run here)"
        ]
        shutil.rmtree(older)
        with pytest.raises(
            ConfigError, match=r"found no run that has ended under .*, but one .* end it first, or name"
        ):
            find_checkpoints("latest", None, tmp_path)
        assert find_checkpoints(str(newer.parent), None, tmp_path).folder == newer
        assert "is still being written (process " in caplog.messages[-1]
    assert find_checkpoints("latest", None, tmp_path).folder == newer


# ---- which step


def test_newest_whole_one_is_taken_and_what_is_skipped_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case C03: a file cut short, a save that was not committed, and a folder that was only touched."""
    folder = add_run(tmp_path, "run", 3, 6)
    part = folder / "step-00000006" / "other.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    shutil.copytree(folder / "step-00000003", folder / "step-00000009.tmp")
    (folder / "step-00000012").mkdir()
    with caplog.at_level(logging.WARNING):
        assert taken(folder, "latest").step == 3
    assert len(caplog.messages) == 3 and all(line.startswith("checkpoint skipped: ") for line in caplog.messages)
    for named in ("step-00000012", "step-00000009.tmp", str(part)):
        assert any(named in line for line in caplog.messages)


def test_step_that_was_asked_for_is_taken_or_refused(tmp_path: Path) -> None:
    folder = add_run(tmp_path, "run", 3, 6, 9)
    assert taken(folder, 3).step == 3
    part = folder / "step-00000006" / "other.safetensors"
    part.unlink()
    with pytest.raises(ConfigError) as caught:
        taken(folder, 6)
    assert str(caught.value).startswith("checkpoint.resume=6 cannot be taken: ")
    assert str(part) in str(caught.value) and "steps there: 9, 6, 3" in str(caught.value)
    for step in (0, 7):
        with pytest.raises(ConfigError, match=f"resume={step} cannot be taken: .*no step-0000000{step}"):
            taken(folder, step)


def flip(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def truncate(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def empty(file: Path, _: random.Random) -> None:
    file.write_bytes(b"")


def zero_the_end(file: Path, draw: random.Random) -> None:
    """As a file system may leave it after a power cut; the last byte must not be zero for the change to be one."""
    data = file.read_bytes().rstrip(b"\0")
    cut = draw.randrange(len(data))
    file.write_bytes(data[:cut] + bytes(file.stat().st_size - cut))


def remove(file: Path, _: random.Random) -> None:
    file.unlink()


DAMAGES = [flip, truncate, empty, zero_the_end, remove]


def test_no_damage_is_ever_loaded(tmp_path: Path, whole: Whole, caplog: pytest.LogCaptureFixture) -> None:
    """Promise G15, on a real run's files: 120 times one file of the newest step is damaged in one way."""
    intact = CheckpointStore(whole.stopped / "checkpoints").load(3).tensors
    files = sorted(path.name for path in (whole.stopped / "checkpoints" / "step-00000004").iterdir())
    assert len(files) == 8  # 6 layers, what belongs to none, the manifest
    for trial in range(120):
        draw = random.Random(trial)
        folder = tmp_path / "checkpoints"
        shutil.copytree(whole.stopped / "checkpoints", folder)
        name = files[trial % len(files)]
        damage = DAMAGES[trial // len(files) % len(DAMAGES)]
        damage(folder / "step-00000004" / name, draw)
        caplog.clear()
        snapshot = taken(folder, "latest")
        assert snapshot.step == 3, f"trial {trial}: {damage.__name__} of {name}"
        assert len(caplog.messages) == 1 and "step-00000004" in caplog.messages[0]
        assert_equal(snapshot.tensors, intact)
        with pytest.raises(ConfigError, match="step-00000004"):
            taken(folder, 4)
        shutil.rmtree(folder)


# ---- whole runs


def test_latest_says_which_run_and_step(outputs: Path, whole: Whole) -> None:
    assert f"going on after step 4 of {stopped_in(outputs)}" in go_on(outputs, whole, "checkpoint.resume=latest")


@pytest.mark.parametrize(
    ("name", "damage"),
    [("layer-00002.safetensors", flip), ("other.safetensors", truncate), ("manifest.json", remove)],
)
def test_run_goes_on_from_the_step_before_a_damaged_one(
    outputs: Path, whole: Whole, name: str, damage: Callable[[Path, random.Random], None]
) -> None:
    damage(stopped_in(outputs) / "checkpoints" / "step-00000004" / name, random.Random(1))
    text = go_on(outputs, whole, "checkpoint.resume=latest")
    assert "checkpoint skipped: " in text and "step-00000004" in text and "going on after step 3" in text


def test_older_step_can_be_asked_for(outputs: Path, whole: Whole) -> None:
    assert "going on after step 3" in go_on(outputs, whole, "checkpoint.resume=3")


def test_folder_of_ones_own_holds_the_runs_before_and_after(outputs: Path, whole: Whole, tmp_path: Path) -> None:
    """The log has the steps before all the same, though the folder is not in that run's."""
    own = tmp_path / "own"
    args = [*whole.args, f"checkpoint.dir={own}"]
    train_here(outputs / "first", *args, *STOPS)
    assert CheckpointStore(own).steps() == [4, 3] and not (outputs / "first" / "checkpoints").exists()
    train_here(outputs / "second", *args, "checkpoint.resume=latest")
    assert CheckpointStore(own).steps() == [10, 9]
    assert_same_run(outputs / "second", whole, checkpoints=own)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_ends_the_run_with_a_checkpoint_that_is_the_latest(
    tmp_path: Path, whole: Whole, name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C12; a run without checkpoints ends as a signal ends a program."""
    monkeypatch.setenv("HETERO_TEST_SIGNAL", name)
    loop = ["loop._target_=own_parts.signal_in_four", "allow_targets=[own_parts.signal_in_four]"]
    where = [f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / 'stopped'}"]
    outcome = run_here("train", *whole.args, *loop, *where)
    assert outcome.code == 0 and "Traceback" not in outcome.text, outcome.text
    assert f"stopped after step 4 of 10 ({name}), with a checkpoint" in outcome.text
    assert f"going on after step 4 of {tmp_path / 'stopped'}" in go_on(tmp_path, whole, "checkpoint.resume=latest")
    off = ["checkpoint=none", "checkpoint.every_steps=null", f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / 'off'}"]
    assert run_here("train", *whole.args, *loop, *off).code == code


def test_refusals_that_need_no_data_come_before_it_is_read(tmp_path: Path, outputs: Path, whole: Whole) -> None:
    """The rows cannot be read, and nothing is said of that."""
    (tmp_path / "rows.jsonl").write_text("no rows\n", encoding="utf-8")
    args = [f"data.path={tmp_path / 'rows.jsonl'}", "checkpoint.resume=latest"]
    assert "rows.jsonl" in refusal(outputs, whole, *args)
    for other, said in {
        "optimizer.lr=0.1": "optimizer.lr is ",
        "seed=5": "seed is 0 there and 5 here",
        "loop.steps=2": "loop.steps must be at least 4, the step that checkpoint.resume goes on from, got 2",
    }.items():
        assert said in refusal(outputs, whole, *args, other)


def test_log_that_is_gone_is_said_and_the_run_goes_on(outputs: Path, whole: Whole) -> None:
    (stopped_in(outputs) / "metrics.jsonl").unlink()
    run_dir = outputs / "again"
    outcome = run_here(
        "train", f"outputs={outputs}", f"hydra.run.dir={run_dir}", *whole.args, "checkpoint.resume=latest"
    )
    assert outcome.code == 0
    file = stopped_in(outputs) / "metrics.jsonl"
    assert f"this run's log lacks some of the 4 steps before, because {file} is not there" in outcome.text
    assert [record["step"] for record in metrics(run_dir)] == list(range(5, 11))


def test_refusals_of_a_run_are_one_line(tmp_path: Path, outputs: Path, whole: Whole) -> None:
    nothing = tmp_path / "nothing"
    found = refusal(nothing, whole, "checkpoint.resume=latest")
    assert found == (
        f"error: checkpoint.resume=latest found no run with a checkpoint under {nothing}; "
        "leave it out to start at step 0"
    )
    assert "checkpoint.resume=7 cannot be taken" in refusal(outputs, whole, "checkpoint.resume=7")
    for step in (3, 4):
        empty(stopped_in(outputs) / "checkpoints" / f"step-0000000{step}" / "other.safetensors", random.Random(0))
    found = refusal(outputs, whole, "checkpoint.resume=4")
    assert str(stopped_in(outputs) / "checkpoints" / "step-00000004" / "other.safetensors") in found
    found = refusal(outputs, whole, "checkpoint.resume=latest")
    assert "found no whole checkpoint" in found and str(stopped_in(outputs)) in found

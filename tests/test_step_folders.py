"""Whose a checkpoint is: a run neither goes back to, nor replaces, nor deletes what another has saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import FastDisk, contents, same, snapshot

from hetero.checkpoint import CheckpointStore, Owner, Snapshot
from hetero.errors import CheckpointError
from hetero.step_folders import run_shown, step_of


def of(run_id: str, step: int, *before: str) -> Snapshot:
    """A snapshot of a run; the same tensors in every run."""
    one = snapshot(step)
    return Snapshot(step, one.tensors, one.about | {"run_id": run_id, "runs_before": list(before)})


def store_of(folder: Path, owner: Owner | None, *saved: Snapshot) -> CheckpointStore:
    store = CheckpointStore(folder, disk=FastDisk(), owner=owner)
    for one in saved:
        store.save(one)
    return store


def test_run_goes_back_to_its_own_steps_alone(tmp_path: Path) -> None:
    store_of(tmp_path, Owner("other"), of("other", 9))
    own = store_of(tmp_path, Owner("own"))
    assert own.newest() == (None, [f"{tmp_path / 'step-00000009'}: is another run's"])
    own.save(of("own", 3))
    found, skipped = own.newest()
    assert same(found, of("own", 3)) and len(skipped) == 1
    assert same(CheckpointStore(tmp_path).newest()[0], of("other", 9))  # whoever resumes sees all of them


def test_another_runs_steps_are_neither_pruned_nor_replaced(tmp_path: Path) -> None:
    store_of(tmp_path, Owner("other"), of("other", 2), of("other", 6))
    before = contents(tmp_path)
    own = store_of(tmp_path, Owner("own"), *(of("own", step) for step in (1, 3, 4, 5)))
    with pytest.raises(CheckpointError, match=r"step 6 could not be written: .*step-00000006 is another run's"):
        own.save(of("own", 6))
    own.save(of("own", 7))
    assert own.steps() == [7, 6, 5, 2]
    assert before.items() <= contents(tmp_path).items()


def test_run_that_goes_on_in_the_folder_lets_the_steps_before_grow_old(tmp_path: Path) -> None:
    store_of(tmp_path, Owner("first"), of("first", 3), of("first", 6))
    owner = Owner.after("second", of("first", 6).about)
    assert owner == Owner("second", ("first",))
    second = store_of(tmp_path, owner)
    assert second.newest() == (None, [])  # it knows where it began
    second.save(of("second", 9, "first"))
    assert second.steps() == [9, 6]
    second.save(of("second", 12, "first"))
    assert second.steps() == [12, 9]
    third = Owner.after("third", of("second", 12, "first").about)
    assert third == Owner("third", ("second", "first"))
    assert Owner.after("fourth", {}) == Owner("fourth", (None,))  # of a version that recorded no run


def test_step_that_is_saved_again_in_the_folder_becomes_the_runs_own(tmp_path: Path) -> None:
    """Though its tensors are the same: otherwise the run could not go back to it."""
    store_of(tmp_path, Owner("first"), of("first", 3))
    second = store_of(tmp_path, Owner("second", ("first",)), of("second", 3, "first"))
    assert same(second.newest()[0], of("second", 3, "first"))


def test_step_that_is_too_damaged_to_say_whose_it_is_is_replaced(tmp_path: Path) -> None:
    store_of(tmp_path, Owner("first"), of("first", 3))
    (tmp_path / "step-00000003" / "manifest.json").write_text("{", encoding="utf-8")
    own = store_of(tmp_path, Owner("own"), of("own", 3))
    assert same(own.newest()[0], of("own", 3))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000012", (12, "")),
        ("step-123456789", (123456789, "")),
        ("step-00000012.tmp", (12, ".tmp")),
        ("step-00000012.old", (12, ".old")),
        ("step-12", None),
        ("step-000000012", None),
        ("step-00000012.bak", None),
    ],
)
def test_names_of_steps(name: str, step: tuple[int, str] | None) -> None:
    assert step_of(name) == step


def test_a_folder_is_shown_as_people_know_it() -> None:
    assert run_shown(Path("/out/run/checkpoints")) == Path("/out/run")
    assert run_shown(Path("/mnt/own")) == Path("/mnt/own")

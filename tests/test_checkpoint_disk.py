"""Checkpoints on a disk that fills up, fails or loses power: no fault takes the last one.

What a power cut leaves is enumerated, not sampled: every state that tests/power_cut.py derives is restored.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import FailingDisk, FastDisk, same, small, snapshot, store_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from power_cut import RecordingDisk, Tree, put_on_disk

from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.disk import Disk
from hetero.errors import CheckpointError

# A full or failing disk.


def every_failure(
    code: int, before: Callable[[Path], None], one: Snapshot, folder: Path
) -> Iterator[tuple[Path, bool]]:
    """Saves a snapshot with a failure at each operation in turn; yields the folder and whether the save said so."""
    for fail_at in range(1000):
        place = folder / str(fail_at)
        place.mkdir()
        before(place)
        disk = FailingDisk(fail_at, code, for_good=bool(fail_at % 2))
        refused = False
        try:
            CheckpointStore(place / "checkpoints", disk=disk).save(one)
        except CheckpointError as exc:
            refused = True
            text = str(exc)
            assert os.strerror(code) in text and "the previous checkpoint is untouched" in text and text.isprintable()
            assert text.startswith(f"the checkpoint of step {one.step} could not be written: {place}")
            if fail_at % 2 == 0:
                assert not list((place / "checkpoints").glob("*.tmp"))
        if not disk.failed:
            assert fail_at > 10
            return
        yield place, refused
    raise AssertionError("it never ended")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_failure_at_any_operation_leaves_the_checkpoints_before(code: int, tmp_path: Path) -> None:
    results = set()
    for place, refused in every_failure(
        code, lambda place: store_of(place, small(1), small(2)) and None, small(3), tmp_path
    ):
        store = store_of(place)
        assert same(store.load(2), small(2))
        found, _ = store.newest()
        if refused:
            assert same(store.load(1), small(1))
        else:  # only what was old could not be deleted
            assert same(found, small(3))
        results.add(refused)
        assert same(found, small(2)) or same(found, small(3))
        store.save(small(3))
        store.save(small(4))
        assert store.steps() == [4, 3] and same(store.load(3), small(3)) and same(store.newest()[0], small(4))
        assert sorted(os.listdir(place / "checkpoints")) == ["step-00000003", "step-00000004"]
    assert results == {True, False}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_failure_while_a_step_is_replaced_leaves_the_old_or_the_new_one(code: int, tmp_path: Path) -> None:
    def before(place: Path) -> None:
        store_of(place, small(1), small(2, seed=9))

    for place, refused in every_failure(code, before, small(2), tmp_path):
        store = store_of(place)
        found, _ = store.newest()
        assert same(found, small(2)) or (refused and same(found, small(2, seed=9)))
        assert same(store.load(1), small(1))
        store.clean()
        assert same(store.newest()[0], found) if found else False
        assert sorted(os.listdir(place / "checkpoints")) == ["step-00000001", "step-00000002"]
        store.save(small(2))
        assert same(store.newest()[0], small(2))


def test_failing_clean_says_what_failed(tmp_path: Path) -> None:
    store_of(tmp_path, small(1))
    (tmp_path / "checkpoints" / "step-00000002.tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"step-00000002.tmp: Input/output error"):
        CheckpointStore(tmp_path / "checkpoints", disk=FailingDisk(1)).clean()


def test_real_disk_that_fills_up_keeps_what_it_has(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, timeout=10).returncode != 0:
        pytest.skip("a small disk needs the right to mount a tmpfs (root on Linux)")
    try:
        store = CheckpointStore(mount / "checkpoints")
        large = [snapshot(step, size=30_000) for step in (1, 2, 3)]  # 2.4 MB each
        store.save(large[0])
        store.save(large[1])
        (mount / "something else").write_bytes(bytes(1_500_000))
        with pytest.raises(CheckpointError, match=r"step-00000003.tmp/\S+: No space left on device; the previous"):
            store.save(large[2])
        assert sorted(os.listdir(mount / "checkpoints")) == ["step-00000001", "step-00000002"]
        assert same(store.newest()[0], large[1]) and same(store.load(1), large[0])
        (mount / "something else").unlink()
        store.save(large[2])
        assert store.steps() == [3, 2] and same(store.newest()[0], large[2])
    finally:
        subprocess.run(["umount", str(mount)], check=True, timeout=10)


# Any order of saves, failures, crashes and cleanings.


class AnyOrder(RuleBasedStateMachine):
    """Against a plain dictionary of what was saved: the newest step of which a save returned is always restorable.

    There is no damage here, so that every step that has a manifest must load.
    """

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp()) / "checkpoints"
        self.step, self.seed = 0, 0
        self.tried: dict[int, set[int]] = {}  # step -> the seeds that a save was begun with
        self.returned: set[int] = set()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder.parent)

    def save(self, step: int, seed: int, disk: Disk) -> None:
        self.tried.setdefault(step, set()).add(seed)
        store = CheckpointStore(self.folder, disk=disk)
        complete = {other for other in store.steps() if other != step}
        store.save(small(step, seed))
        if not (isinstance(disk, FailingDisk) and disk.failed):
            assert store.steps() == sorted({step, *sorted(complete)[-1:]}, reverse=True)
            assert not [name for name in os.listdir(self.folder) if name.endswith((".tmp", ".old"))]
        self.returned.add(step)
        self.tried[step] = {seed}
        assert same(store.load(step), small(step, seed))

    @rule(ahead=st.integers(1, 3))
    def save_a_newer_step(self, ahead: int) -> None:
        self.step += ahead
        self.seed += 1
        self.save(self.step, self.seed, FastDisk())

    @precondition(lambda self: self.step > 0)
    @rule(back=st.integers(0, 4), other=st.booleans())
    def save_an_older_step_again(self, back: int, other: bool) -> None:
        step = max(1, self.step - back)
        self.seed += 1
        self.save(step, self.seed if other else max(self.tried.get(step, {self.seed})), FastDisk())

    @rule(ahead=st.integers(-3, 2), fail_at=st.integers(0, 25), crash=st.booleans())
    def save_with_a_failure(self, ahead: int, fail_at: int, crash: bool) -> None:
        self.step = max(1, self.step + ahead, *self.returned) if ahead > 0 else self.step
        self.seed += 1
        with suppress(CheckpointError):
            self.save(max(1, self.step + min(ahead, 0)), self.seed, FailingDisk(fail_at, for_good=crash))

    @rule()
    def clean(self) -> None:
        CheckpointStore(self.folder, disk=FastDisk()).clean()

    @rule(fail_at=st.integers(0, 6))
    def clean_with_a_crash(self, fail_at: int) -> None:
        with suppress(CheckpointError):
            CheckpointStore(self.folder, disk=FailingDisk(fail_at, for_good=True)).clean()

    @invariant()
    def newest_is_restorable(self) -> None:
        if not hasattr(self, "folder"):
            return
        store = CheckpointStore(self.folder)
        found, _ = store.newest()
        assert (found.step if found else 0) >= max(self.returned, default=0)
        good = [store.load(step) for step in store.steps()]
        assert len(good) >= min(2, len(self.returned))
        for one in good:
            assert any(same(one, small(one.step, seed)) for seed in self.tried[one.step])


AnyOrder.TestCase.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
test_newest_step_is_restorable_after_any_order_of_events = AnyOrder.TestCase


# Power cuts.

Saves = Callable[[CheckpointStore, RecordingDisk], None]


def save_two(store: CheckpointStore, disk: RecordingDisk) -> None:
    for step in (1, 2):
        store.save(small(step))
        disk.acknowledge(step)


def save_three(store: CheckpointStore, disk: RecordingDisk) -> None:
    for step in (1, 2, 3):
        store.save(small(step))
        disk.acknowledge(step)


def replace_one(store: CheckpointStore, disk: RecordingDisk) -> None:
    store.save(small(1))
    disk.acknowledge(1)
    store.save(small(1, seed=9))
    store.save(small(2))
    disk.acknowledge(2)
    store.save(small(2, seed=9))
    store.save(small(3))
    disk.acknowledge(3)


def save_again_after_an_interrupt(store: CheckpointStore, disk: RecordingDisk) -> None:
    store.save(small(1))
    disk.acknowledge(1)
    disk.interrupt_renames = True
    with pytest.raises(KeyboardInterrupt):
        store.save(small(2))
    disk.interrupt_renames = False
    CheckpointStore(disk.root / "run" / "checkpoints", disk=disk).save(small(2))  # nothing is old enough to delete
    disk.acknowledge(2)


def is_good(tree: Tree, must_have: int, folder: Path) -> bool:
    """Restores a state that a power cut leaves, and goes on from there."""
    put_on_disk(tree, folder)
    store = CheckpointStore(folder / "run" / "checkpoints", disk=FastDisk())
    found, _ = store.newest()
    if (found.step if found else 0) < must_have:
        return False
    if found is not None and not (same(found, small(found.step)) or same(found, small(found.step, seed=9))):
        return False
    with suppress(CheckpointError):
        for step in store.steps():  # none looks complete and is not
            store.load(step)
        return goes_on(store, found)
    return False


def goes_on(store: CheckpointStore, found: Snapshot | None) -> bool:
    """Whether cleaning and saving work from there, and the one that was found stays."""
    store.clean()
    again, _ = store.newest()
    if found is not None and not same(again, found):
        return False
    store.save(small(4))
    return same(store.newest()[0], small(4)) and not list(store.save(small(5)).parent.glob("*.tmp"))


def enumerate_states(
    saves: Saves,
    folder: Path,
    disk_kind: type[RecordingDisk] = RecordingDisk,
    store_kind: type[CheckpointStore] = CheckpointStore,
) -> tuple[int, bool]:
    """How many states a power cut can leave, and whether one of them is bad."""
    disk = disk_kind(folder / "recorded")
    disk.root.mkdir()
    saves(store_kind(disk.root / "run" / "checkpoints", disk=disk), disk)
    for index, (tree, must_have) in enumerate(disk.states.items()):
        place = folder / f"state-{index}"
        place.mkdir()
        if not is_good(tree, must_have, place):
            return len(disk.states), True
        shutil.rmtree(place)
    return len(disk.states), False


@pytest.mark.parametrize("saves", [save_three, replace_one, save_again_after_an_interrupt])
def test_no_power_cut_takes_a_checkpoint_of_which_the_save_returned(saves: Saves, tmp_path: Path) -> None:
    num_states, one_is_bad = enumerate_states(saves, tmp_path)
    assert num_states >= 25 and not one_is_bad


class NoFileSync(RecordingDisk):
    """Planted fault: a file may be gone or cut short after it was written."""

    def flush(self, descriptor: int) -> None:
        if not os.path.isfile(f"/proc/self/fd/{descriptor}"):
            super().flush(descriptor)


class NoFolderSync(RecordingDisk):
    """Planted fault: names may be gone."""

    def sync_dir(self, path: Path) -> None:
        assert path.is_dir()


class DeletesFirst(CheckpointStore):
    """Planted fault: makes room before it writes."""

    def save(self, snapshot: Snapshot) -> Path:
        for step in self.steps():
            self._remove(self._folder / f"step-{step:08d}")
        return super().save(snapshot)


class WritesInPlace(CheckpointStore):
    """Planted fault: the newest folder becomes the new step's."""

    def save(self, snapshot: Snapshot) -> Path:
        for step in self.steps():
            draft = self._folder / f"step-{snapshot.step:08d}.tmp"
            self._disk.rename(self._folder / f"step-{step:08d}", draft)
            self._disk.sync_dir(self._folder)
        return super().save(snapshot)


@pytest.mark.parametrize(
    ("disk_kind", "store_kind"),
    [
        (NoFileSync, CheckpointStore),
        (NoFolderSync, CheckpointStore),
        (RecordingDisk, DeletesFirst),
        (RecordingDisk, WritesInPlace),
    ],
)
def test_planted_faults_are_found_by_the_enumeration(
    disk_kind: type[RecordingDisk], store_kind: type[CheckpointStore], tmp_path: Path
) -> None:
    assert enumerate_states(save_two, tmp_path, disk_kind, store_kind)[1]

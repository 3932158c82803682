"""When checkpoints are begun while others are being written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import cast

import pytest
import torch
from peers import wait_until

from hetero.checkpoint import CheckpointStore
from hetero.disk import Disk
from hetero.errors import PeerError
from hetero.inbox import Inbox
from hetero.saving import Saver
from hetero.session import CoordinatorSession
from hetero.spec import CheckpointSpec

SHAPES = {0: {"layers.0.w": [2]}}


class SlowDisk(Disk):
    """Writes when it is allowed to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def make_dir(self, path: Path) -> None:
        assert self.go_on.wait(20)
        super().make_dir(path)


def begin(saver: Saver, step: int) -> None:
    saver.begin(step, SHAPES).part(0, {"adapter:layers.0.w": torch.full((2,), float(step))})


def test_a_checkpoint_that_came_due_while_another_was_written_follows_it_at_once(tmp_path: Path) -> None:
    disk = SlowDisk()
    saver = Saver(CheckpointStore(tmp_path / "c", disk=disk), CheckpointSpec(every_steps=3), {})
    try:
        assert [saver.due(step) for step in (1, 2, 3)] == [False, False, True]
        begin(saver, 3)
        assert not saver.due(4) and not saver.due(5) and not saver.due(6)
        disk.go_on.set()
        wait_until(lambda: saver.last_saved == 3)
        wait_until(lambda: saver.due(7))
        assert not saver.due(7, busy=True)
        begin(saver, 7)
        saver.settle()
        assert saver.last_saved == 7 and not saver.due(8) and saver.due(9)
    finally:
        disk.go_on.set()
        saver.close()


class Session:
    """One whose workers have sent everything; a worker may be lost."""

    def __init__(self) -> None:
        self.inbox = Inbox()

    def is_saving(self) -> bool:
        return False


def saver_at(folder: Path, disk: Disk, safe: int = 0) -> Saver:
    return Saver(CheckpointStore(folder / "c", disk=disk), CheckpointSpec(every_steps=3), {}, safe=safe)


@pytest.mark.parametrize("start", [0, 7])
def test_the_step_after_a_checkpoint_waits_until_it_is_on_the_disk(tmp_path: Path, start: int) -> None:
    """So no more than an interval of steps is lost, whenever the process dies."""
    disk, session = SlowDisk(), cast(CoordinatorSession, Session())
    saver = saver_at(tmp_path, disk, start)
    try:
        for step in (1, 2, 3, 4):
            saver.wait_for_save(start + step, session)  # nothing is being saved
        begin(saver, start + 2)  # by time
        saver.wait_for_save(start + 3, session)
        came: list[int | None] = []
        waiting = threading.Thread(
            target=lambda: came.append(saver.wait_for_save(start + 4, session) or saver.last_saved)
        )
        waiting.start()
        waiting.join(0.2)
        assert came == []
        disk.go_on.set()
        waiting.join(20)
        assert came == [start + 2]
        saver.wait_for_save(start + 5, session)
    finally:
        disk.go_on.set()
        saver.close()


def test_a_checkpoint_that_cannot_be_written_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    saver = saver_at(tmp_path, Disk())
    try:
        begin(saver, 3)
        saver.settle()
        saver.wait_for_save(4, cast(CoordinatorSession, Session()))
        assert saver.last_saved is None
    finally:
        saver.close()


def test_a_worker_that_is_lost_ends_the_wait(tmp_path: Path) -> None:
    disk, session = SlowDisk(), Session()
    saver = saver_at(tmp_path, disk)
    try:
        begin(saver, 3)
        session.inbox.fail(PeerError("is gone", lost=True))
        with pytest.raises(PeerError, match="is gone"):
            saver.wait_for_save(4, cast(CoordinatorSession, session))
    finally:
        disk.go_on.set()
        saver.close()


def test_what_was_due_before_a_fault_is_not_due_after_it(tmp_path: Path) -> None:
    saver = Saver(CheckpointStore(tmp_path / "c"), CheckpointSpec(every_steps=3), {})
    try:
        assert not saver.due(3, busy=True)  # state of the one before is on its way, and never comes
        saver.settle()
        assert not saver.due(1) and not saver.due(2) and saver.due(3)
    finally:
        saver.close()

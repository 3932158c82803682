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


def test_a_due_step_waits_until_the_checkpoint_before_is_on_the_disk(tmp_path: Path) -> None:
    """So fewer than two intervals of steps are lost, whenever the process dies."""
    disk, session = SlowDisk(), cast(CoordinatorSession, Session())
    saver = Saver(CheckpointStore(tmp_path / "c", disk=disk), CheckpointSpec(every_steps=3), {})
    try:
        saver.wait_for_one_before(3, session)  # there is none
        begin(saver, 3)
        for step in (4, 5):
            saver.wait_for_one_before(step, session)  # training goes on meanwhile
        came: list[int | None] = []
        waiting = threading.Thread(
            target=lambda: came.append(saver.wait_for_one_before(6, session) or saver.last_saved)
        )
        waiting.start()
        waiting.join(0.2)
        assert came == []
        disk.go_on.set()
        waiting.join(20)
        assert came == [3] and saver.due(6)
    finally:
        disk.go_on.set()
        saver.close()


def test_a_worker_that_is_lost_ends_the_wait(tmp_path: Path) -> None:
    disk, session = SlowDisk(), Session()
    saver = Saver(CheckpointStore(tmp_path / "c", disk=disk), CheckpointSpec(every_steps=3), {})
    try:
        begin(saver, 3)
        session.inbox.fail(PeerError("is gone", lost=True))
        with pytest.raises(PeerError, match="is gone"):
            saver.wait_for_one_before(6, cast(CoordinatorSession, session))
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

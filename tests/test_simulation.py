"""The real control code on simulated machines; HETERO_SIMULATION_SEED=N replays one seed, and -s shows what happens."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import simulated_training
import simulated_worker
from simulation import simulate

from hetero.control import CoordinatorControl, Membership, Notify, StepReady, judge_hello
from hetero.wire.headers import Hello, Reject, Step
from hetero.worker_control import WorkerControl

REPLAY = os.environ.get("HETERO_SIMULATION_SEED")
BATCH = 500
TRIED = 1000  # seeds within which a planted fault is found

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 4 * BATCH, BATCH))
def test_no_fault_changes_the_result(first: int) -> None:
    faults: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        faults += simulate(seed).faults  # a violation names its seed
    kinds = {"crash", "crash_coordinator", "reset", "half_open", "freeze", "replace", "replay", "stop"}
    assert not kinds - faults.keys()


@pytest.mark.skipif(REPLAY is None, reason="HETERO_SIMULATION_SEED names no seed")
def test_replay_of_one_seed() -> None:
    simulate(int(REPLAY or 0), talks=True)


def test_same_seed_is_the_same_run() -> None:
    for seed in range(20):
        one, two = simulate(seed), simulate(seed)
        assert (one.events, one.now, one.faults) == (two.events, two.now, two.faults)


# --- planted faults ------------------------------------------------------------------------------------------------


def accept_any_apply(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerControl, "_on_apply", lambda self, step: setattr(self, "_decided", step))


def accept_any_step(patch: pytest.MonkeyPatch) -> None:
    def on_step(self: WorkerControl, header: Step) -> None:
        self._begun, self._evaluating = header.step, header.evaluate

    patch.setattr(WorkerControl, "_on_step", on_step)


def accept_sync_of_any_epoch(patch: pytest.MonkeyPatch) -> None:
    right = WorkerControl._on_sync

    def on_sync(self: WorkerControl, sync: Any) -> None:
        self.epoch = sync.epoch
        right(self, sync)

    patch.setattr(WorkerControl, "_on_sync", on_sync)


def survivors_keep_their_state(patch: pytest.MonkeyPatch) -> None:
    right = simulated_training.Member.restore

    def restore(self: simulated_training.Member, step: int, state: tuple[int, int] | None) -> None:
        if self.stage == 0 or self.at == 0:
            right(self, step, state)

    patch.setattr(simulated_training.Member, "restore", restore)


def coordinator_keeps_its_state(patch: pytest.MonkeyPatch) -> None:
    right = simulated_training.Member.restore

    def restore(self: simulated_training.Member, step: int, state: tuple[int, int] | None) -> None:
        if self.stage or self.at == 0:
            right(self, step, state)

    patch.setattr(simulated_training.Member, "restore", restore)


def forget_moments_on_sync(patch: pytest.MonkeyPatch) -> None:
    right = simulated_training.Member.restore

    def restore(self: simulated_training.Member, step: int, state: tuple[int, int] | None) -> None:
        right(self, step, state and (state[0], self.initial[1]))

    patch.setattr(simulated_training.Member, "restore", restore)


def do_not_compare_epochs(patch: pytest.MonkeyPatch) -> None:
    def judge(current: Membership | None, hello: Hello, *, link_taken: bool) -> Reject | None:
        if current is not None and hello.run_id == current.run_id:
            epoch = hello.epoch - (hello.purpose == "control")
            current = Membership(current.run_id, epoch, current.stage)
        return judge_hello(current, hello, link_taken=link_taken)

    patch.setattr(simulated_worker, "judge_hello", judge)


def accept_any_ready(patch: pytest.MonkeyPatch) -> None:
    def on_ready(self: CoordinatorControl, stage: int, frame: Any, header: Any) -> list[Any]:
        self._ready[stage], self._norms[stage] = header, frame.payload
        if len(self._ready) < len(self.peers):
            return []
        return [Notify(StepReady(header.step, dict(self._ready), dict(self._norms)))]

    patch.setattr(CoordinatorControl, "_on_ready", on_ready)


def ignore_complete_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CoordinatorControl, "state_complete", lambda self, stage: None)


def start_without_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(simulated_training.Store, "newest", lambda self: None)


PLANTED: list[Patch] = [
    accept_any_apply,
    accept_any_step,
    accept_sync_of_any_epoch,
    survivors_keep_their_state,
    coordinator_keeps_its_state,
    forget_moments_on_sync,
    do_not_compare_epochs,
    accept_any_ready,
    ignore_complete_state,
    start_without_the_checkpoint,
]


def seeds_until_caught(patch: Patch, most: int) -> tuple[int | None, str]:
    """How many seeds it takes to catch a planted fault, and how it shows."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        for seed in range(most):
            try:
                simulate(seed)
            except simulated_training.Violation as exc:
                return seed + 1, str(exc)
    return None, ""


@pytest.mark.slow
@pytest.mark.parametrize("patch", PLANTED, ids=lambda patch: patch.__name__)
def test_planted_fault_is_caught(patch: Patch) -> None:
    caught_after, _ = seeds_until_caught(patch, TRIED)
    assert caught_after is not None

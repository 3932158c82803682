"""One process of a run dies by SIGKILL, at every named place and several times; nothing of the run is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cluster import (
    EVERY,
    LIMIT_S,
    WORKERS,
    Cluster,
    Result,
    assert_same,
    cluster,
    leftovers,
    result_of,
    wait_for_death,
)
from conftest import Tiny

from hetero.failpoints import NAMES

# How often a place is passed in 10 steps of 2 micro-batches with checkpoints and evaluations after 3, 6, 9 and 10 (and
# an evaluation before the first); 1 where not listed.
_OFTEN = {
    "coordinator.step_begun": 10,
    "coordinator.all_ready": 10,
    "coordinator.decided": 10,
    "coordinator.applied": 10,
    "coordinator.state_taken": 3,
    "coordinator.step_logged": 10,
    "coordinator.evaluating": 5,
    "coordinator.evaluated": 5,
    "checkpoint.begun": 4,
    "checkpoint.before_manifest": 4,
    "checkpoint.before_rename": 4,
    "checkpoint.renamed": 4,
    "checkpoint.pruned": 2,
    "worker.step_begun": 10,
    "worker.forward_done": 20,
    "worker.backward_done": 20,
    "worker.ready_sent": 10,
    "worker.decision_here": 10,
    "worker.applied": 10,
    "worker.evaluating": 30,
    "worker.state_taken": 4,
    "worker.state_queued": 4,
}


@dataclass(frozen=True)
class Case:
    """Who dies where, and at which time that it gets there."""

    victim: str
    name: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.victim}-{self.name}-{self.occurrence}"


def all_cases() -> list[Case]:
    """Every place x 1, 2, 4, 8, on both workers where it is theirs."""
    return [
        Case(victim, name, occurrence)
        for name in NAMES
        for victim in (WORKERS if name.startswith("worker.") else ("coordinator",))
        for occurrence in (1, 2, 4, 8)
        if occurrence <= _OFTEN.get(name, 1)
    ]


def quick_cases() -> list[Case]:
    """Every place once, as late as it can be, so that there are checkpoints to go back to; workers in turn."""
    chosen: list[Case] = []
    for number, name in enumerate(NAMES):
        cases = [case for case in all_cases() if case.name == name]
        victims = sorted({case.victim for case in cases})
        victim = victims[number % len(victims)]
        chosen.append([case for case in cases if case.victim == victim][-1])
    return chosen


@dataclass
class Matrix:
    """The processes of all cases, the result that each must give, and what happened."""

    cluster: Cluster
    expected: Result
    died: set[str] = field(default_factory=set)
    repeated: dict[Case, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, rows_file: Path) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("matrix")
    with cluster(folder, tiny("llama"), rows_file) as lent:
        undisturbed = lent.start_coordinator(folder / "undisturbed")
        lent.finish(undisturbed, LIMIT_S)
        yield Matrix(lent, result_of(undisturbed.run_dir))


def check(matrix: Matrix, case: Case, outputs: Path) -> None:
    """Runs a case, and compares everything with the undisturbed run."""
    began = time.monotonic()
    lent, failpoint = matrix.cluster, f"{case.name}@{case.occurrence}"
    if case.victim == "coordinator":
        first = lent.start_coordinator(outputs, failpoint)
        wait_for_death(first.child, first.child, LIMIT_S, lent.all_logs)
        last = lent.start_coordinator(outputs)
        lent.finish(last, LIMIT_S)
        repeated = first.last_step() - last.began_at()
    else:
        lent.workers[case.victim].kill()
        victim = lent.start_worker(case.victim, failpoint)
        last = lent.start_coordinator(outputs)
        wait_for_death(victim, last.child, LIMIT_S, lent.all_logs)
        lent.start_worker(case.victim)
        lent.finish(last, LIMIT_S)
        repeated = last.repeated()
    matrix.died.add(case.name)
    matrix.repeated[case] = repeated
    assert_same(result_of(last.run_dir), matrix.expected)
    assert 0 <= repeated <= EVERY, f"{repeated} steps were taken again\n{lent.all_logs()}"
    assert time.monotonic() - began < LIMIT_S
    # A run that begins again knows nothing of the folder of the one before.
    assert not leftovers(outputs if last.began_at() or case.victim != "coordinator" else last.run_dir)


@pytest.mark.parametrize("case", quick_cases(), ids=str)
def test_a_kill_changes_nothing(matrix: Matrix, case: Case, tmp_path: Path) -> None:
    check(matrix, case, tmp_path)


@pytest.mark.by_hand
@pytest.mark.parametrize("case", [case for case in all_cases() if case not in quick_cases()], ids=str)
def test_a_kill_at_any_time_changes_nothing(matrix: Matrix, case: Case, tmp_path: Path) -> None:
    check(matrix, case, tmp_path)


def test_checkpoints_in_a_folder_of_their_own_keep_the_records_too(matrix: Matrix, tmp_path: Path) -> None:
    """The coordinator dies twice, and each run of it has another folder."""
    own = f"checkpoint.dir={tmp_path / 'own'}"
    for failpoint in ("coordinator.applied@6", "coordinator.applied@6"):  # the one before is on the disk by then
        run = matrix.cluster.start_coordinator(tmp_path, failpoint, own)
        wait_for_death(run.child, run.child, LIMIT_S, matrix.cluster.all_logs)
    last = matrix.cluster.start_coordinator(tmp_path, "", own)
    matrix.cluster.finish(last, LIMIT_S)
    assert last.began_at() == 6
    assert_same(result_of(last.run_dir, tmp_path / "own"), matrix.expected)
    assert not leftovers(tmp_path)


def test_every_failpoint_was_hit(matrix: Matrix, request: pytest.FixtureRequest) -> None:
    """Of the tests above, in the same session."""
    selected = {item.callspec.params["case"] for item in request.session.items if "test_a_kill_changes" in item.name}
    if selected != {*quick_cases()}:
        pytest.skip("only a part of the matrix is run")
    assert matrix.died == {*NAMES}

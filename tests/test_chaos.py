"""Runs in which processes die by SIGKILL at random times, five times in each; the result is that of a quiet run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import WORKERS, Cluster, Coordinator, Result, assert_same, cluster, leftovers, result_of
from conftest import Tiny
from forkserver import Child

SEED_VARIABLE, RUNS_VARIABLE = "HETERO_CHAOS_SEED", "HETERO_CHAOS_RUNS"  # to do one again, or more of them
RUNS, KILLS = int(os.environ.get(RUNS_VARIABLE, "30")), 5
LIMIT_S = 240.0
LONGEST_S = 4.0  # between two kills: a run takes about that from its start to its end
pytestmark = pytest.mark.by_hand


@dataclass
class Chaos:
    """The processes, and the result that every run must give."""

    cluster: Cluster
    expected: Result
    first_seed: int


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, rows_file: Path) -> Iterator[Chaos]:
    folder = tmp_path_factory.mktemp("chaos")
    seed = int(os.environ.get(SEED_VARIABLE, time.time_ns() % 1_000_000))
    with cluster(folder, tiny("llama"), rows_file) as lent:
        undisturbed = lent.start_coordinator(folder / "undisturbed")
        lent.finish(undisturbed, LIMIT_S)
        yield Chaos(lent, result_of(undisturbed.run_dir), seed)


@pytest.mark.parametrize("number", range(RUNS))
def test_random_kills_change_nothing(chaos: Chaos, number: int, tmp_path: Path) -> None:
    seed = chaos.first_seed + number
    print(f"{SEED_VARIABLE}={seed}")
    draw, lent = random.Random(seed), chaos.cluster
    began = time.monotonic()
    run = lent.start_coordinator(tmp_path)
    killed: Counter[str] = Counter()
    while killed.total() < KILLS:
        time.sleep(draw.uniform(0.0, LONGEST_S) ** 2 / LONGEST_S)  # more often soon after the last one
        if run.child.code() is not None:
            break  # it was done before
        name = draw.choice(["coordinator", *WORKERS])
        run = _kill(lent, run, name, tmp_path, draw)
        killed[name] += 1
    lent.finish(run, LIMIT_S)
    print(f"{killed.total()} kills ({dict(killed)}) in {time.monotonic() - began:.1f} s")
    assert_same(result_of(run.run_dir), chaos.expected)
    assert not leftovers(run.run_dir)
    assert time.monotonic() - began < LIMIT_S


def _kill(lent: Cluster, run: Coordinator, name: str, outputs: Path, draw: random.Random) -> Coordinator:
    """Kills one process and starts it again, at once or a little later."""
    victim: Child = run.child if name == "coordinator" else lent.workers[name]
    victim.send(signal.SIGKILL)
    victim.wait(20.0)
    time.sleep(draw.choice([0.0, draw.uniform(0.0, 1.0)]))
    if name == "coordinator":
        return run if victim.code() == 0 else lent.start_coordinator(outputs)
    lent.start_worker(name)
    return run

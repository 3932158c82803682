"""What a process that computes holds of what it freed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]

_PROCESS = """
import random, resource, sys
import torch
from hetero import heap
bounded = sys.argv[1] == "bounded"
torch.set_num_threads(1)
own = heap.Heap()
own.begin_loading()
own.end_loading()
start = heap._held_bytes()


def step(seed):
    draw, kept, peak = random.Random(seed), [], 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(60):
        for _ in range(4):
            temporary = [torch.ones(draw.randrange(1 << 15, 1 << 20)) for _ in range(4)]
            kept.append(torch.ones(draw.randrange(1 << 15, 1 << 18)))
            peak = max(peak, heap._held_bytes())
            del temporary
        if bounded or seed == 0:
            own.bound()
    del kept
    own.end_step()
    return peak - start, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


for seed in range(6):
    print(*step(seed))
"""


def steps(way: str) -> list[tuple[int, int]]:
    """(peak in bytes, page faults) of each step of many tensors, of which a few stay until its end."""
    done = subprocess.run([sys.executable, "-c", _PROCESS, way], capture_output=True, text=True, timeout=120, cwd=REPO)
    assert done.returncode == 0, done.stderr
    return [(int(peak), int(faults)) for peak, faults in map(str.split, done.stdout.splitlines())]


def grown(steps_: list[tuple[int, int]]) -> float:
    """By what part of the first step's peak, in which all goes back at once, the others' exceed it on average."""
    (needed, _), *later = steps_
    return sum(peak / needed - 1 for peak, _ in later) / len(later)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own settings")
def test_freed_memory_is_kept_for_the_next_tensors_and_the_process_hardly_grows() -> None:
    """Compared with the same process without the bound; all tensors' sizes differ from step to step."""
    bounded = steps("bounded")
    assert grown(bounded) < 0.5 * grown(steps("unbounded"))
    (needed, faults), *later = bounded
    assert max(peak for peak, _ in later) < 1.18 * needed
    assert max(number for _, number in later) < 0.3 * faults

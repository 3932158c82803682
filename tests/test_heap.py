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
own.begin()
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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own settings")
def test_freed_memory_is_kept_for_the_next_tensors_and_the_process_does_not_grow() -> None:
    (needed, faults), *later = steps("bounded")
    assert max(peak for peak, _ in later) <= 1.18 * needed  # all tensors' sizes differ from step to step
    assert max(number for _, number in later) < 0.3 * faults


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own settings")
def test_without_the_bound_it_grows() -> None:
    """Otherwise the test above shows nothing."""
    (needed, _), *later = steps("unbounded")
    assert max(peak for peak, _ in later) > 1.2 * needed

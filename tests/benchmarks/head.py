"""The loss of a large vocabulary: ours by chunks beside plain cross-entropy, memory and time; then with few labels.

python tests/benchmarks/head.py [--vocab 128256] [--tokens 1024] [--hidden 2048] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from hetero.token_loss import token_loss


def anonymous_bytes() -> int:
    """Anonymous memory of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def peak_over(work: Callable[[], object]) -> int:
    """Most anonymous memory while `work` runs, over what there was before."""
    before, peak, over = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    over.set()
    watcher.join()
    return peak - before


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("vocab", 128_256), ("tokens", 1024), ("hidden", 2048), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = nn.Linear(args.hidden, args.vocab, bias=False).requires_grad_(False)
    hidden = torch.randn(args.tokens, args.hidden)
    targets = torch.randint(0, args.vocab, (args.tokens,))

    def ours(share: float = 1.0) -> torch.Tensor:
        n = int(args.tokens * share)
        leaf = hidden[:n].clone().requires_grad_()
        token_loss(head, leaf, targets[:n], n).backward()
        assert leaf.grad is not None
        return leaf.grad

    def plain() -> torch.Tensor:
        leaf = hidden.clone().requires_grad_()
        (F.cross_entropy(head(leaf).float(), targets, reduction="sum") / args.tokens).backward()
        assert leaf.grad is not None
        return leaf.grad

    sides: dict[str, Callable[[], torch.Tensor]] = {
        "plain": plain,
        "ours": ours,
        "ours, 30 % labels": lambda: ours(0.3),
    }
    error = float((ours() - plain()).norm() / plain().norm())
    memory = {name: peak_over(work) for name, work in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, work in sides.items():
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    print(f"{args.tokens} tokens, {args.vocab} words, hidden size {args.hidden}, float32, one thread")
    for name, times in seconds.items():
        ratio = statistics.median(t / p for t, p in zip(times, seconds["plain"], strict=True))
        print(
            f"{name:18} {statistics.median(times):6.2f} s ({min(times):.2f} to {max(times):.2f}), "
            f"{ratio:.2f} of plain; {memory[name] / 2**20:7.0f} MiB, {memory[name] / memory['plain']:.3f} of plain"
        )
    few = statistics.median(a / b for a, b in zip(seconds["ours, 30 % labels"], seconds["ours"], strict=True))
    print(f"30 % labels: {few:.2f} of the time of all; gradients differ by {error:.1e} (relative)")


if __name__ == "__main__":
    main()

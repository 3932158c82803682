"""What a checkpoint adds to a step, and how long a run stands still after a worker was killed.

    python tests/benchmarks/checkpoint_cost.py [--model tiny] [--stages 3] [--every 10] [--checkpoints 12] [--rank 8]

One run on this machine, with local workers. First its steps are timed, those that take a checkpoint or have one in
flight beside those that have none; then a worker is killed (SIGKILL), and the clock runs until a step is finished.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from figures import Figure, table

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.002
START_S = 300.0
WARM_UP = 5  # steps that are not counted
VOCABULARY = 200  # token ids below it: fits any model


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="of conf/model")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8, help="of the adapter; a higher one makes larger checkpoints")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoints", type=int, default=12, help="measured ones")
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _run(args, Path(folder))
    return 0


def _run(args: argparse.Namespace, folder: Path) -> None:
    run_dir = folder / "run"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *_overrides(args, folder), f"hydra.run.dir={run_dir}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
    try:
        records = _wait_for_step(run_dir, WARM_UP + args.every * args.checkpoints, process, folder / "log")
        _print_steps(args, records, run_dir)
        _print_recovery(args, run_dir, process, folder / "log")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _overrides(args: argparse.Namespace, folder: Path) -> list[str]:
    draw = random.Random(5)
    rows = folder / "rows.jsonl"
    lines = [{"input_ids": [draw.randrange(3, VOCABULARY) for _ in range(args.tokens)]} for _ in range(64)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        f"model={args.model}",
        "data=jsonl",
        f"data.path={rows}",
        f"shard_plan.num_stages={args.stages}",
        f"adapter.r={args.rank}",
        "loop.steps=1000000",
        f"checkpoint.every_steps={args.every}",
        f"outputs={folder}",
    ]


def _records(run_dir: Path) -> list[dict[str, Any]]:
    """The steps that are logged; while the log is rewritten, or a line is half there, fewer."""
    found = []
    try:
        text = (run_dir / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            found.append(json.loads(line))
    return found


def _wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> list[dict[str, Any]]:
    """The log when it has come to a step."""
    deadline = time.monotonic() + START_S
    while True:
        records = _records(run_dir)
        last = records[-1]["step"] if records else 0
        if last >= step:
            return records
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run came to step {last} and not to {step}:\n{log.read_text()[-4000:]}")
        time.sleep(POLL_S)


def _print_steps(args: argparse.Namespace, records: list[dict[str, Any]], run_dir: Path) -> None:
    counted = [record for record in records if record["step"] > WARM_UP]
    groups: dict[str, list[float]] = {"takes a checkpoint": [], "the next one": [], "without": []}
    for record in counted:
        after = record["step"] % args.every
        name = "takes a checkpoint" if after == 0 else "the next one" if after == 1 else "without"
        groups[name].append(record["step_time_s"])
    without = sum(groups["without"]) / len(groups["without"])
    rows = []
    for name, seconds in groups.items():
        mean = sum(seconds) / len(seconds)
        rows.append(["", name, str(len(seconds)), f"{1000 * mean:.1f}", f"{1000 * (mean - without):+.1f}"])
        rows[-1].append(Figure.of([1000 * value for value in seconds]).shown(".1f"))
    newest = max((run_dir / "checkpoints").glob("step-????????"))
    size = sum(file.stat().st_size for file in newest.iterdir()) / 2**20
    print(f"{args.model}, {args.stages} stages, a checkpoint of {size:.1f} MiB every {args.every} steps")
    print(table(["", "step", "number", "mean ms", "more ms", "median (lowest to highest)"], rows))
    added = sum(sum(groups[name]) - len(groups[name]) * without for name in groups)
    print(f"a checkpoint adds {1000 * added / args.checkpoints:.1f} ms to a run in all")


def _print_recovery(args: argparse.Namespace, run_dir: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    reached = _records(run_dir)[-1]["step"]
    wanted = reached + args.every - reached % args.every + args.every // 2  # halfway between two checkpoints
    _wait_for_step(run_dir, wanted, process, log)
    victim = psutil.Process(process.pid).children()[-1]
    victim.kill()
    began = time.monotonic()
    killed_at = _records(run_dir)[-1]["step"]
    first = _wait_until_rewound(run_dir, killed_at, process, log)
    finished_s = time.monotonic() - began
    _wait_for_step(run_dir, killed_at + 1, process, log)
    caught_up_s = time.monotonic() - began
    print(
        f"a worker was killed after step {killed_at}: {finished_s:.1f} s to the next finished step ({first}), "
        f"{caught_up_s:.1f} s to step {killed_at + 1}; the worker is started again within that time"
    )


def _wait_until_rewound(run_dir: Path, killed_at: int, process: subprocess.Popen[bytes], log: Path) -> int:
    """The first step that is finished after the log went back."""
    deadline = time.monotonic() + START_S
    lowest = 1 << 60
    while time.monotonic() < deadline and process.poll() is None:
        records = _records(run_dir)
        last = int(records[-1]["step"]) if records else 0
        if last < killed_at:
            lowest = min(lowest, last)
        if last > lowest:
            return last
        time.sleep(POLL_S)
    raise SystemExit(f"the run did not go on:\n{log.read_text()[-4000:]}")


if __name__ == "__main__":
    sys.exit(main())

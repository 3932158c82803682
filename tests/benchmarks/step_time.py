"""How long a step of a two-stage pipeline takes: ours beside torch.distributed.pipelining and single processes.

    python tests/benchmarks/step_time.py [--split 15] [--rounds 7] [--model smollm2_135m]

Ours is `train.py` and `worker.py`, joined by TCP on 127.0.0.1. torch.distributed.pipelining runs the same modules over
gloo. `two singles` are two independent processes that hold the whole model and half of the micro-batches each: what two
cores give where nothing has to wait or be sent. Every process has one core and one torch thread. All are built first;
then they take turns, a few steps each, round after round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from figures import Figure, on_core, ratio, table
from torch_sides import Settings
from turns import Umpire

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WARM_UPS = 2
VOCABULARY = 200  # token ids below it: fits any model


@dataclass
class Side:
    """One of the things that are compared; its processes by name, the one first whose clock counts."""

    name: str
    players: list[str]
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m", help="of conf/model")
    parser.add_argument("--split", type=int, default=15, help="the second stage's first layer")
    parser.add_argument("--chunks", help="three cuts of torch's interleaved schedule, as in 8,15,23; none: left out")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after 2 that warm up")
    parser.add_argument("--steps", type=int, default=1, help="of a turn")
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step, one row each")
    parser.add_argument("--only", help="some of the sides, as in ours-1f1b,torch-1f1b")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the processes end with this one
    with tempfile.TemporaryDirectory() as folder, Started(Path(folder)) as started:
        sides = _start(args, Path(folder), started)
        _play(sides, started, args)
    _print(sides, args)
    return 0


class Started:
    """The processes, and the umpire that they join; a context manager that ends them."""

    def __init__(self, folder: Path) -> None:
        self.umpire = Umpire(self.check)
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []

    def run(self, name: str, core: int, command: list[str]) -> None:
        """Starts a process on a core; what it says goes to a file that is shown if it fails."""
        log = (self._folder / f"{name}.log").open("w+")
        self._logs.append(log)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
        }
        self._processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                cwd=self._folder,
                preexec_fn=lambda: on_core(core),
            )
        )

    def check(self) -> None:
        """Ends the benchmark where a process has failed."""
        for process, log in zip(self._processes, self._logs, strict=True):
            if process.poll():
                log.seek(0)
                raise SystemExit(f"{' '.join(map(str, process.args))} failed:\n{log.read()[-4000:]}")

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.umpire.end()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
        for process, log in zip(self._processes, self._logs, strict=True):
            process.wait(20)
            log.close()


def _start(args: argparse.Namespace, folder: Path, started: Started) -> list[Side]:
    """Starts every process and waits until each has taken a step, which exchanges shapes and warms up."""
    common = _common(args, folder)
    split = ["shard_plan=split", f"shard_plan.split_points=[{args.split}]"]
    sides = []
    for schedule in ("1f1b", "gpipe"):
        sides.append(_ours(started, schedule, [*common, *split], folder, args))
    for schedule in ("1f1b", "gpipe"):
        sides.append(_torch(started, schedule, [*common, *split], args))
    if args.chunks:
        cuts = ["shard_plan=split", f"shard_plan.split_points=[{args.chunks}]"]
        sides.append(_torch(started, "interleaved", [*common, *cuts], args))
    whole = [*common, "shard_plan=single"]
    sides.append(_singles(started, "two singles", 2, whole, args))
    sides.append(_singles(started, "one single", 1, whole, args))
    sides = [side for side in sides if side.players]
    print(f"started {len(started)} processes; waiting until each has taken a step", file=sys.stderr)
    started.umpire.wait_for([player for side in sides for player in side.players])
    return sides


def _wanted(name: str, args: argparse.Namespace) -> bool:
    return not args.only or name in args.only.split(",")


def _common(args: argparse.Namespace, folder: Path) -> list[str]:
    """The configuration that all sides share."""
    draw = random.Random(5)
    rows = folder / "rows.jsonl"
    with rows.open("w") as stream:
        for _ in range(8 * args.micro_batches):
            ids = [draw.randrange(3, VOCABULARY) for _ in range(args.tokens)]
            stream.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    return [
        f"model={args.model}",
        "data=jsonl",
        f"data.path={rows}",
        f"data.max_length={args.tokens}",
        "data.shuffle=false",
        f"loop.batch_size={args.micro_batches}",
        "loop.microbatch_size=1",
        f"loop.steps={1 + (WARM_UPS + args.rounds) * args.steps}",
        "lr_schedule=constant",
        "adapter.modules_to_save=null",
        f"outputs={folder / 'outputs'}",
    ]


def _ours(started: Started, schedule: str, common: list[str], folder: Path, args: argparse.Namespace) -> Side:
    name = f"ours-{schedule}"
    if not _wanted(name, args):
        return Side(name, [])
    port = _free_port()
    worker = [f"worker.port={port}", "worker.device=cpu", "worker.once=true", "worker.threads=1"]
    started.run(f"{name}-worker", 1, [str(ROOT / "worker.py"), *worker, f"outputs={folder / 'outputs'}"])
    coordinator = [
        *common,
        f"schedule={schedule}",
        "role=coordinator",
        f"hardware.workers=[{{id: other, host: 127.0.0.1, port: {port}, device: cpu}}]",
        "hardware.coordinator.device=cpu",
        "hardware.launch=none",
        "transport.connect_timeout_s=300",
        "logger=none",
        f"+logger.turns={{_target_: turns.TurnLogger, port: {started.umpire.port}, name: {name}}}",
        "allow_targets=[turns.TurnLogger]",
    ]
    started.run(name, 0, [str(ROOT / "train.py"), *coordinator])
    return Side(name, [name])


def _torch(started: Started, schedule: str, overrides: list[str], args: argparse.Namespace) -> Side:
    name = f"torch-{schedule}"
    if not _wanted(name, args):
        return Side(name, [])
    rendezvous = _free_port()
    players = []
    for rank in range(2):
        players.append(f"{name}-{rank}")
        settings = Settings(
            players[-1], started.umpire.port, overrides, core=rank, schedule=schedule, rank=rank, rendezvous=rendezvous
        )
        _run_torch_side(started, settings)
    return Side(name, players)


def _singles(started: Started, name: str, count: int, overrides: list[str], args: argparse.Namespace) -> Side:
    if not _wanted(name, args):
        return Side(name, [])
    players = []
    for i in range(count):
        players.append(f"{name}-{i}")
        _run_torch_side(started, Settings(players[-1], started.umpire.port, overrides, core=i, part=(i, count)))
    return Side(name, players)


def _run_torch_side(started: Started, settings: Settings) -> None:
    started.run(settings.name, settings.core, [str(HERE / "torch_sides.py"), msgspec.json.encode(settings).decode()])


def _play(sides: list[Side], started: Started, args: argparse.Namespace) -> None:
    for round_ in range(WARM_UPS + args.rounds):
        print(f"round {round_ + 1} of {WARM_UPS + args.rounds}", file=sys.stderr)
        for side in sides:
            reports = started.umpire.play(side.players, args.steps)
            seconds = max(reports[p][0] for p in side.players) if "single" in side.name else reports[side.players[0]][0]
            if round_ >= WARM_UPS:
                side.step_s.append(seconds / args.steps)
            side.losses += reports[side.players[-1]][1]
            time.sleep(0.05)  # the others' processes come to rest


def _print(sides: list[Side], args: argparse.Namespace) -> None:
    tokens = args.micro_batches * args.tokens
    torch_sides = [side for side in sides if side.name.startswith("torch")]
    best = min(torch_sides, key=lambda side: Figure.of(side.step_s).median, default=sides[-1])
    rows = []
    for side in sides:
        figure = Figure.of(side.step_s)
        speed = f"{tokens / figure.median:.0f}"
        rows.append(
            ["", side.name, figure.shown(".3f"), speed, ratio(best.step_s, side.step_s).shown(".3f"), _last_loss(side)]
        )
    print(
        f"{args.model}, layers [0, {args.split}) and [{args.split}, end), {args.micro_batches} micro-batches of 1 x "
        f"{args.tokens}; medians of {args.rounds} rounds of {args.steps} steps (lowest to highest)"
    )
    heads = ["", "side", "step s", "tokens/s", f"{best.name} / it", "last loss"]
    print(table(heads, rows))


def _last_loss(side: Side) -> str:
    """Equal on all sides that have all micro-batches."""
    return "(half)" if side.name == "two singles" else f"{side.losses[-1]:.5f}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())

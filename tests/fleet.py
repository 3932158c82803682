"""Workers and runs in forked processes, so that a test of what happens to them costs a second or two."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from forkserver import NETWORK, Child, ForkServer
from peers import wait_until
from processes import environment

from hetero.failpoints import VARIABLE

LIMIT_S = 60.0  # of anything on a busy machine
STEPS, EVERY = 8, 3
ADAPTER = "adapter/adapter_model.safetensors"


@dataclass
class Process:
    """A forked `worker.py` or `train.py`."""

    child: Child
    outputs: Path
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self.child.text if self.child.log.exists() else ""

    def wait_for(self, pattern: str, timeout_s: float = LIMIT_S, after: int = 0) -> re.Match[str]:
        """Waits until it has printed what matches, behind this many characters; gives the match."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.text[after:])):
            assert time.monotonic() < deadline, f"no {pattern!r} within {timeout_s:g} s in:\n{self.text}"
            time.sleep(0.01)
        return found

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Waits until it has ended; gives its exit code."""
        code = self.child.wait(timeout_s)
        assert "Traceback" not in self.text, self.text
        return code

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.child.send(number)

    def is_stopped(self) -> bool:
        """Whether it stands still after SIGSTOP."""
        return psutil.Process(self.child.pid).status() == psutil.STATUS_STOPPED

    def wait_stopped(self) -> None:
        """Waits until it stands still."""
        wait_until(self.is_stopped, LIMIT_S)

    def assert_idle(self, timeout_s: float = 10.0) -> None:
        """It lives, listens and is in no run, within the time."""

        def idle() -> bool:
            connections = psutil.Process(self.child.pid).net_connections("tcp")
            return {c.status for c in connections} == {psutil.CONN_LISTEN}

        wait_until(idle, timeout_s)


@dataclass
class Fleet:
    """Starts workers and runs.

    Attributes:
        server: forks the processes.
        folder: everything lies in here.
        model: of the runs.
        rows_file: of the runs.
        network: the namespace of what is started next; empty: this process's.
    """

    server: ForkServer
    folder: Path
    model: Path
    rows_file: Path
    network: str = ""
    _started: list[Process] = field(default_factory=list)

    def worker(self, failpoint: str = "", *, port: int = 0, args: Sequence[str] = ()) -> Process:
        """Starts a worker that stays up, on a port of the system's choice or on this one."""
        command = [f"worker.port={port}", f"worker.models_dir={self.model.parent}", f"outputs={self.folder}", *args]
        process = self._start("worker", command, failpoint, self.folder)
        found = process.wait_for(r"listening on (\S+):(\d+) ")
        process.host, process.port = found[1], int(found[2])
        return process

    def train(
        self, outputs: str | Path, workers: Sequence[Process], *args: str, failpoint: str = "", resume: bool = False
    ) -> Process:
        """Starts a run; its folder is `run` in its outputs, or `again` where it goes on with the one before."""
        folder = self.folder / outputs
        listed = ", ".join(f"{{id: w{n}, host: {w.host}, port: {w.port}}}" for n, w in enumerate(workers, 1))
        command = [
            "hardware.launch=none",
            f"hardware.workers=[{listed}]",
            *self.settings(),
            f"checkpoint.every_steps={EVERY}",
            f"checkpoint.resume={'latest' if resume else 'null'}",
            "recovery.wait_s=40",
            f"outputs={folder}",
            f"hydra.run.dir={run_dir(folder, resume)}",
            *args,
        ]
        return self._start("train", command, failpoint, folder)

    def settings(self) -> list[str]:
        """What decides the result of a run."""
        return [
            f"model.path={self.model}",
            "data=jsonl",
            f"data.path={self.rows_file}",
            "adapter.dropout=0.1",
            f"loop.steps={STEPS}",
            "loop.batch_size=4",
        ]

    def _start(self, script: str, args: Sequence[str], failpoint: str, outputs: Path) -> Process:
        log = self.folder / f"{len(self._started):03d}-{script}.log"
        allow = "allow_targets=[own_parts.sleepy_stage,own_parts.slow_train]"
        args = sorted(args, key=lambda arg: not arg.startswith("-"))  # options stand before overrides
        child = self.server.start(script, *args, allow, log=log, env={VARIABLE: failpoint, NETWORK: self.network})
        self._started.append(Process(child, outputs))
        return self._started[-1]

    def end(self) -> None:
        """Kills what is left."""
        for process in self._started:
            if process.child.code() is None:
                process.child.kill()


def run_dir(outputs: Path, resumed: bool = False) -> Path:
    """A run's folder."""
    return outputs / ("again" if resumed else "run")


def adapter_of(outputs: Path, resumed: bool = False) -> bytes:
    """The adapter that a run left."""
    return (run_dir(outputs, resumed) / ADAPTER).read_bytes()


def checkpoints_of(outputs: Path) -> list[int]:
    """The steps whose checkpoints a first run committed."""
    return sorted(int(p.parent.name[5:]) for p in (outputs / "run" / "checkpoints").glob("step-????????/manifest.json"))


def assert_no_leftovers(outputs: Path) -> None:
    """No unfinished save."""
    assert [p for p in outputs.rglob("*") if p.suffix in (".tmp", ".old")] == []


@contextmanager
def fleet(server: ForkServer, folder: Path, model: Path, rows_file: Path) -> Iterator[Fleet]:
    """Lends a fleet, and leaves nothing of it."""
    lent = Fleet(server, folder, model, rows_file)
    try:
        yield lent
    finally:
        lent.end()


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Lends the preloaded process."""
    with ForkServer(environment()) as server:
        yield server

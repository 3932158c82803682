"""Runs the scripts for tests, as real processes or (many times faster) inside this one, and leaves nothing behind."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
from forkserver import ForkServer
from peers import wait_until

REPO = Path(__file__).parents[1]
START_S = 120.0  # importing torch, transformers and peft on a busy machine
END_S = 15.0
_LOOK_S = 0.01
PRELOADED = ("train", "worker")
_MARK = "HETERO_TEST_PROCESS"


@dataclass(frozen=True)
class Outcome:
    """How a script ended, and what it printed on both streams."""

    code: int
    text: str
    seconds: float

    def one_line(self) -> str:
        """The only line it printed; a mistake is one line and no traceback."""
        assert "Traceback" not in self.text, self.text
        lines = [line for line in self.text.splitlines() if line.strip()]
        assert len(lines) == 1, self.text
        return lines[0]


class Started(Protocol):
    """A process that was started: one of its own, or one that the fork server made."""

    @property
    def pid(self) -> int: ...
    @property
    def text(self) -> str: ...
    def code(self) -> int | None: ...
    def kill(self) -> None: ...


class Own:
    """A process from its very beginning, with what it prints in a file.

    Args:
        argv: the command.
        log: the file.
        cwd: where it starts.
        env: its environment.
    """

    def __init__(self, argv: Sequence[str], log: Path, cwd: Path | None, env: dict[str, str]) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=env,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Ends it for certain."""
        self._process.kill()
        self._process.wait(END_S)


class Running:
    """A started process with its children, which carry a mark of it in their environment.

    Args:
        start: starts it, with a file for what it prints and the mark.
    """

    def __init__(self, start: Callable[[Path, dict[str, str]], Started]) -> None:
        self.mark = uuid.uuid4().hex
        self.started = time.monotonic()
        self._folder: tempfile.TemporaryDirectory[str] | None = tempfile.TemporaryDirectory()
        log = Path(self._folder.name) / "printed"
        log.touch()
        self.process = start(log, {_MARK: self.mark})
        self._printed = ""

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self.process.text if self._folder is not None else self._printed

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """Waits until it has printed what matches."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.code() is not None
            text = self.text
            if found := re.search(pattern, text):
                return found
            assert not ended and time.monotonic() < deadline, f"no {pattern!r} within {timeout_s} s in:\n{text}"
            time.sleep(_LOOK_S)

    def wait(self, timeout_s: float = START_S) -> Outcome:
        """Waits until it has ended."""
        deadline = time.monotonic() + timeout_s
        while (code := self.process.code()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the process", timeout_s, self.text)
            time.sleep(_LOOK_S)
        return Outcome(code, self.text, time.monotonic() - self.started)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone."""
        if self.process.code() is None:
            os.kill(self.process.pid, number)

    def relatives(self) -> list[psutil.Process]:
        """The process and all that came of it, as far as they are alive."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = process.pid == self.process.pid or process.environ().get(_MARK) == self.mark
                if own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def listening(self) -> list[int]:
        """Ports on which the process and its children listen."""
        return [
            connection.laddr.port
            for process in self.relatives()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]

    def assert_gone(self, timeout_s: float = 10.0) -> None:
        """Nothing of it is left, within the time."""
        wait_until(lambda: not self.relatives(), timeout_s)

    def end(self) -> None:
        """Kills whatever is left."""
        for process in self.relatives():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.process.code() is None:
            self.process.kill()
        if self._folder is not None:
            self._printed = self.process.text
            self._folder.cleanup()
            self._folder = None


def environment() -> dict[str, str]:
    """This process's environment without what steers Hydra or wandb, offline, with one thread for each process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HYDRA_", "WANDB_"))}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONDONTWRITEBYTECODE": "1"}


def own_process(argv: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> Running:
    """Starts a process from its very beginning; `env` is added to a small environment that needs no network."""
    return Running(lambda log, mark: Own(argv, log, cwd, environment() | (env or {}) | mark))


@functools.cache
def _preloaded() -> ForkServer:
    server = ForkServer(environment())
    atexit.register(server.close)
    return server


@contextlib.contextmanager
def started(
    script: str, *args: str, cwd: Path | None = None, env: dict[str, str] | None = None, python: Sequence[str] = ()
) -> Iterator[Running]:
    """Lends a running `train.py`, `worker.py` or `visualize.py`.

    The first two come from a process that has imported everything, unless they are to have a folder, an environment or
    options of Python of their own.
    """
    if script in PRELOADED and sys.platform == "linux" and not (cwd or env or python):
        running = Running(lambda log, mark: _preloaded().start(script, *args, log=log, env=mark))
    else:
        running = own_process([sys.executable, *python, str(REPO / f"{script}.py"), *args], cwd=cwd, env=env)
    try:
        yield running
    finally:
        running.end()


def run(script: str, *args: str, timeout_s: float = START_S, **options: Any) -> Outcome:
    """Runs a script as a process to its end; nothing of it is left then."""
    with started(script, *args, **options) as running:
        outcome = running.wait(timeout_s)
        running.assert_gone()
        return outcome


@dataclass
class Worker:
    """A worker that stays up."""

    running: Running
    host: str
    port: int
    outputs: Path

    def entry(self, name: str) -> str:
        """The worker in `hardware.workers=[...]`."""
        return f'{{id: {name}, host: "{self.host}", port: {self.port}}}'

    def wait_idle(self) -> None:
        """Waits until it is in no run and listens."""
        wait_until(lambda: len(self.connections()) == 0, END_S)
        assert self.port in self.running.listening()

    def connections(self) -> list[Any]:
        """Open connections."""
        open_states = (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT)
        process = psutil.Process(self.running.process.pid)
        return [c for c in process.net_connections("tcp") if c.status in open_states]


@contextlib.contextmanager
def worker(outputs: Path, *args: str, port: int = 0, **options: Any) -> Iterator[Worker]:
    """Lends a worker that listens on a port of the system's choice."""
    with started("worker", f"worker.port={port}", f"outputs={outputs}", *args, **options) as running:
        found = running.wait_for(r"listening on (\S+):(\d+) ")
        yield Worker(running, found[1].strip("[]"), int(found[2]), outputs)


def hardware(*workers: Worker) -> list[str]:
    """Overrides for a run on these workers, named w1, w2, ..."""
    entries = ", ".join(w.entry(f"w{number}") for number, w in enumerate(workers, 1))
    return ["hardware.launch=none", f"hardware.workers=[{entries}]"]


def run_here(script: str, *args: str) -> Outcome:
    """Runs a script's command line in this process, which has imported everything already."""
    printed = io.StringIO()
    argv, handlers, level = sys.argv, logging.root.handlers[:], logging.root.level
    on_terminate, full_error = signal.getsignal(signal.SIGTERM), os.environ.pop("HYDRA_FULL_ERROR", None)
    began = time.monotonic()
    try:
        sys.argv = [str(REPO / f"{script}.py"), *args]
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                code = importlib.import_module(script).main()
            except SystemExit as exc:
                code = exc.code
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR", None)
        os.environ.update({} if full_error is None else {"HYDRA_FULL_ERROR": full_error})
        signal.signal(signal.SIGTERM, on_terminate)
        for handler in {*logging.root.handlers} - {*handlers}:
            handler.close()
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    return Outcome(code, printed.getvalue(), time.monotonic() - began)


def train_here(run_dir: Path, *args: str) -> list[dict[str, Any]]:
    """Runs `train.py` in this process into a folder; it must succeed; gives the metrics."""
    outcome = run_here("train", f"outputs={run_dir.parent}", f"hydra.run.dir={run_dir}", *args)
    assert outcome.code == 0, outcome.text
    return metrics(run_dir)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(records: Sequence[dict[str, Any]]) -> list[float]:
    """The loss of each step."""
    return [float(record["loss"]) for record in records]


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def refuses_connections(host: str, port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(END_S)
        return probe.connect_ex((host, port)) != 0


def composed(*overrides: str, config_name: str = "config") -> dict[str, Any]:
    """The plain data that a script gets for these overrides."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from hetero.config import CONF_DIR, register_resolvers

    register_resolvers()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        raw: Any = OmegaConf.to_container(compose(config_name, list(overrides)), resolve=True)
    return raw  # type: ignore[no-any-return]

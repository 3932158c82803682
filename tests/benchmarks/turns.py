"""Taking turns: processes that are all built and then each work only when it is theirs, so that runs interleave.

A process joins with `Turns`, takes one step to warm up, and says so; from then on it waits for a number of steps, takes
them, and reports the seconds that they took together and their losses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

KEY = b"benchmark"  # both ends are on 127.0.0.1 and belong to one user


class Turns:
    """A working process's end."""

    def __init__(self, port: int, name: str) -> None:
        self._connection = Client(("127.0.0.1", port), authkey=KEY)
        self._connection.send(name)

    def next(self) -> int:
        """Waits for the next turn: how many steps it has; 0 at the end."""
        try:
            num_steps: int = self._connection.recv()
        except EOFError:
            return 0
        return num_steps

    def report(self, seconds: float, losses: list[float]) -> None:
        """Ends a turn."""
        self._connection.send((seconds, losses))


class TurnLogger:
    """Makes a run take turns: a logger of hetero that holds the run between two steps until the next turn.

    Args:
        run_dir: not used.
        port: where the turns are given out.
        name: of this run.
    """

    def __init__(self, run_dir: Path, port: int, name: str) -> None:
        self._port, self._name = port, name
        self._left = 1  # the first step warms up and is a turn of its own
        self._losses: list[float] = []
        self._started = 0.0

    def start(self, run: dict[str, Any]) -> None:
        """Joins."""
        self._turns = Turns(self._port, self._name)

    def step(self, record: dict[str, Any]) -> None:
        """Counts a step; after the last of a turn, reports and waits."""
        self._losses.append(record["loss"])
        self._left -= 1
        if self._left == 0:
            self._turns.report(time.perf_counter() - self._started, self._losses)
            self._losses = []
            self._left = self._turns.next()
            self._started = time.perf_counter()

    def finish(self, error: str | None) -> None:
        """Nothing is left to do."""


class Umpire:
    """Gives out the turns.

    Args:
        check: called while waiting; raises where there is nothing to wait for any more.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._listener = Listener(("127.0.0.1", 0), authkey=KEY, backlog=32)
        self.port = int(self._listener.address[1])
        self._players: dict[str, Connection] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def wait_for(self, names: list[str]) -> dict[str, tuple[float, list[float]]]:
        """Waits until these have joined and warmed up; gives their reports."""
        while not set(names) <= self._players.keys():
            time.sleep(0.1)
            self._check()
        return {name: self._report(name) for name in names}

    def play(self, names: list[str], num_steps: int) -> dict[str, tuple[float, list[float]]]:
        """Lets these take so many steps, at once; gives the seconds and losses of each when all are done."""
        for name in names:
            self._players[name].send(num_steps)
        return {name: self._report(name) for name in names}

    def end(self) -> None:
        """No more turns."""
        for connection in self._players.values():
            connection.close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed at the end
            while True:
                connection = self._listener.accept()
                self._players[connection.recv()] = connection

    def _report(self, name: str) -> tuple[float, list[float]]:
        while not self._players[name].poll(1):
            self._check()
        report: tuple[float, list[float]] = self._players[name].recv()
        return report

"""Finds a compute thread that is alive but stuck: it began an operation and goes no further.

Heartbeats come from another thread, so they go on when compute hangs in a driver or a lock. What the compute thread
does is judged by its own measure: an operation is stuck when it takes much longer than any did before.
"""

from __future__ import annotations

import enum
import faulthandler
import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

logger = logging.getLogger(__name__)

_STDERR = 2
_JOIN_S = 5.0


class Phase(enum.Enum):
    """What kind of operation it is; each kind has its own limit."""

    LOADING = "loading"
    STEP = "step"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Operation:
    """What the compute thread is in.

    Attributes:
        phase: its kind.
        what: its name as it follows "has been in", such as "a forward".
        since: when it last moved, in seconds of the clock: it began, or an operation within it ended.
        move: number of that move; the same number later means that nothing began or ended meanwhile.
    """

    phase: Phase
    what: str
    since: float
    move: int


@dataclass
class _Entered:
    """An operation that has not ended, and the longest time that it went without a move."""

    phase: Phase
    what: str
    longest_s: float = 0.0


class Progress:
    """What one compute thread is doing; that thread writes, any thread reads.

    An operation may hold others. Each begin and each end is a move, and what counts is the time without one:

        a step   |--3 s--|              |--4 s--|      its longest is 4 s
        a forward        |-----9 s------|              its longest is 9 s

    Args:
        step_s: least limit of a STEP operation, seconds.
        step_times_longest: limit of a STEP operation as a multiple of the longest that finished.
        loading_s: limit of a LOADING operation, seconds, and of STEP operations until one has finished: the first
            compiles, and touches the weights for the first time.
        checkpoint_s: limit of a CHECKPOINT operation, seconds.
        clock: gives seconds; never goes back.
    """

    def __init__(
        self,
        *,
        step_s: float = 120.0,
        step_times_longest: float = 10.0,
        loading_s: float = 1800.0,
        checkpoint_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._step_s, self._step_times_longest = step_s, step_times_longest
        self._fixed_s = {Phase.LOADING: loading_s, Phase.CHECKPOINT: checkpoint_s}
        self._lock = threading.Lock()
        self._entered: list[_Entered] = []
        self._thread: int | None = None
        self._since = 0.0
        self._move = 0
        self._num_operations = 0
        self._longest_s: dict[Phase, float] = {}

    @contextmanager
    def doing(self, phase: Phase, what: str) -> Iterator[None]:
        """The operation lasts as long as the block, however that ends. Waiting for a peer is no operation.

        Args:
            phase: its kind.
            what: its name as it follows "has been in", such as "a forward".
        """
        operation = _Entered(phase, what)
        finished = False
        self._begin(operation)
        try:
            yield
            finished = True
        finally:
            self._end(operation, finished)

    @property
    def num_operations(self) -> int:
        """How many operations have begun so far."""
        return self._num_operations

    def current(self) -> Operation | None:
        """The innermost operation that the thread is in, None while it is in none."""
        with self._lock:
            if not self._entered:
                return None
            innermost = self._entered[-1]
            return Operation(innermost.phase, innermost.what, self._since, self._move)

    def longest_s(self, phase: Phase) -> float | None:
        """The longest time without a move in an operation that finished, in seconds; None before the first one."""
        return self._longest_s.get(phase)

    def limit_s(self, phase: Phase) -> float:
        """How long an operation may go without a move, in seconds."""
        return self._limit(phase)[0]

    def limit_reason(self, phase: Phase) -> str:
        """Where the limit comes from."""
        return self._limit(phase)[1]

    def restart_clock(self) -> None:
        """Counts the time of the current operation from now on: this machine slept, and it is not to blame."""
        with self._lock:
            self._since = self.clock()

    def _limit(self, phase: Phase) -> tuple[float, str]:
        if phase is not Phase.STEP:
            return self._fixed_s[phase], f"the limit is {self._fixed_s[phase]:.0f} s"
        longest_s = self._longest_s.get(phase)
        if longest_s is None:
            loading_s = self._fixed_s[Phase.LOADING]
            return loading_s, f"the limit of the first one is {loading_s:.0f} s"
        if longest_s * self._step_times_longest > self._step_s:
            return longest_s * self._step_times_longest, f"{self._step_times_longest:g} x the longest before"
        return self._step_s, f"the limit is {self._step_s:.0f} s"

    def _begin(self, operation: _Entered) -> None:
        with self._lock:
            assert not self._entered or self._thread == threading.get_ident(), "one Progress is for one thread"
            self._thread = threading.get_ident()
            self._moved()
            self._entered.append(operation)
            self._num_operations += 1

    def _end(self, operation: _Entered, finished: bool) -> None:
        with self._lock:
            self._moved()
            innermost = self._entered.pop()
            assert innermost is operation, "the innermost operation ends first"
            if finished:
                # A machine that slept may wake in the operation's last moment: those hours must not become the measure.
                counted_s = min(operation.longest_s, self._limit(operation.phase)[0])
                self._longest_s[operation.phase] = max(counted_s, self._longest_s.get(operation.phase, 0.0))

    def _moved(self) -> None:
        now = self.clock()
        if self._entered:
            self._entered[-1].longest_s = max(self._entered[-1].longest_s, now - self._since)
        self._since = now
        self._move += 1


class Watchdog:
    """Looks at a compute thread about once a second, from a thread of its own, while it is entered.

    When the operation is over its limit: a dump of all threads' stacks, one line in the log and `on_stuck`, each once.
    A thread cannot be ended from outside, so if that did not move it, `on_hopeless` comes once, to end the process.
    Both are called in the watchdog's thread; what they raise is logged.

    A thread that never releases Python's global lock stops this one too; then no heartbeat is sent either.

    Args:
        progress: what the compute thread is doing.
        on_stuck: takes the reason, such as "has been in a forward for 130 s (10 x the longest before)".
        on_hopeless: called when nothing has moved `grace_s` after `on_stuck`.
        grace_s: seconds between the two.
        dump_to: where the stacks go, a file with a descriptor; None is sys.stderr.
        check_s: seconds between two looks.
        late_s: a look that comes this many seconds late judges nothing and gives a new full deadline: the whole
            process stood still, in a suspended machine for example.
    """

    def __init__(
        self,
        progress: Progress,
        on_stuck: Callable[[str], None],
        on_hopeless: Callable[[], None] | None = None,
        *,
        grace_s: float = 10.0,
        dump_to: TextIO | None = None,
        check_s: float = 1.0,
        late_s: float = 5.0,
    ) -> None:
        self._progress, self._on_stuck, self._on_hopeless = progress, on_stuck, on_hopeless
        self._grace_s, self._dump_to = grace_s, dump_to
        self._check_s, self._late_s = check_s, late_s
        self._looked_at = progress.clock()
        self._reported_move: int | None = None
        self._hopeless_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._looked_at = self._progress.clock()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def check(self) -> None:
        """Looks once, as its thread does every `check_s`."""
        late = self._progress.clock() - self._looked_at > self._check_s + self._late_s
        try:
            if late:
                self._forgive()
            else:
                self._judge()
        finally:
            self._looked_at = self._progress.clock()  # what was called from here may take its time

    def _watch(self) -> None:
        while not self._stop.wait(self._check_s):
            self.check()

    def _forgive(self) -> None:
        self._progress.restart_clock()
        if self._hopeless_at is not None:
            self._hopeless_at = self._progress.clock() + self._grace_s

    def _judge(self) -> None:
        operation = self._progress.current()
        if operation is None:
            return
        now = self._progress.clock()
        if operation.move == self._reported_move:
            if self._hopeless_at is not None and now >= self._hopeless_at:
                self._hopeless_at = None
                self._give_up(operation)
        elif now - operation.since > self._progress.limit_s(operation.phase):
            self._reported_move = operation.move
            self._report(operation, now - operation.since)
            self._hopeless_at = self._progress.clock() + self._grace_s

    def _report(self, operation: Operation, stuck_s: float) -> None:
        why = self._progress.limit_reason(operation.phase)
        reason = f"has been in {operation.what} for {stuck_s:.0f} s ({why})"
        faulthandler.dump_traceback(file=self._descriptor(), all_threads=True)
        logger.error("the compute thread %s; the stacks of all threads were dumped", reason)
        try:
            self._on_stuck(reason)
        except Exception:
            logger.exception("could not report that the compute thread is stuck")  # and on_hopeless still comes

    def _give_up(self, operation: Operation) -> None:
        logger.error("the compute thread is still in %s and cannot be ended from outside", operation.what)
        if self._on_hopeless is not None:
            try:
                self._on_hopeless()
            except Exception:
                logger.exception("could not end what the stuck compute thread belongs to")

    def _descriptor(self) -> int:
        """Of the file for the dump; a sys.stderr that was replaced or closed may have none."""
        file = self._dump_to or sys.stderr
        try:
            return file.fileno() if file is not None else _STDERR
        except (AttributeError, ValueError, io.UnsupportedOperation):
            return _STDERR

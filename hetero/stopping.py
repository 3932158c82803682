"""How a run ends when somebody wants it to: after the step, with a checkpoint; at once when asked a second time."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

PATIENCE_S = 7.0  # for the step and its checkpoint; then the signal has its usual effect


class Terminated(BaseException):
    """SIGTERM, or SIGHUP; like KeyboardInterrupt it passes through everything that handles errors."""


def end_by_signals() -> None:
    """From now on SIGTERM, and SIGHUP of a terminal that goes away, raise `Terminated`; nohup's SIGHUP does nothing."""
    signal.signal(signal.SIGTERM, _raise_terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _raise_terminated)


def _raise_terminated(number: int, _: FrameType | None) -> None:
    if number == signal.SIGHUP:
        _leave_terminal()
    raise Terminated


def _leave_terminal() -> None:
    """What is still written to a terminal that is gone would fail, and the end with it; files and pipes stay."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed by whoever started this process
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(null, number)
    os.close(null)


class Stop:
    """Whether a run is to end after the step that it is in; asked from any thread."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._lock = threading.Lock()

    def ask(self, reason: str) -> None:
        """From now on the run is to end; the first reason counts."""
        with self._lock:
            self._reason = self._reason or reason

    @property
    def reason(self) -> str | None:
        """Why the run is to end; None while it is not."""
        return self._reason


@contextlib.contextmanager
def signals_ask(ask: Callable[[str], bool]) -> Iterator[None]:
    """While it lasts, the first SIGINT, SIGTERM or SIGHUP asks for an end; a second SIGINT or SIGTERM ends this
    process at once.

    What the signal does elsewhere happens where `ask` gives False, or when the end has not come 7 s later. Only the
    main thread hears of signals; in another one nothing changes.

    Args:
        ask: gets the signal's name; gives False where an end cannot be asked for now.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before: dict[int, Any] = {number: signal.getsignal(number) for number in signals}
    asked: list[int] = []

    def usual(number: int, frame: FrameType | None) -> None:
        handler = before[number]
        if callable(handler):
            handler(number, frame)
        elif handler is not signal.SIG_IGN:
            os._exit(128 + number)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if before[number] is signal.SIG_IGN:
            return
        if number == signal.SIGHUP:
            _leave_terminal()
            if asked:  # the kernel and a shell may both say so
                return
        if asked:
            os._exit(128 + number)
        asked.append(number)
        if not ask(signal.Signals(number).name):
            usual(number, frame)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)

    def out_of_patience(_: int, frame: FrameType | None) -> None:
        usual(asked[0], frame)

    alarm = signal.signal(signal.SIGALRM, out_of_patience)
    try:
        for number in before:
            signal.signal(number, on_signal)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGALRM, alarm)

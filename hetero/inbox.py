"""Where the I/O threads leave events for the compute thread, which takes what it is ready for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hetero.errors import HeteroError

# Waking up now and then lets a signal reach the main thread while it waits.
_WAKE_S = 1.0


class Inbox:
    """Events in order of arrival; the first failure ends every wait, now and later."""

    def __init__(self) -> None:
        self._events: deque[Any] = deque()
        self._failure: HeteroError | None = None
        self._changed = threading.Condition()

    def put(self, event: Any) -> None:
        """Adds an event."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def fail(self, error: HeteroError) -> None:
        """Ends all waits with this error; later ones are ignored."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def failure(self) -> HeteroError | None:
        """The failure, if there was one."""
        return self._failure

    def take(self, match: Callable[[Any], bool]) -> list[Any]:
        """All matching events that are here, without waiting; the failure only when there are none.

        Raises:
            HeteroError: something failed.
        """
        with self._changed:
            found = [event for event in self._events if match(event)]
            if found:
                self._events = deque(event for event in self._events if not any(event is f for f in found))
            elif self._failure is not None:
                raise self._failure
            return found

    def get(
        self, match: Callable[[Any], bool], timeout_s: float | None = None, *, despite_failure: bool = False
    ) -> Any:
        """The first matching event; waits for it. Events that came before a failure are still given.

        Args:
            match: which events are wanted.
            timeout_s: how long to wait; None is without end.
            despite_failure: go on waiting after a failure.

        Raises:
            HeteroError: something failed meanwhile.
            TimeoutError: none came within `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                for position, event in enumerate(self._events):
                    if match(event):
                        del self._events[position]
                        return event
                if self._failure is not None and not despite_failure:
                    raise self._failure
                left = _WAKE_S if deadline is None else min(_WAKE_S, deadline - time.monotonic())
                if left <= 0:
                    raise TimeoutError
                self._changed.wait(left)

"""Tests the line to a worker: round trip, and load one way and the other, bounded in bytes and in time.

dialler   HELLO(probe)  --->            ABOUT comes once, unasked
          ECHO          ---> ECHO       round trip
          LOAD LOAD ..  ---> LOADED ..  rate there: what was answered, by the sender's clock
          DRAW          ---> LOAD ..    rate back: the same with the parts changed, then RATE
          MEASURE       ---> MEASURED   the same between that worker and another one
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hetero.errors import HeteroError, PeerError, RemoteProtocolError, show_address
from hetero.interfaces import card_of
from hetero.transport.link import Closed, Link, Received
from hetero.transport.tcp import TcpTransport
from hetero.versions import versions
from hetero.wire.headers import (
    LOAD_BYTES,
    MAX_DRAW_BYTES,
    About,
    Draw,
    Echo,
    Fault,
    FrameType,
    Header,
    Hello,
    Load,
    Measure,
    Measured,
    Rate,
    Reject,
    Welcome,
)

H = TypeVar("H", bound=Header)

MAX_BYTES = MAX_DRAW_BYTES  # of load, one way
LOAD_S = 1.5
MAX_IN_FLIGHT = 32  # loads that are not answered yet
QUICK_S = 0.2  # an answer within this time lets more be in flight; a slow line's queue stays short
SILENCE_S = 10.0
ANSWER_S = 15.0
MEASURE_S = 40.0  # a slow line takes each of its parts this long at most, both ways
CONNECT_S = 4.0
_ECHOES = 11
_CHUNK = memoryview(bytes(LOAD_BYTES))


class Push:
    """Sends load over a link, a few chunks ahead of their answers, until the bytes or the time are used up.

    Args:
        link: open.
        done: called on the I/O thread with the bytes that were answered and the seconds that it took.
        max_bytes: to send at most; one chunk at least is sent.
    """

    def __init__(self, link: Link, done: Callable[[int, float], None], max_bytes: int = MAX_BYTES) -> None:
        self._link, self._done = link, done
        self._max_chunks = max(1, max_bytes // LOAD_BYTES)
        self._window, self._sent, self._answered = 2, 0, 0
        self._sent_at: dict[int, float] = {}
        self._began = time.monotonic()

    def start(self) -> None:
        """Sends the first chunks."""
        self._began = time.monotonic()
        self._fill()

    def loaded(self, header: Load) -> None:
        """An answer came.

        Raises:
            RemoteProtocolError: to nothing that was sent.
        """
        if (sent_at := self._sent_at.pop(header.sequence, None)) is None:
            raise RemoteProtocolError(f"LOADED {header.sequence} answers nothing")
        now = time.monotonic()
        self._answered += 1
        if now - sent_at < QUICK_S:
            self._window = min(MAX_IN_FLIGHT, self._window + 1)
        if now - self._began < LOAD_S:
            self._fill()
        if not self._sent_at:
            self._done(self._answered * LOAD_BYTES, now - self._began)

    def _fill(self) -> None:
        while len(self._sent_at) < self._window and self._sent < self._max_chunks:
            self._sent += 1
            self._sent_at[self._sent] = time.monotonic()
            self._link.send(FrameType.LOAD, Load(self._sent), (_CHUNK,))


@dataclass(frozen=True)
class LineFigures:
    """Round trip in seconds, bytes a second to the listener and back."""

    latency_s: float
    forward: float
    backward: float


class Probe:
    """A connection that asks a worker about its machine and tests the line to it; a context manager.

    Args:
        transport: of a member of the worker's group.
        host: the worker's.
        port: the worker's.
        connect_s: how long to wait for a connection.

    Raises:
        PeerError: nothing can be reached there, or it is no worker of this group.
    """

    def __init__(self, transport: TcpTransport, host: str, port: int, connect_s: float = CONNECT_S) -> None:
        self._where = (host, port)
        self._events: queue.SimpleQueue[Header | HeteroError] = queue.SimpleQueue()
        self._push: Push | None = None
        self._lock = threading.Lock()
        sock = transport.dial(host, port, stage=0, give_up_at=time.monotonic() + connect_s)
        self.own_host = str(sock.getsockname()[0])
        self.peer_host = str(sock.getpeername()[0])
        name = show_address(host, port)
        self._link: Link = transport.link(sock, dialler=True, deliver=self._deliver, name=name, silence_s=SILENCE_S)
        self._link.send(FrameType.HELLO, Hello("probe", "probe", 0, 0, uuid.uuid4().hex, versions()))
        self._link.start()
        try:
            self.welcome = self._wait(Welcome)
            self.about = self._wait(About)
        except HeteroError:
            self.close()
            raise

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._link.close()
        self._link.join(2.0)

    def test(self) -> LineFigures:
        """Round trip and rates of this line.

        Raises:
            PeerError: it broke, or the worker has something else to do.
        """
        trips = []
        for sequence in range(_ECHOES):
            began = time.monotonic()
            self._link.send(FrameType.ECHO, Echo(sequence))
            self._wait(Echo)
            trips.append(time.monotonic() - began)
        with self._lock:
            self._push = Push(self._link, lambda count, seconds: self._events.put(Rate(count, seconds)))
        self._push.start()
        there = self._wait(Rate, MEASURE_S)
        self._link.send(FrameType.DRAW, Draw(MAX_BYTES))
        back = self._wait(Rate, MEASURE_S)
        return LineFigures(statistics.median(trips), _per_second(there), _per_second(back))

    def measure(self, host: str, port: int) -> Measured:
        """Has the worker test its line to another worker.

        Raises:
            PeerError: the worker is gone or has something else to do.
        """
        self._link.send(FrameType.MEASURE, Measure(host, port))
        return self._wait(Measured, 2 * MEASURE_S)

    def _wait(self, kind: type[H], timeout_s: float = ANSWER_S) -> H:
        host, port = self._where
        try:
            found = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerError(f"gave no {kind.__name__} within {timeout_s:g} s", host=host, port=port) from None
        if isinstance(found, PeerError):
            raise PeerError(found.reason, host=host, port=port, lost=found.lost)
        if isinstance(found, HeteroError):
            raise found
        if isinstance(found, Reject | Fault):
            raise PeerError(found.reason, host=host, port=port)
        if not isinstance(found, kind):
            raise PeerError(f"answered {type(found).__name__} instead of {kind.__name__}", host=host, port=port)
        return found

    def _deliver(self, event: Received | Closed) -> None:
        """On the I/O thread: load is answered at once, all else is for whoever waits."""
        if isinstance(event, Closed):
            self._events.put(event.error or PeerError("closed the connection", lost=True))
            return
        header = event.frame.header
        if event.frame.type is FrameType.LOAD and isinstance(header, Load):
            event.link.send(FrameType.LOADED, header)
        elif event.frame.type is FrameType.LOADED and isinstance(header, Load):
            with self._lock:
                push = self._push
            try:
                if push is None:
                    raise RemoteProtocolError("LOADED came before any load")
                push.loaded(header)
            except RemoteProtocolError as exc:
                self._events.put(exc)
                event.link.close(flush=False)
        else:
            self._events.put(header)


def measured(transport: TcpTransport, host: str, port: int) -> Measured:
    """The figures of the line from here to a worker, or why there are none."""
    try:
        with Probe(transport, host, port) as probe:
            found, card = probe.test(), card_of(probe.own_host)
    except HeteroError as exc:
        return Measured(error=str(exc)[:2000])
    return Measured(
        latency_s=found.latency_s,
        forward=found.forward,
        backward=found.backward,
        card=card.name[:500],
        kind=card.kind,
    )


def _per_second(rate: Rate) -> float:
    return rate.num_bytes / max(rate.seconds, 1e-6)

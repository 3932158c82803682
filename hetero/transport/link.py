"""What a link is: an ordered connection between two processes of a run, and the events that it delivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero.errors import HeteroError
from hetero.transport.clock import PeerClock
from hetero.wire.frames import Frame
from hetero.wire.headers import FrameType, Header
from hetero.wire.protocol import Connection


@dataclass(frozen=True)
class Received:
    """A frame came in; its first byte at `begun_s` and its last at `ended_s` of `time.perf_counter`."""

    link: Link
    frame: Frame
    begun_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True)
class Closed:
    """The connection is over; `error` is None when this side closed it."""

    link: Link
    error: HeteroError | None


Deliver = Callable[[Received | Closed], None]


class Link(Protocol):
    """An ordered connection between two processes of a run."""

    connection: Connection
    name: str
    clock: PeerClock

    def start(self) -> None:
        """Begins to receive."""

    def send(self, type_: FrameType, header: Header, payload: Sequence[memoryview] = ()) -> None:
        """Queues a frame; never blocks. The payload must not change until it is sent."""

    def send_last(self, type_: FrameType, header: Header) -> None:
        """Queues the connection's last words, ahead of all frames that have not begun, which are dropped."""

    def set_silence(self, silence_s: float) -> None:
        """From now on the peer may be silent for this long."""

    def close(self, *, flush: bool = True) -> None:
        """Ends the connection, after what is queued was sent where `flush`; returns at once."""

    def ends(self) -> tuple[str, str]:
        """Addresses of this end and of the other one; empty where the connection is closed or has none."""

    def join(self, timeout_s: float) -> None:
        """Waits until the connection is really closed."""

    def bytes_sent(self) -> int:
        """Bytes given to the network so far."""

    def written(self) -> list[tuple[int, int, float]]:
        """Step, micro-batch and `time.perf_counter` of each tensor frame that was written whole since the last call."""

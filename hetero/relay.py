"""The star: where workers cannot reach one another, the coordinator relays the frames of their links.

    stage s --STEP, FORWARD--> coordinator --STEP, FORWARD--> stage s + 1
            <------BACKWARD---             <------BACKWARD---
            --PROMPT, HIDDEN, ENDED->      --PROMPT, HIDDEN, ENDED->

Frames pass from one connection's I/O thread to the other's queue, as they are and without a copy; both connections
check them against the plan. Results are those of a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetero.control import Peer
from hetero.inbox import Inbox
from hetero.neighbours import flow_at_boundary, open_link, pass_on
from hetero.spec import RunSpec
from hetero.transport.link import Link, Received
from hetero.transport.tcp import TcpTransport
from hetero.wire.headers import FrameType, Hello

_RELAYED = {
    *(FrameType.STEP, FrameType.FORWARD, FrameType.BACKWARD),
    *(FrameType.PROMPT, FrameType.HIDDEN, FrameType.ENDED),
}


@dataclass
class _Ends:
    """The two connections of a relayed link."""

    earlier: Link | None = None
    later: Link | None = None


def open_relay(
    transport: TcpTransport,
    spec: RunSpec,
    earlier: Peer,
    later: Peer,
    hello: Callable[[str, int], Hello],
    inbox: Inbox,
) -> list[Link]:
    """Joins two neighbouring workers through this process; gives both connections, open.

    Args:
        transport: how to dial.
        spec: the run.
        earlier: the worker of stage s.
        later: the worker of stage s + 1.
        hello: makes the HELLO of a purpose and a stage.
        inbox: gets what goes wrong.

    Raises:
        PeerError: one of them cannot be reached, or refuses.
    """
    ends = _Ends()

    def from_earlier(event: Received) -> None:
        _forward(event, ends.later, inbox, earlier)

    def from_later(event: Received) -> None:
        _forward(event, ends.earlier, inbox, later)

    boundary = earlier.stage
    ends.later = open_link(
        transport, later, hello("link", later.stage), flow_at_boundary(spec, boundary), inbox, from_later
    )
    ends.earlier = open_link(
        transport, earlier, hello("relay", earlier.stage), flow_at_boundary(spec, boundary), inbox, from_earlier
    )
    return [ends.earlier, ends.later]


def _forward(event: Received, to: Link | None, inbox: Inbox, peer: Peer) -> None:
    frame = event.frame
    if frame.type in _RELAYED and to is not None:
        to.send(frame.type, frame.header, [frame.payload] if frame.payload.nbytes else [])
    else:
        pass_on(event, inbox, peer)

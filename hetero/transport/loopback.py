"""Links between threads of one process over a socket pair, with the real wire format."""

from __future__ import annotations

import socket

from hetero.transport.channel import PlainChannel
from hetero.transport.link import Deliver
from hetero.transport.socket_link import SocketLink
from hetero.transport.tcp import TcpTransport
from hetero.wire.headers import FrameType, Hello, Welcome


def link_pair(
    transport: TcpTransport, deliver_up: Deliver, deliver_down: Deliver, *, purpose: str = "link"
) -> tuple[SocketLink, SocketLink]:
    """Two ends of an open link: the dialler's (the earlier stage's) and the listener's; not started yet.

    Args:
        transport: whose limits hold.
        deliver_up: gets what the dialler receives.
        deliver_down: gets what the listener receives.
        purpose: `link` or `control`.
    """
    left, right = socket.socketpair()
    dialler, listener = (
        SocketLink(
            PlainChannel(sock),
            transport.connection(dialler=is_dialler),
            deliver=deliver,
            name=name,
            silence_s=transport.io_timeout_s,
        )
        for sock, is_dialler, deliver, name in (
            (left, True, deliver_up, "next"),
            (right, False, deliver_down, "previous"),
        )
    )
    hello = Hello(purpose=purpose, run_id="loopback", epoch=0, stage=0, instance="loopback", versions={})  # type: ignore[arg-type]
    _hand_over(listener, dialler.connection.send(FrameType.HELLO, hello))
    welcome = Welcome(instance="loopback", versions={})
    _hand_over(dialler, listener.connection.send(FrameType.WELCOME, welcome))
    return dialler, listener


def _hand_over(receiver: SocketLink, buffers: list[memoryview]) -> None:
    """Feeds a handshake frame to the other end's protocol state."""
    raw = memoryview(b"".join(buffers))
    while raw.nbytes:
        room = receiver.connection.receive_buffer()
        count = min(room.nbytes, raw.nbytes)
        room[:count] = raw[:count]
        receiver.connection.received(count)
        raw = raw[count:]

"""TCP: dialling, and links over connected sockets.

Sockets become links in one place, `TcpTransport.link`, and there they are encrypted and both sides prove who they are.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from hetero.errors import LocalProtocolError, PeerError
from hetero.transport.addresses import bare_host
from hetero.transport.backoff import Backoff
from hetero.transport.channel import TlsChannel
from hetero.transport.identity import Identity
from hetero.transport.link import Deliver
from hetero.transport.socket_link import SocketLink
from hetero.wire.protocol import Connection
from hetero.wire.tensors import BufferPool

ADVICE = "is worker.py running there (transport.connect_timeout_s)?"
_LAST_TRY_S = 0.05
_ATTEMPT_S = 5.0  # the kernel asks again after 1, 2, 4, .. 64 s: too seldom for a line that comes back


class TcpTransport:
    """Connections over TCP/IP.

    Args:
        topology: `chain`: neighbouring stages talk directly; `star`: the coordinator relays between workers.
        connect_timeout_s: how long dialling goes on until the other side listens.
        io_timeout_s: how long a peer may be silent.
        wire_dtype: dtype of hidden states and gradients between stages; resolved into the plan before.
        identity: of this process in its group; without one nothing can be dialled or accepted.
        max_frame_bytes: limit of one tensor frame.
    """

    def __init__(
        self,
        topology: str = "chain",
        connect_timeout_s: float = 60.0,
        io_timeout_s: float = 15.0,
        wire_dtype: str = "auto",
        max_frame_bytes: int = 1 << 30,
        identity: Identity | None = None,
    ) -> None:
        self.topology, self.wire_dtype = topology, wire_dtype
        self.connect_timeout_s, self.io_timeout_s = connect_timeout_s, io_timeout_s
        self.max_frame_bytes = max_frame_bytes
        self.identity = identity
        self._pool = BufferPool()

    def link(self, sock: socket.socket, *, dialler: bool, deliver: Deliver, name: str, silence_s: float) -> SocketLink:
        """A link over a connected socket, encrypted and between members of one group only; not started yet.

        Raises:
            LocalProtocolError: this transport has no identity.
        """
        if self.identity is None:
            raise LocalProtocolError("a connection between processes needs an identity; there is no plaintext mode")
        channel = TlsChannel(sock, self.identity, dialler=dialler)
        return SocketLink(channel, self.connection(dialler=dialler), deliver=deliver, name=name, silence_s=silence_s)

    def connection(self, *, dialler: bool) -> Connection:
        """A connection's protocol state with this transport's limits and buffers."""
        return Connection(dialler=dialler, allocate=self._pool.take, max_frame_bytes=self.max_frame_bytes)

    def dial(
        self,
        host: str,
        port: int,
        *,
        stage: int,
        give_up_at: float | None = None,
        advice: str = ADVICE,
        backoff: Backoff | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> socket.socket:
        """Connects, again and again while the other side does not listen yet, in growing intervals.

        Args:
            host: a name or an address, IPv4 or IPv6, brackets allowed.
            port: the port.
            stage: the stage that is dialled, for the message.
            give_up_at: `time.monotonic()` value that ends the attempts; connect_timeout_s from now if None.
            advice: what may help where there is no connection.
            backoff: the pauses between attempts; new ones if None.
            check: called before each attempt; what it raises ends them.

        Raises:
            PeerError: no connection within the time, or a name that nobody knows.
        """
        began = time.monotonic()
        deadline = began + self.connect_timeout_s if give_up_at is None else give_up_at
        backoff = backoff or Backoff()
        while True:
            check()
            try:
                left = max(_LAST_TRY_S, deadline - time.monotonic())
                sock = socket.create_connection((bare_host(host), port), timeout=min(_ATTEMPT_S, left))
                break
            except (socket.gaierror, UnicodeError) as exc:
                raise PeerError(f"the name {host!r} cannot be resolved", stage=stage, host=host, port=port) from exc
            except OSError as exc:
                if (left := deadline - time.monotonic()) <= 0:
                    raise PeerError(
                        f"no connection within {round(deadline - began, 1):g} s ({_reason(exc)}); {advice}",
                        stage=stage,
                        host=host,
                        port=port,
                        lost=True,
                    ) from exc
                time.sleep(min(backoff.pause_s(), left))
        tune(sock)
        return sock


def tune(sock: socket.socket) -> None:
    """Small frames leave at once, and the kernel notices a dead path as a second line behind heartbeats."""
    sock.settimeout(None)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS calls the idle time TCP_KEEPALIVE and has no user timeout.
    for name, value in {
        "TCP_KEEPIDLE": 15,
        "TCP_KEEPALIVE": 15,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 20_000,
    }.items():
        if option := getattr(socket, name, None):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _reason(exc: OSError) -> str:
    if isinstance(exc, TimeoutError):
        return "timed out"
    if exc.errno == errno.EINVAL:  # what a route that drops everything gives, and fe80::1 without a scope
        return "no route to host; an address of one link needs its network card, as in fe80::1%eth0"
    return (exc.strerror or str(exc)).lower()

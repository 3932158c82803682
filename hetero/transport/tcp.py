"""TCP: listening, dialling, and links over the sockets that come of it.

Until machines authenticate each other a worker listens on loopback addresses only. The sockets are wrapped in one
place, `TcpTransport.link`, where an authenticated channel will take its seat.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time

from hetero.errors import ConfigError, PeerError, show_address
from hetero.transport.link import Deliver, SocketLink
from hetero.wire.protocol import Connection
from hetero.wire.tensors import BufferPool

_RETRY_S = 0.2


class TcpTransport:
    """Connections over TCP/IP.

    Args:
        topology: `chain`: neighbouring stages talk directly.
        connect_timeout_s: how long dialling goes on until the other side listens.
        io_timeout_s: how long a peer may be silent.
        wire_dtype: dtype of hidden states and gradients between stages; resolved into the plan before.
        max_frame_bytes: limit of one tensor frame.
    """

    def __init__(
        self,
        topology: str = "chain",
        connect_timeout_s: float = 60.0,
        io_timeout_s: float = 15.0,
        wire_dtype: str = "auto",
        max_frame_bytes: int = 1 << 30,
    ) -> None:
        self.topology, self.wire_dtype = topology, wire_dtype
        self.connect_timeout_s, self.io_timeout_s = connect_timeout_s, io_timeout_s
        self.max_frame_bytes = max_frame_bytes
        self._pool = BufferPool()

    def link(self, sock: socket.socket, *, dialler: bool, deliver: Deliver, name: str, silence_s: float) -> SocketLink:
        """A link over a connected socket, not started yet."""
        connection = Connection(dialler=dialler, allocate=self._pool.take, max_frame_bytes=self.max_frame_bytes)
        return SocketLink(sock, connection, deliver=deliver, name=name, silence_s=silence_s)

    def dial(self, host: str, port: int, *, stage: int, give_up_at: float | None = None) -> socket.socket:
        """Connects, again and again while the other side does not listen yet.

        Args:
            host: a name or an address, IPv4 or IPv6, brackets allowed.
            port: the port.
            stage: the stage that is dialled, for the message.
            give_up_at: `time.monotonic()` value that ends the attempts; connect_timeout_s from now if None.

        Raises:
            PeerError: no connection within the time, or a name that nobody knows.
        """
        deadline = time.monotonic() + self.connect_timeout_s if give_up_at is None else give_up_at
        while True:
            try:
                sock = socket.create_connection((bare_host(host), port), timeout=max(0.05, deadline - time.monotonic()))
                break
            except (socket.gaierror, UnicodeError) as exc:
                raise PeerError(f"the name {host!r} cannot be resolved", stage=stage, host=host, port=port) from exc
            except OSError as exc:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise PeerError(
                        f"no connection within {self.connect_timeout_s:g} s ({_reason(exc)}); is worker.py running "
                        "there (transport.connect_timeout_s)?",
                        stage=stage,
                        host=host,
                        port=port,
                    ) from exc
                time.sleep(_RETRY_S)
        tune(sock)
        return sock


def listen(host: str | None, port: int) -> socket.socket:
    """A listening socket on a loopback address.

    Args:
        host: the address or name to bind; None is 127.0.0.1.
        port: 0 lets the system choose.

    Raises:
        ConfigError: the address is not a loopback address, or the port is taken.
    """
    asked = bare_host(host or "127.0.0.1")
    try:
        family, _, _, _, address = socket.getaddrinfo(asked, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as exc:
        raise ConfigError(f"worker.host must be an address of this machine, got {host!r} ({exc})") from None
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"worker.host must be a loopback address such as 127.0.0.1 or ::1, got {host!r}: connections between "
            "machines are not authenticated yet, so a worker does not listen to the network"
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(32)
    except OSError as exc:
        sock.close()
        if exc.errno != errno.EADDRINUSE:
            raise ConfigError(
                f"worker.host and worker.port must be free to bind, got {show_address(asked, port)} ({exc.strerror})"
            ) from None
        raise ConfigError(
            f"worker.port must be free, but something listens on {show_address(asked, port)} already: end it or "
            "choose another with worker.port=N (0 lets the system choose)"
        ) from None
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


def bare_host(host: str) -> str:
    """A host without the brackets that IPv6 addresses wear in front of a port."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _reason(exc: OSError) -> str:
    return "timed out" if isinstance(exc, TimeoutError) else (exc.strerror or str(exc)).lower()

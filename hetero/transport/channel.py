"""The bytes of a connection: plain between threads of one process, TLS between processes. Never blocks."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from hetero.errors import PeerError
from hetero.transport.identity import Identity


class Channel(Protocol):
    """A connected stream that gives and takes what it can right now."""

    socket: socket.socket

    def handshake(self) -> bool | None:
        """Goes on with the opening: None when it is done, True while it waits to write, False to read.

        Raises:
            PeerError: the peer is not a member of this group.
        """

    def receive_into(self, buffer: memoryview) -> int | None:
        """Bytes received into the buffer; 0 at the end of the stream, None where nothing is there now."""

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Bytes taken from the front of the buffers; 0 where none can be taken now."""

    def pending(self) -> bool:
        """Whether bytes are here already that a wait on the socket would not tell of."""

    def end_sending(self) -> None:
        """Tells the peer that nothing more comes."""


class PlainChannel:
    """A socket as it is; for socket pairs within one process."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.setblocking(False)

    def handshake(self) -> bool | None:
        """There is none."""
        return None

    def receive_into(self, buffer: memoryview) -> int | None:
        """See `Channel`."""
        try:
            return self.socket.recv_into(buffer)
        except BlockingIOError:
            return None

    def send(self, buffers: Sequence[memoryview]) -> int:
        """See `Channel`."""
        try:
            return self.socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def pending(self) -> bool:
        """See `Channel`."""
        return False

    def end_sending(self) -> None:
        """See `Channel`."""
        self.socket.shutdown(socket.SHUT_WR)


class TlsChannel:
    """Mutual TLS 1.3 between members of a group; not one byte passes before both have proved the secret.

    Args:
        sock: connected.
        identity: of this process.
        dialler: True on the side that dialled.
    """

    def __init__(self, sock: socket.socket, identity: Identity, *, dialler: bool) -> None:
        sock.setblocking(False)
        context = identity.client if dialler else identity.server
        self._tls = context.wrap_socket(sock, server_side=not dialler, do_handshake_on_connect=False)
        self._identity = identity
        self.socket: socket.socket = self._tls

    def handshake(self) -> bool | None:
        """See `Channel`."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            return True
        except ssl.SSLError as exc:
            raise PeerError(
                f"could not prove to be a member of this group ({_reason(exc)}); pair it: python -m hetero.pair"
            ) from exc
        self._identity.check_peer(self._tls)
        return None

    def receive_into(self, buffer: memoryview) -> int | None:
        """See `Channel`."""
        try:
            return self._tls.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except ssl.SSLEOFError:
            return 0
        except ssl.SSLError as exc:
            raise PeerError(f"the encrypted connection broke ({_reason(exc)})") from exc

    def send(self, buffers: Sequence[memoryview]) -> int:
        """See `Channel`; TLS takes one buffer at a time, a record of 16 KiB a call."""
        try:
            return self._tls.send(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except ssl.SSLError as exc:
            raise PeerError(f"the encrypted connection broke ({_reason(exc)})") from exc

    def pending(self) -> bool:
        """See `Channel`."""
        return self._tls.pending() > 0

    def end_sending(self) -> None:
        """See `Channel`; the stream's end is TCP's."""
        with contextlib.suppress(OSError):
            self._tls.shutdown(socket.SHUT_WR)


def _reason(exc: ssl.SSLError) -> str:
    return (exc.reason or str(exc)).lower().replace("_", " ")

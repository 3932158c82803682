"""The bytes of a connection: plain between threads of one process, TLS between processes. Never blocks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from hetero.errors import PeerError
from hetero.transport.identity import Identity

_RECORD_BYTES = 16 * 1024  # the most that one TLS record holds (RFC 8446, section 5.1)
_READ_BYTES = 1 << 18  # the most that is received before sending has its turn
_WRITE_BYTES = 1 << 20  # given to OpenSSL at a time


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
        """Bytes taken from the front of the buffers; 0 where none can be taken now.

        What was taken may still have to be sent: `owes`.
        """

    def owes(self) -> bool:
        """Whether bytes that `send` took wait for the network; a further `send`, of no buffers too, goes on."""

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
        if not buffers:
            return 0
        try:
            return self.socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def owes(self) -> bool:
        """See `Channel`."""
        return False

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
        self._owed: memoryview | bytes | None = None
        self._broken: OSError | PeerError | None = None
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
                f"could not prove to be a member of this group ({_reason(exc)}); pair it: python -m hetero.pair shows "
                "the code, python -m hetero.pair join --new takes it; then start the worker again"
            ) from exc
        self._identity.check_peer(self._tls)
        return None

    def receive_into(self, buffer: memoryview) -> int | None:
        """See `Channel`; OpenSSL gives one record at a time, here several are put together."""
        if self._broken is not None:
            raise self._broken
        room, received = buffer[:_READ_BYTES], 0
        while room.nbytes:
            try:
                count = self._tls.recv_into(room)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return received or None
            except ssl.SSLEOFError:
                return received
            except OSError as exc:
                self._broken = _as_error(exc)
                if not received:
                    raise self._broken from exc
                return received  # what came before; the error is the next call's
            if count == 0:
                return received
            received += count
            room = room[count:]
        return received

    def send(self, buffers: Sequence[memoryview]) -> int:
        """See `Channel`.

        A write that OpenSSL could not finish must be repeated with the same bytes (SSL_write(3)), and part of them may
        be on the line: they are this object's from then on, whatever becomes of the queue.
        """
        if self._owed is not None and not self._write(self._owed):
            return 0
        self._owed = None
        if not buffers:
            return 0
        chunk = _front(buffers)
        if not self._write(chunk):
            self._owed = chunk
        return len(chunk)

    def owes(self) -> bool:
        """See `Channel`."""
        return self._owed is not None

    def _write(self, chunk: memoryview | bytes) -> bool:
        """Sends all of it, or notes how far it came and gives False."""
        try:
            return self._tls.send(chunk) == len(chunk)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except ssl.SSLEOFError as exc:  # what OpenSSL makes of a reset; what the peer said before can still be read
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from exc
        except ssl.SSLError as exc:
            raise _as_error(exc) from exc

    def pending(self) -> bool:
        """See `Channel`."""
        return self._tls.pending() > 0

    def end_sending(self) -> None:
        """See `Channel`; the stream's end is TCP's."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_WR)  # SSLSocket's own forgets the encryption: no reading then


def _as_error(exc: OSError) -> OSError | PeerError:
    """A failure of the encryption as the peer's; one of the network as it is."""
    return PeerError(f"the encrypted connection broke ({_reason(exc)})") if isinstance(exc, ssl.SSLError) else exc


def _front(buffers: Sequence[memoryview]) -> memoryview | bytes:
    """The first bytes of the buffers; small ones share a record with what follows, each would cost one of its own."""
    first = buffers[0]
    if first.nbytes >= _RECORD_BYTES or len(buffers) == 1:
        return first[:_WRITE_BYTES]
    joined = bytearray()
    for buffer in buffers:
        joined += buffer[: _RECORD_BYTES - len(joined)]
        if len(joined) == _RECORD_BYTES:
            break
    return bytes(joined)


def _reason(exc: ssl.SSLError) -> str:
    return (exc.reason or str(exc)).lower().replace("_", " ")

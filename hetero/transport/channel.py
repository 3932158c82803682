"""The bytes of a connection: plain between threads of one process, TLS between processes. Never blocks."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from hetero.errors import PeerError
from hetero.transport.addresses import HOW_TO_PAIR_ANEW
from hetero.transport.identity import Identity

_RECORD_BYTES = 16 * 1024  # the most that one TLS record holds (RFC 8446, section 5.1)
_CHUNK_BYTES = 1 << 18  # moved in one direction before the other has its turn


class Channel(Protocol):
    """A connected stream that gives and takes what it can right now."""

    socket: socket.socket

    def handshake(self) -> bool | None:
        """Goes on with the opening: None when it is done, True while it waits to write, False to read.

        Raises:
            PeerError: the peer is not a member of this group, or has closed the connection.
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

    OpenSSL works between two buffers in memory, and the socket moves what is in them: one system call for many records
    where OpenSSL itself would make one or two for each. One thread at a time.

    Args:
        sock: connected.
        identity: of this process.
        dialler: True on the side that dialled.
    """

    def __init__(self, sock: socket.socket, identity: Identity, *, dialler: bool) -> None:
        sock.setblocking(False)
        context = identity.client if dialler else identity.server
        self.socket = sock
        self._identity = identity
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not dialler)
        self._landing = memoryview(b"")  # where the socket's bytes come in; taken once the peer is known
        self._owed = memoryview(b"")  # encrypted, not yet on the line
        self._broken: OSError | PeerError | None = None

    def handshake(self) -> bool | None:
        """See `Channel`."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    if not self._flush():
                        return True
                    if not self._fetch(_RECORD_BYTES):
                        return False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as exc:  # no word against this side's secret, so no advice
            raise PeerError("closed the connection before the handshake ended", lost=True) from exc
        except ssl.SSLError as exc:
            with contextlib.suppress(OSError):
                self._flush()  # the alert
            raise PeerError(
                f"could not prove to be a member of this group ({_reason(exc)}); pair it: {HOW_TO_PAIR_ANEW}"
            ) from exc
        self._identity.check_peer(self._tls)
        self._flush()
        return None

    def receive_into(self, buffer: memoryview) -> int | None:
        """See `Channel`; OpenSSL gives one record at a time, here several are put together."""
        if self._broken is not None:
            raise self._broken
        room, received = buffer[:_CHUNK_BYTES], 0
        while room.nbytes:
            try:
                count = int(self._tls.read(room.nbytes, room))  # a number, whatever typeshed says, with a buffer
            except ssl.SSLWantReadError:
                if received or not self._fetch_or_break():
                    return received or None
                continue
            except ssl.SSLEOFError:
                return received
            except ssl.SSLError as exc:
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
        """See `Channel`; what is encrypted is this object's, whatever becomes of the queue."""
        if not self._flush():
            return 0
        taken = 0
        for buffer in buffers:
            part = buffer[: _CHUNK_BYTES - taken]
            try:
                taken += self._tls.write(part)  # never blocks: it grows the buffer
            except ssl.SSLError as exc:
                raise _as_error(exc) from exc
            if taken == _CHUNK_BYTES:
                break
        self._flush()
        return taken

    def owes(self) -> bool:
        """See `Channel`."""
        return bool(self._owed) or self._outgoing.pending > 0

    def pending(self) -> bool:
        """See `Channel`."""
        return self._tls.pending() > 0 or self._incoming.pending > 0

    def end_sending(self) -> None:
        """See `Channel`; the stream's end is TCP's."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def _flush(self) -> bool:
        """Sends what is encrypted; False where some of it has to wait."""
        while self.owes():
            if not self._owed:
                self._owed = memoryview(self._outgoing.read())
            try:
                self._owed = self._owed[self.socket.send(self._owed) :]
            except BlockingIOError:
                return False
        return True

    def _fetch(self, most: int) -> bool:
        """Takes encrypted bytes, or the end of the stream, off the socket; False where there are none now."""
        if self._landing.nbytes < most:
            self._landing = memoryview(bytearray(most))
        try:
            count = self.socket.recv_into(self._landing)
        except BlockingIOError:
            return False
        if count:
            self._incoming.write(self._landing[:count])
        else:
            self._incoming.write_eof()
        return True

    def _fetch_or_break(self) -> bool:
        """`_fetch`; a failure of the network is every later call's too."""
        try:
            return self._fetch(_CHUNK_BYTES)
        except OSError as exc:
            self._broken = exc
            raise


def _as_error(exc: OSError) -> OSError | PeerError:
    """A failure of the encryption as the peer's; one of the network as it is."""
    return (
        PeerError(f"the encrypted connection broke ({_reason(exc)})", lost=True)
        if isinstance(exc, ssl.SSLError)
        else exc
    )


def _reason(exc: ssl.SSLError) -> str:
    return (exc.reason or str(exc)).lower().replace("_", " ")

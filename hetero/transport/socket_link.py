"""A link over a connected socket: one non-blocking I/O thread for both directions, and a sign of life now and then.

    compute thread --send()--> queue --+               +--> deliver(Received)
                                       |   I/O thread  |
    socket  <-------- sendmsg ---------+               +--- recv_into <-------- socket

Sending never blocks; payloads are sent from where they lie and received where they will be used.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

from hetero.errors import HeteroError, LocalProtocolError, PeerError, RemoteProtocolError
from hetero.transport.channel import Channel
from hetero.transport.clock import PeerClock
from hetero.transport.link import Closed, Deliver, Received
from hetero.transport.outbox import Outbox
from hetero.wire.headers import Fault, FrameType, Header, Heartbeat, Tensors
from hetero.wire.protocol import Connection, ConnectionState

log = logging.getLogger(__name__)

MAX_BUFFERS_A_CALL = 64
LATE_LOOP_S = 5.0  # this thread itself slept (suspend, swap): peers get a full new deadline
PROGRESS_S, PROGRESS_BYTES = 10.0, 64 * 1024  # what a message that has begun must gain, however slow the line
FLUSH_S = 2.0
HANDSHAKE_S = 5.0  # to prove the secret, however long the peer may be silent afterwards
FIRST_PINGS, FIRST_PING_S = 5, 0.2  # quick ones, so that a short run knows the peer's clock as well
MAX_WRITTEN = 8192  # frames whose end nobody asked for, as on a relay
TELL_S = 0.5  # for an ERROR to a peer that broke the protocol


class SocketLink:
    """A `Link` over a connected stream socket.

    Args:
        channel: the bytes of a connected socket; this object owns it.
        connection: the protocol's state for it.
        deliver: called on the I/O thread with each frame (heartbeats excepted) and once at the end.
        name: the peer, for messages.
        silence_s: the peer may be silent for this long; any byte counts as a sign of life.
    """

    def __init__(
        self, channel: Channel, connection: Connection, *, deliver: Deliver, name: str, silence_s: float
    ) -> None:
        self.connection, self.name, self.clock = connection, name, PeerClock()
        self._channel, self._socket = channel, channel.socket
        self._deliver, self._silence_s = deliver, silence_s
        self._lock = threading.Lock()  # guards connection, queue and the wake sockets' life
        self._outbox = Outbox()
        self._sent = self._received = 0
        self._frame_begun_s = 0.0
        self._written: deque[tuple[int, int, float]] = deque(maxlen=MAX_WRITTEN)
        self._closing = self._flush = False  # close() was called, and how
        self._ended = False  # nothing is queued any more
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"io {name}", daemon=True)

    def start(self) -> None:
        """Begins to receive; nothing happens on a link that was closed before."""
        with self._lock:
            if not self._closing:
                self._thread.start()

    def send(self, type_: FrameType, header: Header, payload: Sequence[memoryview] = ()) -> None:
        """Queues a frame; never blocks. What is sent on a connection that has ended is dropped: `deliver` told so.

        Raises:
            LocalProtocolError: the frame may not be sent now.
        """
        with self._lock:
            if self._is_over():
                return
            was_idle = not self._outbox
            frame = self.connection.send(type_, header, payload)
            mark = (header.step, header.micro_batch) if isinstance(header, Tensors) else None
            self._outbox.add(frame, unhurried=type_ is FrameType.STATE, mark=mark)  # decisions about steps pass STATE
        if was_idle:
            self._wake()

    def send_last(self, type_: FrameType, header: Header) -> None:
        """Queues the connection's last words, ahead of all frames that have not begun, which are dropped.

        Behind a queue of tensors they would not be sent before the connection closes.
        """
        with self._lock:
            if self._is_over():
                return
            self._outbox.drop_unbegun()
            self._outbox.add(self.connection.send(type_, header))
        self._wake()

    def set_silence(self, silence_s: float) -> None:
        """From now on the peer may be silent for this long."""
        self._silence_s = silence_s
        self._wake()

    def close(self, *, flush: bool = True) -> None:
        """Ends the connection, after what is queued was sent where `flush`; returns at once.

        What still comes in is dropped. Sending may go on for 2 s.
        """
        with self._lock:
            self._closing, self._flush = True, flush
            if not flush:
                self._outbox.clear()
            if self._thread.ident is None:  # never started
                self._close_sockets()
        self._wake()

    def ends(self) -> tuple[str, str]:
        """Addresses of this end and of the other one; empty where the connection is closed or has none."""
        try:
            own, other = self._socket.getsockname(), self._socket.getpeername()
        except OSError:
            return "", ""
        return (str(own[0]), str(other[0])) if isinstance(own, tuple) else ("", "")

    def join(self, timeout_s: float) -> None:
        """Waits until the connection is really closed."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def bytes_sent(self) -> int:
        """Bytes given to the network so far."""
        return self._sent

    def written(self) -> list[tuple[int, int, float]]:
        """See `Link`; behind TLS, when the last byte was encrypted."""
        found = []
        with contextlib.suppress(IndexError):  # the I/O thread adds, so asking for the length would prove nothing
            while True:
                found.append(self._written.popleft())
        return found

    def _wake(self) -> None:
        # Under the lock, since a number of a closed socket may be another's already. Full: it wakes anyway.
        with self._lock, contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")

    def _is_over(self) -> bool:
        """Nothing is sent any more; the peer's end counts from when it came, before this side has dealt with it."""
        return self._ended or self._closing or self.connection.state is ConnectionState.CLOSED

    def _close_sockets(self) -> None:
        for end in (self._socket, self._wake_receiver, self._wake_sender):
            end.close()

    def _run(self) -> None:
        error: HeteroError | None = None
        try:
            self._serve()
        except HeteroError as exc:
            error = exc
        except OSError as exc:
            error = PeerError(f"connection lost ({_why(exc)})", lost=True)
        except Exception as exc:
            log.exception("%s: a defect of this program", self.name)
            error = HeteroError(f"{type(exc).__name__}: {exc}")
        with self._lock:
            self._ended = True
            error = None if self._closing else error
            told = isinstance(error, RemoteProtocolError) and self._tell(str(error))
            parts = told or (self._closing and self._flush)
        if parts:
            # OpenSSL answers an end without TLS's own closing words by an alert, which may be all that comes.
            with contextlib.suppress(OSError, PeerError):
                self._part(TELL_S if told else FLUSH_S)
        with self._lock:
            self._outbox.clear()
            self.connection.state = ConnectionState.CLOSED
            self._close_sockets()
        self._deliver(Closed(self, error))

    def _shake_hands(self) -> bool:
        """Opens the channel within 5 s; False where this side closed meanwhile."""
        limit_s = min(self._silence_s, HANDSHAKE_S)
        until = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while (to_write := self._channel.handshake()) is not None:
                if self._closing:
                    return False
                if (left := until - time.monotonic()) <= 0:
                    raise PeerError(f"no handshake within {limit_s:g} s", lost=True)
                selector.modify(self._socket, selectors.EVENT_WRITE if to_write else selectors.EVENT_READ)
                selector.select(min(left, 0.2))  # not longer, to notice a close
        return True

    def _serve(self) -> None:
        if not self._shake_hands():
            return
        started = last_heard = last_beat = last_round = time.monotonic()
        beat_number = heard_before = 0
        progress_at = started
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            selector.register(self._socket, selectors.EVENT_READ)
            watched = selectors.EVENT_READ
            while True:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._has_to_send() else 0)
                if wanted != watched:
                    selector.modify(self._socket, wanted)
                    watched = wanted
                beat_s = self._beat_s(beat_number)
                pause_s = 0.0 if self._channel.pending() else max(0.0, last_beat + beat_s - time.monotonic())
                ready = {key.fileobj: mask for key, mask in selector.select(pause_s)}
                now = time.monotonic()
                if now - last_round > LATE_LOOP_S or self._awaits_welcome():
                    last_heard = now
                last_round = now
                if self._wake_receiver in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_receiver.recv(4096)
                if self._closing:
                    return
                mask = ready.get(self._socket, 0)
                if (mask & selectors.EVENT_READ or self._channel.pending()) and self._receive():
                    last_heard = time.monotonic()
                if self._has_to_send():
                    self._send_or_hear_why()
                if now - started > self._silence_s and self._awaits_hello():
                    raise PeerError(f"no HELLO within {self._silence_s:g} s", lost=True)
                if now - last_heard > self._silence_s:
                    raise PeerError(f"silent for {self._silence_s:g} s (transport.io_timeout_s)", lost=True)
                if self.connection.at_frame_border() or now - progress_at >= PROGRESS_S:
                    if not self.connection.at_frame_border() and self._received - heard_before < PROGRESS_BYTES:
                        raise PeerError(
                            f"sent under {PROGRESS_BYTES // 1024} KiB of a message in {PROGRESS_S:g} s", lost=True
                        )
                    progress_at, heard_before = now, self._received
                if now - last_beat >= beat_s:
                    last_beat, beat_number = now, beat_number + 1
                    self._beat(beat_number)

    def _pings(self) -> bool:
        """The coordinator asks what time it is at a worker."""
        return self.connection.dialler and self.connection.purpose == "control"

    def _beat_s(self, number: int) -> float:
        """Seconds from beat `number` to the next."""
        first = self._pings() and number < FIRST_PINGS and not self._awaits_welcome()
        return min(FIRST_PING_S if first else 2.0, self._silence_s / 4)

    def _beat(self, number: int) -> None:
        ping = self._pings()
        if self._say(Heartbeat(sequence=number, ping=ping)) and ping:
            self.clock.asked(number, time.perf_counter())

    def _say(self, beat: Heartbeat) -> bool:
        """Queues a heartbeat where nothing else waits; behind something it would prove and measure nothing."""
        with self._lock:
            if self._outbox or self._closing or self.connection.state is not ConnectionState.OPEN:
                return False
            self._outbox.add(self.connection.send(FrameType.HEARTBEAT, beat))
            return True

    def _on_beat(self, beat: Heartbeat) -> None:
        now = time.perf_counter()
        if beat.ping:
            self._say(Heartbeat(sequence=0, answers=beat.sequence, came_s=now, went_s=time.perf_counter()))
        if beat.answers is not None and beat.came_s is not None and beat.went_s is not None:
            self.clock.answered(beat.answers, beat.came_s, beat.went_s, now)

    def _tell(self, reason: str) -> bool:
        """Queues an ERROR, so that the other side can say what it did wrong; False where none may be sent."""
        try:
            last_words = self.connection.send(FrameType.ERROR, Fault(reason=reason[:2000]))
        except LocalProtocolError:
            return False
        self._outbox.drop_unbegun()
        self._outbox.add(last_words)
        return True

    def _part(self, limit_s: float) -> None:
        """Sends what is queued, then drops what comes until the peer has closed as well; `limit_s` at most.

        A socket that is closed while bytes come in resets the connection (RFC 2525, section 2.17), and what the
        kernel has not sent yet, the ERROR last of all, is lost.
        """
        until = time.monotonic() + limit_s
        scrap = memoryview(bytearray(1 << 16))
        heard_all = said_all = False
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not (heard_all and said_all) and (left := until - time.monotonic()) > 0:
                wanted = 0 if heard_all else selectors.EVENT_READ
                if self._has_to_send():
                    wanted |= selectors.EVENT_WRITE
                if wanted:
                    selector.modify(self._socket, wanted)
                    selector.select(min(left, 0.05))  # not longer, to notice a close without flush
                if self._closing and not self._flush:
                    return
                if self._has_to_send():
                    self._send_queued()
                elif not said_all:
                    self._channel.end_sending()
                    said_all = True
                heard_all = heard_all or self._channel.receive_into(scrap) == 0

    def _awaits_hello(self) -> bool:
        return self.connection.state is ConnectionState.OPENING and self.connection.purpose is None

    def _awaits_welcome(self) -> bool:
        """Between HELLO and its answer a worker looks for the model: nothing may be sent, so silence says nothing.

        The dialler has a deadline of its own for the answer.
        """
        return self.connection.state is ConnectionState.OPENING and self.connection.purpose is not None

    def _has_to_send(self) -> bool:
        return bool(self._outbox) or self._channel.owes()

    def _send_or_hear_why(self) -> None:
        """Sends; where that fails, first takes what the peer said before it went."""
        try:
            self._send_queued()
        except OSError:
            with contextlib.suppress(OSError):
                while self._receive():
                    pass
            raise

    def _receive(self) -> bool:
        """Reads what is there, frame by frame; True when a byte came.

        Raises:
            PeerError: the peer closed the connection.
        """
        heard = False
        for _ in range(MAX_BUFFERS_A_CALL):
            at_border = self.connection.at_frame_border()
            count = self._channel.receive_into(self.connection.receive_buffer())
            if at_border:
                self._frame_begun_s = time.perf_counter()
            if count is None:
                return heard
            if count == 0:
                try:
                    self.connection.received_eof()
                except RemoteProtocolError as exc:  # it died while it sent; nobody broke a rule
                    raise PeerError(str(exc), lost=True) from exc
                raise PeerError("closed the connection", lost=True)
            heard = True
            self._received += count
            with self._lock:
                frame = self.connection.received(count)
            if frame is None:
                continue
            if isinstance(frame.header, Heartbeat):
                self._on_beat(frame.header)
            else:
                self._deliver(Received(self, frame, self._frame_begun_s, time.perf_counter()))
        return heard

    def _send_queued(self) -> None:
        """Gives the network of the queue what it takes now; in turns, so that receiving has its share."""
        for _ in range(MAX_BUFFERS_A_CALL):
            with self._lock:
                buffers = self._outbox.front(MAX_BUFFERS_A_CALL)
            if not buffers and not self._channel.owes():
                return
            count = self._channel.send(buffers)
            if not count:
                return
            self._sent += count
            with self._lock:
                marks = self._outbox.sent(count)
            if marks:
                now = time.perf_counter()
                self._written.extend((step, micro_batch, now) for step, micro_batch in marks)


def _why(exc: OSError) -> str:
    return (exc.strerror or type(exc).__name__).lower()

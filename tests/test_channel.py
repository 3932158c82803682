"""The bytes of a connection, plain and encrypted: never blocking, whole, and with an end."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from peers import DEADLINE_S, EXAMPLES, Events, wait_until

from hetero.errors import PeerError
from hetero.transport.channel import Channel, PlainChannel, TlsChannel
from hetero.transport.identity import identity_of
from hetero.transport.tcp import TcpTransport
from hetero.wire.frames import Frame
from hetero.wire.headers import Control, FrameType, Hello, Reason
from hetero.wire.protocol import ConnectionState

IDENTITY = identity_of(bytes(32))


@contextmanager
def channels(kind: str) -> Iterator[tuple[Channel, Channel]]:
    """Both ends, open."""
    left, right = socket.socketpair()
    if kind == "plain":
        ends: tuple[Channel, Channel] = (PlainChannel(left), PlainChannel(right))
    else:
        ends = (TlsChannel(left, IDENTITY, dialler=True), TlsChannel(right, IDENTITY, dialler=False))
    try:
        waiting = [True, True]
        until = time.monotonic() + DEADLINE_S
        while any(waiting):
            assert time.monotonic() < until
            waiting = [end.handshake() is not None for end in ends]
        yield ends
    finally:
        for end in ends:
            end.socket.close()


def receive_all(channel: Channel, count: int, sender: Channel | None = None) -> bytes:
    """So many bytes, while the sender (if given) goes on with what it owes."""
    found, room = bytearray(), memoryview(bytearray(1 << 16))
    until = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} bytes"
        if sender is not None:
            sender.send([])
        if not channel.pending():
            select.select([channel.socket], [], [], 0.05)
        if sender is not None and sender.owes():
            sender.send([])
        got = channel.receive_into(room)
        assert got != 0, "the stream ended"
        found += room[: got or 0]
    return bytes(found)


def send_without_end(channel: Channel, block: memoryview) -> None:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        channel.send([block])


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_nothing_blocks_on_an_idle_connection(kind: str) -> None:
    with channels(kind) as ends:
        for end in ends:
            assert end.receive_into(memoryview(bytearray(10))) is None
            assert not end.pending() and end.handshake() is None
            assert not end.socket.getblocking()


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_sender_takes_no_more_than_the_peer_reads(kind: str) -> None:
    block = memoryview(bytes(1 << 16))
    with channels(kind) as (one, other):
        sent = 0
        while count := one.send([block]):
            sent += count
            assert sent < 1 << 28
        assert receive_all(other, sent, one) == bytes(sent)
        assert not one.owes()


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_bytes_arrive_in_order_whatever_their_pieces(kind: str) -> None:
    raw = os.urandom(300_000)
    with channels(kind) as (one, other):
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(receive_all(other, len(raw))), daemon=True)
        thread.start()
        rest = memoryview(raw)
        until = time.monotonic() + DEADLINE_S
        while rest.nbytes or one.owes():
            assert time.monotonic() < until
            if not (count := one.send([rest[:7], rest[7:20_000], rest[20_000:]])):
                select.select([], [one.socket], [], 0.05)
            rest = rest[count:]
        while one.owes():
            assert time.monotonic() < until
            one.send([])
        thread.join(DEADLINE_S)
        assert found == [raw]


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_end_of_the_peer_s_words_is_seen_after_all_of_them(kind: str) -> None:
    with channels(kind) as (one, other):
        assert one.send([memoryview(b"last words")]) == 10
        one.end_sending()
        assert receive_all(other, 10) == b"last words"
        select.select([other.socket], [], [], DEADLINE_S)
        assert other.receive_into(memoryview(bytearray(10))) == 0


def test_nothing_leaves_in_plain_text_once_the_encryption_has_ended() -> None:
    """Python forgets its TLS object at a shutdown; what is sent then would be readable."""
    with channels("tls") as (one, other):
        one.end_sending()
        with pytest.raises((OSError, PeerError)):
            one.send([memoryview(b"secret states")])
        raw = socket.socket(fileno=os.dup(other.socket.fileno()))
        with raw:
            raw.settimeout(DEADLINE_S)
            assert raw.recv(100) == b""


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_last_words_of_a_peer_that_reset_the_connection_can_still_be_read(kind: str) -> None:
    block = memoryview(bytes(1 << 16))
    with channels(kind) as (one, other):
        assert one.send([memoryview(b"why")]) == 3
        while other.send([block]):  # the peer never reads it, so that its close is a reset
            pass
        one.socket.close()
        with pytest.raises(OSError):
            send_without_end(other, block)
        assert receive_all(other, 3) == b"why"


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_peer_that_is_gone_ends_the_stream(kind: str) -> None:
    with channels(kind) as (one, other):
        one.socket.close()
        select.select([other.socket], [], [], DEADLINE_S)
        assert other.receive_into(memoryview(bytearray(10))) == 0


@pytest.mark.parametrize(("dialler", "arrives"), [(True, 0), (True, 100), (False, 0), (False, 100), (False, 1 << 16)])
def test_peer_that_gives_up_during_the_handshake_is_gone_and_not_called_a_stranger(dialler: bool, arrives: int) -> None:
    """What a worker finds when it wakes that was frozen while its coordinator dialled it: a ClientHello and the end."""
    left, right = socket.socketpair()
    channel, peer = TlsChannel(left, IDENTITY, dialler=dialler), TlsChannel(right, IDENTITY, dialler=not dialler)
    try:
        if dialler:
            channel.handshake()
        peer.handshake()
        right.sendall(left.recv(1 << 16)[:arrives])  # its first words, as far as they arrive
        right.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerError) as caught:
            channel.handshake()
        assert str(caught.value) == "the peer: closed the connection before the handshake ended"
        assert caught.value.lost
    finally:
        left.close()
        right.close()


def test_bytes_that_are_decrypted_already_are_told_of() -> None:
    """A record of 16 KiB comes whole; a wait on the socket would never tell of the rest."""
    with channels("tls") as (one, other):
        assert one.send([memoryview(bytes(16_000))]) == 16_000
        select.select([other.socket], [], [], DEADLINE_S)
        assert other.receive_into(memoryview(bytearray(1))) == 1
        assert other.pending() and not select.select([other.socket], [], [], 0)[0]
        assert receive_all(other, 15_999) == bytes(15_999)
        assert not other.pending()


@pytest.mark.parametrize(
    "raw", [b"junk", b"\x17\x03\x03\x00\x20" + bytes(32), b"\x15\x03\x03\x00\x02\x02\x28", bytes(99)]
)
def test_bytes_put_into_an_encrypted_connection_end_it(raw: bytes) -> None:
    with channels("tls") as (one, other):
        socket.socket(fileno=os.dup(one.socket.fileno())).sendall(raw)  # beside the encryption
        select.select([other.socket], [], [], DEADLINE_S)
        room = memoryview(bytearray(100))
        other.socket.setblocking(True)
        other.socket.settimeout(0.2)
        with pytest.raises((PeerError, TimeoutError)) as caught:
            assert other.receive_into(room) is None
        if isinstance(caught.value, PeerError):
            assert "the encrypted connection broke" in str(caught.value)
        else:
            assert raw == b"junk"  # not a whole record head: it waits
        assert bytes(room) == bytes(100)


def test_changed_bit_on_the_wire_is_noticed() -> None:
    left, near = socket.socketpair()
    far, right = socket.socketpair()
    ends = (TlsChannel(left, IDENTITY, dialler=True), TlsChannel(right, IDENTITY, dialler=False))
    near.setblocking(False)
    far.setblocking(False)

    def carry(change: bool = False) -> None:
        for source, sink in ((near, far), (far, near)):
            try:
                raw = bytearray(source.recv(1 << 16))
            except BlockingIOError:
                continue
            if change:
                raw[-1] ^= 1
            sink.sendall(raw)

    try:
        for _ in range(10):
            for end in ends:
                end.handshake()
            carry()
        assert all(end.handshake() is None for end in ends)
        assert ends[0].send([memoryview(b"hidden states")]) == 13
        carry(change=True)
        with pytest.raises(PeerError, match="the encrypted connection broke"):
            ends[1].receive_into(memoryview(bytearray(100)))
    finally:
        for sock in (left, near, far, right, *(end.socket for end in ends)):
            sock.close()


def test_frames_much_larger_than_a_record_pass_in_both_directions_at_once() -> None:
    """Links over TLS: many frames and megabytes each way, with no two threads on one socket."""
    transport = TcpTransport(io_timeout_s=DEADLINE_S, identity=IDENTITY)
    left, right = socket.socketpair()
    here, there = Events(), Events()
    one = transport.link(left, dialler=True, deliver=here, name="next", silence_s=DEADLINE_S)
    other = transport.link(right, dialler=False, deliver=there, name="previous", silence_s=DEADLINE_S)
    texts = [Control({"n": n, "text": "x" * (n * 97 % 8000)}, {}) for n in range(1500)]
    try:
        one.send(FrameType.HELLO, Hello("control", "run-1", 0, 1, "me", {}))
        one.start()
        other.start()
        there.frame(FrameType.HELLO)
        other.send(FrameType.WELCOME, EXAMPLES[FrameType.WELCOME][0])
        here.frame(FrameType.WELCOME)

        def say(link: object) -> None:
            for header in texts:
                link.send(FrameType.CONTROL, header)  # type: ignore[attr-defined]

        threads = [threading.Thread(target=say, args=(link,)) for link in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        for events in (here, there):
            _, *frames = events.num_frames(1 + len(texts))
            assert [frame.header for frame in frames] == texts
    finally:
        for link in (one, other):
            link.close(flush=False)
        for link in (one, other):
            link.join(DEADLINE_S)


def test_what_is_encrypted_goes_out_whole_whatever_is_queued_then() -> None:
    """A record that is half on the line must be finished before anything else."""
    first, second, said = os.urandom(1 << 20), b"another frame", b""
    with channels("tls") as (one, other):
        while not one.owes():
            said += first[: one.send([memoryview(first)])]
        assert one.send([memoryview(second)]) == 0  # nothing of it while something is owed
        assert receive_all(other, len(said), one) == said
        assert not one.owes()
        assert one.send([memoryview(second)]) == len(second)
        assert receive_all(other, len(second)) == second


def test_pieces_of_a_frame_go_together() -> None:
    with channels("tls") as (one, other):
        raw = os.urandom(1 << 20)
        pieces = [memoryview(raw)[:16], memoryview(raw)[16:200], memoryview(raw)[200:]]
        taken = one.send(pieces)
        assert taken == 1 << 18  # so much has its turn
        assert receive_all(other, taken, one) == raw[:taken]


def test_last_words_pass_a_queue_that_the_peer_does_not_read_over_tls() -> None:
    """The message that has begun is finished, all others make room for the last words."""
    left, right = socket.socketpair()
    transport = TcpTransport(io_timeout_s=DEADLINE_S, identity=IDENTITY)
    link = transport.link(left, dialler=True, deliver=Events(), name="next", silence_s=DEADLINE_S)
    peer, connection = TlsChannel(right, IDENTITY, dialler=False), transport.connection(dialler=False)
    frames: list[Frame] = []

    def read_until(type_: FrameType) -> None:
        until = time.monotonic() + DEADLINE_S
        while not frames or frames[-1].type is not type_:
            assert time.monotonic() < until
            if not peer.pending():
                select.select([peer.socket], [], [], 0.05)
            count = peer.receive_into(connection.receive_buffer())
            assert count != 0, "the stream ended"
            if count and (frame := connection.received(count)) is not None:
                frames.append(frame)

    try:
        link.send(FrameType.HELLO, Hello("control", "run-1", 0, 1, "me", {}))
        link.start()
        wait_until(lambda: peer.handshake() is None)
        read_until(FrameType.HELLO)
        peer.send(connection.send(FrameType.WELCOME, EXAMPLES[FrameType.WELCOME][0]))
        wait_until(lambda: link.connection.state is ConnectionState.OPEN)
        queued = Control({"text": "x" * 8000}, {})
        for _ in range(1000):
            link.send(FrameType.CONTROL, queued)
        sent = -1
        while sent != (sent := link.bytes_sent()):  # until the line is full
            time.sleep(0.05)
        link.send_last(FrameType.ABORT, Reason("the end"))
        read_until(FrameType.ABORT)
        assert len(frames) < 1000 and frames[-1].header == Reason("the end")
        assert all(frame.header == queued for frame in frames[1:-1] if frame.type is not FrameType.HEARTBEAT)
    finally:
        link.close(flush=False)
        link.join(DEADLINE_S)
        peer.socket.close()


def test_answer_to_hello_may_take_longer_than_a_peer_may_be_silent() -> None:
    """A worker looks for the model in between, and neither side may send anything meanwhile."""
    silence_s = 0.3
    transport = TcpTransport(io_timeout_s=silence_s, identity=IDENTITY)
    left, right = socket.socketpair()
    here, there = Events(), Events()
    one = transport.link(left, dialler=True, deliver=here, name="next", silence_s=silence_s)
    other = transport.link(right, dialler=False, deliver=there, name="previous", silence_s=silence_s)
    try:
        one.send(FrameType.HELLO, Hello("control", "run-1", 0, 1, "me", {}))
        one.start()
        other.start()
        there.frame(FrameType.HELLO)
        until = time.monotonic() + 3 * silence_s
        wait_until(lambda: time.monotonic() > until)
        other.send(FrameType.WELCOME, EXAMPLES[FrameType.WELCOME][0])
        here.frame(FrameType.WELCOME)
        one.send(FrameType.CONTROL, Control({"text": "go on"}, {}))
        there.frame(FrameType.CONTROL)
    finally:
        for link in (one, other):
            link.close(flush=False)
        for link in (one, other):
            link.join(DEADLINE_S)

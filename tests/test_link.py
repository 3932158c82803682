import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from peers import DEADLINE_S, EXAMPLES, Events, feed, hostile_blobs, make_flow, raw_frame, wait_until

from hetero.errors import HeteroError, LocalProtocolError, PeerError, RemoteProtocolError
from hetero.transport.channel import PlainChannel
from hetero.transport.link import Closed, Received
from hetero.transport.listening import listen
from hetero.transport.loopback import link_pair
from hetero.transport.socket_link import SocketLink
from hetero.transport.tcp import TcpTransport
from hetero.wire.flow import LinkFlow, pack_shapes
from hetero.wire.frames import PREFIX, FrameReader
from hetero.wire.headers import MAX_HEADER_BYTES, Control, Fault, FrameType, Hello, Reason, Step, TensorEntry, Tensors
from hetero.wire.protocol import Connection
from hetero.wire.tensors import pack, unpack

T = FrameType
NOISE = Control({"command": "x", "text": "a" * 8000}, {})


def plain_connection(dialler: bool) -> Connection:
    return Connection(dialler=dialler, allocate=lambda n: memoryview(bytearray(n)), max_frame_bytes=1 << 30)


@contextmanager
def raw_peer(
    *, purpose: str = "control", handshake: bool = True, silence_s: float = 10.0, deliver: Events | None = None
) -> Iterator[tuple[socket.socket, SocketLink, Events]]:
    """A listener's link over TCP, and the bare socket of the one who dialled it."""
    events = deliver or Events()
    with listen(None, 0) as listener:
        raw = socket.create_connection(listener.getsockname())
        sock, _ = listener.accept()
    raw.settimeout(DEADLINE_S)
    link = SocketLink(PlainChannel(sock), plain_connection(False), deliver=events, name="raw", silence_s=silence_s)
    try:
        if handshake:
            feed(link.connection, raw_frame(T.HELLO, Hello(purpose, "run-1", 0, 1, "me", {}), b""))  # type: ignore[arg-type]
            link.connection.send(T.WELCOME, EXAMPLES[T.WELCOME][0])  # never sent: the raw peer knows
            if purpose == "link":
                link.connection.flow = make_flow()
        link.start()
        yield raw, link, events
    finally:
        raw.close()
        link.close(flush=False)
        link.join(DEADLINE_S)
        assert not link._thread.is_alive()


@contextmanager
def pair(
    purpose: str = "control", transport: TcpTransport | None = None, flow: Callable[[], LinkFlow] | None = None
) -> Iterator[tuple[SocketLink, SocketLink, Events, Events]]:
    """Both ends of an open connection, running."""
    up, down = Events(), Events()
    links = link_pair(transport or TcpTransport(io_timeout_s=10), up, down, purpose=purpose)
    for link in links:
        if flow is not None:
            link.connection.flow = flow()
        link.start()
    try:
        yield *links, up, down
    finally:
        for link in links:
            link.close()
        for link in links:
            link.join(DEADLINE_S)
            assert not link._thread.is_alive()


def read_all(raw: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = bytearray()
    try:
        while chunk := raw.recv(1 << 20):
            found += chunk
    except ConnectionError:
        pass
    return bytes(found)


def parse(raw: bytes) -> list[tuple[FrameType, object]]:
    reader = FrameReader(lambda n: memoryview(bytearray(n)), lambda *_: None, 1 << 30)
    return [(frame.type, frame.header) for frame in feed(reader, raw) if frame.type is not T.HEARTBEAT]


def flood(raw: socket.socket, chunk: bytes, stop: threading.Event) -> threading.Thread:
    """Sends without end, reading nothing."""

    def send() -> None:
        try:
            while not stop.is_set():
                raw.sendall(chunk)
        except OSError:
            pass

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


# --- both directions ---------------------------------------------------------------------------------------------


def test_frames_arrive_in_order_in_both_directions_at_once() -> None:
    with pair() as (left, right, up, down):
        for n in range(500):
            left.send(T.CONTROL, Control({"command": "a", "n": n}, {}))
            right.send(T.CONTROL, Control({"command": "b", "n": n}, {}))
        for events, command in ((up, "b"), (down, "a")):
            sent = [{"command": command, "n": n} for n in range(500)]
            assert [frame.header.payload for frame in events.num_frames(500)] == sent  # type: ignore[attr-defined]


def test_frames_of_many_threads_are_not_mixed_up() -> None:
    def send_all(link: SocketLink, k: int) -> None:
        for n in range(100):
            link.send(T.STOP, Reason(f"{k}:{n}"))

    with pair() as (left, _, _, down):
        threads = [threading.Thread(target=send_all, args=(left, k), daemon=True) for k in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        reasons = [frame.header.reason for frame in down.num_frames(500)]  # type: ignore[attr-defined]
        for k in range(5):
            assert [r for r in reasons if r.startswith(f"{k}:")] == [f"{k}:{n}" for n in range(100)]


def test_frame_that_may_not_be_sent_is_refused_and_the_link_lives_on() -> None:
    with pair("link", flow=make_flow) as (left, right, up, _):
        with pytest.raises(LocalProtocolError):
            left.send(T.APPLY, EXAMPLES[T.APPLY][0])
        right.send(T.ERROR, Fault("still here"))
        assert up.frame(T.ERROR).header == Fault("still here")


@pytest.mark.parametrize("rows", [8, pytest.param(64, id="300MB")])
def test_frame_far_above_usual_limits_arrives_exactly_and_costs_three_times_its_size(rows: int) -> None:
    length, width = 2048, 576
    hidden = torch.empty(rows, length, width)
    hidden.view(torch.int32).random_(generator=torch.Generator().manual_seed(1))
    labels = torch.arange(rows * length).view(rows, length)
    table, payload = pack({"hidden": hidden, "labels": labels})
    frame_bytes = sum(part.nbytes for part in payload)

    def flow() -> LinkFlow:
        return LinkFlow(hidden_size=width, dtype="float32", max_rows=rows, max_length=length)

    before = reset_peak_memory()
    with pair("link", flow=flow) as (left, right, _, down):
        left.send(T.STEP, Step(1, 1), [memoryview(pack_shapes([(rows, length)]))])
        left.send(T.FORWARD, Tensors(1, 0, table), payload)
        frame = down.frame(T.FORWARD, 60)
        received = unpack(frame.header.tensors, frame.payload)  # type: ignore[attr-defined]
        assert torch.equal(received["hidden"].view(torch.int32), hidden.view(torch.int32))
        assert torch.equal(received["labels"], labels)
        assert left.bytes_sent() > frame_bytes and right.bytes_sent() < 1000
    if before is not None:  # the frame itself was there before; one more is the receiver's buffer
        assert peak_memory() - before < 1.25 * frame_bytes + (8 << 20)


def reset_peak_memory() -> int | None:
    """The resident set now, from which on the peak counts; None where the system cannot say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return peak_memory()


def peak_memory() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def test_send_never_blocks_while_the_peer_reads_nothing() -> None:
    chunk = memoryview(bytes(1 << 20))
    header = EXAMPLES[T.STATE][0]

    def send_all() -> None:
        for _ in range(50):
            link.send(T.STATE, header, [chunk])

    with raw_peer(silence_s=60) as (_, link, _):
        sender = threading.Thread(target=send_all, daemon=True)
        sender.start()
        sender.join(DEADLINE_S)
        assert not sender.is_alive()
        assert link.bytes_sent() < 50 << 20


def test_everything_is_delivered_to_a_peer_that_reads_late() -> None:
    chunk = memoryview(os.urandom(1 << 20))
    header = EXAMPLES[T.STATE][0]
    with raw_peer(silence_s=60) as (raw, link, _):
        for _ in range(20):
            link.send(T.STATE, header, [chunk])
        expected = raw_frame(T.STATE, header, bytes(chunk)) * 20
        found = bytearray()
        while len(found) < len(expected):
            found += raw.recv(1 << 20)
            assert raw.gettimeout() == DEADLINE_S
        assert bytes(found[: len(expected)]) == expected


# --- life and silence --------------------------------------------------------------------------------------------


def test_idle_link_stays_alive_by_heartbeats_which_are_not_delivered() -> None:
    with pair(transport=TcpTransport(io_timeout_s=0.6)) as (left, right, up, down):
        started = time.monotonic()
        wait_until(lambda: time.monotonic() > started + 1.5)
        assert left.bytes_sent() > 0 and right.bytes_sent() > 0
        assert up.all == down.all == []


@pytest.mark.parametrize("handshake", [True, False])
def test_peer_that_says_nothing_is_reported_in_time(handshake: bool) -> None:
    started = time.monotonic()
    with raw_peer(silence_s=0.5, handshake=handshake) as (_, _, events):
        error = events.closed().error
        assert 0.5 <= time.monotonic() - started < 5
        assert isinstance(error, PeerError)
        if handshake:
            assert error.reason == "silent for 0.5 s (transport.io_timeout_s)"


def test_silence_may_be_set_anew_while_the_link_runs() -> None:
    with raw_peer(silence_s=600) as (_, link, events):
        link.set_silence(0.3)
        error = events.closed().error
        assert isinstance(error, PeerError) and "silent for 0.3 s" in error.reason


_CHILD = """
import socket, sys
from hetero.transport.channel import PlainChannel
from hetero.transport.socket_link import SocketLink
from hetero.wire.headers import FrameType, Hello
from hetero.wire.protocol import Connection

def deliver(event):
    print(type(event).__name__, getattr(event, "error", ""), flush=True)

sock = socket.socket(fileno=int(sys.argv[1]))
connection = Connection(dialler=True, allocate=lambda n: memoryview(bytearray(n)), max_frame_bytes=1 << 20)
link = SocketLink(PlainChannel(sock), connection, deliver=deliver, name="parent", silence_s=1.0)
link.send(FrameType.HELLO, Hello("control", "run-1", 0, 1, "child", {}))
link.start()
link.join(60)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")
def test_frozen_process_is_reported_and_finds_its_connection_closed_when_it_wakes() -> None:
    ours, theirs = socket.socketpair()
    events = Events()
    link = SocketLink(PlainChannel(ours), plain_connection(False), deliver=events, name="child", silence_s=30)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    try:
        link.start()
        events.frame(T.HELLO)
        link.send(T.WELCOME, EXAMPLES[T.WELCOME][0])
        link.set_silence(1.0)
        started = time.monotonic()
        wait_until(lambda: time.monotonic() > started + 1.5)  # it beats, so it is no silence
        assert [type(e) for e in events.all] == [Received]
        child.send_signal(signal.SIGSTOP)
        error = events.closed().error
        assert isinstance(error, PeerError) and error.reason == "silent for 1 s (transport.io_timeout_s)"
        child.send_signal(signal.SIGCONT)
        output, _ = child.communicate(timeout=DEADLINE_S)
        assert output.splitlines()[0] == "Received " and output.splitlines()[-1].startswith("Closed the peer: ")
    finally:
        child.kill()
        child.communicate()
        link.close(flush=False)
        link.join(DEADLINE_S)


def dribble(raw: socket.socket, data: bytes, pause_s: float) -> None:
    for at in range(len(data)):
        raw.send(data[at : at + 1])
        time.sleep(pause_s)


def test_peer_that_sends_a_byte_at_a_time_is_alive() -> None:
    with raw_peer(silence_s=0.7) as (raw, _, events):
        data = raw_frame(T.STOP, Reason("x")) * 2
        dribble(raw, data, 1.6 / len(data))
        events.wait(lambda _: len(events.all) == 2)
        assert [frame.type for frame in events.frames()] == [T.STOP, T.STOP]


def test_frame_that_takes_longer_than_the_silence_is_no_silence() -> None:
    with raw_peer(purpose="link", silence_s=0.6) as (raw, _, events):
        raw.sendall(raw_frame(T.STEP))
        data = raw_frame(T.FORWARD)
        raw.sendall(data[:-20])
        dribble(raw, data[-20:], 0.07)
        assert events.frame(T.FORWARD).payload.nbytes == 144
        assert isinstance(events.closed().error, PeerError)  # and silence is noticed afterwards


# --- the end of a connection -------------------------------------------------------------------------------------


@pytest.mark.parametrize("purpose", ["control", "link"])
def test_closing_delivers_what_was_queued_and_ends_both_sides_once(purpose: str) -> None:
    with pair(purpose, flow=make_flow) as (left, right, up, down):
        sent = [(T.STEP, Step(n, 1)) for n in (1,)] if purpose == "link" else [(T.CONTROL, NOISE)] * 200
        for type_, header in sent:
            payload = [memoryview(pack_shapes([(1, 1)]))] if type_ is T.STEP else []
            left.send(type_, header, payload)
        left.send(T.ERROR, Fault("it broke", stage=2, host="box", port=9999, step=7))
        left.close()
        for link in (left, right):
            link.join(DEADLINE_S)
        assert [(f.type, f.header) for f in down.frames()] == [
            *sent,
            (T.ERROR, Fault("it broke", stage=2, host="box", port=9999, step=7)),
        ]
        ends = [[e for e in events.all if isinstance(e, Closed)] for events in (up, down)]
        assert [len(found) for found in ends] == [1, 1]
        assert up.all[-1] is ends[0][0] and down.all[-1] is ends[1][0]
        assert ends[0][0].error is None
        assert isinstance(ends[1][0].error, PeerError) and ends[1][0].error.reason == "closed the connection"


def test_last_words_reach_a_peer_that_talks_without_end_and_reads_late() -> None:
    """Closing while bytes come in resets the connection, and what the kernel had not sent yet would be lost."""
    with listen(None, 0) as listener:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that bytes pile up on the sender's side
        raw.connect(listener.getsockname())
        sock, _ = listener.accept()
    events, stop = Events(), threading.Event()
    link = SocketLink(PlainChannel(sock), plain_connection(False), deliver=events, name="raw", silence_s=20)
    link.start()
    raw.sendall(raw_frame(T.HELLO, Hello("control", "run-1", 0, 1, "me", {}), b"{}"))
    events.frame(T.HELLO)
    link.send(T.WELCOME, EXAMPLES[T.WELCOME][0])
    thread = flood(raw, raw_frame(T.CONTROL, NOISE), stop)
    try:
        for _ in range(20):
            link.send(T.CONTROL, NOISE)
        link.send(T.ERROR, Fault("it broke"))
        link.close()
        wait_until(lambda: not link._outbox)
        raw.settimeout(DEADLINE_S)
        assert parse(read_all(raw))[-1] == (T.ERROR, Fault("it broke"))
    finally:
        stop.set()
        raw.close()
        thread.join(DEADLINE_S)
        link.join(DEADLINE_S)
    assert events.closed().error is None


def test_reason_of_a_peer_that_is_gone_is_heard_though_sending_to_it_fails() -> None:
    busy, go_on = threading.Event(), threading.Event()

    class Slow(Events):
        def __call__(self, event: Received | Closed) -> None:
            super().__call__(event)
            busy.set()
            assert go_on.wait(DEADLINE_S)

    with raw_peer(silence_s=60, deliver=Slow()) as (raw, link, events):
        link.send(T.CONTROL, NOISE)
        wait_until(lambda: link.bytes_sent() > 8000)  # unread there, so that the peer's close is a reset
        raw.sendall(raw_frame(T.STOP, Reason("first")))
        assert busy.wait(DEADLINE_S)  # the I/O thread is held up there meanwhile
        raw.sendall(raw_frame(T.STOP, Reason("more")) * 50 + raw_frame(T.ERROR, Fault("it broke")))
        link.send(T.CONTROL, NOISE)
        raw.close()
        go_on.set()
        assert events.frame(T.ERROR).header == Fault("it broke")
        assert isinstance(events.closed().error, PeerError)


def test_close_without_flush_drops_what_is_queued_and_ends_soon() -> None:
    chunk = memoryview(bytes(1 << 20))
    with raw_peer(silence_s=60) as (_, link, events):
        for _ in range(50):
            link.send(T.STATE, EXAMPLES[T.STATE][0], [chunk])
        link.close(flush=False)
        assert events.closed().error is None
        assert link.bytes_sent() < 50 << 20


def test_close_does_not_wait_for_ever_for_a_peer_that_reads_nothing() -> None:
    chunk = memoryview(bytes(1 << 20))
    with raw_peer(silence_s=60) as (_, link, events):
        for _ in range(50):
            link.send(T.STATE, EXAMPLES[T.STATE][0], [chunk])
        link.close()
        assert events.closed(10).error is None


def test_sending_and_closing_after_the_end_do_nothing() -> None:
    with pair() as (left, right, up, down):
        right.close()
        up.closed()
        down.closed()
        left.send(T.STOP, Reason("too late"))
        left.set_silence(1.0)
        for _ in range(3):
            left.close()
            right.close(flush=False)
        for link in (left, right):
            link.join(DEADLINE_S)
        assert [len([e for e in events.all if isinstance(e, Closed)]) for events in (up, down)] == [1, 1]


def test_frame_sent_while_the_end_is_only_just_noticed_is_dropped() -> None:
    """What the sender hears is why the connection ended, not that it did something wrong."""
    with pair("link", flow=make_flow) as (up, down, told, _):
        noticed, sent = threading.Event(), threading.Event()
        received_eof = up.connection.received_eof

        def eof() -> None:
            received_eof()
            noticed.set()
            assert sent.wait(DEADLINE_S)

        up.connection.received_eof = eof  # type: ignore[method-assign]
        down.close()
        assert noticed.wait(DEADLINE_S)
        try:
            up.send(T.FORWARD, EXAMPLES[T.FORWARD][0])
            up.send_last(T.ERROR, Fault(reason="nothing"))
        finally:
            sent.set()
        error = told.closed().error
        assert isinstance(error, PeerError) and error.reason == "closed the connection"


def test_link_that_never_started_is_closed_too() -> None:
    left, right = link_pair(TcpTransport(), Events(), Events())
    sockets = [*(link._socket for link in (left, right)), left._wake_sender, left._wake_receiver]
    for link in (left, right):
        link.close()
        link.join(1)
        link.start()  # comes too late
        assert not link._thread.is_alive()
    assert {sock.fileno() for sock in sockets} == {-1}


def test_link_may_be_closed_from_what_it_delivers_to() -> None:
    done = threading.Event()

    def deliver(event: Received | Closed) -> None:
        if isinstance(event, Received):
            event.link.close()
            event.link.join(DEADLINE_S)
        else:
            done.set()

    left, right = link_pair(TcpTransport(io_timeout_s=10), Events(), deliver, purpose="control")
    left.start()
    right.start()
    left.send(T.STOP, Reason("x"))
    assert done.wait(DEADLINE_S)
    left.join(DEADLINE_S)


@pytest.mark.parametrize("cut", [1, PREFIX.size - 1, PREFIX.size, PREFIX.size + 3, -1])
def test_peer_that_closes_in_mid_frame_is_reported(cut: int) -> None:
    with raw_peer() as (raw, _, events):
        raw.sendall(raw_frame(T.STOP, Reason("whole")) + raw_frame(T.STOP, Reason("half"))[:cut])
        raw.close()
        error = events.closed().error
        assert str(error) == "the peer: the connection ended in the middle of a frame"
        assert isinstance(error, PeerError) and error.lost
        assert [frame.header for frame in events.frames()] == [Reason("whole")]


def test_peer_that_closes_between_frames_is_reported() -> None:
    with raw_peer() as (raw, _, events):
        raw.sendall(raw_frame(T.STOP, Reason("whole")))
        raw.close()
        assert str(events.closed().error) == "the peer: closed the connection"


def test_reset_of_the_connection_is_reported() -> None:
    with raw_peer() as (raw, _, events):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
        assert str(events.closed().error) == "the peer: connection lost (connection reset by peer)"


def test_defect_in_what_handles_a_frame_ends_the_link_and_is_no_clean_end() -> None:
    class Broken(Events):
        def __call__(self, event: Received | Closed) -> None:
            super().__call__(event)
            if isinstance(event, Received):
                raise KeyError("oops")

    with raw_peer(deliver=Broken()) as (raw, _, events):
        raw.sendall(raw_frame(T.STOP))
        error = events.closed().error
        assert isinstance(error, HeteroError) and "KeyError" in str(error)


def test_nothing_is_left_behind_by_links_that_came_and_went() -> None:
    def come_and_go() -> None:
        with pair() as (left, right, _, _):
            left.send(T.CONTROL, NOISE)
            right.close(flush=False)
        with raw_peer() as (raw, _, events):
            raw.sendall(b"x" * 100)
            raw.close()
            events.closed()

    come_and_go()
    process = psutil.Process()
    before = process.num_fds(), threading.active_count()
    for _ in range(40):
        come_and_go()
    assert (process.num_fds(), threading.active_count()) == before


# --- hostile peers -----------------------------------------------------------------------------------------------


def test_peer_that_breaks_the_protocol_is_told_why() -> None:
    with raw_peer(handshake=False) as (raw, _, events):
        raw.sendall(PREFIX.pack(18, 9, T.GATHER, 0, 10))
        told = parse(read_all(raw))
        raw.close()
        error = events.closed().error
        assert isinstance(error, RemoteProtocolError)
        assert str(error).startswith("the peer speaks protocol version 9, this side 1")
        assert told == [(T.ERROR, Fault(str(error)))]


@pytest.mark.parametrize("handshake", [True, False])
@pytest.mark.parametrize("length", [2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_declared_size_costs_nothing_and_ends_the_connection(length: int, handshake: bool) -> None:
    before = reset_peak_memory()
    with raw_peer(handshake=handshake) as (raw, _, events):
        for header_bytes in (10, 1 << 30):
            raw.sendall(PREFIX.pack(length, 1, T.FORWARD, 0, header_bytes))
        assert isinstance(events.closed().error, RemoteProtocolError)
    if before is not None:
        assert peak_memory() - before < 8 << 20


@pytest.mark.parametrize("handshake", [True, False])
def test_hostile_pickles_are_never_run_and_the_next_peer_is_served(tmp_path: Path, handshake: bool) -> None:
    marker = tmp_path / "marker"
    for blob in hostile_blobs(marker):
        framed = PREFIX.pack(8 + len(blob), 1, T.CONTROL, 0, len(blob)) + blob
        state = raw_frame(T.STATE, payload=blob)
        for attack in (blob + bytes(64), framed, state, raw_frame(T.ERROR) + framed):
            with raw_peer(handshake=handshake) as (raw, _, events):
                raw.sendall(attack)
                raw.shutdown(socket.SHUT_WR)
                if attack is state and handshake:  # bytes of a tensor, which is what they stay
                    assert bytes(events.frame(T.STATE).payload) == blob
                else:
                    assert isinstance(events.closed().error, RemoteProtocolError)
                assert len(blob) < MAX_HEADER_BYTES and not marker.exists()
    with raw_peer(handshake=handshake) as (raw, _, events):
        raw.sendall(raw_frame(T.ERROR))
        assert events.frame(T.ERROR).header == EXAMPLES[T.ERROR][0]


def test_hostile_tensor_bytes_of_the_right_size_are_numbers(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for blob in hostile_blobs(marker):
        with raw_peer(purpose="link") as (raw, link, events):
            link.connection.flow = LinkFlow(hidden_size=len(blob), dtype="int8", max_rows=1, max_length=1)
            table = [TensorEntry("labels", "int64", [1, 1]), TensorEntry("hidden", "int8", [1, 1, len(blob)])]
            raw.sendall(raw_frame(T.STEP, Step(1, 1), pack_shapes([(1, 1)])))
            raw.sendall(raw_frame(T.FORWARD, Tensors(1, 0, table), bytes(8) + blob))
            frame = events.frame(T.FORWARD)
            assert bytes(unpack(table, frame.payload)["hidden"].numpy().tobytes()) == blob
            assert not marker.exists()

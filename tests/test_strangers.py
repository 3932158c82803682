"""A flood from another address neither blocks a join nor changes a run. Case S06, and the flooder of SECURITY.md."""

from __future__ import annotations

import contextlib
import random
import resource
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import Tiny
from peers import DEADLINE_S, raw_frame, wait_until
from pipeline import make_spec
from processes import Worker, hardware, losses, train_here

from hetero import serve
from hetero.inbox import Inbox
from hetero.serve import MAX_WAITING_AN_ADDRESS, WorkerServer
from hetero.session import CoordinatorSession
from hetero.spec import RunSpec, WorkerEntry
from hetero.transport.identity import identity_of
from hetero.transport.listening import listen
from hetero.transport.tcp import TcpTransport
from hetero.wire.headers import FrameType
from hetero.worker_session import WorkerSession

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on all of 127/8")

STRANGER = "127.0.0.2"
IDENTITY = identity_of(bytes(32))
HELLO_BYTES = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)


class Flood:
    """Idle, slow and short connections from another loopback address, renewed as long as it lasts."""

    def __init__(self, address: tuple[str, int], *, idle: int = 300, slow: int = 300, junk: int = 2000) -> None:
        self._address, self._idle, self._slow, self._junk = address, idle, slow, junk
        self._stop = threading.Event()
        self.standing, self.done = threading.Event(), threading.Event()
        self.sent_junk = 0
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._hold, self._throw)]

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _connect(self) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((STRANGER, 0))
        sock.setblocking(False)
        sock.connect_ex(self._address)
        return sock

    def _hold(self) -> None:
        """Idle ones, and slow ones that say a byte of a TLS hello a second; whoever is put out comes back."""
        held = [self._connect() for _ in range(self._idle + self._slow)]
        said = [0] * len(held)
        self.standing.set()
        while not self._stop.wait(1.0):
            for number, sock in enumerate(held):
                with contextlib.suppress(OSError):
                    if number >= self._idle:
                        said[number] += sock.send(HELLO_BYTES[said[number] : said[number] + 1])
                if _is_over(sock):
                    sock.close()
                    held[number], said[number] = self._connect(), 0
        for sock in held:
            sock.close()

    def _throw(self) -> None:
        """Junk, as fast as it goes; every third connection is reset at once."""
        draw = random.Random(1)
        kinds = [
            b"GET / HTTP/1.1\r\n\r\n",
            raw_frame(FrameType.HELLO),
            b"SSH-2.0-x\r\n",
            HELLO_BYTES,
            b"",
            b"\x80\x04N.",
        ]
        for number in range(self._junk):
            if self._stop.is_set():
                break
            with self._connect() as sock, contextlib.suppress(OSError):
                with selectors.DefaultSelector() as selector:
                    selector.register(sock, selectors.EVENT_WRITE)
                    selector.select(1.0)
                sock.send(draw.choice(kinds))
                if number % 3 == 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.sent_junk += 1
        self.done.set()


def _is_over(sock: socket.socket) -> bool:
    try:
        return sock.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.fixture(autouse=True)
def enough_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def served() -> Iterator[tuple[WorkerServer, tuple[str, int]]]:
    """A worker in this process whose sessions do nothing until they are stopped."""
    listener = listen(None, 0)
    address = listener.getsockname()[:2]

    def work(session: WorkerSession) -> None:
        session.welcome({})
        session.wait_sync()
        session.next_order()

    class Ended(BaseException):
        pass

    server = WorkerServer(listener, lambda _: TcpTransport(identity=IDENTITY), IDENTITY)

    def serve_until_ended() -> None:
        with contextlib.suppress(Ended):
            server.serve(work)

    thread = threading.Thread(target=serve_until_ended, daemon=True)
    thread.start()
    try:
        yield server, address
    finally:
        server._sessions.fail(Ended())  # type: ignore[arg-type]
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def join_once(spec: RunSpec, address: tuple[str, int], name: str) -> float:
    """A session from the first dial to SYNC, and its end; gives the seconds that joining took."""
    began = time.monotonic()
    workers = [WorkerEntry("w1", address[0], address[1])]
    spec = RunSpec(**{field: getattr(spec, field) for field in spec.__struct_fields__} | {"workers": workers})
    spec = RunSpec.from_json(spec.to_json())
    transport = TcpTransport(identity=IDENTITY, connect_timeout_s=DEADLINE_S)
    session = CoordinatorSession(spec, run_id=name, epoch=1, inbox=Inbox(), transport=transport, instance=name)
    try:
        session.join({})
        session.sync(0)
        return time.monotonic() - began
    finally:
        session.end(stop=True, reason="finished")


@pytest.mark.slow
def test_five_sessions_start_one_after_the_other_in_a_flood(tiny: Tiny) -> None:
    spec = make_spec(tiny("llama"), [3])
    with served() as (server, address), Flood(address) as flood:
        assert flood.standing.wait(DEADLINE_S)
        # Wanted: 1 s each; the deadline is that of a join, for machines that are busy with other things.
        seconds = [join_once(spec, address, f"run-{number}") for number in range(5)]
        print("seconds to join in a flood:", [round(s, 2) for s in seconds])
        assert len(server._waiting) <= MAX_WAITING_AN_ADDRESS
        assert flood.done.wait(3 * DEADLINE_S) and flood.sent_junk == 2000
        join_once(spec, address, "after")
        threads = sum(thread.name.startswith("io ") for thread in threading.enumerate())
        assert threads <= MAX_WAITING_AN_ADDRESS + 4
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(f"io {STRANGER}")])


def test_idle_and_slow_strangers_are_put_out_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is a sign of life and still no handshake."""
    assert serve.HELLO_S == 5.0
    monkeypatch.setattr(serve, "HELLO_S", 1.0)
    with served() as (server, address):
        socks = [socket.create_connection(address, timeout=DEADLINE_S) for _ in range(4)]
        wait_until(lambda: len(server._waiting) == 4)
        said, began = 0, time.monotonic()
        while server._waiting:
            assert time.monotonic() - began < 10
            for sock in socks[:2]:
                with contextlib.suppress(OSError):
                    sock.sendall(HELLO_BYTES[said : said + 1])
            said += 1
            time.sleep(0.1)
        for sock in socks:
            with sock, contextlib.suppress(ConnectionError):
                assert sock.recv(10) == b""


def test_member_that_says_no_hello_is_put_out_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HELLO_S", 1.0)
    with served() as (server, address):
        with IDENTITY.client.wrap_socket(socket.create_connection(address, timeout=DEADLINE_S)) as sock:
            wait_until(lambda: len(server._waiting) == 1)
            assert sock.recv(10) == b""
        wait_until(lambda: not server._waiting)


def test_connections_that_are_reset_before_they_are_accepted_do_not_end_the_worker(tiny: Tiny) -> None:
    with served() as (server, address):
        with server._lock:  # so that the worker accepts them late
            for raw in (b"", b"junk", HELLO_BYTES) * 4:
                with socket.create_connection(address, timeout=DEADLINE_S) as sock:
                    sock.sendall(raw)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        join_once(make_spec(tiny("llama"), [3]), address, "run")


@pytest.mark.slow
def test_flood_during_a_run_changes_no_loss(tmp_path: Path, rows_file: Path, workers: tuple[Worker, Worker]) -> None:
    args = ["data=jsonl", f"data.path={rows_file}", *hardware(workers[0]), "loop.steps=8", "loop.batch_size=4"]
    quiet = train_here(tmp_path / "quiet", *args)
    process = psutil.Process(workers[0].running.process.pid)
    with Flood((workers[0].host, workers[0].port), junk=10**9) as flood:
        assert flood.standing.wait(DEADLINE_S)
        flooded = train_here(tmp_path / "flooded", *args)
        assert process.num_threads() < 40 and flood.sent_junk > 0
    assert losses(flooded) == losses(quiet)
    workers[0].wait_idle()
    lines = [line for line in workers[0].running.text.splitlines() if STRANGER in line]
    assert 0 < len(lines) < 20  # said now and then, not two thousand times

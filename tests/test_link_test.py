"""Probes of a worker over real sockets: figures, bounds, and a worker that has a run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from threads import worker_threads

from hetero.errors import PeerError
from hetero.link_test import MAX_BYTES, MAX_IN_FLIGHT, Probe, Push
from hetero.probes import BUSY, MAX_PROBES, Probes
from hetero.secret import new_secret, secret_of_this_machine
from hetero.serve import WorkerServer
from hetero.transport.identity import identity_of
from hetero.transport.link import Received
from hetero.transport.listening import listen
from hetero.transport.tcp import TcpTransport
from hetero.wire.headers import LOAD_BYTES, Draw, Fault, FrameType, Load


def transport() -> TcpTransport:
    return TcpTransport(identity=identity_of(secret_of_this_machine()[0]))


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    with worker_threads(2, tmp_path_factory.mktemp("workers")) as ports:
        yield ports


def test_probe_tells_about_the_machine_and_measures_both_ways(ports: list[int]) -> None:
    with Probe(transport(), "127.0.0.1", ports[0]) as probe:
        assert probe.about.kind == "loopback" and probe.about.seen_host == probe.own_host == "127.0.0.1"
        assert probe.about.device == "cpu" and probe.about.memory_bytes > 1 << 28 and not probe.about.busy
        found = probe.test()
        between = probe.measure("127.0.0.1", ports[1])
    assert 0 < found.latency_s < 1 and found.forward > 1e6 and found.backward > 1e6
    assert not between.error and between.forward > 1e6 and between.backward > 1e6 and between.kind == "loopback"


def test_worker_says_why_it_cannot_reach_another(ports: list[int]) -> None:
    with listen("127.0.0.1", 0) as closed:
        port = closed.getsockname()[1]
    with Probe(transport(), "127.0.0.1", ports[0]) as probe:
        assert "connection refused" in probe.measure("127.0.0.1", port).error


def test_probe_of_another_group_learns_nothing(ports: list[int]) -> None:
    stranger = TcpTransport(identity=identity_of(new_secret()))
    with pytest.raises(PeerError, match="could not prove"):
        Probe(stranger, "127.0.0.1", ports[0])


def test_number_of_probes_is_bounded(ports: list[int]) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_PROBES):
            stack.enter_context(Probe(transport(), "127.0.0.1", ports[1]))
        with pytest.raises(PeerError, match="probes already"):
            Probe(transport(), "127.0.0.1", ports[1])


@pytest.fixture
def busy_server() -> Iterator[tuple[WorkerServer, int]]:
    """A worker whose run never ends, as far as probes can see."""
    identity = identity_of(secret_of_this_machine()[0])
    sock = listen("127.0.0.1", 0)
    server = WorkerServer(sock, lambda _: TcpTransport(identity=identity), identity, device="cpu")
    thread = threading.Thread(target=server._accept, daemon=True)
    thread.start()
    yield server, sock.getsockname()[1]
    server._stopping = True
    with contextlib.suppress(OSError):
        sock.shutdown(2)
    sock.close()
    thread.join(10)


def test_busy_worker_says_so_and_bears_no_load(busy_server: tuple[WorkerServer, int]) -> None:
    server, port = busy_server
    server._probes._is_busy = lambda: True
    with Probe(transport(), "127.0.0.1", port) as probe:
        assert probe.about.busy
        assert probe.measure("127.0.0.1", port).error == BUSY
        with pytest.raises(PeerError, match=BUSY):
            probe.test()


def test_run_that_begins_ends_the_probes(busy_server: tuple[WorkerServer, int]) -> None:
    server, port = busy_server
    with Probe(transport(), "127.0.0.1", port) as probe:
        server._probes.end("a run began on this worker")
        with pytest.raises(PeerError, match="a run began"):
            probe.test()


class _Sent:
    """A link that takes note."""

    def __init__(self) -> None:
        self.frames: list[tuple[FrameType, Any]] = []
        self.name = "here"

    def send(self, type_: FrameType, header: Any, payload: Any = ()) -> None:
        self.frames.append((type_, header))

    def send_last(self, type_: FrameType, header: Any) -> None:
        self.frames.append((type_, header))

    def set_silence(self, _: float) -> None: ...

    def ends(self) -> tuple[str, str]:
        return "127.0.0.1", "127.0.0.1"

    def close(self, **_: Any) -> None: ...


def test_load_beyond_the_limit_ends_a_probe() -> None:
    link = _Sent()
    probes = Probes(identity_of(new_secret()), "me", "cpu", lambda: False)
    probes.admit(link)  # type: ignore[arg-type]
    payload = memoryview(bytes(LOAD_BYTES))
    for number in range(MAX_BYTES // LOAD_BYTES + 1):
        frame = SimpleNamespace(type=FrameType.LOAD, header=Load(number), payload=payload)
        assert probes.takes(Received(link, frame))  # type: ignore[arg-type]
    assert [header for _, header in link.frames if isinstance(header, Fault)] == [
        Fault(f"a probe may send {MAX_BYTES} bytes of load")
    ]
    assert not probes.takes(Received(link, frame))  # type: ignore[arg-type]


def test_answer_to_nothing_ends_a_probe() -> None:
    link = _Sent()
    probes = Probes(identity_of(new_secret()), "me", "cpu", lambda: False)
    probes.admit(link)  # type: ignore[arg-type]
    empty = memoryview(b"")
    for type_, header in ((FrameType.DRAW, Draw(LOAD_BYTES)), (FrameType.LOADED, Load(77))):
        probes.takes(Received(link, SimpleNamespace(type=type_, header=header, payload=empty)))  # type: ignore[arg-type]
    assert "LOADED 77 answers nothing" in link.frames[-1][1].reason


def test_push_keeps_few_chunks_in_flight_and_ends_at_its_limit() -> None:
    link, results = _Sent(), []
    push = Push(link, lambda count, seconds: results.append((count, seconds)), 50 * LOAD_BYTES)  # type: ignore[arg-type]
    push.start()
    assert len(link.frames) == 2
    answered = 0
    while answered < len(link.frames):
        assert len(link.frames) - answered <= MAX_IN_FLIGHT
        push.loaded(link.frames[answered][1])
        answered += 1
    assert answered == 50 and [count for count, _ in results] == [50 * LOAD_BYTES]

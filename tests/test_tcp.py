import socket
import sys
import threading
import time

import pytest
from peers import DEADLINE_S, EXAMPLES, Events, wait_until

from hetero.errors import ConfigError, PeerError
from hetero.transport import tcp
from hetero.transport.addresses import bare_host
from hetero.transport.backoff import Backoff
from hetero.transport.identity import identity_of
from hetero.transport.listening import listen
from hetero.transport.tcp import TcpTransport, tune
from hetero.wire.headers import FrameType, Hello


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
HOSTS = ["127.0.0.1", "localhost", pytest.param("::1", marks=needs_ipv6), pytest.param("[::1]", marks=needs_ipv6)]


def free_port(host: str = "127.0.0.1") -> int:
    with listen(host, 0) as sock:
        return int(sock.getsockname()[1])


def dial_error(host: str, port: int, **arguments: float) -> PeerError:
    transport = TcpTransport(**arguments)  # type: ignore[arg-type]
    with pytest.raises(PeerError) as caught:
        transport.dial(host, port, stage=2)
    return caught.value


# --- listening ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [None, "", "127.0.0.2", *HOSTS])
def test_worker_listens_on_loopback_addresses(host: str | None) -> None:
    if host == "127.0.0.2" and sys.platform != "linux":
        pytest.skip("only Linux answers on all of 127/8")
    with listen(host, 0) as sock:
        address = sock.getsockname()
        assert address[0] in ("127.0.0.1", "127.0.0.2", "::1") and address[1] > 0
        if not host:
            assert address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "0", "192.0.2.1", "10.0.0.5", "8.8.8.8", "::", "[::]", "2001:db8::1", "::ffff:192.0.2.1"]
)
def test_addresses_that_the_network_reaches_are_refused(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listen(host, 0)
    text = str(caught.value)
    assert text.startswith("worker.host must be ") and repr(host) in text
    assert "127.0.0.1" in text or "address" in text


def test_refusal_names_key_rule_value_and_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        listen("0.0.0.0", 0)
    assert str(caught.value).startswith(
        "worker.host must be a loopback address such as 127.0.0.1 or ::1 while this machine is not paired, got "
        "'0.0.0.0'; pair it first: python -m hetero.pair"
    )


def test_a_name_is_judged_by_the_address_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver is replaced, since no name stands for a foreign address on every machine."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=r"loopback address.*got 'my-laptop'"):
        listen("my-laptop", 0)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 70, "1.2.3.4.5", "[]", "::g"])
def test_name_that_nobody_knows_is_refused_by_its_key(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listen(host, 0)
    assert str(caught.value).startswith(f"worker.host must be an address of this machine, got {host!r} (")


@pytest.mark.parametrize("host", HOSTS)
def test_port_in_use_is_said_with_address_and_remedy(host: str) -> None:
    with listen(host, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen(host, port)
    shown = f"[::1]:{port}" if ":" in host else f"{host}:{port}"
    assert str(caught.value) == (
        f"worker.port must be free, but something listens on {shown} already: end it or "
        "choose another with worker.port=N (0 lets the system choose)"
    )


def test_port_binds_again_at_once_after_a_connection_was_closed_from_here() -> None:
    with listen(None, 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as dialler:
            accepted, _ = first.accept()
            accepted.close()  # the side that closes first keeps the port in TIME_WAIT
            assert dialler.recv(1) == b""
    with listen(None, port) as second:
        with socket.create_connection(("127.0.0.1", port)):
            assert second.accept()


# --- dialling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_listener_is_reached_by_each_way_to_write_its_address(host: str) -> None:
    with listen(host, 0) as listener:
        with TcpTransport(connect_timeout_s=5).dial(host, listener.getsockname()[1], stage=1) as sock:
            accepted, _ = listener.accept()
            with accepted:
                sock.sendall(b"hello")
                assert accepted.recv(5) == b"hello"


@pytest.mark.parametrize("listening", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_localhost_reaches_a_listener_of_either_family(listening: str) -> None:
    families = {entry[0] for entry in socket.getaddrinfo("localhost", 1)}
    if listening == "::1" and socket.AF_INET6 not in families:
        pytest.skip("localhost has no IPv6 address on this machine")
    with listen(listening, 0) as listener:
        with TcpTransport(connect_timeout_s=5).dial("localhost", listener.getsockname()[1], stage=1):
            listener.accept()[0].close()


def test_refused_connection_names_stage_host_port_reason_and_key_in_time() -> None:
    port = free_port()
    started = time.monotonic()
    error = dial_error("127.0.0.1", port, connect_timeout_s=0.5)
    assert time.monotonic() - started < 5
    assert (error.stage, error.host, error.port) == (2, "127.0.0.1", port)
    assert str(error) == (
        f"stage 2 at 127.0.0.1:{port}: no connection within 0.5 s (connection refused); "
        "is worker.py running there (transport.connect_timeout_s)?"
    )


@needs_ipv6
def test_message_about_an_ipv6_address_wears_brackets() -> None:
    port = free_port("::1")
    assert str(dial_error("::1", port, connect_timeout_s=0.1)).startswith(f"stage 2 at [::1]:{port}: ")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse where the queue is full")
def test_peer_that_does_not_answer_times_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]  # more than its queue holds: further ones are dropped
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        started = time.monotonic()
        error = dial_error("127.0.0.1", listener.getsockname()[1], connect_timeout_s=0.6)
        assert time.monotonic() - started < 5
        for sock in waiting:
            sock.close()
    assert "no connection within 0.6 s (timed out)" in str(error)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 70, "", "exämple..de"])
def test_name_that_nobody_knows_is_said_at_once(host: str) -> None:
    started = time.monotonic()
    error = dial_error(host, 9999, connect_timeout_s=60)
    assert time.monotonic() - started < 5
    assert str(error).startswith("stage 2") and f"the name {host!r} cannot be resolved" in str(error)


def test_worker_may_start_after_the_coordinator() -> None:
    port = free_port()
    found: list[socket.socket] = []

    def dial() -> None:
        found.append(TcpTransport(connect_timeout_s=DEADLINE_S).dial("127.0.0.1", port, stage=1))

    thread = threading.Thread(target=dial, daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    with listen(None, port) as listener:
        listener.accept()[0].close()
        thread.join(DEADLINE_S)
    assert not thread.is_alive() and found
    found[0].close()


def test_pauses_between_attempts_double_up_to_a_cap_and_are_shortened_at_random_by_up_to_a_half() -> None:
    longest = [0.25, 0.5, 1.0, 1.5, 1.5, 1.5]
    for uniform, share in ((0.0, 1.0), (0.5, 0.75), (1.0 - 2**-53, 0.5)):
        backoff = Backoff(0.25, 1.5, lambda number=uniform: number)  # type: ignore[misc]
        assert [backoff.pause_s() for _ in longest] == pytest.approx([s * share for s in longest])


def test_two_that_lost_the_same_peer_dial_it_again_at_different_times() -> None:
    pauses = [[backoff.pause_s() for _ in range(8)] for backoff in (Backoff(), Backoff())]
    assert not set(pauses[0]) & set(pauses[1])
    assert max(max(pauses, key=max)) <= 1.0


@pytest.mark.parametrize("pauses", [[0.1, 0.2, 0.3, 60.0], [0.6, 60.0]])
def test_worker_that_does_not_listen_is_dialled_again_after_each_pause_and_once_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    now, tried, port = [100.0], [], free_port()

    def refuse(*_: object, **__: object) -> None:
        tried.append(now[0])
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(tcp.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tcp.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    backoff = Backoff()
    monkeypatch.setattr(backoff, "pause_s", iter(pauses).__next__)
    with pytest.raises(PeerError, match=r"no connection within 1 s \(connection refused\)"):
        TcpTransport(connect_timeout_s=1).dial("127.0.0.1", port, stage=1, backoff=backoff)
    expected = [100.0 + sum(pauses[:n]) for n in range(len(pauses))]
    assert tried == pytest.approx([*expected, 101.0])


@pytest.mark.parametrize("give_up_at", [0.0, 1.0])
def test_time_to_give_up_that_is_past_allows_one_try(give_up_at: float) -> None:
    port = free_port()
    started = time.monotonic()
    with pytest.raises(PeerError):
        TcpTransport(connect_timeout_s=60).dial("127.0.0.1", port, stage=1, give_up_at=give_up_at)
    assert time.monotonic() - started < 5


def test_dialled_socket_blocks_sends_at_once_and_is_kept_alive() -> None:
    with listen(None, 0) as listener:
        with TcpTransport(connect_timeout_s=5).dial("127.0.0.1", listener.getsockname()[1], stage=1) as sock:
            assert sock.gettimeout() is None
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if sys.platform == "linux":
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


def test_socket_that_is_no_tcp_needs_no_tuning() -> None:
    left, right = socket.socketpair()
    with left, right:
        tune(left)
        assert left.gettimeout() is None


@pytest.mark.parametrize(
    ("host", "bare"), [("[::1]", "::1"), ("::1", "::1"), ("localhost", "localhost"), ("[", "["), ("", "")]
)
def test_brackets_are_taken_off(host: str, bare: str) -> None:
    assert bare_host(host) == bare


def test_transport_makes_links_that_hold_its_limits() -> None:
    transport = TcpTransport(connect_timeout_s=5, max_frame_bytes=1 << 16, identity=identity_of(bytes(32)))
    with listen(None, 0) as listener:
        dialled = transport.dial("127.0.0.1", listener.getsockname()[1], stage=1)
        accepted, _ = listener.accept()
    here, there = Events(), Events()
    left = transport.link(dialled, dialler=True, deliver=here, name="stage 1", silence_s=10)
    right = transport.link(accepted, dialler=False, deliver=there, name="stage 0", silence_s=10)
    assert right.connection._reader._max_payload_bytes == 1 << 16
    left.start()
    right.start()
    try:
        hello = Hello("link", "run-1", 0, 1, "me", {})
        left.send(FrameType.HELLO, hello)
        assert there.frame(FrameType.HELLO).header == hello
        right.send(FrameType.WELCOME, EXAMPLES[FrameType.WELCOME][0])
        assert here.frame(FrameType.WELCOME).header == EXAMPLES[FrameType.WELCOME][0]
        wait_until(lambda: left.connection.state is right.connection.state)
    finally:
        for link in (left, right):
            link.close()
        for link in (left, right):
            link.join(DEADLINE_S)

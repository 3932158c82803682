"""Who may talk: members of the group, and none of the impostors, in either role."""

from __future__ import annotations

import contextlib
import datetime
import pickle
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID
from peers import DEADLINE_S, EXAMPLES, Events, raw_frame
from processes import REPO
from tls13 import Refused, Tls13

from hetero.errors import LocalProtocolError, PeerError
from hetero.transport.identity import identity_of
from hetero.transport.link import Received
from hetero.transport.listening import listen
from hetero.transport.socket_link import HANDSHAKE_S, SocketLink
from hetero.transport.tcp import TcpTransport
from hetero.wire.headers import FrameType, Hello

SECRET = bytes(range(32))
GROUP, OTHERS = identity_of(SECRET), identity_of(bytes(32))
HELLO = Hello("control", "run-1", 0, 1, "me", {})
REFUSED_S = 5.0
SILENCE_S = 1.0  # so that impostors who just wait are refused soon

Act = Callable[[socket.socket, bool], bytes]


def key_of(secret: bytes) -> Ed25519PrivateKey:
    """The documented derivation, once more."""
    seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"hetero group identity v1").derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)


class Watched:
    """A link of this side, with note of whether the protocol ever saw a byte."""

    def __init__(self, sock: socket.socket, *, dialler: bool, silence_s: float = SILENCE_S) -> None:
        self.events, self.seen = Events(), 0
        transport = TcpTransport(identity=GROUP)
        self.link: SocketLink = transport.link(
            sock, dialler=dialler, deliver=self.events, name="peer", silence_s=silence_s
        )
        received = self.link.connection.received

        def watch(count: int) -> object:
            self.seen += count
            return received(count)

        self.link.connection.received = watch  # type: ignore[method-assign, assignment]
        if dialler:
            self.link.send(FrameType.HELLO, HELLO)

    def end(self) -> None:
        self.link.close(flush=False)
        self.link.join(DEADLINE_S)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Dialler's and listener's ends of a TCP connection."""
    with listen(None, 0) as listener:
        dialled = socket.create_connection(listener.getsockname())
        return dialled, listener.accept()[0]


@contextlib.contextmanager
def against(*, dialler: bool) -> Iterator[tuple[Watched, socket.socket]]:
    """This side, which dialled or was dialled, and the impostor's bare socket."""
    dialled, accepted = tcp_pair()
    ours, theirs = (dialled, accepted) if dialler else (accepted, dialled)
    theirs.settimeout(DEADLINE_S)
    watched = Watched(ours, dialler=dialler)
    try:
        yield watched, theirs
    finally:
        theirs.close()
        watched.end()


# --- members -----------------------------------------------------------------------------------------------------


def test_one_secret_gives_one_certificate_to_the_last_byte_in_every_process() -> None:
    assert identity_of(SECRET).certificate == GROUP.certificate != OTHERS.certificate
    code = "import sys; from hetero.transport.identity import identity_of as i; "
    code += "sys.stdout.write(i(bytes(range(32))).certificate.hex())"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO, timeout=60
    ).stdout
    assert found == GROUP.certificate.hex()


def test_certificate_is_the_documented_one_and_holds_nothing_of_the_secret() -> None:
    certificate = x509.load_der_x509_certificate(GROUP.certificate)
    public = certificate.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    assert public == key_of(SECRET).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    assert certificate.serial_number == 1
    assert (certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year) == (2020, 2120)
    assert SECRET not in GROUP.certificate


def test_contexts_demand_tls_1_3_and_the_peer_s_certificate_and_give_no_tickets() -> None:
    for context in (GROUP.server, GROUP.client):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.cert_store_stats()["x509"] == 1
    assert GROUP.server.num_tickets == 0


def test_key_is_left_in_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    identity_of(SECRET)
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def members(relay: bool = False) -> Iterator[tuple[Watched, Watched, dict[bool, bytearray]]]:
    """Two members that talk, where asked through a relay that takes down what each of them sent."""
    recorded: dict[bool, bytearray] = {True: bytearray(), False: bytearray()}
    dialled, accepted = tcp_pair()
    pumps: list[threading.Thread] = []
    middle: list[socket.socket] = []
    if relay:
        near, far = tcp_pair()
        middle = [accepted, near]
        for source, sink, from_dialler in ((accepted, near, True), (near, accepted, False)):
            pumps.append(threading.Thread(target=pump, args=(source, sink, recorded[from_dialler]), daemon=True))
        accepted = far
    for thread in pumps:
        thread.start()
    one, other = (
        Watched(dialled, dialler=True, silence_s=DEADLINE_S),
        Watched(accepted, dialler=False, silence_s=DEADLINE_S),
    )
    try:
        one.link.start()
        other.link.start()
        yield one, other, recorded
    finally:
        one.end()
        other.end()
        for thread in pumps:
            thread.join(DEADLINE_S)
        for sock in middle:
            sock.close()


def pump(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
    with contextlib.suppress(OSError):
        while raw := source.recv(4096):
            record += raw
            sink.sendall(raw)
        sink.shutdown(socket.SHUT_WR)


def test_two_members_talk_both_ways() -> None:
    with members() as (one, other, _):
        assert other.events.frame(FrameType.HELLO).header == HELLO
        other.link.send(FrameType.WELCOME, *pack(FrameType.WELCOME))
        assert one.events.frame(FrameType.WELCOME).header == EXAMPLES[FrameType.WELCOME][0]
        assert one.seen and other.seen


def pack(type_: FrameType) -> tuple[object, list[memoryview]]:
    header, payload = EXAMPLES[type_]
    return header, [memoryview(payload)] if payload else []


def test_what_members_say_is_not_readable_between_them(good_session: dict[bool, bytes]) -> None:
    for raw in good_session.values():
        assert len(raw) > 500 and b"run-1" not in raw and b"instance" not in raw


@pytest.mark.parametrize("dialler", [True, False])
def test_certificate_with_its_own_key_is_let_in_so_the_key_is_what_keeps_impostors_out(dialler: bool) -> None:
    """The same hand-made TLS as that of the impostor with the right certificate and another key."""
    with against(dialler=dialler) as (ours, raw):
        ours.link.start()
        tls = Tls13(raw, GROUP.certificate, key_of(SECRET))
        if dialler:
            tls.accept()
            assert tls.receive() == raw_frame(FrameType.HELLO, HELLO, b"")
        else:
            tls.connect()
            tls.send(raw_frame(FrameType.HELLO, HELLO, b""))
            assert ours.events.frame(FrameType.HELLO).header == HELLO


def test_transport_without_an_identity_makes_no_link() -> None:
    left, right = socket.socketpair()
    with left, right, pytest.raises(LocalProtocolError, match="there is no plaintext mode"):
        TcpTransport().link(left, dialler=True, deliver=Events(), name="peer", silence_s=1)


# --- impostors ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good_session() -> dict[bool, bytes]:
    """The bytes of a session between members as they were on the wire; by whether the dialler sent them."""
    with members(relay=True) as (one, other, recorded):
        other.events.frame(FrameType.HELLO)
        other.link.send(FrameType.WELCOME, *pack(FrameType.WELCOME))
        one.events.frame(FrameType.WELCOME)
    return {side: bytes(raw) for side, raw in recorded.items()}


def with_tls(client: ssl.SSLContext, server: ssl.SSLContext) -> Act:
    """Does the handshake with a context, says HELLO or WELCOME, and gives what it could read."""

    def act(sock: socket.socket, dials: bool) -> bytes:
        with (client if dials else server).wrap_socket(sock, server_side=not dials) as tls:
            tls.sendall(raw_frame(FrameType.HELLO if dials else FrameType.WELCOME))
            return tls.recv(4096)

    return act


def bare_context(*, serves: bool, key: Ed25519PrivateKey | None = None, certificate: bytes = b"") -> ssl.SSLContext:
    """A context that checks nothing, with a certificate or without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if key is not None:
        pem = x509.load_der_x509_certificate(certificate).public_bytes(Encoding.PEM)
        pem += key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        with tempfile.NamedTemporaryFile() as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def no_certificate(sock: socket.socket, dials: bool) -> bytes:
    """As a server, one with an ordinary certificate that asks for none."""
    ordinary = bare_context(serves=True, key=key_of(bytes(32)), certificate=OTHERS.certificate)
    return with_tls(bare_context(serves=False), ordinary)(sock, dials)


def certificate_alone(sock: socket.socket, dials: bool) -> bytes:
    """Shows the group's certificate, which everyone on the wire's ends can see, and signs with another key."""
    tls = Tls13(sock, GROUP.certificate, Ed25519PrivateKey.generate())
    if dials:
        tls.connect()
        tls.send(raw_frame(FrameType.HELLO))
    else:
        tls.accept()
    return tls.receive()


def old_tls(sock: socket.socket, dials: bool) -> bytes:
    """A member in all but the version."""
    contexts = []
    for serves in (False, True):
        context = bare_context(serves=serves, key=key_of(SECRET), certificate=GROUP.certificate)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        contexts.append(context)
    return with_tls(*contexts)(sock, dials)


def says(raw: bytes, *, half_close: bool = False) -> Act:
    """Sends some bytes; what comes back that is no TLS would be the application's."""

    def act(sock: socket.socket, dials: bool) -> bytes:
        sock.sendall(raw)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        return whole_records(sock)

    return act


def whole_records(sock: socket.socket) -> bytes:
    """Reads to the end; gives what is not a hello, a handshake record or an alert."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while raw := sock.recv(4096):
            answer += raw
    assert not answer or answer[0] in (21, 22), answer
    return answer if b"run-1" in answer or b"instance" in answer else b""


def replay(session: dict[bool, bytes]) -> Act:
    def act(sock: socket.socket, dials: bool) -> bytes:
        return says(session[dials])(sock, dials)

    return act


def truncated_hello(session: dict[bool, bytes]) -> Act:
    """The first bytes of a good handshake, then nothing: the connection stays open."""

    def act(sock: socket.socket, dials: bool) -> bytes:
        return says(session[dials][:60])(sock, dials)

    return act


def half_close(session: dict[bool, bytes]) -> Act:
    """A whole first flight, and then the end of what this side says."""

    def act(sock: socket.socket, dials: bool) -> bytes:
        first = session[dials]
        return says(first[: 5 + int.from_bytes(first[3:5])], half_close=True)(sock, dials)

    return act


IMPOSTORS: dict[str, Act | Callable[[dict[bool, bytes]], Act]] = {
    "wrong secret": with_tls(OTHERS.client, OTHERS.server),
    "no certificate": no_certificate,
    "certificate without its key": certificate_alone,
    "TLS 1.2": old_tls,
    "plaintext frame": says(raw_frame(FrameType.HELLO)),
    "HTTP": says(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:9999\r\n\r\n"),
    "SSH banner": says(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "pickle": says(pickle.dumps({"a": [1, 2, 3]})),
    "random bytes": says(random.Random(5).randbytes(4096)),
    "replay": replay,
    "truncated hello": truncated_hello,
    "half-close": half_close,
}
RECORDED = {"replay", "truncated hello", "half-close"}


@pytest.mark.parametrize("dialler", [False, True], ids=["our listener", "our dialler"])
@pytest.mark.parametrize("name", IMPOSTORS)
def test_impostor_is_refused_in_time_and_no_application_byte_passes(
    name: str, dialler: bool, good_session: dict[bool, bytes]
) -> None:
    act: Act = IMPOSTORS[name](good_session) if name in RECORDED else IMPOSTORS[name]  # type: ignore[call-arg, assignment, arg-type]
    with against(dialler=dialler) as (ours, raw):
        began = time.monotonic()
        ours.link.start()
        got = b""
        with contextlib.suppress(ssl.SSLError, ConnectionError, Refused):
            got = act(raw, not dialler)
        closed = ours.events.closed()
        assert time.monotonic() - began < REFUSED_S
        assert got == b""
        assert isinstance(closed.error, PeerError)
        assert ours.seen == 0 and not [e for e in ours.events.all if isinstance(e, Received)]
        assert ours.link.bytes_sent() == 0
        ours.link.join(DEADLINE_S)
        assert ours.link._socket.fileno() == -1
        assert_over(raw)


def assert_over(sock: socket.socket) -> None:
    """The impostor sees the end as well."""
    with contextlib.suppress(OSError, ValueError):
        while sock.recv(4096):
            pass


def test_there_are_twelve_impostors() -> None:
    assert len(IMPOSTORS) == 12


def test_stranger_has_no_longer_than_five_seconds_to_prove_the_secret_whatever_the_silence_allowed() -> None:
    assert HANDSHAKE_S <= REFUSED_S


def test_refusal_says_what_to_do() -> None:
    with against(dialler=False) as (ours, raw):
        ours.link.start()
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            with_tls(OTHERS.client, OTHERS.server)(raw, True)
        assert "python -m hetero.pair" in str(ours.events.closed().error)


def somebody() -> tuple[Ed25519PrivateKey, bytes]:
    """An ordinary self-signed certificate, of a name of its own."""
    key, name = Ed25519PrivateKey.generate(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 2)
    start = datetime.datetime(2020, 1, 1)
    made = builder.not_valid_before(start).not_valid_after(start.replace(year=2100)).sign(key, None)
    return key, made.public_bytes(Encoding.DER)


def test_certificate_that_is_trusted_otherwise_is_still_not_the_group_s() -> None:
    """The comparison of all bytes is a lock of its own: here OpenSSL trusts another certificate too."""
    lenient, (key, certificate) = identity_of(SECRET), somebody()
    lenient.client.load_verify_locations(cadata=certificate)
    server = bare_context(serves=True, key=key, certificate=certificate)
    dialled, accepted = tcp_pair()
    accepted.settimeout(DEADLINE_S)
    events = Events()
    link = TcpTransport(identity=lenient).link(dialled, dialler=True, deliver=events, name="peer", silence_s=5)
    link.send(FrameType.HELLO, HELLO)
    link.start()
    try:
        with (
            contextlib.suppress(ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError),
            server.wrap_socket(accepted, server_side=True) as tls,
        ):
            assert tls.recv(4096) == b""
        assert "is not a member of this group" in str(events.closed().error)
        assert link.bytes_sent() == 0
    finally:
        accepted.close()
        link.close(flush=False)
        link.join(DEADLINE_S)

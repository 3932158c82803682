"""Who answers at a worker's address: a worker of this group, one of another group, another program, or nothing."""

from __future__ import annotations

import contextlib
import enum
import errno
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from cryptography import x509
from cryptography.x509.oid import NameOID

from hetero.errors import HeteroError, PeerError, show_address
from hetero.link_test import CONNECT_S, Probe
from hetero.transport.addresses import HOW_TO_PAIR_ANEW, bare_host
from hetero.transport.tcp import TcpTransport, tune

_LISTEN_S = 2.0


class Who(enum.Enum):
    """What was found at an address."""

    MEMBER = "a worker of this group"
    OLDER = "a worker of this group with another version of hetero"
    STRANGER = "a worker of another group"
    PROGRAM = "another program"
    NOTHING = "nothing listens"
    SILENCE = "no answer"
    NO_NAME = "unknown name"


@dataclass(frozen=True)
class Answer:
    """What was found, why one thinks so, and what would help; `probe` is open where it is a member."""

    who: Who
    detail: str = ""
    remedy: str = ""
    probe: Probe | None = None


def who_answers(transport: TcpTransport, host: str, port: int, connect_s: float = CONNECT_S) -> Answer:
    """Looks who is at an address; the caller closes the probe of a member.

    Args:
        transport: of this machine's group.
        host: a name or an address.
        port: the port.
        connect_s: how long the connection may take.
    """
    where = show_address(host, port)
    try:
        socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return Answer(Who.NO_NAME, f"the name {host!r} cannot be resolved", "write its address in the hardware file")
    if (no_way := _unreachable(host, port, connect_s)) is not None:
        return no_way
    try:
        return Answer(Who.MEMBER, f"{where} answers", probe=Probe(transport, host, port, connect_s))
    except PeerError as exc:
        return _not_a_member(host, port, exc)
    except HeteroError as exc:  # it proved the secret, and then spoke another protocol
        return _older(str(exc))


def _unreachable(host: str, port: int, connect_s: float) -> Answer | None:
    """Why no connection is possible; None where one is."""
    where = show_address(host, port)
    try:
        with socket.create_connection((bare_host(host), port), timeout=connect_s):
            return None
    except ConnectionRefusedError:
        return Answer(
            Who.NOTHING,
            f"{where} refuses: nothing listens on this port",
            f"start python worker.py there (it says on which address), or worker.host={host} worker.port={port}",
        )
    except TimeoutError:
        return Answer(
            Who.SILENCE,
            f"{where} gave no sign within {connect_s:g} s",
            f"is the machine on, in this network, and does its firewall let TCP port {port} in? Under WSL2 set "
            "networkingMode=mirrored",
        )
    except OSError as exc:
        reason = "no route" if exc.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) else (exc.strerror or str(exc))
        return Answer(
            Who.SILENCE,
            f"{where} cannot be reached ({reason.lower()})",
            "is the machine on, in this network, with this address?",
        )


def _not_a_member(host: str, port: int, exc: PeerError) -> Answer:
    if "header of a HELLO" in exc.reason or "protocol version" in exc.reason:
        return _older(exc.reason)
    if "probes already" in exc.reason or "gave no" in exc.reason:
        return Answer(Who.OLDER, exc.reason, "try again; if it stays, start the worker again")
    name = _certificate_name(host, port)
    if name == "hetero":
        return Answer(
            Who.STRANGER,
            "a hetero worker whose secret is another one",
            f"pair the two: {HOW_TO_PAIR_ANEW}",
        )
    what = f"a TLS server named {name!r}" if name is not None else _first_words(host, port)
    return Answer(
        Who.PROGRAM,
        f"{what}, no hetero worker",
        f"end it, or choose another port: python worker.py worker.port=N and port: N in the hardware file (not {port})",
    )


def _older(reason: str) -> Answer:
    return Answer(
        Who.OLDER, f"its hetero does not know this question ({reason})", "update the older checkout (git pull)"
    )


def _certificate_name(host: str, port: int) -> str | None:
    """The name in the certificate of whatever listens there; None where that is no TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only to look; nothing is said
    with contextlib.suppress(OSError, ValueError):
        with socket.create_connection((bare_host(host), port), timeout=_LISTEN_S) as plain:
            tune(plain)
            plain.settimeout(_LISTEN_S)
            with context.wrap_socket(plain) as tls:
                found = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
                names = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
                return str(names[0].value)[:100] if names else ""
    return None


def _first_words(host: str, port: int) -> str:
    """What a program says by itself, or to a line that it does not know."""
    for question in (b"", b"GET / HTTP/1.0\r\n\r\n"):
        said = _said(host, port, question)
        if said:
            return f"a program that says {said[:60]!r}"
    return "a program that accepts connections and says nothing"


def _said(host: str, port: int, question: bytes) -> str:
    until = time.monotonic() + _LISTEN_S / 2
    with contextlib.suppress(OSError), socket.create_connection((bare_host(host), port), timeout=_LISTEN_S) as sock:
        if question:
            sock.sendall(question)
        sock.settimeout(max(0.05, until - time.monotonic()))
        return sock.recv(60).decode("ascii", "replace").strip()
    return ""


Look = Callable[[str, int], Answer]

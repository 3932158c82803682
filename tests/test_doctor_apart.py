"""The doctor over network namespaces that stand for machines; workers and doctor are threads that entered them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import netns
import pytest
from netns import Machine

from hetero.doctor_checks import Diagnosis, Finding, diagnose
from hetero.secret import new_secret, secret_of_this_machine
from hetero.serve import WorkerServer
from hetero.spec import HardwareSpec, WorkerEntry
from hetero.transport.identity import identity_of
from hetero.transport.listening import listen
from hetero.transport.tcp import TcpTransport

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not())),
]


@contextlib.contextmanager
def worker(machine: Machine, secret: bytes | None = None) -> Iterator[WorkerServer]:
    """Lends a worker that listens on a machine."""
    identity = identity_of(secret or secret_of_this_machine()[0])

    def start() -> tuple[WorkerServer, socket.socket]:
        sock = listen(machine.host, 9999, paired=True)
        server = WorkerServer(sock, lambda _: TcpTransport(identity=identity), identity, device="cpu")
        threading.Thread(target=server._accept, daemon=True).start()  # a thread is where its maker is
        return server, sock

    server, sock = machine.inside(start)
    try:
        yield server
    finally:
        server._stopping = True
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def doctor_on(machine: Machine, *workers: Machine) -> Diagnosis:
    entries = [WorkerEntry(id=m.name, host=m.host, port=9999) for m in workers]
    return machine.inside(lambda: diagnose(HardwareSpec(workers=entries), entries, "chain"))


def row(diagnosis: Diagnosis, machine: str, check: str) -> Finding:
    (found,) = [f for f in diagnosis.findings if (f.machine, f.check) == (machine, check)]
    return found


def test_doctor_tells_what_is_wrong_between_machines(tmp_path: Path) -> None:
    with netns.lan(tmp_path, "a", "b", "c") as (a, b, c):
        assert row(doctor_on(a, b), "b", "reach").found.startswith("nothing listens")
        with worker(b, new_secret()):
            stranger = row(doctor_on(a, b), "b", "reach")
            assert stranger.found.startswith("a worker of another group") and "pair join --new" in stranger.remedy
        with worker(b), worker(c) as on_c:
            b.shape("20mbit")
            found = doctor_on(a, b, c)
            there, between = found.lines
            for slow in (there.backward, between.forward):  # what leaves b
                assert 14e6 / 8 < slow < 24e6 / 8
            assert min(there.forward, between.backward) > 30e6 / 8
            assert row(found, "local - b", "line").state == "note" and row(found, "b", "network").state == "ok"
            assert "eth0" in row(found, "b", "network").found

            c.drop(f"ip saddr {b.host}")
            found = doctor_on(a, b, c)
            assert row(found, "c", "reach").state == "ok"
            assert row(found, "b - c", "line").state == "fail" and "star" in row(found, "b - c", "line").remedy
            c.undrop()

            c.drop(f"ip saddr {a.host}")
            assert "firewall" in row(doctor_on(a, b, c), "c", "reach").remedy
            c.undrop()

            on_c._probes._is_busy = lambda: True
            found = doctor_on(a, b, c)
            assert row(found, "c", "reach").state == "note" and row(found, "b - c", "line").state == "not run"

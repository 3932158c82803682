"""Workers as threads of the test process: real sockets and frames, without the time that processes take to start."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from processes import END_S

from hetero.errors import HeteroError
from hetero.member import Member
from hetero.serve import WorkerServer
from hetero.spec import WorkerSpec
from hetero.transport.identity import identity_of
from hetero.transport.listening import start_listening
from hetero.work import StageBuilder, make_transport_of, work_on


@contextlib.contextmanager
def worker_threads(count: int, outputs: Path, allow_targets: tuple[str, ...] = ()) -> Iterator[list[int]]:
    """Lends the ports of workers on the loopback address that serve run after run."""
    servers, threads, ports = [], [], []
    for _ in range(count):
        spec = WorkerSpec(port=0)
        listening = start_listening(spec)
        identity = identity_of(listening.secret)
        ports.append(listening.sock.getsockname()[1])
        builder = StageBuilder(spec, allow_targets)
        server = WorkerServer(
            listening.sock, lambda run, own=identity: make_transport_of(run, allow_targets, own), identity
        )

        def serve(server: WorkerServer = server, builder: StageBuilder = builder, port: int = ports[-1]) -> None:
            with contextlib.suppress(_Over):
                server.serve(
                    lambda session: work_on(session, builder, outputs / f"worker-{port}"),
                    lambda over: builder.ended(over=over),
                )

        servers.append(server)
        threads.append(threading.Thread(target=serve, name=f"worker-{ports[-1]}", daemon=True))
        threads[-1].start()
    try:
        with _one_builds_at_a_time():
            yield ports
    finally:
        for server in servers:
            server._sessions.fail(_Over("the test is over"))
        for thread in threads:
            thread.join(END_S)
        assert not any(thread.is_alive() for thread in threads), "a worker's thread hangs"


@contextlib.contextmanager
def _one_builds_at_a_time() -> Iterator[None]:
    """accelerate's and peft's ways to build on the meta device patch torch for the whole process."""
    lock, build = threading.Lock(), Member._build

    def locked(member: Member, *args: Any) -> None:
        with lock:
            build(member, *args)

    with mock.patch.object(Member, "_build", locked):
        yield


class _Over(HeteroError):
    """Ends a worker that is between two runs."""


def hardware_of(ports: list[int]) -> list[str]:
    """Overrides for a run on these workers, named w1, w2, ..."""
    entries = ", ".join(f"{{id: w{n}, host: 127.0.0.1, port: {port}}}" for n, port in enumerate(ports, 1))
    return ["hardware.launch=none", f"hardware.workers=[{entries}]"]

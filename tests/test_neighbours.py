"""Links between neighbouring stages: what a refused one means for the run."""

from __future__ import annotations

import socket
import threading

import pytest
from conftest import Tiny
from peers import DEADLINE_S
from pipeline import make_spec

from hetero.control import Peer
from hetero.errors import PeerError
from hetero.inbox import Inbox
from hetero.neighbours import flow_at_boundary, open_link
from hetero.serve import WorkerServer
from hetero.spec import RunSpec
from hetero.transport.identity import identity_of
from hetero.transport.listening import listen
from hetero.transport.tcp import TcpTransport
from hetero.wire.headers import Hello

IDENTITY = identity_of(bytes(32))


def test_worker_that_was_started_again_refuses_the_link_of_before_as_a_lost_one(tiny: Tiny) -> None:
    """Its restart is found by the neighbour before the coordinator has noticed; the run goes on in another session."""
    spec = RunSpec.from_json(make_spec(tiny("llama"), [3]).to_json())
    transport = TcpTransport(identity=IDENTITY, connect_timeout_s=DEADLINE_S)
    listener = listen(None, 0)
    server = WorkerServer(listener, lambda _: transport, IDENTITY)
    thread = threading.Thread(target=server._accept, daemon=True)
    thread.start()
    peer = Peer(1, *listener.getsockname()[:2])
    try:
        with pytest.raises(PeerError, match="refused the link: this worker is in no such session") as caught:
            open_link(transport, peer, Hello("link", "run", 1, 1, "me", {}), flow_at_boundary(spec, 0), Inbox())
        assert caught.value.lost
    finally:
        server._stopping = True
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(DEADLINE_S)

"""The coordinator's session between its I/O threads, which may see it fail, and compute, which has not looked yet."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from conftest import Tiny
from pipeline import make_spec

from hetero.errors import PeerError
from hetero.gathering import Gathering
from hetero.inbox import Inbox
from hetero.session import CoordinatorSession
from hetero.spec import RunSpec, WorkerEntry
from hetero.transport.identity import identity_of
from hetero.transport.tcp import TcpTransport


@pytest.fixture
def session(tiny: Tiny) -> CoordinatorSession:
    spec = RunSpec.from_json(make_spec(tiny("llama"), [3]).to_json())
    spec = msgspec.structs.replace(spec, workers=[WorkerEntry(id="w1", host="127.0.0.1", port=9)])
    transport = TcpTransport(identity=identity_of(bytes(32)))
    return CoordinatorSession(spec, run_id="run", epoch=1, inbox=Inbox(), transport=transport, instance="me")


@pytest.mark.parametrize(
    "decide",
    [
        lambda session: session.sync(0),
        lambda session: session.begin_step(1),
        lambda session: session.apply(1.0),
        lambda session: session.gather(Gathering(1, {}, lambda *_: None)),
    ],
    ids=["sync", "begin_step", "apply", "gather"],
)
def test_decision_after_a_worker_is_lost_raises_the_loss(
    session: CoordinatorSession, decide: Callable[[CoordinatorSession], None]
) -> None:
    """From which the run recovers, as it could not from a breach of this program's own rules."""
    session._perform(session._control.closed(1, "connection reset by peer"))
    with pytest.raises(PeerError, match=r"stage 1 at 127\.0\.0\.1:9: connection reset by peer"):
        decide(session)

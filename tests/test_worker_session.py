"""A worker's session between its I/O threads and compute."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Tiny
from peers import EXAMPLES
from pipeline import make_spec

from hetero.control import Membership, Peer
from hetero.errors import PeerError
from hetero.inbox import Inbox
from hetero.spec import RunSpec
from hetero.transport.link import Received
from hetero.transport.tcp import TcpTransport
from hetero.wire.frames import Frame
from hetero.wire.headers import Apply, FrameType, Header, Ready, Reason, Step, Sync, Synced
from hetero.worker_session import SessionOver, WorkerSession

T = FrameType
COORDINATOR, BEFORE = Peer(0, "the coordinator", 0), Peer(1, "a.lan", 9001)


class Nowhere:
    """A link that takes what is sent."""

    def send(self, *_: Any) -> None:
        """Drops it."""


@pytest.fixture
def session(tiny: Tiny) -> WorkerSession:
    spec = RunSpec.from_json(make_spec(tiny("llama"), [2, 4]).to_json())
    link: Any = Nowhere()
    return WorkerSession(spec, Membership("run", 3, 2), Inbox(), TcpTransport(), link, "me")


def tell(session: WorkerSession, who: Peer, type_: FrameType, header: Header | None = None) -> None:
    example, payload = EXAMPLES[type_]
    link: Any = session.control
    session.received(Received(link, Frame(type_, header or example, memoryview(payload))), who)


def test_frames_in_their_turn_are_for_compute(session: WorkerSession) -> None:
    tell(session, COORDINATOR, T.SYNC, Sync(3, 7, 0))
    assert session.wait_sync().step == 7
    session.send(T.SYNCED, Synced(3, "cpu", "float32", 1, 1))
    tell(session, BEFORE, T.STEP, Step(8, 1))
    assert session.next_order().frame.header.step == 8
    session.send(T.READY, Ready(8, True, None, 0, 0, 0, 0))
    tell(session, COORDINATOR, T.APPLY, Apply(8, 0.5))
    assert session.wait_apply().clip_factor == 0.5
    tell(session, COORDINATOR, T.ABORT, Reason("a machine was lost", again=True))
    with pytest.raises(SessionOver, match="a machine was lost") as caught:
        session.next_order()
    assert caught.value.again


@pytest.mark.parametrize(
    ("who", "type_", "header", "message"),
    [
        (COORDINATOR, T.APPLY, Apply(8, 0.5), "stage 0 at the coordinator: APPLY of step 8 may not come"),
        (COORDINATOR, T.SYNC, Sync(2, 7, 0), "stage 0 at the coordinator: SYNC must be of epoch 3, got epoch 2"),
        (BEFORE, T.STEP, Step(8, 1), "stage 1 at a.lan:9001: STEP of step 8 may not come"),
    ],
)
def test_frame_out_of_its_turn_ends_the_session_by_the_senders_name(
    session: WorkerSession, who: Peer, type_: FrameType, header: Header, message: str
) -> None:
    tell(session, who, type_, header)
    with pytest.raises(PeerError, match=message) as caught:
        session.wait_sync()
    assert not caught.value.lost

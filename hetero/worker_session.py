"""One session of a worker, as its compute thread sees it."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero.control import Membership, Peer
from hetero.errors import HeteroError, LocalProtocolError, PeerError, RemoteProtocolError
from hetero.inbox import Inbox
from hetero.neighbours import flow_at_boundary, is_end, open_link, pass_on
from hetero.spec import RunSpec
from hetero.state import StateAssembler
from hetero.training_state import adapter_of
from hetero.transport.link import Link, Received
from hetero.transport.tcp import TcpTransport
from hetero.versions import versions
from hetero.wire.headers import (
    Apply,
    Ended,
    Fault,
    FrameType,
    Gather,
    Header,
    Hello,
    Hidden,
    Prompt,
    Reason,
    State,
    Step,
    Sync,
    TensorEntry,
    Welcome,
)
from hetero.wire.tensors import state_frames
from hetero.worker_control import WorkerControl

log = logging.getLogger(__name__)

END_S = 3.0
END_GRACE_S = 1.0
DIAL_NEXT_S = 10.0
SAY_WAITING_S = 60.0
STAR = "if these two machines cannot reach one another, transport.topology=star lets the coordinator relay"


class SessionOver(Exception):
    """The coordinator ended the session; not a fault.

    Args:
        reason: why.
        again: the run goes on in another session.
    """

    def __init__(self, reason: str, *, again: bool) -> None:
        super().__init__(reason)
        self.again = again


@dataclass
class WorkerSession:
    """One session of a worker: what compute needs of it.

    Attributes:
        spec: the run.
        member: run, epoch and stage.
        inbox: frames of both links and of the control, and the first failure.
        transport: as the spec says.
        control: to the coordinator.
        upstream: from the stage before, once it dialled.
        downstream: to the stage after, once it is there.
    """

    spec: RunSpec
    member: Membership
    inbox: Inbox
    transport: TcpTransport
    control: Link
    instance: str
    upstream: Link | None = None
    downstream: Link | None = None
    _rules: WorkerControl = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards the rules
    _upstream_there: threading.Event = field(default_factory=threading.Event)
    _downstream_there: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._rules = WorkerControl(self.member.epoch)

    def received(self, event: Received, who: Peer) -> None:
        """A frame of the coordinator's or of a neighbour's: for compute in its turn, the session's fault out of it."""
        try:
            with self._lock:
                wanted = self._rules.received(event.frame)
        except RemoteProtocolError as exc:
            self.inbox.fail(who.error(str(exc)))
            return
        if wanted:
            pass_on(event, self.inbox, who)

    def welcome(self, model: dict[str, str]) -> None:
        """Takes part in the run, with the fingerprint of this machine's base model (empty: it is not here yet)."""
        header = Welcome(instance=self.instance, versions=versions(), digest=self.spec.digest())
        self.control.send(FrameType.WELCOME, header, [memoryview(json.dumps(model).encode())])

    def wait_sync(self) -> Sync:
        """The coordinator's SYNC."""
        return self._next((Sync,)).frame.header  # type: ignore[no-any-return]

    def wait_state(self, sync: Sync, expected: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """The state that follows a SYNC, by state name; empty where the stage is to stay as it was built.

        Args:
            sync: says how many tensors.
            expected: global key -> shape of this stage's trained tensors.

        Raises:
            PeerError: something else came.
        """
        assembler = StateAssembler(expected, sync.num_tensors)
        done = sync.num_tensors == 0
        while not done:
            piece = self._next((State,))
            try:
                done = assembler.add(piece.frame.header, piece.frame.payload)
            except PeerError as exc:
                raise PeerError(exc.reason, stage=0) from None
        if missing := expected.keys() - adapter_of(assembler.tensors).keys() if assembler.tensors else set():
            raise PeerError(f"sent state without {min(missing)!r}", stage=0)
        return assembler.tensors

    def connect(self) -> None:
        """Links up with both neighbours: dials the stage after, and waits for whoever dials.

        Raises:
            PeerError: a neighbour cannot be reached, or does not dial.
        """
        stage = self.member.stage
        is_last = stage == len(self.spec.stages) - 1
        if not is_last and self.transport.topology == "chain":
            self.downstream = self._dial_next()
        self._wait_for(self._upstream_there, stage - 1)
        if not is_last and self.transport.topology == "star":
            self._wait_for(self._downstream_there, stage + 1)

    def _dial_next(self) -> Link:
        stage = self.member.stage
        peer = Peer(stage + 1, self.spec.workers[stage].host, self.spec.workers[stage].port)
        hello = Hello(
            purpose="link",
            run_id=self.member.run_id,
            epoch=self.member.epoch,
            stage=stage + 1,
            instance=self.instance,
            versions={},
        )
        # The next worker has joined already, so it listens: what does not connect soon never will.
        give_up_at = time.monotonic() + min(DIAL_NEXT_S, self.transport.connect_timeout_s)
        try:
            return open_link(
                self.transport,
                peer,
                hello,
                flow_at_boundary(self.spec, stage),
                self.inbox,
                give_up_at=give_up_at,
                advice=STAR,
            )
        except PeerError as exc:
            if exc.stage != peer.stage:
                raise
            # In the first session that is no lost machine but a line that never was there; waiting does not help.
            lost = exc.lost and self.member.epoch > 1
            raise peer.error(f"stage {stage} cannot link to it: {exc.reason}", lost=lost) from exc

    def _wait_for(self, there: threading.Event, neighbour: int) -> None:
        """As long as it takes: a neighbour may still download its weights, and a lost one ends the session."""
        said_at = time.monotonic()
        while not there.wait(0.2):
            if failure := self.inbox.failure():
                raise failure
            self.raise_if_over()
            if time.monotonic() - said_at > SAY_WAITING_S:
                said_at = time.monotonic()
                log.info("ready; stage %d is still loading", neighbour)

    def raise_if_over(self) -> None:
        """Looks, without waiting, whether this session goes on.

        Raises:
            SessionOver: the coordinator said STOP or ABORT.
            HeteroError: a fault.
        """
        for event in self.inbox.take(is_end):
            raise SessionOver(event.frame.header.reason, again=event.frame.header.again)

    def next_order(self) -> Received:
        """The next STEP or PROMPT (from the stage before) or GATHER (from the coordinator).

        Raises:
            SessionOver: the coordinator said STOP or ABORT.
        """
        return self._next((Step, Prompt, Gather))  # type: ignore[no-any-return]

    def next_piece(self) -> Received:
        """The next HIDDEN of a batch of prompts, or the batch's ENDED.

        Raises:
            SessionOver: the coordinator said STOP or ABORT.
        """
        return self._next((Hidden, Ended))  # type: ignore[no-any-return]

    def wait_apply(self) -> Apply:
        """The coordinator's decision about the step."""
        return self._next((Apply,)).frame.header  # type: ignore[no-any-return]

    def send(self, type_: FrameType, header: Header, payload: tuple[memoryview, ...] = ()) -> None:
        """Sends a frame to the coordinator."""
        with self._lock:
            self._rules.sending(header)
        self.control.send(type_, header, payload)

    def send_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Sends tensors to the coordinator as STATE frames."""
        if not tensors:
            nothing = TensorEntry("nothing", "uint8", [0])
            self.control.send(FrameType.STATE, State(index=0, total=0, tensor=nothing, offset=0))
        for header, payload in state_frames(tensors):
            self.control.send(FrameType.STATE, header, payload)

    def ask_stop(self, reason: str) -> bool:
        """Asks the coordinator to end the run after this step; False where it cannot be asked now."""
        try:
            self.control.send(FrameType.STOP, Reason(reason=reason[:2000]))
        except LocalProtocolError:
            return False
        return True

    def tell_stuck(self, reason: str) -> None:
        """Tells the coordinator that this worker's compute thread does not come back; ends the session."""
        fault = Fault(reason=reason[:2000], lost=True, stuck=True)
        with contextlib.suppress(HeteroError):
            self.control.send_last(FrameType.ERROR, fault)
        self.inbox.fail(PeerError(reason, stage=self.member.stage, lost=True))

    def end_announced(self) -> Reason | None:
        """The coordinator's STOP or ABORT, where it comes within a second; None otherwise."""
        try:
            event = self.inbox.get(is_end, timeout_s=END_GRACE_S, despite_failure=True)
        except TimeoutError:
            return None
        return event.frame.header  # type: ignore[no-any-return]

    def is_linked(self, purpose: str) -> bool:
        """Whether the neighbour that a `link` or a `relay` stands for is there already."""
        return (self.upstream if purpose == "link" else self.downstream) is not None

    def adopt(self, link: Link, purpose: str) -> None:
        """A neighbour has dialled: the stage before, or the coordinator in place of the stage after (`relay`)."""
        if purpose == "link":
            self.upstream = link
            self._upstream_there.set()
        else:
            self.downstream = link
            self._downstream_there.set()

    def end(self, fault: Fault | None) -> None:
        """Closes all connections, after telling everyone what went wrong, if something did."""
        links = [link for link in (self.control, self.upstream, self.downstream) if link is not None]
        for link in links:
            if fault is not None:
                with contextlib.suppress(HeteroError):
                    link.send_last(FrameType.ERROR, fault)
            link.close()
        for link in links:
            link.join(END_S)

    def _next(self, kinds: tuple[type[Header], ...]) -> Any:
        event = self.inbox.get(lambda e: isinstance(e, Received) and isinstance(e.frame.header, (*kinds, Reason)))
        if isinstance(event.frame.header, Reason):
            raise SessionOver(event.frame.header.reason, again=event.frame.header.again)
        return event

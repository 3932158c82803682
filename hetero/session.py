"""The coordinator's session: dials every worker, drives the control state machine, and hands events to compute."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero.control import (
    Action,
    AllSynced,
    CoordinatorControl,
    Fail,
    Joined,
    Notify,
    Peer,
    Retry,
    Send,
    StatePiece,
    StepReady,
)
from hetero.errors import HeteroError, PeerError
from hetero.inbox import Inbox
from hetero.spec import RunSpec
from hetero.transport.link import Closed, Link, Received
from hetero.transport.tcp import TcpTransport
from hetero.versions import differences, versions
from hetero.wire.flow import LinkFlow
from hetero.wire.headers import FrameType, Hello, Reason, Reject, State
from hetero.wire.messages import CommandTable, Message
from hetero.wire.tensors import DTYPES, as_bytes, state_frames

log = logging.getLogger(__name__)

RETRY_BUSY_S = 0.3
END_S = 3.0


def flow_at_boundary(spec: RunSpec, boundary: int) -> LinkFlow:
    """What the link between stages `boundary` and `boundary + 1` may carry."""
    return LinkFlow(
        hidden_size=spec.hidden_size,
        dtype=spec.boundary_dtypes[boundary],
        max_rows=spec.loop.microbatch_size,
        max_length=spec.max_length,
    )


class StateAssembler:
    """Puts the pieces of a sender's STATE frames together, each where it belongs and once.

    Args:
        expected: name -> shape of every tensor that may come; None lets any through, within `max_bytes`.
        max_bytes: limit of all tensors together.
    """

    def __init__(self, expected: dict[str, list[int]] | None = None, max_bytes: int = 1 << 36) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._expected, self._left = expected, max_bytes
        self._next_index = 0
        self._next_offset = 0

    def add(self, header: State, payload: memoryview) -> bool:
        """Takes the next piece; True when all tensors of this sender are complete.

        Raises:
            PeerError: it is not the piece that must follow, or a tensor that is not expected.
        """
        entry = header.tensor
        if self._expected is not None and self._expected.get(entry.name) != list(entry.shape):
            raise PeerError(f"sent state {entry.name} {list(entry.shape)}, which this run does not have")
        if (header.index, header.offset) != (self._next_index, self._next_offset):
            raise PeerError("sent pieces of state out of order")
        if header.offset == 0:
            self._left -= entry.nbytes()
            if self._left < 0 or entry.name in self.tensors:
                raise PeerError(f"sent too much state, or {entry.name} twice")
            self.tensors[entry.name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        end = header.offset + payload.nbytes
        if end > entry.nbytes() or (payload.nbytes == 0 and entry.nbytes()):
            raise PeerError(f"sent state {entry.name} of the wrong size")
        if payload.nbytes:
            as_bytes(self.tensors[entry.name])[header.offset : end] = payload
        done = end == entry.nbytes()
        self._next_index, self._next_offset = (header.index + 1, 0) if done else (header.index, end)
        return done and header.index == header.total - 1


@dataclass
class _Worker:
    """A worker as its coordinator sees it."""

    peer: Peer
    link: Link | None = None
    attempts: int = 0
    seen: dict[str, str] = field(default_factory=dict)


class CoordinatorSession:
    """The connections of one epoch of a run, from the coordinator.

    Args:
        spec: the run; its workers have real ports.
        run_id: the run's name on the wire.
        epoch: number of this session.
        inbox: gets events and the first failure.
        transport: how to dial.
        instance: this process, so that a restarted one is told apart.
        commands: functions for messages that workers send.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        run_id: str,
        epoch: int,
        inbox: Inbox,
        transport: TcpTransport,
        instance: str,
        commands: CommandTable | None = None,
    ) -> None:
        self.spec, self.run_id, self.epoch, self.inbox = spec, run_id, epoch, inbox
        self._transport, self._instance = transport, instance
        self._commands = commands or CommandTable()
        peers = {i: Peer(i, w.host, w.port) for i, w in enumerate(spec.workers, 1)}
        self._workers = {stage: _Worker(peer) for stage, peer in peers.items()}
        self._control = CoordinatorControl(peers, epoch)
        self._lock = threading.RLock()
        self._downstream: Link | None = None

    # --- joining -----------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Connects to every worker and waits for their WELCOMEs; any start order within connect_timeout_s.

        Raises:
            PeerError: a worker cannot be reached, or refuses.
        """
        if not self._workers:
            return
        give_up_at = time.monotonic() + self._transport.connect_timeout_s
        for stage in self._workers:
            self._dial(stage, give_up_at)
        while True:
            left = give_up_at - time.monotonic()
            try:
                event = self.inbox.get(lambda e: isinstance(e, Joined | Retry), timeout_s=max(0.05, left))
            except TimeoutError:
                missing = [w.peer for w in self._workers.values() if not w.seen]
                raise missing[0].error(
                    f"gave no answer within {self._transport.connect_timeout_s:g} s (transport.connect_timeout_s); "
                    "is it a hetero worker?"
                ) from None
            if isinstance(event, Joined):
                break
            worker = self._workers[event.stage]
            if time.monotonic() + RETRY_BUSY_S > give_up_at:
                raise worker.peer.error(f"refused: {event.reason}")
            time.sleep(RETRY_BUSY_S)
            self._dial(event.stage, give_up_at)
        for stage, welcome in event.welcomes.items():
            if other := differences(versions(), welcome.versions):
                log.warning("versions differ from those of stage %d (here / there): %s", stage, ", ".join(other))

    def sync(self, step: int, tensors: dict[int, dict[str, torch.Tensor]] | None = None) -> None:
        """Tells every worker to build its stage, link up, and continue after `step`, with these tensors by stage."""
        tensors = tensors or {}
        self._perform(self._control.sync(step, {stage: len(t) for stage, t in tensors.items()}))
        for stage, own in tensors.items():
            link = self._workers[stage].link
            assert link is not None
            for header, payload in state_frames(own):
                link.send(FrameType.STATE, header, payload)

    def connect_downstream(self) -> Link | None:
        """The link to stage 1, open; None in a run of one stage."""
        if not self._workers:
            return None
        self._downstream = open_link(
            self._transport,
            self._workers[1].peer,
            Hello(
                purpose="link",
                run_id=self.run_id,
                epoch=self.epoch,
                stage=1,
                instance=self._instance,
                versions={},
            ),
            flow_at_boundary(self.spec, 0),
            self.inbox,
        )
        return self._downstream

    def wait_synced(self) -> AllSynced:
        """Waits until every worker is ready to train."""
        if not self._workers:
            return AllSynced({})
        return self.inbox.get(lambda e: isinstance(e, AllSynced))  # type: ignore[no-any-return]

    # --- steps -------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """The coordinator starts to compute a step."""
        if self._workers:
            with self._lock:
                self._control.begin_step(step)

    def wait_ready(self) -> StepReady | None:
        """Waits until every worker has finished the backward work of the step."""
        if not self._workers:
            return None
        return self.inbox.get(lambda e: isinstance(e, StepReady))  # type: ignore[no-any-return]

    def apply(self, clip_factor: float) -> None:
        """Sends the one decision about the step."""
        if self._workers:
            with self._lock:
                self._perform(self._control.apply(clip_factor))

    def gather(self, step: int, expected: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Every worker's trained tensors as they are after `step`, by global key.

        Args:
            step: the last finished step.
            expected: key -> shape of all tensors of the adapter.
        """
        if not self._workers:
            return {}
        with self._lock:
            self._perform(self._control.gather(step))
        waiting = {stage: StateAssembler(expected) for stage in self._workers}
        gathered: dict[str, torch.Tensor] = {}
        while waiting:
            piece = self.inbox.get(lambda e: isinstance(e, StatePiece))
            assembler = waiting[piece.stage]
            try:
                done = piece.header.total == 0 or assembler.add(piece.header, piece.payload)
            except PeerError as exc:
                raise self._workers[piece.stage].peer.error(exc.reason, step) from None
            if done:
                gathered |= assembler.tensors
                del waiting[piece.stage]
        self._control.gathered()
        return gathered

    def send_message(self, stage: int, message: Message) -> None:
        """Sends a message of the extension point to a worker."""
        link = self._workers[stage].link
        assert link is not None
        link.send(FrameType.CONTROL, message.header())

    # --- ending ------------------------------------------------------------------------------------------------

    def end(self, *, stop: bool, reason: str) -> None:
        """Ends the session: STOP after a finished run, ABORT otherwise; returns within a few seconds."""
        with self._lock:
            self._perform(self._control.end(FrameType.STOP if stop else FrameType.ABORT, reason))
        links = [w.link for w in self._workers.values() if w.link is not None]
        links += [self._downstream] if self._downstream is not None else []
        for link in links:
            link.close()
        for link in links:
            link.join(END_S)

    # --- the I/O side ------------------------------------------------------------------------------------------

    def _dial(self, stage: int, give_up_at: float) -> None:
        worker = self._workers[stage]
        sock = self._transport.dial(worker.peer.host, worker.peer.port, stage=stage, give_up_at=give_up_at)
        link = self._transport.link(
            sock,
            dialler=True,
            deliver=lambda event: self._on_event(stage, event),
            name=f"stage {stage}",
            silence_s=self._transport.io_timeout_s,
        )
        worker.link, worker.seen = link, {}
        worker.attempts += 1
        hello = Hello(
            purpose="control",
            run_id=self.run_id,
            epoch=self.epoch,
            stage=stage,
            instance=self._instance,
            versions=versions(),
        )
        link.send(FrameType.HELLO, hello, [memoryview(self.spec.to_json())])
        link.start()

    def _on_event(self, stage: int, event: Received | Closed) -> None:
        worker = self._workers[stage]
        with self._lock:
            if event.link is not worker.link:
                return  # an earlier attempt
            if isinstance(event, Closed):
                if event.error is not None:
                    reason = event.error.reason if isinstance(event.error, PeerError) else str(event.error)
                    self._perform(self._control.closed(stage, reason))
                return
            header = event.frame.header
            if event.frame.type is FrameType.CONTROL:
                self._dispatch(stage, event)
                return
            if isinstance(header, Reject):
                worker.link = None
                event.link.close()
            elif event.frame.type is FrameType.WELCOME:
                worker.seen = header.versions  # type: ignore[attr-defined]
            self._perform(self._control.received(stage, event.frame))

    def _dispatch(self, stage: int, event: Received) -> None:
        try:
            self._commands.dispatch(Message.of(event.frame.header))  # type: ignore[arg-type]
        except HeteroError as exc:
            self._perform([Fail(self._workers[stage].peer.error(str(exc)))])

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                link = self._workers[action.stage].link
                if link is not None:
                    link.send(action.type, action.header)
            elif isinstance(action, Notify):
                self.inbox.put(action.event)
            elif isinstance(action, Retry):
                self.inbox.put(action)
            else:
                self.inbox.fail(action.error)


def open_link(transport: TcpTransport, peer: Peer, hello: Hello, flow: LinkFlow, inbox: Inbox) -> Link:
    """Dials the link to the next stage and waits for its WELCOME.

    Its frames go to the inbox; its end, unless this side closed it, is the inbox's failure.

    Raises:
        PeerError: it cannot be reached, refuses, or gives no answer.
    """
    opened = threading.Event()
    refusal: list[str] = []

    def deliver(event: Received | Closed) -> None:
        if isinstance(event, Closed):
            if event.error is not None:
                inbox.fail(named(event.error, peer))
            opened.set()
        elif isinstance(event.frame.header, Reject):
            refusal.append(event.frame.header.reason)
            opened.set()
        elif event.frame.type is FrameType.WELCOME:
            opened.set()
        else:
            pass_on(event, inbox, peer)

    sock = transport.dial(peer.host, peer.port, stage=peer.stage)
    link = transport.link(
        sock, dialler=True, deliver=deliver, name=f"stage {peer.stage}", silence_s=transport.io_timeout_s
    )
    link.connection.flow = flow
    link.send(FrameType.HELLO, hello)
    link.start()
    answered = opened.wait(transport.connect_timeout_s)
    if failure := inbox.failure():
        link.close()
        raise failure
    if refusal or not answered:
        link.close()
        raise peer.error(f"refused the link: {refusal[0]}" if refusal else "gave no answer to the link's HELLO")
    return link


def pass_on(event: Received, inbox: Inbox, peer: Peer) -> None:
    """A neighbour's frame: an ERROR is the session's failure, all else is for compute."""
    header: Any = event.frame.header
    if event.frame.type is not FrameType.ERROR:
        inbox.put(event)
    elif header.stage is None:
        inbox.fail(peer.error(header.reason, header.step))
    else:
        inbox.fail(PeerError(header.reason, stage=header.stage, host=header.host, port=header.port, step=header.step))


def named(error: HeteroError, peer: Peer) -> PeerError:
    """A connection's error with the peer's name on it."""
    return peer.error(error.reason if isinstance(error, PeerError) else str(error))


def is_end(event: Any) -> bool:
    """True for a coordinator's STOP or ABORT."""
    return isinstance(event, Received) and isinstance(event.frame.header, Reason)

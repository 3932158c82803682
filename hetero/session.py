"""The coordinator's session: dials every worker, drives the control state machine, and hands events to compute."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from hetero.agreement import disagreement, read_model
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
    StopAsked,
    TokensChosen,
)
from hetero.errors import HeteroError, LocalProtocolError, PeerError
from hetero.gathering import Gathering
from hetero.inbox import Inbox
from hetero.neighbours import flow_at_boundary, open_link
from hetero.relay import open_relay
from hetero.spec import RunSpec
from hetero.transport.backoff import Backoff
from hetero.transport.clock import Offset
from hetero.transport.link import Closed, Link, Received
from hetero.transport.tcp import TcpTransport
from hetero.versions import differences, versions
from hetero.wire.headers import Fault, FrameType, Hello, Reject
from hetero.wire.messages import CommandTable, Message
from hetero.wire.tensors import state_frames

log = logging.getLogger(__name__)

ANSWER_S = 0.3  # that the last attempt leaves for an answer, such as why the worker is busy
END_S = 3.0


@dataclass
class _Worker:
    """A worker as its coordinator sees it."""

    peer: Peer
    link: Link | None = None
    backoff: Backoff = field(default_factory=Backoff)
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
        on_stop_asked: called on an I/O thread with the reason why a worker wants the run to end.
        recovers: after a lost peer the run goes on in another session.
        check_worker: called with a stage while nobody answers there; raises PeerError where nobody will.
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
        on_stop_asked: Callable[[str], None] | None = None,
        recovers: bool = False,
        check_worker: Callable[[int], None] = lambda stage: None,
    ) -> None:
        self.spec, self.run_id, self.epoch, self.inbox = spec, run_id, epoch, inbox
        self._transport, self._instance = transport, instance
        self._commands = commands or CommandTable()
        peers = {i: Peer(i, w.host, w.port) for i, w in enumerate(spec.workers, 1)}
        self._workers = {stage: _Worker(peer) for stage, peer in peers.items()}
        self._control = CoordinatorControl(peers, epoch, recovers=recovers)
        self._lock = threading.RLock()
        self._on_stop_asked, self._check_worker = on_stop_asked, check_worker
        self._gathering: Gathering | None = None
        self._downstream: Link | None = None
        self._relays: list[Link] = []

    # --- joining -----------------------------------------------------------------------------------------------

    def join(self, model: dict[str, str] | None = None, *, within_s: float | None = None) -> None:
        """Connects to every worker and waits for their WELCOMEs; any start order within the time.

        Args:
            model: fingerprint of this machine's base model.
            within_s: the time; connect_timeout_s where None.

        Raises:
            PeerError: a worker cannot be reached, refuses, or is about to run something else.
        """
        if not self._workers:
            return
        limit_s = self._transport.connect_timeout_s if within_s is None else within_s
        key = "transport.connect_timeout_s" if within_s is None else "recovery.wait_s"
        give_up_at = time.monotonic() + limit_s
        for stage in self._workers:
            self._dial(stage, give_up_at, key)
        while True:
            left = give_up_at - time.monotonic()
            try:
                event = self.inbox.get(lambda e: isinstance(e, Joined | Retry), timeout_s=max(0.05, left))
            except TimeoutError:
                missing = [w.peer for w in self._workers.values() if not w.seen]
                raise missing[0].error(
                    f"gave no answer within {limit_s:g} s ({key}); is it a hetero worker?",
                    lost=True,
                ) from None
            if isinstance(event, Joined):
                break
            worker = self._workers[event.stage]
            if (left := give_up_at - time.monotonic() - ANSWER_S) <= 0:
                raise worker.peer.error(event.reason, lost=True)
            time.sleep(min(worker.backoff.pause_s(), left))
            self._dial(event.stage, give_up_at, key)
        for stage, welcome in event.welcomes.items():
            theirs = read_model(event.models[stage])
            if reason := disagreement(self.spec.digest(), model or {}, welcome, theirs):
                raise self._workers[stage].peer.error(reason)
            if other := differences(versions(), welcome.versions):
                log.warning("versions differ from those of stage %d (here / there): %s", stage, ", ".join(other))

    def sync(self, step: int, tensors: dict[int, dict[str, torch.Tensor]] | None = None) -> None:
        """Tells every worker to build its stage, link up, and continue after `step`, with these tensors by stage."""
        tensors = tensors or {}
        with self._lock:
            self._raise_failure()
            self._perform(self._control.sync(step, {stage: len(t) for stage, t in tensors.items()}))
        for stage, own in tensors.items():
            link = self._workers[stage].link
            assert link is not None
            for header, payload in state_frames(own):
                link.send(FrameType.STATE, header, payload)

    def connect_downstream(self) -> Link | None:
        """The link to stage 1, open, and in a star the relays between workers; None in a run of one stage."""
        if not self._workers:
            return None
        self._downstream = open_link(
            self._transport, self._workers[1].peer, self._hello("link", 1), flow_at_boundary(self.spec, 0), self.inbox
        )
        if self.spec.transport.topology == "star":
            peers = [worker.peer for worker in self._workers.values()]
            for earlier, later in pairwise(peers):
                self._relays += open_relay(self._transport, self.spec, earlier, later, self._hello, self.inbox)
        return self._downstream

    def _hello(self, purpose: str, stage: int) -> Hello:
        return Hello(
            purpose=purpose,  # type: ignore[arg-type]
            run_id=self.run_id,
            epoch=self.epoch,
            stage=stage,
            instance=self._instance,
            versions=versions() if purpose == "control" else {},
        )

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
                self._raise_failure()
                self._control.begin_step(step)

    def begin_evaluation(self, step: int, number: int) -> None:
        """The coordinator starts an evaluation after a step, the `number`-th after it in this session."""
        if self._workers:
            with self._lock:
                self._raise_failure()
                self._control.begin_evaluation(step, number)

    def wait_ready(self) -> StepReady | None:
        """Waits until every worker has finished the backward work of the step."""
        if not self._workers:
            return None
        return self.inbox.get(lambda e: isinstance(e, StepReady))  # type: ignore[no-any-return]

    def apply(self, clip_factor: float, save: Gathering | None = None) -> None:
        """Sends the one decision about the step; with `save` every worker's state then comes in there."""
        if self._workers:
            with self._lock:
                self._raise_failure()
                self._gathering = save or self._gathering
                self._perform(self._control.apply(clip_factor, save=save is not None))

    def gather(self, into: Gathering) -> None:
        """Lets every worker send its state as it is now; no step follows in this session."""
        if self._workers:
            with self._lock:
                self._raise_failure()
                self._gathering = into
                self._perform(self._control.gather(into.step))

    def await_tokens(self, batch: int, position: int, rows: int) -> None:
        """Hidden states of prompts are about to be sent to stage 1."""
        with self._lock:
            self._raise_failure()
            self._control.await_tokens(batch, position, rows)

    def wait_tokens(self) -> TokensChosen:
        """Waits for the tokens that the last stage chooses."""
        return self.inbox.get(lambda e: isinstance(e, TokensChosen))  # type: ignore[no-any-return]

    def is_saving(self) -> bool:
        """Whether state of workers is still on its way."""
        with self._lock:
            return self._control.is_saving()

    def _raise_failure(self) -> None:
        """A session that has failed since compute looked last takes no more decisions."""
        if (failure := self.inbox.failure()) is not None:
            raise failure

    def peer(self, stage: int) -> Peer:
        """Where a worker is."""
        return self._workers[stage].peer

    def clock(self, stage: int) -> Offset | None:
        """A worker's clock minus this process's, by pings over its control; None before the first answer."""
        link = self._workers[stage].link
        return None if link is None else link.clock.offset(time.perf_counter())

    def send_message(self, stage: int, message: Message) -> None:
        """Sends a message of the extension point to a worker."""
        link = self._workers[stage].link
        assert link is not None
        link.send(FrameType.CONTROL, message.header())

    # --- ending ------------------------------------------------------------------------------------------------

    def end(self, *, stop: bool, reason: str, again: bool = False) -> None:
        """Ends the session: STOP after a finished run, ABORT otherwise; returns within a few seconds.

        Args:
            stop: the run is over as it should be.
            reason: for the workers' logs.
            again: the run goes on in another session.
        """
        with self._lock:
            self._perform(self._control.end(FrameType.STOP if stop else FrameType.ABORT, reason, again=again))
        links = [w.link for w in self._workers.values() if w.link is not None]
        links += [self._downstream] if self._downstream is not None else []
        links += self._relays
        for link in links:
            link.close()
        for link in links:
            link.join(END_S)

    # --- the I/O side ------------------------------------------------------------------------------------------

    def _dial(self, stage: int, give_up_at: float, key: str) -> None:
        worker = self._workers[stage]
        sock = self._transport.dial(
            worker.peer.host,
            worker.peer.port,
            stage=stage,
            give_up_at=give_up_at,
            advice=f"is worker.py running there ({key})?",
            check=lambda: self._check_worker(stage),
        )
        link = self._transport.link(
            sock,
            dialler=True,
            deliver=lambda event: self._on_event(stage, event),
            name=f"stage {stage}",
            silence_s=self._transport.io_timeout_s,
        )
        worker.link, worker.seen = link, {}
        link.send(FrameType.HELLO, self._hello("control", stage), [memoryview(self.spec.to_json())])
        link.start()

    def _on_event(self, stage: int, event: Received | Closed) -> None:
        worker = self._workers[stage]
        with self._lock:
            if event.link is not worker.link:
                return  # an earlier attempt
            if isinstance(event, Closed):
                if event.error is not None:
                    reason, lost = _reason_and_loss(event.error)
                    self._perform(self._control.closed(stage, reason, lost=lost))
                return
            header = event.frame.header
            if isinstance(header, Fault) and header.stuck:
                faulthandler.dump_traceback(all_threads=True)  # the other side did so as well
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

    def _tell(self, action: Send) -> None:
        link = self._workers[action.stage].link
        if link is None:
            return
        try:
            (link.send_last if action.type is FrameType.ABORT else link.send)(action.type, action.header)
        except LocalProtocolError:
            # A worker that has not answered yet hears of the end by the connection's.
            if action.type not in (FrameType.ABORT, FrameType.STOP):
                raise

    def _notify(self, event: Joined | AllSynced | StepReady | StatePiece | TokensChosen | StopAsked) -> None:
        if isinstance(event, StopAsked):
            if self._on_stop_asked is not None:
                self._on_stop_asked(event.reason)
        elif isinstance(event, StatePiece):
            assert self._gathering is not None
            try:
                if self._gathering.piece(event.stage, event.header, event.payload):
                    self._control.state_complete(event.stage)
            except PeerError as exc:
                self._perform([Fail(self._workers[event.stage].peer.error(exc.reason, self._gathering.step))])
        else:
            self.inbox.put(event)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._tell(action)
            elif isinstance(action, Notify):
                self._notify(action.event)
            elif isinstance(action, Retry):
                self.inbox.put(action)
            else:
                self.inbox.fail(action.error)


def _reason_and_loss(error: HeteroError) -> tuple[str, bool]:
    return (error.reason, error.lost) if isinstance(error, PeerError) else (str(error), False)

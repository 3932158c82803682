"""A worker of a simulated run: the real control code, the rest said again as generators."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from simulated_training import (
    Assembler,
    Member,
    Violation,
    pack,
    require,
    state_frames,
    unpack,
)
from simulated_wire import (
    CONNECT_S,
    NOTHING,
    End,
    Get,
    Inbox,
    Process,
    Wait,
    is_end,
    is_frame,
    link_closed,
    link_frame,
    open_link,
    pass_on,
    sleep,
)

from hetero.control import (
    Membership,
    Peer,
    judge_hello,
)
from hetero.errors import LocalProtocolError, PeerError, RemoteProtocolError
from hetero.wire.frames import Frame
from hetero.wire.headers import (
    Apply,
    Fault,
    FrameType,
    Gather,
    Ready,
    Reason,
    Reject,
    State,
    Step,
    Sync,
    Synced,
    Tensors,
    Welcome,
)
from hetero.worker_control import WorkerControl, WorkerPhase

if TYPE_CHECKING:
    from simulation import Simulation

T = FrameType
END_GRACE_S = 1.0


class SessionOver(Exception):
    """As `worker_session.SessionOver`."""


class WorkerSession:
    """As `hetero.worker_session.WorkerSession`."""

    def __init__(self, worker: Worker, member: Membership, control: End) -> None:
        self.member, self.control = member, control
        self.epoch = (member.run_id, member.epoch)
        self.inbox = Inbox(worker)
        self.rules = WorkerControl(member.epoch)
        self.upstream: End | None = None
        self.downstream: End | None = None

    def received(self, frame: Frame, who: Peer) -> None:
        try:
            wanted = self.rules.received(frame)
        except RemoteProtocolError as exc:
            self.inbox.fail(who.error(str(exc)))
            return
        if isinstance(frame.header, Sync) and wanted:
            require(frame.header.epoch == self.member.epoch, "SYNC of epoch %d was taken", frame.header.epoch)
        if wanted:
            pass_on(frame, self.inbox, who)

    def send(self, type_: FrameType, header: Any, payload: memoryview = NOTHING) -> None:
        self.rules.sending(header)
        self.control.send(type_, header, payload)


class Worker(Process):
    """As `hetero.serve.WorkerServer` and `hetero.work.work_on`."""

    def __init__(self, sim: Simulation, stage: int) -> None:
        number = sum(isinstance(process, Worker) and process.stage == stage for process in sim.processes)
        super().__init__(sim, f"worker {stage}" + "'" * number, stage)
        self.member = Member(stage)
        self.current: WorkerSession | None = None
        self.jobs = Inbox(self)
        self.newest: dict[str, int] = {}  # run -> epoch of the newest session

    # --- the I/O side

    def on_frame(self, end: End, frame: Frame) -> None:
        if end.about == "link":
            link_frame(end, frame)
            return
        if end.about is None:  # its first
            end.about = "placed"
            rejection = self.admit(end, frame.header)
            if rejection is not None:
                end.send(T.REJECT, rejection)
                end.close()
            return
        session = self.current
        if session is None or end not in (session.control, session.upstream):
            return
        require(
            end.epoch == session.epoch, "%s listens to session %s in session %s", self.name, end.epoch, session.epoch
        )
        session.received(
            frame, Peer(0, "the coordinator", 0) if end is session.control else Peer(self.stage - 1, "host", 1)
        )

    def on_closed(self, end: End, reason: str) -> None:
        if end.about == "link":
            link_closed(end, reason)
            return
        session = self.current
        if session is not None and end in (session.control, session.upstream):
            stage = 0 if end is session.control else self.stage - 1
            session.inbox.fail(Peer(stage, "host", 1).error(reason, lost=True))

    def awaits_state(self, end: End) -> bool:
        return self.current is not None and self.current.rules.phase is WorkerPhase.SYNCING

    def admit(self, end: End, hello: Any) -> Reject | None:
        """As `WorkerServer._admit`."""
        current = self.current
        taken = current is not None and current.upstream is not None
        rejection = judge_hello(current.member if current else None, hello, link_taken=taken)
        if rejection is not None:
            return rejection
        newest = self.newest.get(hello.run_id, 0)
        if hello.purpose == "link":
            assert current is not None
            require(end.epoch == current.epoch, "%s took a link of %s in %s", self.name, end.epoch, current.epoch)
            end.send(T.WELCOME, Welcome("w", {}))
            current.upstream = end
            current.inbox.put("linked")
            return None
        if current is not None:
            require(hello.epoch > newest, "epoch %d ended epoch %d of %s", hello.epoch, newest, self.name)
            current.inbox.fail(PeerError(f"epoch {hello.epoch} began", stage=0, lost=True))
            return Reject("ending the epoch before", permanent=False)
        self.newest[hello.run_id] = max(newest, hello.epoch)
        self.current = WorkerSession(self, Membership(hello.run_id, hello.epoch, hello.stage), end)
        self.jobs.put(self.current)
        return None

    # --- the compute side

    def main(self) -> Wait:
        while True:
            session = yield Get(self.jobs, lambda _: True)
            fault = yield from self.work(session)
            for end in (session.control, session.upstream, session.downstream):
                if end is not None:
                    if fault is not None and end.welcomed:
                        end.send_last(T.ERROR, fault)
                    end.close()
            yield sleep(self.sim.rng.choice((0.0, 0.01, 0.5, 3.0)))
            self.current = None

    def work(self, session: WorkerSession) -> Wait:
        """As `WorkerServer._work`."""
        try:
            yield from self.work_on(session)
        except SessionOver:
            return None
        except PeerError as exc:
            try:
                yield Get(session.inbox, is_end, END_GRACE_S, despite_failure=True)
            except TimeoutError:
                return Fault(exc.reason, exc.stage, exc.host, exc.port, exc.step, exc.lost)
            return None
        except LocalProtocolError as exc:
            raise Violation(f"{self.name} broke a rule of its own: {exc}") from exc

    def next(self, session: WorkerSession, kinds: Any) -> Wait:
        event = yield Get(session.inbox, lambda e: isinstance(e, Frame) and isinstance(e.header, kinds))
        if isinstance(event.header, Reason):
            raise SessionOver
        return event

    def work_on(self, session: WorkerSession) -> Wait:
        """As `work.work_on`."""
        sim = self.sim
        yield sleep(sim.moment())
        session.control.send(T.WELCOME, Welcome("w", {}))
        sync = (yield from self.next(session, (Sync, Reason))).header
        state = None
        assembler = Assembler()
        while sync.num_tensors and state is None:
            frame = yield from self.next(session, (State, Reason))
            try:
                state = assembler.add(frame)
            except PeerError as exc:
                raise PeerError(exc.reason, stage=0) from None
        yield sleep(sim.moment())
        self.member.restore(sync.step, state)
        if self.stage < sim.num_stages - 1:
            peer = Peer(self.stage + 1, "host", 9000)
            run_id, epoch = session.epoch
            try:
                session.downstream = yield from open_link(self, session.inbox, peer, run_id, epoch)
            except PeerError as exc:
                if exc.stage != peer.stage:
                    raise
                raise peer.error(f"stage {self.stage} cannot link to it: {exc.reason}", lost=exc.lost) from exc
        if session.upstream is None:
            try:
                yield Get(session.inbox, lambda e: e == "linked", CONNECT_S)
            except TimeoutError:
                raise PeerError("was not linked", stage=self.stage - 1, lost=True) from None
        session.send(T.SYNCED, Synced(sync.epoch, "cpu", "float32", 1, 0))
        while True:
            order = (yield from self.next(session, (Step, Gather, Reason))).header
            if isinstance(order, Gather):
                self.give_state(session)
            elif order.evaluate:
                yield from self.evaluate(session, order)
            else:
                yield from self.one_step(session, order.step)

    def one_step(self, session: WorkerSession, step: int) -> Wait:
        """As `work._do_step`."""
        member, sim = self.member, self.sim
        came = unpack((yield Get(session.inbox, lambda e: is_frame(e, T.FORWARD, step))).payload)
        forward = member.forward(step, came)
        if session.downstream is not None:
            session.downstream.send(T.STEP, Step(step, 1))
            session.downstream.send(T.FORWARD, Tensors(step, 0, []), pack(forward))
            back = unpack((yield Get(session.inbox, lambda e: is_frame(e, T.BACKWARD, step))).payload)
        else:
            back = forward
        gradient = member.backward(step, came, back)
        session.upstream.send(T.BACKWARD, Tensors(step, 0, []), pack(gradient))
        session.send(T.READY, Ready(step, True, None, 0, 0, 0, 0), memoryview(struct.pack("<d", member.norm())))
        apply = (yield from self.next(session, (Apply, Reason))).header
        member.apply(apply.step, apply.clip_factor)
        sim.check_applied(member)
        if apply.save:
            self.give_state(session)

    def evaluate(self, session: WorkerSession, order: Step) -> Wait:
        """As `work._evaluate`, with one micro-batch."""
        step, loss = order.step, None
        came = unpack((yield Get(session.inbox, lambda e: is_frame(e, T.FORWARD, step))).payload)
        forward = self.member.evaluate(step, came)
        session.upstream.send(T.BACKWARD, Tensors(step, 0, []))
        if session.downstream is not None:
            session.downstream.send(T.STEP, Step(step, 1, evaluate=order.evaluate))
            session.downstream.send(T.FORWARD, Tensors(step, 0, []), pack(forward))
            yield Get(session.inbox, lambda e: is_frame(e, T.BACKWARD, step))
        else:
            loss = float(forward & 0xFFFFFFFF)
        session.send(T.READY, Ready(step, True, loss, 0, 0, 0, 0, evaluate=order.evaluate))

    def give_state(self, session: WorkerSession) -> None:
        for frame in state_frames(self.member.state()):
            session.send(frame.type, frame.header, frame.payload)

"""The coordinator of a simulated run: the real control code, the rest said again as generators."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulated_training import (
    Assembler,
    Member,
    clip_factor,
    evaluated,
    pack,
    require,
    state_frames,
    unpack,
)
from simulated_wire import (
    CONNECT_S,
    RETRY_S,
    WAIT_S,
    End,
    Get,
    Inbox,
    Process,
    Wait,
    connect,
    is_frame,
    link_closed,
    link_frame,
    open_link,
    sleep,
)

from hetero.control import (
    AllSynced,
    CoordinatorControl,
    Joined,
    Notify,
    Peer,
    Phase,
    Retry,
    Send,
    StatePiece,
    StepReady,
    StopAsked,
)
from hetero.errors import PeerError
from hetero.recovery import Recovery
from hetero.spec import RecoverySpec
from hetero.wire.frames import Frame
from hetero.wire.headers import (
    FrameType,
    Hello,
    Reject,
    Step,
    Tensors,
)

if TYPE_CHECKING:
    from simulation import Simulation

T = FrameType


class CoordinatorSession:
    """As `hetero.session.CoordinatorSession`."""

    def __init__(self, process: Coordinator, run_id: str, epoch: int, *, recovers: bool) -> None:
        self.process, self.sim, self.run_id, self.epoch = process, process.sim, run_id, epoch
        self.began_at = self.sim.now
        self.inbox = Inbox(process)
        self.peers = {stage: Peer(stage, "host", 9000 + stage) for stage in range(1, self.sim.num_stages)}
        self.control = CoordinatorControl(self.peers, epoch, recovers=recovers)
        self.links: dict[int, End | None] = {}
        self.downstream: End | None = None
        self.gathering: Gathering | None = None

    def join(self, limit_s: float) -> Wait:
        sim = self.sim
        give_up_at = self.began_at + limit_s
        for stage in self.peers:
            yield from self.dial(stage, give_up_at)
        while True:
            try:
                event = yield Get(self.inbox, _is_joined_or_retry, max(0.05, give_up_at - sim.now))
            except TimeoutError:
                raise self.away(min(set(self.peers) - self.control._welcomes.keys())) from None
            if isinstance(event, Joined):
                return
            if sim.now + RETRY_S > give_up_at:
                raise self.away(event.stage)
            yield sleep(RETRY_S)
            yield from self.dial(event.stage, give_up_at)

    def away(self, stage: int) -> PeerError:
        self.process.waited_s = self.sim.now - self.began_at
        return self.peers[stage].error("gave no answer", lost=True)

    def dial(self, stage: int, give_up_at: float) -> Wait:
        end = yield from connect(self.process, stage, (self.run_id, self.epoch), give_up_at)
        if end is None:
            raise self.away(stage)
        end.session, end.about = self, stage
        self.links[stage] = end
        end.send(T.HELLO, Hello("control", self.run_id, self.epoch, stage, "c", {}))

    def on_frame(self, end: End, frame: Frame) -> None:
        stage = end.about
        if end is not self.links.get(stage):
            return
        require(end.epoch == (self.run_id, self.epoch), "a frame of session %s came into %d", end.epoch, self.epoch)
        if isinstance(frame.header, Reject):
            self.links[stage] = None
            end.close()
        self.perform(self.control.received(stage, frame))

    def on_closed(self, end: End, reason: str) -> None:
        if end is self.links.get(end.about):
            self.perform(self.control.closed(end.about, reason, lost=True))

    def perform(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.tell(action)
            elif isinstance(action, Notify):
                self.notify(action.event)
            elif isinstance(action, Retry):
                self.inbox.put(action)
            else:
                self.inbox.fail(action.error)

    def tell(self, action: Send) -> None:
        link = self.links.get(action.stage)
        if link is None or (not link.welcomed and action.type in (T.ABORT, T.STOP)):
            return
        (link.send_last if action.type is T.ABORT else link.send)(action.type, action.header)

    def notify(self, event: Any) -> None:
        if isinstance(event, StopAsked):
            self.process.stopping = True
        elif isinstance(event, StatePiece):
            assert self.gathering is not None
            try:
                if self.gathering.piece(event.stage, Frame(T.STATE, event.header, event.payload)):
                    self.control.state_complete(event.stage)
            except PeerError as exc:
                self.inbox.fail(self.peers[event.stage].error(exc.reason))
        else:
            self.inbox.put(event)

    def raise_failure(self) -> None:
        if self.inbox.failure is not None:
            raise self.inbox.failure

    def end(self, *, stop: bool, again: bool = False) -> None:
        self.perform(self.control.end(T.STOP if stop else T.ABORT, "over", again=again))
        for link in (*self.links.values(), self.downstream):
            if link is not None:
                link.close()


class Gathering:
    """As `hetero.gathering.Gathering`."""

    def __init__(self, stages: int, step: int, done: Callable[[int, list[tuple[int, int]]], None]) -> None:
        self.step, self._done, self._stages = step, done, stages
        self._assemblers: dict[int, Assembler] = {}
        self._parts: dict[int, tuple[int, int]] = {}

    def piece(self, stage: int, frame: Frame) -> bool:
        state = self._assemblers.setdefault(stage, Assembler()).add(frame)
        if state is None:
            return False
        self.part(stage, state)
        return True

    def part(self, stage: int, state: tuple[int, int]) -> None:
        self._parts[stage] = state
        if len(self._parts) == self._stages:
            self._done(self.step, [self._parts[index] for index in sorted(self._parts)])


class Coordinator(Process):
    """As `hetero.coordinate.coordinate` and `hetero.run.Run`, for one process."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__(sim, "the coordinator", 0)
        self.run_id = f"run-{next(sim.run_numbers)}"
        self.member = Member(0)
        self.session: CoordinatorSession | None = None
        self.stopping = self.joined = self.writing = False
        self.last_saved: int | None = None
        self.start_step = 0
        self.waited_s = 0.0

    def main(self) -> Wait:
        sim, store = self.sim, self.sim.store
        self.start_step = step = store.newest() or 0
        self.check_lost(step)
        store.records = [record for record in store.records if record <= step]
        store.evaluations = [record for record in store.evaluations if record <= step]
        sim.say("the coordinator starts %s after step %d", self.run_id, step)
        recovery = Recovery(RecoverySpec(wait_s=WAIT_S))
        furthest, fruitless = -1, 0
        for epoch in itertools.count(1):
            try:
                yield from self.one_session(epoch, step, recovery)
                return
            except PeerError as exc:
                sim.say("session %d is over: %s (lost: %s)", epoch, exc, exc.lost)
                faulty = (self.run_id, epoch) in sim.replayed
                require(exc.lost or faulty, "a lost machine was taken for a breach of the rules: %s", exc)
                reached = self.last_step()
                if not self.joined:
                    limit_s = CONNECT_S if epoch == 1 else WAIT_S
                    require(faulty or self.waited_s >= limit_s - 1, "a machine was not waited for: %s", exc)
                    break
                fruitless = 0 if reached > furthest else fruitless + 1
                furthest = max(furthest, reached)
                if not recovery.goes_on(exc, reached):
                    require(faulty or fruitless >= 5, "the run gave up after %d sessions without a step", fruitless)
                    break
                require(fruitless < 5, "the run goes on after %d sessions without a step", fruitless)
                while self.writing:
                    yield sleep(0.05)
                step = self.go_back()
                sim.say("everyone goes back from step %d to step %d", reached, step)
        sim.say("the coordinator gives up")
        sim.faults["gave up"] += 1
        sim.after(5.0, None, sim.start_coordinator)

    def go_back(self) -> int:
        store = self.sim.store
        newest = store.newest()
        step = self.start_step if newest is None else newest
        self.check_lost(step)
        store.records = [record for record in store.records if record <= step]
        store.evaluations = [record for record in store.evaluations if record <= step]
        return step

    def check_lost(self, step: int) -> None:
        """No more than an interval of finished steps is lost: the step after it waits for its checkpoint."""
        sim = self.sim
        reached = sim.store.records[-1] if sim.store.records else 0
        lost = reached - step
        sim.max_lost = max(sim.max_lost, lost)
        require(lost <= sim.every_steps, "%d steps are lost, checkpoints come every %d", lost, sim.every_steps)

    def last_step(self) -> int:
        records = self.sim.store.records
        return records[-1] if records else self.start_step

    def one_session(self, epoch: int, step: int, recovery: Recovery) -> Wait:
        sim = self.sim
        sim.sessions += 1
        session = self.session = CoordinatorSession(self, self.run_id, epoch, recovers=recovery.is_on)
        try:
            self.joined, self.waited_s = False, 0.0
            yield from session.join(CONNECT_S if epoch == 1 else WAIT_S)
            self.joined = True
            yield from self.assemble(session, step)
            yield from self.train(session, step)
        except PeerError as exc:
            session.end(stop=False, again=recovery.is_on and exc.lost)
            yield sleep(sim.rng.choice((0.001, 0.1, 3.0)))
            raise
        session.end(stop=True)

    def assemble(self, session: CoordinatorSession, step: int) -> Wait:
        """As `Run._assemble`."""
        sim = self.sim
        states = sim.store.steps[step] if step else None
        others = range(1, sim.num_stages) if states else ()
        session.raise_failure()
        session.perform(session.control.sync(step, dict.fromkeys(others, 2)))
        for stage in others:
            link = session.links[stage]
            for frame in state_frames(states[stage]):
                link.send(frame.type, frame.header, frame.payload)
        self.member.restore(step, states[0] if states else None)
        session.downstream = yield from open_link(self, session.inbox, session.peers[1], session.run_id, session.epoch)
        yield Get(session.inbox, _is_all_synced)
        for stage, link in session.links.items():
            worker: Any = link.other.owner if link is not None else None
            if session.control.phase is Phase.RUN and worker.alive:
                found = (worker.member.at, worker.member.state())
                wanted = (step, sim.reference[step][stage])
                require(found == wanted, "%s is not at step %d after SYNC: %s", worker.name, step, found)
        require(
            session.control.phase is not Phase.RUN or self.member.state() == sim.reference[step][0],
            "stage 0 has not the state of step %d",
            step,
        )

    def train(self, session: CoordinatorSession, step: int) -> Wait:
        sim, store = self.sim, self.sim.store
        yield from self.evaluate(session, step)
        for number in range(step + 1, sim.num_steps + 1):
            if self.stopping:
                break
            yield from self.one_step(session, number)
            require(
                (store.records[-1] if store.records else 0) == number - 1,
                "step %d is recorded after %s",
                number,
                store.records,
            )
            store.records.append(number)
            yield from self.evaluate(session, number)
        states = yield from self.save_last(session)
        last = self.last_step()
        require(states == sim.reference[last], "the state after step %d is not that of an uninterrupted run", last)
        if last == sim.num_steps:
            sim.say("the run is over")
            store.adapter, sim.over = states, True
        else:
            sim.say("stopped after step %d", last)
            sim.after(3.0, None, sim.start_coordinator)

    def evaluate(self, session: CoordinatorSession, step: int) -> Wait:
        """As `evaluation.evaluate`, in two passes of one micro-batch."""
        sim = self.sim
        if step in sim.store.evaluations or (step % sim.eval_every and step != sim.num_steps):
            return
        for number in (1, 2):
            if self.stopping:
                return
            session.raise_failure()
            session.control.begin_evaluation(step, number)
            down = session.downstream
            down.send(T.STEP, Step(step, 1, evaluate=number))
            down.send(T.FORWARD, Tensors(step, 0, []), pack(self.member.evaluate(step, 0)))
            yield Get(session.inbox, lambda e: is_frame(e, T.BACKWARD, step))
            everyone = yield Get(session.inbox, _is_step_ready)
            loss = everyone.ready[max(everyone.ready)].loss
            require(loss == evaluated(sim.reference[step], step), "the evaluation after step %d is another", step)
        sim.store.evaluations.append(step)

    def one_step(self, session: CoordinatorSession, step: int) -> Wait:
        """As `loop.run_step`."""
        sim, member, control = self.sim, self.member, session.control
        session.raise_failure()
        control.begin_step(step)
        forward = member.forward(step, 0)
        down = session.downstream
        down.send(T.STEP, Step(step, 1))
        down.send(T.FORWARD, Tensors(step, 0, []), pack(forward))
        came = yield Get(session.inbox, lambda e: is_frame(e, T.BACKWARD, step))
        member.backward(step, 0, unpack(came.payload))
        everyone = yield Get(session.inbox, _is_step_ready)
        norms = [member.norm(), *(struct.unpack("<d", everyone.norms[s])[0] for s in sorted(everyone.norms))]
        factor = clip_factor(norms)
        session.raise_failure()
        gathering = None
        while step - max(self.start_step, self.last_saved or 0) > sim.every_steps and (
            self.writing or control.is_saving()
        ):
            yield from _pause(session.inbox)
        session.raise_failure()
        if step % sim.every_steps == 0 and not (self.writing or control.is_saving()):
            gathering = session.gathering = Gathering(sim.num_stages, step, self.write)
        session.perform(control.apply(factor, save=gathering is not None))
        yield sleep(sim.moment())
        member.apply(step, factor)
        sim.check_applied(member)
        if gathering is not None:
            gathering.part(0, member.state())
        yield sleep(sim.moment())

    def write(self, step: int, states: list[tuple[int, int]]) -> None:
        """On a thread of its own."""
        self.writing = True
        self.sim.after(self.sim.rng.choice((0.001, 0.05, 0.5)), self, self.written, step, states)

    def written(self, step: int, states: list[tuple[int, int]]) -> None:
        require(states == self.sim.reference[step], "a checkpoint of step %d holds something else", step)
        self.sim.store.commit(step, states)
        self.sim.say("checkpoint of step %d", step)
        self.writing, self.last_saved = False, step

    def save_last(self, session: CoordinatorSession) -> Wait:
        """As `Saver.save_last`."""
        sim = self.sim
        while session.control.is_saving():
            yield from _pause(session.inbox)
        found: list[list[tuple[int, int]]] = []
        session.raise_failure()
        last = self.last_step()
        gathering = session.gathering = Gathering(sim.num_stages, last, lambda _, states: found.append(states))
        session.perform(session.control.gather(last))
        gathering.part(0, self.member.state())
        while not found:
            yield from _pause(session.inbox)
        while self.writing:
            yield sleep(0.05)
        if self.last_saved != last:
            yield sleep(0.01)
            self.written(last, found[0])
        return found[0]

    def on_frame(self, end: End, frame: Frame) -> None:
        if end.about == "link":
            link_frame(end, frame)
        else:
            end.session.on_frame(end, frame)

    def on_closed(self, end: End, reason: str) -> None:
        if end.about == "link":
            link_closed(end, reason)
        else:
            end.session.on_closed(end, reason)

    def awaits_state(self, end: End) -> bool:
        return end.about != "link" and end.about in end.session.control._saving


def _pause(inbox: Inbox) -> Wait:
    if inbox.failure is not None:
        raise inbox.failure
    yield sleep(0.05)


def _is_joined_or_retry(event: Any) -> bool:
    return isinstance(event, Joined | Retry)


def _is_all_synced(event: Any) -> bool:
    return isinstance(event, AllSynced)


def _is_step_ready(event: Any) -> bool:
    return isinstance(event, StepReady)

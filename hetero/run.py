"""A run on its way: session after session, until all steps are done or somebody wants it to end.

session: join, everybody's state, steps, checkpoints beside them --> last checkpoint and adapter --> the run is over
                             a lost machine --> back to the newest checkpoint --> the next session, a higher epoch
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from hetero import adapters, best, registry
from hetero.adapter_files import PART_FOLDER, check_complete, part_of_stage, save_adapter, shapes_digest
from hetero.answers import answer_prompts
from hetero.best import Best
from hetero.best_adapter import write_best
from hetero.console import ANSWERING
from hetero.errors import NumericError, PeerError, printable
from hetero.evaluation import Evaluation
from hetero.failpoints import hit
from hetero.fingerprint import fingerprint
from hetero.inbox import Inbox
from hetero.launch import LocalWorkers
from hetero.loggers import RunLogger
from hetero.loop import Training
from hetero.machines import remember
from hetero.member import Member
from hetero.prepare import Prepared
from hetero.recovery import Recovery
from hetero.resolve import ResolvedRun
from hetero.resume import StartingPoint
from hetero.run_result import RunResult
from hetero.saving import Saver
from hetero.session import CoordinatorSession
from hetero.spec import RunSpec
from hetero.stopping import Stop, Terminated, signals_ask
from hetero.timeline import Timeline
from hetero.tracing import Tracing
from hetero.training_state import adapter_of, as_state, part_of
from hetero.transport.identity import Identity
from hetero.watchdog import Progress, Watchdog
from hetero.wire.headers import Synced
from hetero.work import make_transport_of

log = logging.getLogger(__name__)


@dataclass
class Run:
    """A run on its way: what outlives the sessions that faults end.

    Attributes:
        resolved: the checked configuration.
        prepared: data, weights and adapter.
        spec: of the run; another one after a machine has left it.
        run_id: the run's name on the wire.
        model: fingerprint of this machine's base model.
        start: what it began with.
        saver: of checkpoints.
        loggers: get each step.
        launched: the workers that this process started, if it did.
        identity: of this process in its group.
        result: what it has given so far.
        stop: whether it is to end.
        doing: told in a few words what it is busy with, for whoever looks on.
    """

    resolved: ResolvedRun
    prepared: Prepared
    spec: RunSpec
    run_id: str
    model: dict[str, str]
    start: StartingPoint
    saver: Saver
    loggers: list[RunLogger]
    launched: LocalWorkers | None
    identity: Identity
    result: RunResult
    stop: Stop = field(default_factory=Stop)
    doing: Callable[[str], None] = lambda words: None
    _instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    _member: Member | None = None
    _joined: bool = False
    _progress: Progress = field(init=False)
    _tracing: Tracing = field(init=False)

    def __post_init__(self) -> None:
        self._progress = Progress(step_s=self.spec.stuck_s)
        self._keep_best()
        self._tracing = Tracing(self.resolved.config.loop.trace_steps)

    def through_all_sessions(self) -> None:
        """Runs session after session until the run is over.

        Raises:
            PeerError: a worker was lost and did not come back, or failed in a way that another session cannot mend;
                it says how to go on, where there is something to go on from.
        """
        try:
            self._through_all_sessions()
        except PeerError as exc:
            self.saver.settle()
            saved = self.saver.last_saved
            if saved is None and self.start.source is not None:
                saved = self.start.step
            if saved is None:
                raise
            again = f"the same command with checkpoint.resume=latest goes on after step {saved}"
            raise exc.adding(again) from exc
        finally:
            self._tracing.write(self.result.adapter_dir.parent, self.spec)

    def _through_all_sessions(self) -> None:
        recovery = Recovery(self.resolved.config.recovery)
        step, state = self.start.step, self.start.state
        for epoch in itertools.count(1):
            try:
                self._session(epoch, step, state, recovery)
                return
            except PeerError as exc:
                if self.stop.reason is not None:
                    log.warning("%s; the run was to end, so nobody is waited for", exc)
                    self._end_as_usual()
                if not self._joined and not (exc.lost and self._has_ended(exc.stage)):
                    if epoch == 1:  # a machine that was never there: nothing is lost yet
                        raise
                    self._leave_out(exc)
                elif not recovery.goes_on(exc, self._last_step()):
                    raise recovery.last_words(exc) from exc
                reached = self._last_step()
                step, state = self._go_back()
                log.warning(
                    "%s; everyone goes back from step %d to step %d and waits up to %g s",
                    exc,
                    reached,
                    step,
                    recovery.wait_s,
                )
                if self.launched is not None:
                    self.launched.replace_lost(exc.stage)

    def _session(self, epoch: int, step: int, state: dict[str, torch.Tensor], recovery: Recovery) -> None:
        """One session: everyone continues after `step` with this state, to the end of the run."""
        config = self.resolved.config
        session = CoordinatorSession(
            self.spec,
            run_id=self.run_id,
            epoch=epoch,
            inbox=Inbox(),
            transport=make_transport_of(self.spec, config.allow_targets, self.identity),
            instance=self._instance,
            on_stop_asked=self.stop.ask,
            recovers=recovery.is_on,
            check_worker=self.launched.check if self.launched is not None else lambda stage: None,
        )
        with (
            _ending(session, recovery),
            Watchdog(self._progress, functools.partial(_tell_stuck, session), _end_process),
        ):
            self._joined = False
            self.doing(_waiting_for(self.spec, epoch))
            session.join(self.model, within_s=None if epoch == 1 else recovery.wait_s)
            self._joined = True
            hit("coordinator.joined")
            self.doing("loading")
            member = self._assemble(session, step, state)
            hit("coordinator.synced")
            if config.hardware.launch == "none":
                remember(self.spec.workers)
            with signals_ask(self._ask_stop):
                self._train(session, member, step)

    def _assemble(self, session: CoordinatorSession, step: int, state: dict[str, torch.Tensor]) -> Member:
        """Gives every stage its state, builds stage 0 while workers build theirs, and links up."""
        spec, config = self.spec, self.resolved.config
        session.sync(step, {index: part_of(state, own) for index, own in self._shapes().items() if index and state})
        if self._member is None:
            self._member = Member(
                spec,
                0,
                model_path=self.prepared.model_path,
                device_name=config.hardware.coordinator.device,
                allow_targets=config.allow_targets,
                progress=self._progress,
                check=functools.partial(session.inbox.take, lambda _: False),  # raises once the session has failed
            )
            # By now all of it is here; what was here before stays as it was compared with the workers'.
            self.model = fingerprint(self.prepared.model_path) | self.model
        member = self._member
        member.restore(state)
        member.connect(session.inbox, None, session.connect_downstream())
        synced = session.wait_synced().synced
        _check_adapters(session, self.prepared, synced)
        stages = [(str(member.stage.device), str(spec.stages[0].dtype))]
        stages += [(printable(synced[i].device), printable(synced[i].dtype)) for i in sorted(synced)]
        self.result.stages = stages
        for plan, (device_name, dtype) in zip(spec.stages, stages, strict=True):
            numbers = plan.numbers(dtype)
            log.info("stage %s: layers [%d, %d) on %s in %s", plan.id, plan.start, plan.end, device_name, numbers)
        return member

    def _train(self, session: CoordinatorSession, member: Member, step: int) -> None:
        """The steps that are left, the last checkpoint, the adapter, and the trained model's answers to prompts."""
        config, spec = self.resolved.config, self.spec
        if config.task == "generate":
            self._answer(session, member)
            self.result.stopped = self.stop.reason
            return

        def on_step(record: dict[str, Any]) -> None:
            self.result.records.append(record)
            for logger in self.loggers:
                logger.step(record)
            hit("coordinator.step_logged")
            if (state := self.saver.own_part(member)) is not None:
                self._keep_own_part(record["step"], state)

        def on_timeline(began_s: float, step: int, timeline: Callable[[], Timeline]) -> None:
            self.result.last_timeline = timeline
            self._tracing.add(began_s, step, timeline)

        self.doing("training" if config.task == "train" else "evaluating")
        train = registry.build("loop", spec.loop.target, config.allow_targets)
        train(
            Training(
                spec=spec,
                member=member,
                session=session,
                examples=self.prepared.data_set.examples,
                data=config.data,
                pad_id=self.prepared.pad_id,
                on_step=on_step,
                saver=self.saver,
                first_step=step + 1,
                stop=self.stop,
                shapes=self._shapes(),
                evaluation=self._evaluation(),
                on_timeline=on_timeline,
            )
        )
        if self.result.task == "evaluate":
            self._end_of_evaluating()
            return
        self.doing("saving")
        last = self._last_step()
        adapter = adapter_of(self.saver.save_last(session, member, last, self._shapes()))
        check_complete(self.prepared.adapter, adapter)
        save_adapter(self.result.adapter_dir, self.prepared.adapter, adapter)
        own = {key: adapter[key] for key in member.stage.trained}
        self._keep_own_part(last, as_state(own))
        if config.checkpoint.keep_best:
            self.result.best = write_best(
                self.result.best_dir, self._ranked(), self.saver.store, self.prepared.adapter, (last, adapter)
            )
        hit("coordinator.adapter_written")
        if last < spec.total_steps:
            self.result.stopped = self.stop.reason
            if self.stop.reason is not None and self.saver.last_saved != last:
                self._end_as_usual()
            return
        if self.prepared.prompts:
            self._answer(session, member)
        if self._is_left_out(last):
            self.result.stopped = self.stop.reason

    def _answer(self, session: CoordinatorSession, member: Member) -> None:
        """What the model as it is now answers to the run's prompts."""
        self.doing(ANSWERING)
        answer_prompts(self.resolved, self.prepared, self.spec, session, member, self.stop, self.result)

    def _is_left_out(self, last: int) -> bool:
        """Whether the end that was asked for came between the last step and all that follows it."""
        evaluation = self._evaluation()
        answered = [sample for sample in self.result.samples or [] if sample.finish != "stopped"]
        missing = evaluation is not None and evaluation.is_missing(last, last)
        return missing or len(answered) < len(self.prepared.prompts)

    def _evaluation(self) -> Evaluation | None:
        if not self.prepared.evaluated:
            return None

        def on_record(record: dict[str, Any]) -> None:
            self.result.evaluations.append(record)
            for logger in self.loggers:
                logger.evaluation(record)
            self._keep_best()

        known = {record["step"] for record in self.result.evaluations}
        return Evaluation(
            examples=self.prepared.evaluated,
            loop=self.spec.loop,
            data=self.resolved.config.data,
            pad_id=self.prepared.pad_id,
            on_record=on_record,
            is_known=known.__contains__,
            doing=self.doing if self.result.task == "train" else lambda _: None,  # otherwise it does nothing else
        )

    def _end_of_evaluating(self) -> None:
        """What only evaluates has nothing to save."""
        if not self.result.evaluations:
            self.result.stopped = self.stop.reason
        elif self.result.evaluations[-1]["eval_loss"] is None:
            raise NumericError("the evaluation's loss is not finite; model.dtype=float32 may help")

    def _keep_best(self) -> None:
        if self.resolved.config.checkpoint.keep_best:
            self.saver.keep_best(next(iter(self._ranked()), None))

    def _ranked(self) -> list[Best]:
        return best.ranked(self.result.evaluations, self.start.best)

    def _keep_own_part(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """As every worker does: the parts of all machines make an adapter where the checkpoints are lost."""
        part = part_of_stage(self.spec, 0, self.run_id, step, self.model)
        folder = self.result.adapter_dir.with_name(PART_FOLDER)
        save_adapter(folder, self.prepared.adapter, adapter_of(state), part)

    def _ask_stop(self, signal_name: str) -> bool:
        """A signal came: without checkpoints there is nothing to wait for."""
        if self.saver.store is None:
            return False
        if self._last_step() < self.spec.total_steps:
            log.warning("%s: the run ends after this step, with a checkpoint (again: at once)", signal_name)
        else:
            log.warning("%s: all steps are done, and the run ends without what follows (again: at once)", signal_name)
        self.stop.ask(signal_name)
        return True

    def _end_as_usual(self) -> NoReturn:
        """The run was to stop and could not be saved, so it ends as a signal ends a program."""
        raise Terminated if str(self.stop.reason).startswith(("SIGTERM", "SIGHUP")) else KeyboardInterrupt

    def _go_back(self) -> tuple[int, dict[str, torch.Tensor]]:
        """The step and the state that everyone continues from after a fault; what came later is forgotten."""
        self.saver.settle()
        snapshot = None
        if self.saver.store is not None:
            snapshot, skipped = self.saver.store.newest()
            for line in skipped:
                log.warning("checkpoint skipped: %s", line)
        step, state = (self.start.step, self.start.state) if snapshot is None else (snapshot.step, snapshot.tensors)
        self.result.records = [record for record in self.result.records if record["step"] <= step]
        self.result.evaluations = [record for record in self.result.evaluations if record["step"] <= step]
        self._keep_best()
        self._tracing.rewind(step)
        for logger in self.loggers:
            logger.rewind(step)
        return step, state

    def _leave_out(self, error: PeerError) -> None:
        """A machine stays away: the others take its layers, evenly, where the configuration wants that.

        Raises:
            PeerError: `error`, where it does not, or the machine is not to blame.
        """
        config = self.resolved.config
        if not (config.recovery.replan and error.lost and error.stage and self.launched is None):
            raise error
        gone = self.spec.workers[error.stage - 1]
        left = [worker for worker in self.spec.workers if worker.id != gone.id]
        self.resolved = self.resolved.evenly_over(left)
        self.spec = self.resolved.spec(total_steps=self.spec.total_steps)
        self.result.spec, self._member = self.spec, None
        log.warning(
            "%s stays away, and the others take its layers: %s",
            gone.id,
            ", ".join(f"{stage.id} [{stage.start}, {stage.end})" for stage in self.spec.stages),
        )

    def _has_ended(self, stage: int | None) -> bool:
        """Whether a stage's worker is a process of this run that is no more."""
        return self.launched is not None and stage is not None and stage > 0 and self.launched.has_ended(stage)

    def _last_step(self) -> int:
        records = self.result.records
        return int(records[-1]["step"]) if records else self.start.step

    def _shapes(self) -> dict[int, dict[str, list[int]]]:
        """Stage -> global key -> shape of what trains there."""
        stages = self.spec.stages
        return {index: adapters.part_of(self.prepared.adapter.shapes, stages, index) for index in range(len(stages))}


def _waiting_for(spec: RunSpec, epoch: int) -> str:
    if not spec.workers:
        return "loading"
    return "joining the workers" if epoch == 1 else "waiting for a lost machine"


def _tell_stuck(session: CoordinatorSession, reason: str) -> None:
    """The coordinator's own compute thread does not come back: the workers are let go."""
    session.end(stop=False, reason=f"the coordinator {reason}")


def _end_process() -> None:
    log.error("ending this run, since its compute thread cannot be ended; checkpoint.resume=latest goes on with it")
    os._exit(1)


def _check_adapters(session: CoordinatorSession, prepared: Prepared, synced: dict[int, Synced]) -> None:
    """Every worker trains exactly its part of the adapter, by names and shapes."""
    for index, answer in synced.items():
        mine = shapes_digest(adapters.part_of(prepared.adapter.shapes, session.spec.stages, index))
        if answer.adapter != mine:
            raise session.peer(index).error(
                f"has another adapter: its tensors' names and shapes have the digest {answer.adapter} there and {mine} "
                "here; the versions of peft or transformers differ, see the table of versions above"
            )


@contextlib.contextmanager
def _ending(session: CoordinatorSession, recovery: Recovery) -> Iterator[None]:
    """Tells the workers how the session ended, whichever way it did."""
    try:
        yield
    except BaseException as exc:
        again = recovery.is_on and isinstance(exc, PeerError) and exc.lost
        session.end(stop=False, reason=str(exc) or type(exc).__name__, again=again)
        raise
    session.end(stop=True, reason="finished")

"""A run from the coordinator's side, start to end: workers, data, session, loop, adapter, summary."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from hetero import adapters, registry
from hetero.adapter_files import check_complete, save_adapter
from hetero.agreement import shapes_digest
from hetero.awake import kept_awake
from hetero.checkpoint import CheckpointStore
from hetero.console import StepProgress
from hetero.errors import ConfigError, PeerError
from hetero.failpoints import hit
from hetero.fingerprint import fingerprint
from hetero.inbox import Inbox
from hetero.launch import LocalWorkers
from hetero.loggers import RunLogger
from hetero.loop import Training
from hetero.machines import remember
from hetero.member import Member
from hetero.prepare import Prepared, check_device, prepare, total_steps
from hetero.recovery import Recovery
from hetero.resolve import ResolvedRun
from hetero.resume import (
    FOLDER,
    StartingPoint,
    about_of,
    check_settings,
    find_checkpoints,
    read_checkpoint,
    records_before,
    settings_of,
)
from hetero.roles import is_here, own_names
from hetero.saving import Saver
from hetero.secret import new_secret, secret_of_this_machine
from hetero.session import CoordinatorSession
from hetero.spec import RunSpec, WorkerEntry
from hetero.stopping import Stop, Terminated, signals_ask
from hetero.training_state import adapter_of, as_state, part_of
from hetero.transport.identity import Identity, identity_of
from hetero.versions import versions
from hetero.watchdog import Progress, Watchdog
from hetero.wire.headers import Synced
from hetero.work import make_transport_of

log = logging.getLogger(__name__)


@dataclass
class RunResult:
    """What a run gave.

    Attributes:
        spec: of the run.
        records: one for each step, as in metrics.jsonl.
        adapter_dir: the adapter of the whole model.
        stages: device and dtype of each stage.
        stopped: why it ended before its last step; None where it did not.
    """

    spec: RunSpec
    adapter_dir: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    stages: list[tuple[str, str]] = field(default_factory=list)
    stopped: str | None = None


def coordinate(resolved: ResolvedRun, run_dir: Path) -> RunResult:
    """Runs what a configuration asks for, and leaves no process, port or half-written file behind.

    Args:
        resolved: the checked configuration.
        run_dir: the run's own folder; must not hold a run yet.

    Raises:
        ConfigError: something cannot work, found before any worker is contacted where it can be.
        PeerError: a worker cannot be reached or failed, and did not come back.
        NumericError: loss or gradients are not finite.
    """
    if (run_dir / "run.json").exists():
        raise ConfigError(f"the run's folder must be a new one, {run_dir} holds a run already (hydra.run.dir)")
    run_dir.mkdir(parents=True, exist_ok=True)
    check_device(resolved)
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_awake())
        loggers = _loggers(resolved, run_dir)
        secret = _secret(resolved)
        source = _source_of_resume(resolved)
        launched = _launch(resolved, run_dir, secret, stack)
        prepared = prepare(resolved)
        num_steps = total_steps(resolved, len(prepared.data_set.examples))
        workers = launched.addresses() if launched is not None else None
        spec = resolved.spec(total_steps=num_steps, workers=workers)
        run_id = uuid.uuid4().hex
        settings = settings_of(spec, prepared.data_set.digest(), resolved.config.data.shuffle)
        start = _starting_point(resolved, source, settings, spec, prepared)
        store = _store(resolved, run_dir, source)
        saver = Saver(store, resolved.config.checkpoint, about_of(spec, run_id, settings, versions()))
        stack.callback(saver.close)
        about = _write_run_json(run_dir, run_id, spec, resolved, start)
        with _logging_to(loggers, about, start.records):
            run = Run(
                resolved=resolved,
                prepared=prepared,
                spec=spec,
                run_id=run_id,
                start=start,
                saver=saver,
                loggers=loggers,
                launched=launched,
                identity=identity_of(secret),
                result=RunResult(spec, run_dir / "adapter", records=list(start.records)),
            )
            run.through_all_sessions()
    return run.result


@dataclass
class Run:
    """A run on its way: what outlives the sessions that faults end.

    Attributes:
        resolved: the checked configuration.
        prepared: data, weights and adapter.
        spec: of the run; another one after a machine has left it.
        run_id: the run's name on the wire.
        start: what it began with.
        saver: of checkpoints.
        loggers: get each step.
        launched: the workers that this process started, if it did.
        identity: of this process in its group.
        result: what it has given so far.
    """

    resolved: ResolvedRun
    prepared: Prepared
    spec: RunSpec
    run_id: str
    start: StartingPoint
    saver: Saver
    loggers: list[RunLogger]
    launched: LocalWorkers | None
    identity: Identity
    result: RunResult
    stop: Stop = field(default_factory=Stop)
    _instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    _member: Member | None = None
    _progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        self._progress = Progress(step_s=self.spec.stuck_s)

    def through_all_sessions(self) -> None:
        """Runs session after session until the run is over.

        Raises:
            PeerError: a worker was lost and did not come back, or failed in a way that another session cannot mend.
        """
        recovery = Recovery(self.resolved.config.recovery)
        step, state = self.start.step, self.start.state
        for epoch in itertools.count(1):
            try:
                self._session(epoch, step, state, recovery)
                return
            except PeerError as exc:
                if not recovery.goes_on(exc, self._last_step()):
                    raise
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
        )
        with (
            _ending(session, recovery),
            Watchdog(self._progress, functools.partial(_tell_stuck, session), _end_process),
        ):
            self._join(session, None if epoch == 1 else recovery.wait_s)
            hit("coordinator.joined")
            member = self._assemble(session, step, state)
            hit("coordinator.synced")
            if config.hardware.launch == "none":
                remember(self.spec.workers)
            with signals_ask(self._ask_stop):
                self._train(session, member, step)

    def _join(self, session: CoordinatorSession, within_s: float | None) -> None:
        path = self.prepared.model_path
        session.join(fingerprint(path) if isinstance(path, Path) else {}, within_s=within_s)

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
            )
        member = self._member
        member.restore(state)
        member.connect(session.inbox, None, session.connect_downstream())
        synced = session.wait_synced().synced
        _check_adapters(session, self.prepared, synced)
        stages = [(str(member.stage.device), str(spec.stages[0].dtype))]
        stages += [(synced[i].device, synced[i].dtype) for i in sorted(synced)]
        self.result.stages = stages
        for plan, (device_name, dtype) in zip(spec.stages, stages, strict=True):
            log.info("stage %s: layers [%d, %d) on %s in %s", plan.id, plan.start, plan.end, device_name, dtype)
        return member

    def _train(self, session: CoordinatorSession, member: Member, step: int) -> None:
        """The steps that are left, the last checkpoint and the adapter."""
        config, spec = self.resolved.config, self.spec
        with StepProgress(spec.total_steps) as progress:

            def on_step(record: dict[str, Any]) -> None:
                self.result.records.append(record)
                for logger in self.loggers:
                    logger.step(record)
                progress.step(record)
                hit("coordinator.step_logged")

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
                )
            )
        last = self._last_step()
        adapter = adapter_of(self.saver.save_last(session, member, last, self._shapes()))
        check_complete(self.prepared.adapter, adapter)
        save_adapter(self.result.adapter_dir, self.prepared.adapter, adapter)
        hit("coordinator.adapter_written")
        if last < spec.total_steps:
            self.result.stopped = self.stop.reason or "the loop ended"
            if self.saver.last_saved != last:
                self._end_as_usual()

    def _ask_stop(self, signal_name: str) -> bool:
        """A signal came: without checkpoints there is nothing to wait for."""
        if self.saver.store is None:
            return False
        log.warning("%s: the run ends after this step, with a checkpoint (again: at once)", signal_name)
        self.stop.ask(signal_name)
        return True

    def _end_as_usual(self) -> None:
        """The run was to stop and could not be saved, so it ends as a signal ends a program."""
        raise Terminated if str(self.stop.reason).startswith("SIGTERM") else KeyboardInterrupt

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
        for logger in self.loggers:
            logger.rewind(step)
        return step, state

    def _last_step(self) -> int:
        records = self.result.records
        return int(records[-1]["step"]) if records else self.start.step

    def _shapes(self) -> dict[int, dict[str, list[int]]]:
        """Stage -> global key -> shape of what trains there."""
        stages = self.spec.stages
        return {index: adapters.part_of(self.prepared.adapter.shapes, stages, index) for index in range(len(stages))}


def _tell_stuck(session: CoordinatorSession, reason: str) -> None:
    """The coordinator's own compute thread does not come back: the workers are let go."""
    session.end(stop=False, reason=f"the coordinator {reason}")


def _end_process() -> None:
    log.error("ending this run, since its compute thread cannot be ended; checkpoint.resume=latest goes on with it")
    os._exit(1)


def _source_of_resume(resolved: ResolvedRun) -> Path | None:
    """The checkpoints that the run is to go on from, found before anything is started."""
    wanted = resolved.config.checkpoint
    if wanted.resume is None:
        return None
    return find_checkpoints(wanted.resume, wanted.dir, Path(resolved.config.outputs))


def _starting_point(
    resolved: ResolvedRun, source: Path | None, settings: dict[str, Any], spec: RunSpec, prepared: Prepared
) -> StartingPoint:
    if source is None:
        return StartingPoint(state=as_state(prepared.initial))
    wanted = resolved.config.checkpoint
    assert wanted.resume is not None
    snapshot = read_checkpoint(source, wanted.resume, wanted.keep_last)
    check_settings(snapshot, source, settings, spec)
    records = records_before(source, snapshot.step)
    log.info("going on after step %d of %s", snapshot.step, source.parent)
    return StartingPoint(snapshot.step, snapshot.tensors, records, source)


def _store(resolved: ResolvedRun, run_dir: Path, source: Path | None) -> CheckpointStore | None:
    """Where the run's checkpoints go.

    Raises:
        ConfigError: the folder holds those of another run.
    """
    wanted = resolved.config.checkpoint
    if not wanted.is_on():
        return None
    folder = Path(wanted.dir).expanduser() if wanted.dir else run_dir / FOLDER
    store = CheckpointStore(folder, keep_last=wanted.keep_last)
    if store.steps() and (source is None or source.absolute() != folder.absolute()):
        raise ConfigError(
            f"checkpoint.dir must not hold another run's checkpoints, got {folder.absolute()}; go on with that run "
            "(checkpoint.resume=latest), or name another folder"
        )
    store.clean()
    return store


def _check_adapters(session: CoordinatorSession, prepared: Prepared, synced: dict[int, Synced]) -> None:
    """Every worker trains exactly its part of the adapter, by names and shapes."""
    for index, answer in synced.items():
        mine = shapes_digest(adapters.part_of(prepared.adapter.shapes, session.spec.stages, index))
        if answer.adapter != mine:
            raise session.peer(index).error(
                f"has another adapter: its tensors' names and shapes have the digest {answer.adapter} there and {mine} "
                "here; the versions of peft or transformers differ, see the table of versions above"
            )


def _secret(resolved: ResolvedRun) -> bytes:
    """A fresh secret for processes that this one starts; otherwise that of this machine, or of its paired group.

    Raises:
        ConfigError: a worker is on another machine and this one is not paired.
    """
    hardware = resolved.config.hardware
    if hardware.launch == "local":
        return new_secret()
    secret, paired = secret_of_this_machine()
    names = own_names()
    for index, worker in enumerate(hardware.workers):
        if not paired and not is_here(worker.host, names):
            raise ConfigError(
                f"hardware.workers[{index}].host is another machine, {worker.host!r}, and this one is not paired: "
                "python -m hetero.pair here, python -m hetero.pair join there, then start the worker there"
            )
    return secret


def _launch(resolved: ResolvedRun, run_dir: Path, secret: bytes, stack: contextlib.ExitStack) -> LocalWorkers | None:
    """Starts local workers where the hardware says so; shares this machine's cores among all processes."""
    if resolved.config.hardware.launch != "local" or not resolved.workers:
        return None
    entries: list[WorkerEntry] = resolved.workers
    threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // (1 + len(entries))))
    torch.set_num_threads(threads)
    models_dir = resolved.model_folder.parent if resolved.local_model and resolved.model_folder else None
    return stack.enter_context(
        LocalWorkers(
            entries,
            models_dir=models_dir,
            threads=threads,
            outputs=run_dir,  # their ports are new each time, so their folders belong to the run
            log_dir=run_dir,
            secret=secret,
            allow_targets=resolved.config.allow_targets,
        )
    )


def _loggers(resolved: ResolvedRun, run_dir: Path) -> list[RunLogger]:
    found = []
    for raw in (resolved.config.logger or {}).values():
        args = {key: value for key, value in raw.items() if key != "_target_"}
        found.append(registry.make("logger", raw["_target_"], resolved.config.allow_targets, run_dir=run_dir, **args))
    return found


@contextlib.contextmanager
def _logging_to(loggers: list[RunLogger], about: dict[str, Any], before: list[dict[str, Any]]) -> Iterator[None]:
    """Starts the loggers with the steps before, and finishes them with the error that ended the run, if one did."""
    started: list[RunLogger] = []
    error: str | None = "interrupted"
    try:
        for logger in loggers:
            logger.start(about)
            started.append(logger)
            for record in before:
                logger.step(record)
        yield
        error = None
    except Exception as exc:
        error = str(exc)
        raise
    finally:
        for logger in started:
            logger.finish(error)


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


def _write_run_json(
    run_dir: Path, run_id: str, spec: RunSpec, resolved: ResolvedRun, start: StartingPoint
) -> dict[str, Any]:
    """What the run is, for people and for later commands."""
    about = {
        "run_id": run_id,
        "run_name": resolved.config.run_name,
        "digest": spec.digest(),
        "spec": msgspec.to_builtins(spec),
        "config": msgspec.to_builtins(resolved.config),
        "versions": versions(),
        "resumed": None if start.source is None else {"step": start.step, "checkpoints": str(start.source.absolute())},
    }
    text = json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False)
    (run_dir / "run.json").write_text(text, encoding="utf-8")
    return about

"""A run from the coordinator's side, start to end: workers, data, session, loop, adapter, summary."""

from __future__ import annotations

import contextlib
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
from hetero.console import StepProgress
from hetero.errors import ConfigError
from hetero.fingerprint import fingerprint
from hetero.inbox import Inbox
from hetero.launch import LocalWorkers
from hetero.loggers import RunLogger
from hetero.loop import Training
from hetero.machines import remember
from hetero.member import Member
from hetero.prepare import Prepared, check_quickly, prepare, total_steps
from hetero.resolve import ResolvedRun
from hetero.roles import is_here, own_names
from hetero.secret import new_secret, secret_of_this_machine
from hetero.session import CoordinatorSession
from hetero.spec import RunSpec, WorkerEntry
from hetero.transport.identity import identity_of
from hetero.versions import versions
from hetero.wire.headers import Synced
from hetero.work import make_transport_of

log = logging.getLogger(__name__)


@dataclass
class RunResult:
    """What a finished run gave.

    Attributes:
        spec: of the run.
        records: one for each step, as in metrics.jsonl.
        adapter_dir: the adapter of the whole model.
        stages: device and dtype of each stage.
    """

    spec: RunSpec
    adapter_dir: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    stages: list[tuple[str, str]] = field(default_factory=list)


def coordinate(resolved: ResolvedRun, run_dir: Path) -> RunResult:
    """Runs what a configuration asks for, and leaves no process, port or half-written file behind.

    Args:
        resolved: the checked configuration.
        run_dir: the run's own folder; must not hold a run yet.

    Raises:
        ConfigError: something cannot work, found before any worker is contacted where it can be.
        PeerError: a worker cannot be reached or failed.
        NumericError: loss or gradients are not finite.
    """
    if (run_dir / "run.json").exists():
        raise ConfigError(f"the run's folder must be a new one, {run_dir} holds a run already (hydra.run.dir)")
    run_dir.mkdir(parents=True, exist_ok=True)
    config = resolved.config
    check_quickly(resolved)
    with contextlib.ExitStack() as stack:
        loggers = _loggers(resolved, run_dir)
        secret = _secret(resolved)
        launched = _launch(resolved, run_dir, secret, stack)
        prepared = prepare(resolved)
        num_steps = total_steps(resolved, len(prepared.data_set.examples))
        workers = launched.addresses() if launched is not None else None
        spec = resolved.spec(total_steps=num_steps, workers=workers)
        result = RunResult(spec, run_dir / "adapter")
        run_id = uuid.uuid4().hex
        about = _write_run_json(run_dir, run_id, spec, resolved)
        with _logging_to(loggers, about):
            session = CoordinatorSession(
                spec,
                run_id=run_id,
                epoch=1,
                inbox=Inbox(),
                transport=make_transport_of(spec, config.allow_targets, identity_of(secret)),
                instance=uuid.uuid4().hex,
            )
            with _ending(session):
                member = _assemble(session, prepared, config.hardware.coordinator.device, config.allow_targets, result)
                if config.hardware.launch == "none":
                    remember(spec.workers)
                with StepProgress(num_steps) as progress:

                    def on_step(record: dict[str, Any]) -> None:
                        result.records.append(record)
                        for logger in loggers:
                            logger.step(record)
                        progress.step(record)

                    train = registry.build("loop", spec.loop.target, config.allow_targets)
                    train(
                        Training(
                            spec=spec,
                            member=member,
                            session=session,
                            examples=prepared.data_set.examples,
                            data=config.data,
                            pad_id=prepared.pad_id,
                            on_step=on_step,
                        )
                    )
                gathered = member.stage.state() | session.gather(num_steps, prepared.adapter.shapes)
                check_complete(prepared.adapter, gathered)
                save_adapter(result.adapter_dir, prepared.adapter, gathered)
    return result


def _assemble(
    session: CoordinatorSession, prepared: Prepared, device: str, allow_targets: list[str], result: RunResult
) -> Member:
    """Joins the workers, builds stage 0 while they build theirs, and links up."""
    spec = session.spec
    session.join(fingerprint(prepared.model_path) if isinstance(prepared.model_path, Path) else {})
    session.sync(
        0,
        {
            index: adapters.part_of(prepared.initial, spec.stages, index)
            for index in range(1, len(spec.stages))
            if prepared.initial
        },
    )
    member = Member(
        spec,
        0,
        model_path=prepared.model_path,
        device_name=device,
        allow_targets=allow_targets,
        inbox=session.inbox,
    )
    if prepared.initial:
        member.load_state(prepared.initial)
    member.connect(None, session.connect_downstream())
    synced = session.wait_synced().synced
    _check_adapters(session, prepared, synced)
    result.stages = [(str(member.stage.device), str(spec.stages[0].dtype))]
    result.stages += [(synced[i].device, synced[i].dtype) for i in sorted(synced)]
    for plan, (device_name, dtype) in zip(spec.stages, result.stages, strict=True):
        log.info("stage %s: layers [%d, %d) on %s in %s", plan.id, plan.start, plan.end, device_name, dtype)
    return member


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
def _logging_to(loggers: list[RunLogger], about: dict[str, Any]) -> Iterator[None]:
    """Starts the loggers, and finishes them with the error that ended the run, if one did."""
    started: list[RunLogger] = []
    error: str | None = "interrupted"
    try:
        for logger in loggers:
            logger.start(about)
            started.append(logger)
        yield
        error = None
    except Exception as exc:
        error = str(exc)
        raise
    finally:
        for logger in started:
            logger.finish(error)


@contextlib.contextmanager
def _ending(session: CoordinatorSession) -> Iterator[None]:
    """Tells the workers how the run ended, whichever way it did."""
    try:
        yield
    except BaseException as exc:
        session.end(stop=False, reason=str(exc) or type(exc).__name__)
        raise
    session.end(stop=True, reason="finished")


def _write_run_json(run_dir: Path, run_id: str, spec: RunSpec, resolved: ResolvedRun) -> dict[str, Any]:
    """What the run is, for people and for later commands."""
    about = {
        "run_id": run_id,
        "run_name": resolved.config.run_name,
        "digest": spec.digest(),
        "spec": msgspec.to_builtins(spec),
        "config": msgspec.to_builtins(resolved.config),
        "versions": versions(),
    }
    text = json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False)
    (run_dir / "run.json").write_text(text, encoding="utf-8")
    return about

"""A run from the coordinator's side, start to end: workers, data, session, loop, adapter, summary."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

import msgspec
import torch

from hetero import hub, resume
from hetero.awake import kept_awake
from hetero.best import EVAL_ROWS
from hetero.console import RunDisplay
from hetero.data import DataSet
from hetero.diagram import drawn_beside
from hetero.errors import ConfigError
from hetero.eval_rules import is_due
from hetero.fingerprint import fingerprint
from hetero.launch import LocalWorkers
from hetero.machine_memory import machine_of
from hetero.prepare import check_quickly, prepare, total_steps
from hetero.prompts import limits_of
from hetero.report import ReportWriter
from hetero.resolve import ResolvedRun
from hetero.resume import StartingPoint
from hetero.resume_settings import about_of, settings_of
from hetero.roles import is_here, own_names
from hetero.run import Run
from hetero.run_facts import facts_of
from hetero.run_loggers import Guarded, loggers_of, logging_to
from hetero.run_result import RunResult
from hetero.saving import Saver
from hetero.secret import new_secret, secret_of_this_machine
from hetero.spec import RunSpec, WorkerEntry
from hetero.training_state import as_state
from hetero.transport.identity import identity_of
from hetero.versions import versions

log = logging.getLogger(__name__)


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
    secret = _secret(resolved)
    check_quickly(resolved)
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_awake())
        display = stack.enter_context(RunDisplay())
        loggers = loggers_of(resolved.config, run_dir)
        run_id = uuid.uuid4().hex
        beginning = resume.begin(resolved, run_dir, run_id, stack)
        # Local workers load while this process reads; a resume, which may yet be refused, starts them afterwards.
        goes_on = beginning.snapshot is not None
        launched = None if goes_on else _launch(resolved, run_dir, secret, stack)
        display.doing("reading data and model")
        prepared = prepare(resolved)
        if not resolved.local_model:
            resolved = dataclasses.replace(resolved, commit=hub.commit_of(prepared.model_path))
        resolved = dataclasses.replace(resolved, generation=limits_of(prepared.prompts, resolved))
        num_steps = total_steps(resolved, len(prepared.data_set.examples))
        spec = resolved.spec(total_steps=num_steps)
        order = resolved.config.data
        settings = settings_of(spec, prepared.data_set.digest(), order.shuffle, order.bucket)
        model = fingerprint(prepared.model_path)
        eval_rows = DataSet(prepared.evaluated, "").digest() if prepared.evaluated else None
        start = resume.starting_point(beginning, settings, model, spec, prepared.adapter.shapes, eval_rows)
        start = start or StartingPoint(state=as_state(prepared.initial))
        resume.clean(beginning)
        stack.enter_context(drawn_beside(resolved, run_dir, prepared.memory))
        if goes_on:
            launched = _launch(resolved, run_dir, secret, stack)
        if launched is not None:
            display.doing("starting the local workers")
            spec = resolved.spec(total_steps=num_steps, workers=launched.addresses())
        saved = about_of(spec, run_id, run_dir, settings, model, versions(), beginning.owner.before)
        keeps_best, loop = resolved.config.checkpoint.keep_best, spec.loop
        saved |= {} if eval_rows is None else {EVAL_ROWS: eval_rows}
        saver = Saver(
            beginning.store,
            resolved.config.checkpoint,
            saved,
            safe=start.step,
            needs=lambda step: keeps_best and step < num_steps and is_due(loop, step, num_steps),  # it saves the last
        )
        stack.callback(saver.close)
        memory = {stage.id: machine_of(resolved, index)[1] for index, stage in enumerate(resolved.stages)}
        display.expect(num_steps, memory)
        about = _write_run_json(run_dir, run_id, spec, resolved, start)
        report = ReportWriter(run_dir)
        loggers = [*loggers, report]
        with logging_to(loggers, about, [*start.records, *start.evaluations]) as ending:
            run = Run(
                resolved=resolved,
                prepared=prepared,
                spec=spec,
                run_id=run_id,
                model=model,
                start=start,
                saver=saver,
                loggers=[*loggers, Guarded(display, "terminal")],
                doing=display.doing,
                launched=launched,
                identity=identity_of(secret),
                result=RunResult(
                    spec,
                    run_dir / "adapter",
                    records=list(start.records),
                    task=resolved.config.task,
                    evaluations=list(start.evaluations),
                ),
            )
            report.follow(facts_of(run, resolved))
            run.through_all_sessions()
            ending.stopped = run.result.stopped
            display.doing("ending")
    return run.result


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

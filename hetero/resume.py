"""From where a run goes on, and where it saves: one folder of checkpoints belongs to one run at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero.best import EVAL_ROWS, Best, best_before
from hetero.checkpoint import CheckpointStore, Owner, Snapshot
from hetero.errors import CheckpointError, ConfigError
from hetero.folder_lock import FolderInUse, only_one
from hetero.loggers import EVALUATIONS_FILE
from hetero.resolve import ResolvedRun
from hetero.resume_choice import Choice, find_checkpoints, read_checkpoint
from hetero.resume_settings import (
    check_model,
    check_settings,
    check_steps,
    check_tensors,
    say_what_differs,
    settings_of,
)
from hetero.spec import CheckpointSpec, RunSpec
from hetero.step_folders import FOLDER, file_and_reason, run_shown, step_name

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StartingPoint:
    """What a run begins with.

    Attributes:
        step: finished steps.
        state: of all stages by state name; empty: as they are built.
        records: of the finished steps, as in metrics.jsonl.
        source: the checkpoints' folder; None for a run from the beginning.
        evaluations: records of the evaluations up to there, as in eval.jsonl.
        best: the best step up to there, where a run before kept it.
    """

    step: int = 0
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    source: Path | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    best: Best | None = None


@dataclass(frozen=True)
class Beginning:
    """What is known of a run's checkpoints before its data has been read.

    Attributes:
        store: where it saves; None where it does not.
        snapshot: that it goes on from; None for a run from the beginning.
        source: the folder that the snapshot is in.
        owner: the run, and those before it in the same folder.
    """

    store: CheckpointStore | None
    snapshot: Snapshot | None
    source: Path | None
    owner: Owner


def begin(resolved: ResolvedRun, run_dir: Path, run_id: str, stack: contextlib.ExitStack) -> Beginning:
    """Takes the folder that a run saves in for this process alone, and reads what it is to go on from.

    Args:
        resolved: the checked configuration.
        run_dir: the run's own folder.
        run_id: of the run.
        stack: gives the folder back at its end.

    Raises:
        ConfigError: there is nothing to go on from, it is another run's, or the folder is.
    """
    wanted = resolved.config.checkpoint
    choice = home = None
    if wanted.is_on():
        home = Path(wanted.dir).expanduser().absolute() if wanted.dir else run_dir.absolute() / FOLDER
        _take(home, wanted, run_dir, stack)
    if wanted.resume is not None:
        choice = find_checkpoints(wanted.resume, wanted.dir, Path(resolved.config.outputs))
    in_place = home is not None and choice is not None and _same(choice.folder, home)
    if home is not None and not in_place and CheckpointStore(home).steps():
        raise ConfigError(
            f"checkpoint.dir must not hold another run's checkpoints, got {home}; go on with that run "
            "(checkpoint.resume=latest), or name another folder"
        )
    snapshot, owner = None, Owner(run_id)
    if choice is not None:
        snapshot = read_checkpoint(choice)
        _check_early(snapshot, choice.folder, resolved)
        if in_place:
            _refuse_later_steps(snapshot, choice)
            owner = Owner.after(run_id, snapshot.about)
    store = None if home is None else CheckpointStore(home, keep_last=wanted.keep_last, owner=owner)
    return Beginning(store, snapshot, None if choice is None else choice.folder, owner)


def starting_point(
    beginning: Beginning,
    settings: dict[str, Any],
    model: Mapping[str, str],
    spec: RunSpec,
    shapes: Mapping[str, Sequence[int]],
    eval_rows: str | None = None,
) -> StartingPoint | None:
    """What a run goes on with, all of it compared with what the run is now; None for a run from the beginning.

    Args:
        beginning: what was read.
        settings: of the run, its rows' digest included.
        model: fingerprint of the base model.
        spec: of the run.
        shapes: global key -> shape of what trains.
        eval_rows: digest of the rows that the run evaluates on; None where it does not.

    Raises:
        ConfigError: something would train differently.
    """
    snapshot, source = beginning.snapshot, beginning.source
    if snapshot is None or source is None:
        return None
    check_settings(snapshot, source, settings)
    check_steps(snapshot, spec.total_steps)
    check_model(snapshot, source, model)
    check_tensors(snapshot, source, shapes)
    say_what_differs(snapshot, spec)
    log.info("going on after step %d of %s", snapshot.step, run_shown(source))
    start = StartingPoint(snapshot.step, snapshot.tensors, records_before(snapshot, source), source)
    if eval_rows is None:
        return start
    if snapshot.about.get(EVAL_ROWS) != eval_rows:
        if snapshot.about.get(EVAL_ROWS) is not None:
            log.warning("the evaluations before are left out: they were on other rows")
        return start
    own = beginning.owner.before != ()
    best = best_before(snapshot.about, None if own else str(source.absolute()))
    file = _log_of(snapshot, source, EVALUATIONS_FILE)
    evaluations = _records_up_to(snapshot.step, file) if file.is_file() else []
    if not evaluations:
        log.warning("this run's log lacks the evaluations before, because %s is not there, or empty", file)
    return dataclasses.replace(start, evaluations=evaluations, best=best)


def clean(beginning: Beginning) -> None:
    """Removes what interrupted saves have left, in the run's folder and in the one that it goes on from.

    Raises:
        CheckpointError: the disk fails.
    """
    if beginning.store is not None:
        beginning.store.clean()
    if beginning.source is None or beginning.owner.before:
        return
    try:  # it is only read from here on, so it may be another's, or on a read-only disk
        with only_one(beginning.source, "which removes what an interrupted save has left"):
            CheckpointStore(beginning.source).clean()
    except FolderInUse:
        return  # what is unfinished there is being written
    except (CheckpointError, OSError) as exc:
        log.warning("what an interrupted save left may be there still: %s", file_and_reason(exc, beginning.source))


def _take(home: Path, wanted: CheckpointSpec, run_dir: Path, stack: contextlib.ExitStack) -> None:
    key = "checkpoint.dir" if wanted.dir else "hydra.run.dir"
    try:
        stack.enter_context(only_one(home, f"run {run_dir.absolute()}"))
    except FolderInUse as exc:
        raise ConfigError(
            f"{key} must not be a folder that another run saves in, got {home}, which is in use ({exc}); "
            "wait for that run or end it, or name another folder"
        ) from None
    except OSError as exc:
        raise ConfigError(
            f"{key} must be a folder that can be written, got {home} ({file_and_reason(exc, home)}); name "
            "another folder"
        ) from None


def _check_early(snapshot: Snapshot, folder: Path, resolved: ResolvedRun) -> None:
    """Refuses what the checkpoint alone shows to be another run's, before any data is read."""
    config = resolved.config
    settings = settings_of(resolved.spec(total_steps=1), None, config.data.shuffle, config.data.bucket)
    check_settings(snapshot, folder, settings)
    if config.loop.steps is not None:
        check_steps(snapshot, config.loop.steps)


def _refuse_later_steps(snapshot: Snapshot, choice: Choice) -> None:
    """In one folder there is one line of steps: a later one would be taken for this run's, or stay in its way."""
    if choice.step is None:
        return
    later = [step for step in CheckpointStore(choice.folder).steps() if step > snapshot.step]
    if later:
        raise ConfigError(
            f"checkpoint.resume={choice.given} must be the last step where a run goes on in the same checkpoint.dir, "
            f"{choice.folder.absolute()} has later ones ({', '.join(map(str, later))}); name another checkpoint.dir "
            f"with checkpoint.resume={choice.folder / step_name(snapshot.step)}, or use checkpoint.resume=latest"
        )


def _same(one: Path, other: Path) -> bool:
    return one.is_dir() and other.is_dir() and one.samefile(other)


def records_before(snapshot: Snapshot, folder: Path) -> list[dict[str, Any]]:
    """The records of the steps up to a checkpoint, from the run that it belongs to; what is not there is said.

    Args:
        snapshot: the checkpoint.
        folder: the checkpoints' folder: in the run's, which may have been moved, or one of its own.
    """
    file = _log_of(snapshot, folder, METRICS)
    found = _records_up_to(snapshot.step, file) if file.is_file() else []
    if len(found) < snapshot.step:
        why = f"holds {len(found)} of them" if file.is_file() else "is not there"
        log.warning("this run's log lacks some of the %d steps before, because %s %s", snapshot.step, file, why)
    return found


def _log_of(snapshot: Snapshot, folder: Path, name: str) -> Path:
    home = folder.parent if folder.name == FOLDER else Path(snapshot.about.get("run_dir", folder.parent))
    return home / name


def _records_up_to(step: int, file: Path) -> list[dict[str, Any]]:
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        if isinstance(record, dict) and record.get("step", step + 1) <= step:
            found.append(record)
    return found

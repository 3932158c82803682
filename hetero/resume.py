"""From where a run goes on: the newest checkpoint that is whole, of the run that was meant, with the same settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.errors import CheckpointError, ConfigError
from hetero.spec import RunSpec

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StartingPoint:
    """What a run begins with.

    Attributes:
        step: finished steps.
        state: of all stages by state name; empty: as they are built.
        records: of the finished steps, as in metrics.jsonl.
        source: the checkpoints' folder; None for a run from the beginning.
    """

    step: int = 0
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    source: Path | None = None


def settings_of(spec: RunSpec, data_digest: str, shuffle: bool) -> dict[str, Any]:
    """What must be as it was for a run to go on as if it had never ended; any split, machine and policy will do."""
    model = msgspec.to_builtins(spec.model)
    return {
        "seed": spec.seed,
        "model": {key: model[key] for key in ("path", "revision")}
        | {"num_hidden_layers": spec.num_hidden_layers, "hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size},
        "adapter": msgspec.to_builtins(spec.adapter),
        "optimizer": {"_target_": spec.optimizer.target} | spec.optimizer.args,
        "lr_schedule": msgspec.to_builtins(spec.lr_schedule),
        "loop": {"batch_size": spec.loop.batch_size, "max_grad_norm": spec.loop.max_grad_norm},
        "data": {"rows": data_digest, "shuffle": shuffle},
    }


def find_checkpoints(resume: int | str, folder: str | None, outputs: Path) -> Path:
    """The folder of checkpoints that `checkpoint.resume` means.

    Args:
        resume: `latest`, a step, or a run's folder.
        folder: `checkpoint.dir`, where `latest` and a step are looked for; else the newest run under `outputs`.
        outputs: where runs have their folders.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(resume, str) and resume != "latest":
        given = Path(resume).expanduser()
        for found in (given / FOLDER, given):
            if CheckpointStore(found).steps():
                return found
        raise ConfigError(
            f"checkpoint.resume must be latest, a step number, or a run's folder with {FOLDER}/ in it, found no "
            f"checkpoint in {given.absolute()}"
        )
    if folder is not None:
        found = Path(folder).expanduser()
        if not CheckpointStore(found).steps():
            raise ConfigError(f"checkpoint.resume={resume} found no checkpoint in checkpoint.dir, {found.absolute()}")
        return found
    newest = sorted(
        (file.stat().st_mtime_ns, file.parent.parent) for file in outputs.glob(f"**/{FOLDER}/step-*/manifest.json")
    )
    if not newest:
        raise ConfigError(
            f"checkpoint.resume={resume} found no run with a checkpoint under {outputs.absolute()}; leave it out to "
            "start at step 0"
        )
    return newest[-1][1]


def read_checkpoint(folder: Path, resume: int | str, keep_last: int) -> Snapshot:
    """The checkpoint to go on from: the step that was asked for, else the newest that is whole.

    Raises:
        ConfigError: the step is not there or not whole, or none is.
    """
    store = CheckpointStore(folder, keep_last=keep_last)
    if isinstance(resume, int):
        try:
            return store.load(resume)
        except CheckpointError as exc:
            there = ", ".join(map(str, store.steps())) or "none"
            raise ConfigError(f"checkpoint.resume={resume} cannot be taken: {exc} (steps there: {there})") from None
    snapshot, skipped = store.newest()
    for line in skipped:
        log.warning("checkpoint skipped: %s", line)
    if snapshot is None:
        raise ConfigError(
            f"checkpoint.resume={resume} found no whole checkpoint in {folder.absolute()}; leave it out to start at "
            "step 0"
        )
    return snapshot


def check_settings(snapshot: Snapshot, folder: Path, settings: dict[str, Any], spec: RunSpec) -> None:
    """Compares what must be equal, and says what may differ and does.

    Raises:
        ConfigError: something would train differently.
    """
    theirs = snapshot.about.get("settings", {})
    wrong = list(_differences(theirs, settings))
    if wrong:
        key, there, here = wrong[0]
        what = "other rows" if key == "data.rows" else f"{key} is {there!r} there and {here!r} here"
        raise ConfigError(
            f"checkpoint.resume must go on with the run's own settings: {what} ({folder.parent}, step {snapshot.step}; "
            f"{len(wrong)} in all differ); give them as they were, or adapter.init_from=FOLDER/adapter for a new run"
        )
    if spec.total_steps < snapshot.step:
        raise ConfigError(
            f"loop.steps must be at least {snapshot.step}, the step that checkpoint.resume goes on from, "
            f"got {spec.total_steps}"
        )
    before = snapshot.about.get("total_steps")
    if before != spec.total_steps:
        log.info(
            "%d steps in all instead of %s: from step %d on the learning rate is that of a run of %d steps, without a "
            "second warm-up",
            spec.total_steps,
            before,
            snapshot.step + 1,
            spec.total_steps,
        )
    numbers = {"loop.microbatch_size": spec.loop.microbatch_size, "numbers": _numbers(spec)}
    if snapshot.about.get("numbers") not in (None, numbers):
        log.warning("micro-batch size or dtypes differ from before: results will not be equal to the last bit")


def about_of(spec: RunSpec, run_id: str, settings: dict[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """What every checkpoint of a run says of it."""
    return {
        "run_id": run_id,
        "settings": settings,
        "total_steps": spec.total_steps,
        "numbers": {"loop.microbatch_size": spec.loop.microbatch_size, "numbers": _numbers(spec)},
        "spec": msgspec.to_builtins(spec),
        "versions": dict(versions),
    }


def records_before(folder: Path, snapshot: Snapshot) -> list[dict[str, Any]]:
    """The records of the steps up to a checkpoint, from the run that wrote it: beside its folder, or elsewhere.

    Args:
        folder: of the checkpoints; with `checkpoint.dir` not in the run's folder.
        snapshot: says which folder was the run's.
    """
    run_dirs = dict.fromkeys((folder.parent, Path(str(snapshot.about.get("run_dir", folder.parent)))))
    found = [_records_of(run_dir / METRICS, snapshot.step) for run_dir in run_dirs]
    records = max(found, key=len)
    if len(records) < snapshot.step:
        level = logging.WARNING if records else logging.INFO  # there may have been no logger
        log.log(level, "%s of the steps before is not whole in %s", METRICS, " or ".join(map(str, run_dirs)))
    return records


def _records_of(file: Path, step: int) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        if isinstance(record, dict) and record.get("step", step + 1) <= step:
            found.append(record)
    return found


def _numbers(spec: RunSpec) -> list[Any]:
    """What rounding depends on, each once: a split alone changes nothing."""
    return sorted({f"{stage.dtype} {stage.quantization}" for stage in spec.stages} | set(spec.boundary_dtypes))


def _differences(theirs: Any, mine: Any, key: str = "") -> Any:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for name in sorted(theirs.keys() | mine.keys()):
            yield from _differences(theirs.get(name), mine.get(name), f"{key}.{name}" if key else name)
    elif json.dumps(theirs, sort_keys=True) != json.dumps(mine, sort_keys=True):
        yield key, theirs, mine

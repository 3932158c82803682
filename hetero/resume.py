"""From where a run goes on: the newest checkpoint that is whole, of the run that was meant, with the same settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.errors import CheckpointError, ConfigError
from hetero.fingerprint import difference
from hetero.spec import RunSpec
from hetero.training_state import adapter_of, may_be_state
from hetero.wire.headers import TensorEntry
from hetero.wire.tensors import NAMES

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
    } | ({} if spec.router_loss is None else {"router_loss": msgspec.to_builtins(spec.router_loss)})


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
        (file.stat().st_mtime_ns, file.parent.parent)
        for file in outputs.glob(f"**/{FOLDER}/step-*/manifest.json")
        if CheckpointStore(file.parent.parent).steps()  # not only one that was never committed
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
        what = f"{key} is {there!r} there and {here!r} here"
        if key == "data.rows":
            what = f"the rows of data have the digest {there[:16]} there and {here[:16]} here"
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


def check_model(snapshot: Snapshot, folder: Path, model: Mapping[str, str]) -> None:
    """Compares the base model's weights, whose folder may have the same name and others in it.

    Raises:
        ConfigError: a part that is known of both differs.
    """
    found = difference(dict(model), snapshot.about.get("model", {}))
    if found:
        raise ConfigError(
            f"checkpoint.resume must go on with the run's own base model: {found} ({folder.parent}, "
            f"step {snapshot.step}); give model.path and model.revision as they were"
        )


def check_tensors(snapshot: Snapshot, folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Compares a checkpoint's tensors with what trains.

    Args:
        snapshot: the checkpoint.
        folder: the checkpoints' folder.
        shapes: global key -> shape of what trains.

    Raises:
        ConfigError: it has tensors of another run.
    """
    for name, tensor in sorted(snapshot.tensors.items()):
        entry = TensorEntry(name, NAMES.get(tensor.dtype, "other"), list(tensor.shape))  # type: ignore[arg-type]
        if not may_be_state(entry, shapes):
            found = f"has {name!r} as {entry.dtype} {entry.shape}"
            break
    else:
        lacking = sorted(set(shapes) - set(adapter_of(snapshot.tensors)))
        if not lacking:
            return
        found = f"lacks {lacking[0]!r}"
    raise ConfigError(
        f"checkpoint.resume must have the tensors that this run trains, but {folder}, step {snapshot.step}, {found}: "
        "the model or the version of peft is another one"
    )


def about_of(
    spec: RunSpec,
    run_id: str,
    run_dir: Path,
    settings: dict[str, Any],
    model: Mapping[str, str],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """What every checkpoint of a run says of it."""
    return {
        "run_id": run_id,
        "run_dir": str(run_dir.absolute()),
        "settings": settings,
        "model": dict(model),
        "total_steps": spec.total_steps,
        "numbers": {"loop.microbatch_size": spec.loop.microbatch_size, "numbers": _numbers(spec)},
        "spec": msgspec.to_builtins(spec),
        "versions": dict(versions),
    }


def records_before(snapshot: Snapshot, folder: Path) -> list[dict[str, Any]]:
    """The records of the steps up to a checkpoint, from the run that it belongs to; what is not there is said.

    Args:
        snapshot: the checkpoint.
        folder: the checkpoints' folder: in the run's, which may have been moved, or one of its own.
    """
    beside = folder.parent / METRICS
    file = beside if folder.name == FOLDER else Path(snapshot.about.get("run_dir", folder.parent)) / METRICS
    found = _records_up_to(snapshot.step, file) if file.is_file() else []
    if len(found) < snapshot.step:
        log.warning("%s holds %d of the %d steps before, so this run's log does too", file, len(found), snapshot.step)
    return found


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


def _numbers(spec: RunSpec) -> list[Any]:
    """What rounding depends on, each once: a split alone changes nothing."""
    found = {f"{stage.dtype} {stage.quantization}" for stage in spec.stages}
    for dtype, left, right in zip(spec.boundary_dtypes, spec.stages, spec.stages[1:], strict=False):
        if {left.dtype, right.dtype} != {dtype}:
            found.add(f"{dtype} between stages")
    return sorted(found)


def _differences(theirs: Any, mine: Any, key: str = "") -> Any:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for name in sorted(theirs.keys() | mine.keys()):
            yield from _differences(theirs.get(name), mine.get(name), f"{key}.{name}" if key else name)
    elif json.dumps(theirs, sort_keys=True) != json.dumps(mine, sort_keys=True):
        yield key, theirs, mine

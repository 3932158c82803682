"""What must be as it was for a run to go on, what may differ, and what every checkpoint records for that."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hetero.checkpoint import Snapshot
from hetero.errors import ConfigError
from hetero.fingerprint import difference
from hetero.spec import RunSpec
from hetero.step_folders import BEFORE, RUN_ID, run_shown
from hetero.training_state import adapter_of, may_be_state
from hetero.wire.headers import TensorEntry
from hetero.wire.tensors import NAMES

log = logging.getLogger(__name__)


def settings_of(spec: RunSpec, data_digest: str | None, shuffle: bool, bucket: bool = False) -> dict[str, Any]:
    """What must be as it was for a run to go on as if it had never ended; any split, machine and policy will do.

    Args:
        spec: of the run.
        data_digest: of the rows; None while they have not been read.
        shuffle: whether they are shuffled.
        bucket: whether those of like length come together.
    """
    model = msgspec.to_builtins(spec.model)
    return {
        "seed": spec.seed,
        "model": {key: model[key] for key in ("path", "revision")}
        | {"num_hidden_layers": spec.num_hidden_layers, "hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size},
        "adapter": msgspec.to_builtins(spec.adapter),
        "optimizer": {"_target_": spec.optimizer.target} | spec.optimizer.args,
        "lr_schedule": msgspec.to_builtins(spec.lr_schedule),
        "loop": {"batch_size": spec.loop.batch_size, "max_grad_norm": spec.loop.max_grad_norm},
        "data": {"shuffle": shuffle, "bucket": bucket} | ({} if data_digest is None else {"rows": data_digest}),
    } | ({} if spec.router_loss is None else {"router_loss": msgspec.to_builtins(spec.router_loss)})


def check_settings(snapshot: Snapshot, folder: Path, settings: dict[str, Any]) -> None:
    """Compares what must be equal; the rows only where `settings` has their digest.

    Raises:
        ConfigError: something would train differently.
    """
    theirs = dict(snapshot.about.get("settings", {}))
    if "rows" not in settings["data"] and isinstance(theirs.get("data"), dict):
        theirs["data"] = {key: value for key, value in theirs["data"].items() if key != "rows"}
    wrong = list(_differences(theirs, settings))
    if not wrong:
        return
    key, there, here = wrong[0]
    what = f"{key} is {there!r} there and {here!r} here"
    if key == "data.rows":
        what = f"the rows of data have the digest {str(there)[:16]} there and {str(here)[:16]} here"
    raise ConfigError(
        f"checkpoint.resume must go on with the run's own settings: {what} ({run_shown(folder)}, step {snapshot.step}; "
        f"{len(wrong)} in all differ); give them as they were, or adapter.init_from=FOLDER/adapter for a new run"
    )


def check_steps(snapshot: Snapshot, total_steps: int) -> None:
    """Compares the length of the run with what has been done.

    Raises:
        ConfigError: it would have to go back.
    """
    if total_steps < snapshot.step:
        raise ConfigError(
            f"loop.steps must be at least {snapshot.step}, the step that checkpoint.resume goes on from, "
            f"got {total_steps}"
        )


def say_what_differs(snapshot: Snapshot, spec: RunSpec) -> None:
    """Says what may differ from before and does, with what follows from it."""
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
    if (before := snapshot.about.get("numbers")) not in (None, numbers):
        log.warning("%s", _other_numbers(before, numbers))


def check_model(snapshot: Snapshot, folder: Path, model: Mapping[str, str]) -> None:
    """Compares the base model's weights, whose folder may have the same name and others in it.

    Raises:
        ConfigError: a part that is known of both differs.
    """
    found = difference(dict(model), snapshot.about.get("model", {}))
    if found:
        raise ConfigError(
            f"checkpoint.resume must go on with the run's own base model: {found} ({run_shown(folder)}, "
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
    before: Sequence[Any] = (),
) -> dict[str, Any]:
    """What every checkpoint of a run says of it.

    Args:
        spec, run_dir, settings, model, versions: of the run.
        run_id: by which its checkpoints are told from those of other runs.
        before: ids of the runs that it goes on from in the same folder of checkpoints.
    """
    return {
        RUN_ID: run_id,
        BEFORE: list(before),
        "run_dir": str(run_dir.absolute()),
        "settings": settings,
        "model": dict(model),
        "total_steps": spec.total_steps,
        "numbers": {"loop.microbatch_size": spec.loop.microbatch_size, "numbers": _numbers(spec)},
        "spec": msgspec.to_builtins(spec),
        "versions": dict(versions),
    }


def _other_numbers(before: Any, now: dict[str, Any]) -> str:
    """What becomes of a run whose stages compute with other numbers than before."""
    before = before if isinstance(before, dict) else {}
    changed = [key for key in now if before.get(key) != now[key]]
    said = ", ".join(f"{key} was {_in_words(before.get(key))} and is {_in_words(now[key])}" for key in changed)
    in_4_bits = ["nf4" in _in_words(about.get("numbers")) for about in (before, now)]
    if in_4_bits[0] != in_4_bits[1]:
        return (
            f"{said}: 4 bits are another base than 16 or 32, so the loss may jump, and is not that of an unbroken run"
        )
    return f"{said}: results will not be equal to the last bit"


def _in_words(value: Any) -> str:
    words = (
        [str(one).removesuffix(" none").removesuffix(" None") for one in value] if isinstance(value, list) else [value]
    )
    return " and ".join(map(str, words))


def _numbers(spec: RunSpec) -> list[Any]:
    """What rounding depends on, each once: a split alone changes nothing."""
    found = {f"{stage.dtype} {stage.quantization}" for stage in spec.stages}
    for dtype, left, right in zip(spec.boundary_dtypes, spec.stages, spec.stages[1:], strict=False):
        if {left.dtype, right.dtype} != {dtype}:
            found.add(f"{dtype} between stages")
    if len({stage.quantization for stage in spec.stages}) > 1:  # then a split does change something
        in_4_bits = [layer for s in spec.stages if s.quantization == "nf4" for layer in range(s.start, s.end)]
        found.add("nf4 in layers " + ", ".join(map(str, in_4_bits)))
    return sorted(found)


def _differences(theirs: Any, mine: Any, key: str = "") -> Any:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for name in sorted(theirs.keys() | mine.keys()):
            yield from _differences(theirs.get(name), mine.get(name), f"{key}.{name}" if key else name)
    elif json.dumps(theirs, sort_keys=True) != json.dumps(mine, sort_keys=True):
        yield key, theirs, mine

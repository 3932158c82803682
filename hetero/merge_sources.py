"""Where an adapter is: a run's folder, its adapter, a checkpoint of it, or the parts that stages have kept."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero import adapters, hub
from hetero.adapter_config import CONFIG_FILE
from hetero.adapter_files import PART_FOLDER, WEIGHTS_FILE, StagePart, config_digest, read_part
from hetero.adapter_on_base import check_on_base, consists_of
from hetero.adapter_parts import check_digest, is_part, unite
from hetero.adapter_whole import check_modules, check_names
from hetero.checkpoint import CheckpointStore
from hetero.errors import CheckpointError, ConfigError
from hetero.fingerprint import difference
from hetero.folders import fetched_folder, one_line
from hetero.models import meta_model
from hetero.snapshot import MANIFEST_FILE, Snapshot, read_manifest, read_snapshot
from hetero.spec import RunSpec
from hetero.store import find_weights
from hetero.tiny import TINY
from hetero.training_state import adapter_of

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
RECORD = "merge.json"  # what a merge says of what it wrote


@dataclass
class Source:
    """An adapter of a whole model.

    Attributes:
        config: content of adapter_config.json.
        tensors: by global key.
        origin: where it is from, in words.
        step: that it is the state after, where that is known.
        quantizations: what the stages that trained it held the base in, where that is known.
        model: fingerprint of the base that it was trained on, where that is known.
        num_layers: of that base, where it is known and no digest has told already that all tensors are there.
        named: how the user named it, for messages.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    origin: str
    step: int | None = None
    quantizations: list[str] = field(default_factory=list)
    model: dict[str, str] = field(default_factory=dict)
    num_layers: int | None = None
    named: str = "RUN"

    def base_name(self) -> str | None:
        """The base model, as the adapter names it."""
        name = self.config.get("base_model_name_or_path")
        return str(name) if name else None


def find_base(given: str | None, named: str | None) -> Path:
    """The folder of the base model.

    Args:
        given: by the user.
        named: by the adapter.

    Raises:
        ConfigError: it is not on this machine.
    """
    wanted = given or named
    if wanted is None:
        raise ConfigError("--base must name the base model's folder, since the adapter names none: --base PATH")
    try:
        found = find_weights(wanted)
    except ConfigError as exc:
        raise ConfigError(f"--base must lead to the base model {wanted!r}: --base PATH ({exc})") from None
    if not isinstance(found, Path):
        raise ConfigError(f"--base must be a folder of this machine, {wanted!r} is on the hub only: --base PATH")
    return found


def check_whole(source: Source, base: str | None) -> None:
    """Refuses an adapter that is not whole, or has what its configuration does not ask for.

    Exactly, where the base's config.json is on this machine; the base is not asked for on the hub.

    Args:
        source: the adapter.
        base: the base model that the user names.

    Raises:
        ConfigError: names the tensor.
    """
    folder = _base_here(source.base_name()) if base is None else find_base(base, None)
    if folder is not None:
        try:
            expected = consists_of(source.config, folder, source.named)
        except ConfigError as exc:
            if base is not None:
                raise
            log.warning("the adapter was not compared with the base that it names: %s", exc)
        else:
            return check_on_base(source.tensors, expected, folder, source.named)
    else:
        log.info(
            "the base model is not on this machine, so the adapter was compared with its own files and the run's "
            "alone: --base PATH compares it with the model"
        )
    return check_names(source.config, source.tensors, source.named, source.num_layers)


def _base_here(named: str | None) -> Path | None:
    """Where this machine has the configuration of the model that an adapter names."""
    if named is None:
        return None
    if named == TINY:
        return find_base(None, named)
    places = (Path(named).expanduser(), fetched_folder(named))
    found = next((place for place in places if (place / "config.json").is_file()), None)
    try:
        return found or hub.snapshot(named, None)
    except ValueError:  # a path is no name on the hub
        return None


def find_source(path: Path, base: str | None) -> Source:
    """The adapter in a run's folder, an adapter's or a checkpoint's.

    Args:
        path: what the user names.
        base: the base model that the user names, which a checkpoint's adapter is put together on.

    Raises:
        ConfigError: there is none.
    """
    if not path.is_dir():
        raise ConfigError(f"RUN must be the folder of a run, an adapter or a checkpoint, found none at {path}")
    for place in (path, path / "adapter"):
        if (place / CONFIG_FILE).is_file():
            return _of_adapter(place)
    if (path / MANIFEST_FILE).is_file():
        return _of_checkpoint(path, _snapshot(path), base)
    for place in (path / CHECKPOINTS, path):
        if CheckpointStore(place).steps():
            return _of_newest(place, base)
    raise ConfigError(
        f"RUN must hold an adapter ({CONFIG_FILE}, or adapter/ with it) or checkpoints, found neither in "
        f"{path.absolute()}"
    )


def find_stages(folders: Sequence[Path]) -> Source:
    """The adapter of the parts in these folders."""
    config, tensors, parts = unite(folders)
    part = parts[0]
    origin = f"the parts that {len(folders)} stages kept after step {part.step}"
    check_modules(config, tensors, "--stages")
    source = Source(config, tensors, origin, part.step, num_layers=_to_look_at(part), named="--stages")
    source.quantizations = list(part.quantizations)
    for one in parts:
        if other := difference(source.model, one.model):
            log.warning("stage %d had another base model than the ones before: %s", one.stage, other)
        source.model = one.model | source.model
    return source


def _of_adapter(folder: Path) -> Source:
    from safetensors.torch import load_file

    if not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(f"RUN must hold {WEIGHTS_FILE} beside {CONFIG_FILE}, found none in {folder.absolute()}")
    if is_part(folder / WEIGHTS_FILE):
        raise ConfigError(
            f"RUN must hold a whole adapter, {folder.absolute()} is a stage's part: merge --stages with the folders of "
            "all stages"
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise ValueError(f"{CONFIG_FILE} is not that of a LoRA adapter")
        source = Source(config, load_file(folder / WEIGHTS_FILE), str(folder.absolute()))
    except Exception as exc:  # safetensors raises its own SafetensorError without a common base
        raise ConfigError(f"RUN cannot be read: {folder.absolute()}: {one_line(exc)}") from None
    check_modules(source.config, source.tensors, source.named)
    _add_run(source, folder.absolute())
    return source


def _add_run(source: Source, folder: Path) -> None:
    """What the run's own files say, or a merge's record, where there are any."""
    run = folder.parent
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        about = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        source.step, source.quantizations = about.get("step"), list(about.get("trained_on") or ())
        source.model = dict(about.get("base_digests") or {})
        return
    if (part := _part_beside(folder)) is not None:
        check_digest(part.adapter, source.tensors, source.named)
        source.num_layers = _to_look_at(part)
        source.quantizations, source.model = list(part.quantizations), dict(part.model)
    try:
        spec = json.loads((run / "run.json").read_text(encoding="utf-8"))["spec"]
        if part is None:
            source.num_layers = int(spec["num_hidden_layers"])
        source.quantizations = [s["quantization"] or spec["model"]["quantization"] for s in spec["stages"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if source.model:
        return
    for step in CheckpointStore(run / CHECKPOINTS).steps():
        try:
            manifest = read_manifest(run / CHECKPOINTS / f"step-{step:08d}" / MANIFEST_FILE, step)
        except (OSError, CheckpointError):
            continue
        source.model = dict(manifest.about.get("model", {}))
        return


def _to_look_at(part: StagePart) -> int | None:
    """Layers of which each should have tensors; None where the run's own digest has told that all are there."""
    return None if part.adapter else part.num_layers


def _part_beside(folder: Path) -> StagePart | None:
    """What stage 0 of the run kept beside this adapter, where the two have the same configuration."""
    try:
        part = read_part(folder.parent / PART_FOLDER)
        return part if part is not None and part.config == config_digest(folder) else None
    except (OSError, ValueError):  # it may be half written, or older; the adapter is whole without it
        return None


def _of_newest(folder: Path, base: str | None) -> Source:
    snapshot, skipped = CheckpointStore(folder).newest()
    for line in skipped:
        log.warning("checkpoint skipped: %s", line)
    if snapshot is None:
        raise ConfigError(f"RUN must hold a whole checkpoint, found none in {folder.absolute()}")
    return _of_checkpoint(folder, snapshot, base)


def _snapshot(folder: Path) -> Snapshot:
    digits = folder.absolute().name.removeprefix("step-")
    if not digits.isdecimal():
        raise ConfigError(f"RUN must be named as the run named it (step-00000012), got {folder.absolute().name}")
    try:
        return read_snapshot(folder, int(digits))[0]
    except CheckpointError as exc:
        raise ConfigError(f"RUN is no whole checkpoint: {exc}") from None


def _of_checkpoint(folder: Path, snapshot: Snapshot, base: str | None) -> Source:
    about = snapshot.about
    try:
        spec = RunSpec.from_json(json.dumps(about["spec"]).encode())
    except (KeyError, TypeError) as exc:
        raise ConfigError(f"RUN does not say what it is of: {folder.absolute()}: {one_line(exc)}") from None
    named = spec.model.path
    if spec.local_model:
        named = _local_base(Path(about.get("run_dir", "")), folder) or named
    model = meta_model(find_base(base, named))
    resolved = adapters.resolve(model, spec.adapter, named)
    tensors = adapter_of(snapshot.tensors)
    if {key: list(value.shape) for key, value in tensors.items()} != resolved.shapes:
        raise ConfigError(
            f"--base must be the model that {folder.absolute()} was trained on: other tensors train there"
        )
    resolved.config.inference_mode = True
    config = json.loads(json.dumps(resolved.config.to_dict(), default=str))
    source = Source(config, tensors, f"the checkpoint of step {snapshot.step} in {folder.absolute()}", snapshot.step)
    source.model = dict(about.get("model", {}))
    source.quantizations = [stage.quantization or spec.model.quantization for stage in spec.stages]
    return source


def _local_base(run_dir: Path, folder: Path) -> str | None:
    """Where the coordinator had a model that is no hub's; checkpoints hold no paths of it."""
    for run in (run_dir, folder.absolute().parent, folder.absolute().parent.parent):
        try:
            return str(json.loads((run / "run.json").read_text(encoding="utf-8"))["config"]["model"]["path"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None

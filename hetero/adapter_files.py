"""Adapters on disk: standard PEFT folders of the whole model, safetensors and JSON."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from hetero.adapter_config import CONFIG_FILE
from hetero.adapter_rules import FROM_BASE
from hetero.adapters import ResolvedAdapter
from hetero.errors import ConfigError
from hetero.facts import ModelFacts
from hetero.families import Family, layer_of
from hetero.folders import one_line
from hetero.spec import AdapterSpec, RunSpec
from hetero.tensor_files import Entry, read_entries, read_metadata

WEIGHTS_FILE = "adapter_model.safetensors"
PART_FOLDER = "adapter-stage"  # where every stage keeps its own part, on its own machine
PART_KEY = "hetero.part"  # in the metadata of a file that holds a stage's part
# A key of PEFT's files: the module's own name, and whether the tensor is LoRA's A or B.
_LORA = re.compile(r"\.([^.]+)\.lora_(?:embedding_)?([AB])(?:\.weight)?$")


class StagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of which adapter a stage has kept.

    Attributes:
        run: the run's id, another one each time that a run is started or resumed.
        step: that it is the state after.
        stage: index of the stage.
        start: its first layer.
        end: one past its last.
        num_layers: of the whole model.
        config: SHA-256 of the adapter_config.json beside it.
        quantizations: what the stages of the run hold the base in; empty: an older version kept the part.
        model: fingerprint of the base on this machine; empty: likewise.
        adapter: digest of names and shapes of the whole adapter's tensors; empty: likewise.
    """

    run: str
    step: int
    stage: int
    start: int
    end: int
    num_layers: int
    config: str = ""
    quantizations: tuple[str, ...] = ()
    model: dict[str, str] = {}
    adapter: str = ""


def part_of_stage(spec: RunSpec, index: int, run_id: str, step: int, model: dict[str, str]) -> StagePart:
    """What a stage says of the part that it keeps; `model` is the fingerprint of its base model."""
    plan = spec.stages[index]
    quantizations = tuple(stage.quantization or spec.model.quantization for stage in spec.stages)
    return StagePart(
        run_id,
        step,
        index,
        plan.start,
        plan.end,
        spec.num_hidden_layers,
        quantizations=quantizations,
        model=model,
    )


def read_part(folder: Path) -> StagePart | None:
    """What a folder says of which part is in it; None where it says nothing, or was not written as a whole.

    Raises:
        ValueError: it cannot be read, with the reason.
    """
    said = read_metadata(folder / WEIGHTS_FILE).get(PART_KEY)
    if said is None:
        return None
    part = msgspec.json.decode(said.encode(), type=StagePart)
    return part if part.config == config_digest(folder) else None


def config_digest(folder: Path) -> str:
    """SHA-256 of a folder's adapter_config.json."""
    return hashlib.sha256((folder / CONFIG_FILE).read_bytes()).hexdigest()


def shapes_digest(shapes: Mapping[str, Sequence[int]]) -> str:
    """Digest of names and shapes of trained tensors."""
    text = json.dumps({key: list(shape) for key, shape in sorted(shapes.items())})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_adapter(folder: Path, spec: AdapterSpec, facts: ModelFacts, family: Family) -> None:
    """Refuses a PEFT folder of another adapter or another model, as far as its headers and the model's sizes tell.

    Takes milliseconds; `read_adapter` compares the rest, once the model's modules are known.

    Raises:
        ConfigError: as for `read_adapter`.
    """
    theirs, entries = _read_headers(folder)
    _check_same_scaling(theirs, {"lora_alpha": spec.alpha} | msgspec.to_builtins(spec))
    found = {(lora[1], lora[2], key): entry.shape for key, entry in entries.items() if (lora := _LORA.search(key))}
    there = {name for name, _, _ in found}
    asked = spec.target_modules
    if asked == "auto":
        asked = [name for name in family.default_targets if name in there or name not in family.optional_modules]
    saved = spec.modules_to_save if isinstance(spec.modules_to_save, list) else []
    if spec.exclude_modules or spec.target_parameters or saved:
        asked = "judged later"  # the names in the file do not say what was asked for
    if isinstance(asked, list) and (ours := {name.rpartition(".")[2] for name in asked}) != there:
        raise ConfigError(
            f"adapter.target_modules must be as in adapter.init_from, got {', '.join(sorted(ours))}, "
            f"there {', '.join(sorted(there))}"
        )
    for (_, side, key), shape in found.items():
        if (layer := layer_of(key)) is not None and layer >= facts.num_hidden_layers:
            raise ConfigError(
                f"adapter.init_from must be of a model with {facts.num_hidden_layers} layers, got one with {key}"
            )
        if not spec.rank_pattern and shape[0 if side == "A" else -1] != spec.r:
            raise ConfigError(f"adapter.init_from must fit adapter.r={spec.r}, but {key} has shape {shape} there")
    for module, sizes in _outer_sizes(found).items():
        if facts.hidden_size not in sizes and module.rpartition(".")[2] not in family.inner_modules:
            raise ConfigError(
                f"adapter.init_from must be of a model with hidden size {facts.hidden_size}, but {module} goes from "
                f"{sizes[0]} to {sizes[1]} there"
            )


def read_adapter(folder: str | Path, adapter: ResolvedAdapter) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT folder, which must be an adapter of exactly this shape.

    Raises:
        ConfigError: files are missing or pickled, tensors are missing, left over or of another shape, or the
            folder's scaling differs.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    theirs, _ = _read_headers(folder)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except Exception as exc:  # safetensors raises its own SafetensorError without a common base
        raise ConfigError(f"adapter.init_from cannot be read: {folder}: {exc}") from None
    _check_same_scaling(theirs, adapter.config.to_dict())
    for key, shape in adapter.shapes.items():
        if key not in tensors:
            raise ConfigError(f"adapter.init_from must hold every tensor that trains, lacks {key}")
        if list(tensors[key].shape) != shape:
            raise ConfigError(
                f"adapter.init_from must fit adapter.r and the model: {key} has shape "
                f"{list(tensors[key].shape)} there and {shape} here"
            )
    if extra := sorted(set(tensors) - set(adapter.shapes)):
        raise ConfigError(f"adapter.init_from must hold nothing that this adapter does not train, got {extra[0]}")
    return dict(tensors)


def _read_headers(folder: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """PEFT's configuration, and what tensors there are."""
    if (folder / "adapter_model.bin").exists() and not (folder / WEIGHTS_FILE).exists():
        raise ConfigError(
            f"adapter.init_from must hold {WEIGHTS_FILE}, got only a pickled adapter_model.bin in {folder}"
        )
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            hint = f"; did you mean {folder / 'adapter'}?" if (folder / "adapter" / name).is_file() else ""
            raise ConfigError(
                f"adapter.init_from must be a folder of a PEFT adapter, found no {name} in {folder}{hint}"
            )
    if _is_part(folder / WEIGHTS_FILE):
        raise ConfigError(
            f"adapter.init_from must be a whole adapter, got a stage's part in {folder}: RUN/adapter, or put the parts "
            "together with python -m hetero.adapters merge --stages"
        )
    try:
        theirs = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(theirs, dict):
            raise ValueError(f"{CONFIG_FILE} must hold a JSON object")
        return theirs, read_entries(folder / WEIGHTS_FILE)
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"adapter.init_from cannot be read: {folder}: {one_line(exc)}") from None


def _is_part(file: Path) -> bool:
    try:
        return PART_KEY in read_metadata(file)
    except (OSError, ValueError):
        return False  # judged by whoever reads the tensors


def _outer_sizes(found: dict[tuple[str, str, str], list[int]]) -> dict[str, list[int]]:
    """Full name of a module -> sizes of what it reads and writes, of LoRA's A [R, in] and B [out, R]."""
    sizes: dict[str, list[int]] = {}
    for (_, side, key), shape in sorted(found.items(), key=lambda item: item[0][1]):  # A first
        sizes.setdefault(key.partition(".lora_")[0], []).append(shape[-1 if side == "A" else 0])
    return {name: pair for name, pair in sizes.items() if len(pair) == 2}


def _check_same_scaling(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    inits = [options.get("init_lora_weights", True) for options in (theirs, ours)]
    if inits[0] != inits[1] and any(init in FROM_BASE for init in inits):
        raise ConfigError(
            f"adapter.init_lora_weights must be as in adapter.init_from, got {inits[1]!r}, there {inits[0]!r}: "
            f"{' and '.join(FROM_BASE)} change the base weights"
        )
    for key, name in (
        ("lora_alpha", "adapter.alpha"),
        ("use_rslora", "adapter.use_rslora"),
        ("use_dora", "adapter.use_dora"),
        ("rank_pattern", "adapter.rank_pattern"),
        ("alpha_pattern", "adapter.alpha_pattern"),
        ("lora_bias", "adapter.lora_bias"),
        ("bias", "adapter.bias"),
    ):
        if theirs.get(key) != ours.get(key) and (theirs.get(key) or ours.get(key)):
            raise ConfigError(
                f"{name} must be as in adapter.init_from, got {ours.get(key)!r}, there {theirs.get(key)!r}"
            )


def save_adapter(
    folder: Path, adapter: ResolvedAdapter, tensors: Mapping[str, torch.Tensor], part: StagePart | None = None
) -> None:
    """Writes a standard PEFT folder of the whole model, or of a stage's part.

    Args:
        folder: made if it is not there; files in it are replaced one by one by renaming.
        adapter: of the whole model.
        tensors: global key -> values.
        part: which part it is, where it is one; written into the file of the tensors.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(adapter.config)
    config.inference_mode = True
    config.save_pretrained(folder)
    metadata = {"format": "pt"}
    if part is not None:
        digests = {"config": config_digest(folder), "adapter": shapes_digest(adapter.shapes)}
        metadata[PART_KEY] = msgspec.json.encode(msgspec.structs.replace(part, **digests)).decode()
    temporary = folder / f".{WEIGHTS_FILE}.part"
    own = {key: value.detach().cpu().contiguous() for key, value in sorted(tensors.items())}
    save_file(own, temporary, metadata)
    temporary.chmod((folder / CONFIG_FILE).stat().st_mode)  # it is written for this user alone, whatever the umask
    temporary.replace(folder / WEIGHTS_FILE)


def check_complete(adapter: ResolvedAdapter, tensors: dict[str, torch.Tensor]) -> None:
    """Asserts that gathered tensors are those of the whole adapter, no more and no fewer."""
    found = {key: list(value.shape) for key, value in tensors.items()}
    assert found == adapter.shapes, f"stages gave {len(found)} tensors, the whole adapter has {len(adapter.shapes)}"

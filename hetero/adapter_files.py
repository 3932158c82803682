"""Adapters on disk: standard PEFT folders of the whole model, safetensors and JSON."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from hetero.adapters import ResolvedAdapter
from hetero.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def read_adapter(folder: str | Path, adapter: ResolvedAdapter) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT folder, which must be an adapter of exactly this shape.

    Raises:
        ConfigError: files are missing or pickled, tensors are missing, left over or of another shape, or the
            folder's scaling differs.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    if (folder / "adapter_model.bin").exists() and not (folder / WEIGHTS_FILE).exists():
        raise ConfigError(
            f"adapter.init_from must hold {WEIGHTS_FILE}, got only a pickled adapter_model.bin in {folder}"
        )
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"adapter.init_from must be a folder of a PEFT adapter, found no {name} in {folder}")
    try:
        theirs = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
        if not isinstance(theirs, dict):
            raise ValueError(f"{CONFIG_FILE} must hold a JSON object")
    except Exception as exc:  # safetensors raises its own SafetensorError without a common base
        raise ConfigError(f"adapter.init_from cannot be read: {folder}: {exc}") from None
    _check_same_scaling(theirs, adapter.config)
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


def _check_same_scaling(theirs: dict[str, Any], config: Any) -> None:
    ours = config.to_dict()
    for key, name in (
        ("lora_alpha", "adapter.alpha"),
        ("use_rslora", "adapter.use_rslora"),
        ("use_dora", "adapter.use_dora"),
        ("rank_pattern", "adapter.rank_pattern"),
        ("alpha_pattern", "adapter.alpha_pattern"),
    ):
        if theirs.get(key) != ours.get(key) and (theirs.get(key) or ours.get(key)):
            raise ConfigError(
                f"{name} must be as in adapter.init_from, got {ours.get(key)!r}, there {theirs.get(key)!r}"
            )


def save_adapter(folder: Path, adapter: ResolvedAdapter, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a standard PEFT folder of the whole model (or, for a worker, of its part).

    Args:
        folder: made if it is not there; files in it are replaced one by one by renaming.
        adapter: of the whole model.
        tensors: global key -> values.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(adapter.config)
    config.inference_mode = True
    temporary = folder / f".{WEIGHTS_FILE}.part"
    save_file(
        {key: value.detach().cpu().contiguous() for key, value in sorted(tensors.items())}, temporary, {"format": "pt"}
    )
    temporary.replace(folder / WEIGHTS_FILE)
    config.save_pretrained(folder)


def check_complete(adapter: ResolvedAdapter, tensors: dict[str, torch.Tensor]) -> None:
    """Asserts that gathered tensors are those of the whole adapter, no more and no fewer."""
    found = {key: list(value.shape) for key, value in tensors.items()}
    assert found == adapter.shapes, f"stages gave {len(found)} tensors, the whole adapter has {len(adapter.shapes)}"

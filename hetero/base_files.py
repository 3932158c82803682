"""The tensors of a base model's files by the names of the model, 4-bit ones as the 16-bit ones that they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero.errors import ConfigError
from hetero.folders import one_line
from hetero.shards import INDEX
from hetero.tensor_files import Entry, read_entries
from hetero.tensor_stream import NAMES, read_tensor

SINGLE = "model.safetensors"


@dataclass(frozen=True)
class BaseTensor:
    """A tensor of the base: where it is, and where the numbers that its 4 bits stand for are kept.

    Attributes:
        file: that holds it.
        key: its name there.
        entry: its place there.
        dtype: of the values.
        shape: of the values.
        quantised: names and places of what belongs to 4-bit values; empty for others.
    """

    file: Path
    key: str
    entry: Entry
    dtype: str
    shape: list[int]
    quantised: Mapping[str, Entry] = field(default_factory=dict)

    def read(self) -> torch.Tensor:
        """Its values."""
        raw = read_tensor(self.file, self.entry)
        if not self.quantised:
            return raw
        from bitsandbytes.functional import QuantState, dequantize_4bit

        about = {key: read_tensor(self.file, entry) for key, entry in self.quantised.items()}
        state = QuantState.from_dict(about, device=torch.device("cpu"))
        values: torch.Tensor = dequantize_4bit(raw, state)
        return values.reshape(self.shape)


def read_base(folder: Path, config: Mapping[str, Any]) -> dict[str, list[BaseTensor]]:
    """File name -> its tensors, with 4-bit ones as one tensor each.

    Raises:
        ConfigError: files are damaged, or the base is quantised in another way than bitsandbytes' 4 bits.
    """
    quantised = is_quantised(config)
    found = {}
    for name in _file_names(folder):
        try:
            entries = read_entries(folder / name)
            found[name] = _tensors(folder / name, entries, quantised)
        except (ValueError, KeyError) as exc:
            raise ConfigError(f"the base model's file {folder / name} is damaged: {one_line(exc)}") from None
    return found


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether a base holds bitsandbytes' 4-bit values.

    Raises:
        ConfigError: it is quantised in another way.
    """
    about = config.get("quantization_config")
    if about is None:
        return False
    if about.get("quant_method", "bitsandbytes") == "bitsandbytes" and about.get("load_in_4bit"):
        return True
    raise ConfigError(
        f"--base must be a model in 16 or 32 bits or in bitsandbytes' 4 bits, got one that is quantised by "
        f"{about.get('quant_method')!r}; name the model that it was made from: --base PATH"
    )


def _file_names(folder: Path) -> Sequence[str]:
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return [SINGLE]
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def _tensors(file: Path, entries: dict[str, Entry], quantised: bool) -> list[BaseTensor]:
    states = [key for key in entries if ".quant_state.bitsandbytes__" in key] if quantised else []
    belongs: dict[str, dict[str, Entry]] = {}
    for state in states:
        weight = state.partition(".quant_state.")[0]
        belongs[weight] = {key[len(weight) + 1 :]: e for key, e in entries.items() if key.startswith(f"{weight}.")}
    parts = {f"{weight}.{key}" for weight, own in belongs.items() for key in own}
    found = []
    for key, entry in entries.items():
        if key in parts:
            continue
        dtype, shape = entry.dtype, entry.shape
        if key in belongs:
            packed = next(e for k, e in belongs[key].items() if k.startswith("quant_state."))
            about = json.loads(bytes(read_tensor(file, packed).tolist()))
            dtype, shape = NAMES[getattr(torch, about["dtype"])], list(about["shape"])
        found.append(BaseTensor(file, key, entry, dtype, shape, belongs.get(key, {})))
    return found

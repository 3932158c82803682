"""The tensors of a base model's files by the names of the model, 4-bit ones as the values that they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero.errors import ConfigError
from hetero.folders import one_line
from hetero.mxfp4 import BLOCKS, SCALES, values_of
from hetero.shards import INDEX
from hetero.tensor_files import Entry, read_entries
from hetero.tensor_stream import NAMES, read_tensor

SINGLE = "model.safetensors"
_NF4_STATE = ".quant_state.bitsandbytes__"


@dataclass(frozen=True)
class Stored:
    """Where a tensor is."""

    file: Path
    entry: Entry

    def read(self) -> torch.Tensor:
        """What is there."""
        return read_tensor(self.file, self.entry)


@dataclass(frozen=True)
class BaseTensor:
    """A tensor of the base: where it is, and where the numbers that its 4 bits stand for are kept.

    Attributes:
        file: that holds it.
        key: its name there, without what says that it is packed.
        entry: its place there.
        dtype: of the values.
        shape: of the values.
        quantised: what belongs to 4-bit values; empty for others. By bitsandbytes' names for nf4; `_scales` for mxfp4.
    """

    file: Path
    key: str
    entry: Entry
    dtype: str
    shape: list[int]
    quantised: Mapping[str, Stored] = field(default_factory=dict)

    def read(self) -> torch.Tensor:
        """Its values."""
        raw = read_tensor(self.file, self.entry)
        if not self.quantised:
            return raw
        about = {key: stored.read() for key, stored in self.quantised.items()}
        if SCALES in about:
            return values_of(raw, about[SCALES])
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = QuantState.from_dict(about, device=torch.device("cpu"))
        values: torch.Tensor = dequantize_4bit(raw, state)
        return values.reshape(self.shape)


def read_base(folder: Path, config: Mapping[str, Any]) -> dict[str, list[BaseTensor]]:
    """File name -> its tensors, with 4-bit ones as one tensor each, in the file that has their values.

    Raises:
        ConfigError: files are damaged, or the base is quantised in a way that is not known here.
    """
    kind = stored_in(config)
    stored: dict[str, Stored] = {}
    for name in _file_names(folder):
        try:
            stored |= {key: Stored(folder / name, entry) for key, entry in read_entries(folder / name).items()}
        except (ValueError, KeyError) as exc:
            raise _damaged(folder / name, exc) from None
    found: dict[str, list[BaseTensor]] = {}
    belonging = {"none": _nothing, "nf4": _of_nf4, "mxfp4": _of_mxfp4}[kind](stored)
    parts = {key for own in belonging.values() for key in own.values()}
    for key, place in stored.items():
        if key not in parts:
            try:
                own = {name: stored[part] for name, part in belonging.get(key, {}).items()}
                found.setdefault(place.file.name, []).append(_base_tensor(key, place, own))
            except (ValueError, KeyError) as exc:
                raise _damaged(place.file, exc) from None
    return found


def stored_in(config: Mapping[str, Any]) -> str:
    """In which numbers a base is: `none` (16 or 32 bits), `nf4` (or bitsandbytes' other 4 bits) or `mxfp4`.

    Raises:
        ConfigError: in others.
    """
    about = config.get("quantization_config")
    if about is None:
        return "none"
    method = about.get("quant_method", "bitsandbytes")
    if method == "mxfp4" or (method == "bitsandbytes" and about.get("load_in_4bit")):
        return "mxfp4" if method == "mxfp4" else "nf4"
    raise ConfigError(
        "--base must be a model in 16 or 32 bits, in bitsandbytes' 4 bits or in mxfp4, got one that is quantised by "
        f"{method!r}; name the model that it was made from: --base PATH"
    )


def _damaged(file: Path, exc: Exception) -> ConfigError:
    return ConfigError(f"the base model's file {file} is damaged: {one_line(exc)}")


def _file_names(folder: Path) -> Sequence[str]:
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return [SINGLE]
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def _nothing(_stored: Mapping[str, Stored]) -> dict[str, dict[str, str]]:
    return {}


def _of_nf4(stored: Mapping[str, Stored]) -> dict[str, dict[str, str]]:
    """Key of a packed weight -> bitsandbytes' names for what belongs to it -> their keys."""
    found = {}
    for weight in (key.partition(".quant_state.")[0] for key in stored if _NF4_STATE in key):
        found[weight] = {key[len(weight) + 1 :]: key for key in stored if key.startswith(f"{weight}.")}
    return found


def _of_mxfp4(stored: Mapping[str, Stored]) -> dict[str, dict[str, str]]:
    """Key of blocks -> `_scales` -> their key."""
    blocks = [key for key in stored if key.endswith(BLOCKS)]
    return {key: {SCALES: key.removesuffix(BLOCKS) + SCALES} for key in blocks}


def _base_tensor(key: str, place: Stored, own: Mapping[str, Stored]) -> BaseTensor:
    entry = place.entry
    if SCALES in own:
        experts, made, pieces, half = entry.shape
        return BaseTensor(place.file, key.removesuffix(BLOCKS), entry, "BF16", [experts, pieces * half * 2, made], own)
    if own:
        packed = next(stored for name, stored in own.items() if name.startswith("quant_state."))
        about = json.loads(bytes(packed.read().tolist()))
        return BaseTensor(place.file, key, entry, NAMES[getattr(torch, about["dtype"])], list(about["shape"]), own)
    return BaseTensor(place.file, key, entry, entry.dtype, entry.shape)

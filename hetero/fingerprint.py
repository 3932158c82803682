"""Digests of a base model, by which two machines see that they hold the same one without sending it.

Of each tensor go in: name, dtype, shape, and the first and last 2 KiB of its bytes. Tensors of a layer share one
digest, so machines that hold different parts can compare what both have.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.tensor_files import read_entries

SAMPLE_BYTES = 2048
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LAYER = re.compile(r"(?:^|\.)((?:layers|h)\.\d+)\.")
# Keys of config.json that tools write for themselves; they say nothing about the model.
_VOLATILE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")


def fingerprint(folder: Path) -> dict[str, str]:
    """What of a model is in a folder: part -> digest; parts are `config`, `tokenizer`, each layer, and other tensors.

    Where an index names the model's files, only those count, and a layer that is here in part only has no digest.

    Raises:
        ConfigError: a file is not safetensors, or config.json is no JSON object.
    """
    config = _read_config(folder / "config.json")
    plain = {key: value for key, value in config.items() if key not in _VOLATILE}
    found = {"config": _digest(json.dumps(plain, sort_keys=True).encode())}
    if (folder / "tokenizer.json").is_file():
        found["tokenizer"] = _digest((folder / "tokenizer.json").read_bytes())
    parts: dict[str, dict[str, bytes]] = {}
    weight_map = _weight_map(folder)
    for file in sorted(folder.glob("*.safetensors")):
        if weight_map is None or file.name in weight_map.values():
            for name, content in _tensors(file):
                parts.setdefault(_part_of(name), {})[name] = content
    lacking = {_part_of(name) for name in weight_map or () if name not in parts.get(_part_of(name), {})}
    for part, tensors in parts.items():
        if part in lacking:
            continue
        found[part] = _digest(b"".join(name.encode() + b"\0" + tensors[name] for name in sorted(tensors)))
    return found


def difference(mine: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first part that both have and that differs, with both digests; None where all agree."""
    for part in sorted(mine.keys() & theirs.keys()):
        if mine[part] != theirs[part]:
            return f"{part} has the digest {theirs[part]} there and {mine[part]} here"
    return None


def _part_of(name: str) -> str:
    layer = _LAYER.search(name)
    return layer[1] if layer else name


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor -> file by the model's index; None for a model in one file."""
    if (folder / _SINGLE).exists() or not (folder / _INDEX).is_file():
        return None
    found = _read_config(folder / _INDEX).get("weight_map")
    return found if isinstance(found, dict) else None


def _read_config(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{file} must be a JSON object ({exc}); copy it again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must be a JSON object, got a {type(found).__name__}; copy it again")
    return found


def _tensors(file: Path) -> list[tuple[str, bytes]]:
    """Name and sampled content of each tensor of a safetensors file."""
    try:
        entries = read_entries(file)
    except ValueError as exc:
        raise ConfigError(f"{file} must be a safetensors file ({exc}); copy it again") from None
    found = []
    with file.open("rb") as stream:
        for name, entry in entries.items():
            stream.seek(entry.begin)
            first = stream.read(min(SAMPLE_BYTES, entry.end - entry.begin))
            stream.seek(max(entry.begin, entry.end - SAMPLE_BYTES))
            last = stream.read(min(SAMPLE_BYTES, entry.end - entry.begin))
            about = json.dumps([entry.dtype, entry.shape]).encode()
            found.append((name, about + first + last))
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]

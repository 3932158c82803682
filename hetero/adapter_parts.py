"""The parts of an adapter that the stages of a run have kept, made one again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from hetero.adapter_config import CONFIG_FILE
from hetero.adapter_files import PART_FOLDER, PART_KEY, WEIGHTS_FILE, StagePart, shapes_digest
from hetero.adapter_whole import uneven
from hetero.errors import ConfigError
from hetero.families import layer_of
from hetero.folders import one_line
from hetero.tensor_files import read_metadata

# A worker writes down its own name of the base model, which may be another folder than the coordinator's.
_OF_A_MACHINE = ("base_model_name_or_path",)


def unite(folders: Sequence[Path]) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[StagePart]]:
    """One adapter from the folders that every stage of one run has kept.

    Returns:
        PEFT's configuration, the tensors by global key, and what the stages say of their parts, the first's first.

    Raises:
        ConfigError: a folder is none, or they are not the parts of one run and one step, each layer once.
    """
    found = [(file, *_read_part(file)) for file in map(_file_of, folders)]
    found.sort(key=lambda one: (one[1].start, one[1].stage))
    first_file, first, config, _ = found[0]
    for file, part, theirs, _ in found[1:]:
        for what in ("run", "step", "num_layers"):
            if getattr(part, what) != getattr(first, what):
                raise ConfigError(
                    f"--stages must be folders of one {'run' if what == 'num_layers' else what}, got "
                    f"{what} {getattr(first, what)} in {first_file} and {getattr(part, what)} in {file}"
                )
        if _shared(theirs) != _shared(config):
            raise ConfigError(f"--stages must be folders of one adapter, {CONFIG_FILE} differs beside {file}")
    _check_cover([(file, part) for file, part, _, _ in found])
    tensors: dict[str, torch.Tensor] = {}
    for file, part, _, own in found:
        for key, value in own.items():
            layer = layer_of(key)
            if key in tensors or (layer is not None and not part.start <= layer < part.end):
                raise ConfigError(f"{file} must hold layers [{part.start}, {part.end}) alone, got {key}")
            tensors[key] = value
    if not tensors:
        raise ConfigError(f"--stages must hold trained tensors, got none in {first_file} and the others")
    check_digest(first.adapter, tensors, "--stages")
    return config, tensors, [part for _, part, _, _ in found]


def check_digest(digest: str, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Compares names and shapes with what a run recorded of its adapter; empty: it recorded nothing.

    Raises:
        ConfigError: they differ; it names a tensor that is missing, where the layers tell which.
    """
    shapes = {key: list(value.shape) for key, value in tensors.items()}
    if digest and shapes_digest(shapes) != digest:
        missing = uneven(shapes)
        what = f"it lacks {missing}" if missing else "its tensors' names and shapes are not those that the run recorded"
        raise ConfigError(f"{where} must hold the whole adapter that was trained, {what}: take a whole one")


def is_part(file: Path) -> bool:
    """Whether a file of tensors holds a stage's part only."""
    try:
        return PART_KEY in read_metadata(file)
    except ValueError:
        return False


def _file_of(folder: Path) -> Path:
    for place in (folder, folder / PART_FOLDER):
        if (place / WEIGHTS_FILE).is_file():
            return place / WEIGHTS_FILE
    raise ConfigError(f"--stages must be folders that a stage has kept ({PART_FOLDER}), found none at {folder}")


def _read_part(file: Path) -> tuple[StagePart, dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    try:
        said = read_metadata(file).get(PART_KEY)
        if said is None:
            raise ConfigError(
                f"--stages must be folders that stages of a run have kept, but {file} does not say of which: it is a "
                "whole adapter, or of an older version"
            )
        part = msgspec.json.decode(said.encode(), type=StagePart)
        raw = (file.parent / CONFIG_FILE).read_bytes()
        if hashlib.sha256(raw).hexdigest() != part.config:
            raise ConfigError(
                f"{file.parent / CONFIG_FILE} must be the one that was written with {file.name}, it differs"
            )
        return part, json.loads(raw), load_file(file)
    except ConfigError:
        raise
    except Exception as exc:  # safetensors raises its own SafetensorError without a common base
        raise ConfigError(f"{file} cannot be read: {one_line(exc)}") from None


def _shared(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _OF_A_MACHINE}


def _check_cover(parts: Sequence[tuple[Path, StagePart]]) -> None:
    at, before = 0, None
    for file, part in parts:
        if part.start > at:
            raise ConfigError(f"--stages must hold each layer once, layer {at} is missing before {file}")
        if part.start < at:
            raise ConfigError(f"--stages must hold each layer once, layer {part.start} is in {before} and in {file}")
        at, before = part.end, file
    if at != parts[-1][1].num_layers:
        raise ConfigError(
            f"--stages must hold each layer once, layer {at} of {parts[-1][1].num_layers} is missing after {before}"
        )

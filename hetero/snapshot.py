"""State of a run at the end of a step, as a folder of safetensors and JSON that is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch

from hetero.errors import CheckpointError
from hetero.families import layer_of
from hetero.folders import one_line

FORMAT = 1
MANIFEST_FILE = "manifest.json"
_MAX_MANIFEST_BYTES = 64 * 1024 * 1024
_PART_NAME = re.compile(r"layer-[0-9]{5,}\.safetensors|other\.safetensors")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """State of a run at the end of a step.

    Args:
        step: the optimizer step, counted from 1; 0 is the state before the first.
        tensors: on the host, by name: `adapter:<global key>` and `optimizer.<moment>:<global key>`. A key's
            `.layers.<n>.` or `.h.<n>.` says to which layer it belongs.
        about: plain JSON that the caller records: run, spec, digests, versions.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    about: dict[str, Any]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the manifest says of a file."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Part:
        """What it says of a file that holds this."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step's table of contents; in the file, `sha256` is over everything else in it.

    `tensors` says for each tensor in which file it is.
    """

    format: int
    step: int
    files: dict[str, Part]
    tensors: dict[str, str]
    about: dict[str, Any]

    def to_bytes(self) -> bytes:
        """The file: the same content gives the same bytes; raises ValueError where it is too large to be read again."""
        data = _sealed(msgspec.to_builtins(self))
        if len(data) > _MAX_MANIFEST_BYTES:
            raise ValueError(f"a manifest must have {_MAX_MANIFEST_BYTES} bytes at most, got {len(data)}")
        return data


def part_files(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file that the tensors make, a layer at a time; they do not depend on the split."""
    names_of_part: dict[str, list[str]] = {}
    for name in sorted(tensors):
        names_of_part.setdefault(part_of(name), []).append(name)
    for part, names in sorted(names_of_part.items()):
        # safetensors takes neither views nor tensors that share memory.
        own = {name: tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in names}
        yield part, safetensors.torch.save(own)


def part_of(name: str) -> str:
    """The file that a tensor belongs to."""
    layer = layer_of(name)
    return "other.safetensors" if layer is None else f"layer-{layer:05d}.safetensors"


def manifest_of(snapshot: Snapshot, files: dict[str, Part]) -> Manifest:
    """The manifest of a snapshot whose files have been written.

    Raises:
        TypeError: `about` holds something that is not JSON.
        ValueError: `about` holds a number that is not finite.
    """
    tensors = {name: part_of(name) for name in snapshot.tensors}
    about = json.loads(json.dumps(snapshot.about, allow_nan=False))  # keys are strings from here on
    return Manifest(FORMAT, snapshot.step, files, tensors, about)


def read_snapshot(folder: Path, step: int) -> tuple[Snapshot, Manifest]:
    """Reads the folder of a step; every byte has been checked when this returns.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise CheckpointError(f"{folder}: must be a folder, a symbolic link or file is refused")
        present = sorted(name for name in os.listdir(folder) if not name.startswith("."))  # Finder leaves such files
        for name in present:
            if name.endswith(_PICKLE_SUFFIXES):
                raise CheckpointError(f"{folder / name}: is pickled, which can run code when it is loaded; refused")
        if MANIFEST_FILE not in present:
            raise CheckpointError(f"{folder}: has no {MANIFEST_FILE}, so it was never complete")
        manifest = read_manifest(folder / MANIFEST_FILE, step)
        for name in sorted({MANIFEST_FILE, *manifest.files} ^ set(present)):
            fault = "is missing"
            if name not in manifest.files:
                fault = f"is not in {MANIFEST_FILE} and does not belong here: move it away"
            raise CheckpointError(f"{folder / name}: {fault}")
        tensors: dict[str, torch.Tensor] = {}
        for name, part in sorted(manifest.files.items()):
            tensors |= _read_part(folder / name, part, {key for key, file in manifest.tensors.items() if file == name})
    except OSError as exc:
        raise CheckpointError(f"{exc.filename or folder}: cannot be read: {exc.strerror or one_line(exc)}") from exc
    return Snapshot(step, {name: tensors[name] for name in sorted(tensors)}, manifest.about), manifest


def read_manifest(file: Path, step: int) -> Manifest:
    """Reads a manifest, of which a changed byte shows.

    Raises:
        CheckpointError: it is damaged, of another format or step, or names files that a checkpoint does not have.
        OSError: it cannot be read.
    """
    if (size := _size_of(file)) > _MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{file}: must have {_MAX_MANIFEST_BYTES} bytes at most, got {size}")
    try:
        plain = _unsealed(_read_file(file, size))
        if plain.get("format") != FORMAT:
            raise CheckpointError(f"{file}: must be of format {FORMAT}, got {plain.get('format')!r}")
        manifest = msgspec.convert(plain, Manifest)
    except ValueError as exc:  # that of msgspec is one too
        raise CheckpointError(f"{file}: is damaged: {one_line(exc)}") from exc
    if manifest.step != step:
        raise CheckpointError(f"{file}: must be of step {step}, got {manifest.step}")
    for name in sorted({*manifest.files, *manifest.tensors.values()}):
        if not _PART_NAME.fullmatch(name):
            raise CheckpointError(f"{file}: names the file {name!r}, which a checkpoint does not have; refused")
        if name not in manifest.files:
            raise CheckpointError(f"{file}: says of no file {name!r} how large it is")
    return manifest


def _read_part(file: Path, part: Part, names: set[str]) -> dict[str, torch.Tensor]:
    if (size := _size_of(file)) != part.num_bytes:
        raise CheckpointError(f"{file}: must have {part.num_bytes} bytes, got {size}")
    data = _read_file(file, size)
    if Part.of(data) != part:
        raise CheckpointError(f"{file}: is damaged: its SHA-256 is not the one in {MANIFEST_FILE}")
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(data)
    except Exception as exc:  # safetensors raises its own SafetensorError without a common base
        raise CheckpointError(f"{file}: is not a safetensors file: {one_line(exc)}") from exc
    for name in sorted(set(tensors) ^ names):
        raise CheckpointError(f"{file}: {'must' if name in names else 'must not'} hold the tensor {name!r}")
    return tensors


def _size_of(file: Path) -> int:
    info = os.lstat(file)
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(f"{file}: must be a regular file, a symbolic link or folder is refused")
    return info.st_size


def _read_file(file: Path, num_bytes: int) -> bytes:
    """The content of a regular file of this size; it may have become a symbolic link or another file by now."""
    no_follow = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | no_follow)) as stream:
        return stream.read(num_bytes + 1)


def _sealed(plain: dict[str, Any]) -> bytes:
    """JSON with a digest of itself in it."""
    return _encoded(plain | {"sha256": hashlib.sha256(_encoded(plain)).hexdigest()})


def _unsealed(raw: bytes) -> dict[str, Any]:
    try:
        plain = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON any more") from None
    if not isinstance(plain, dict):
        raise ValueError("it must hold a JSON object")
    plain.pop("sha256", None)
    try:
        whole = _sealed(plain) == raw
    except (ValueError, RecursionError):  # a number that is not finite
        whole = False
    if not whole:
        raise ValueError("its content is not the one that its digest is of")
    return plain


def _encoded(plain: dict[str, Any]) -> bytes:
    return (json.dumps(plain, indent=1, sort_keys=True, allow_nan=False) + "\n").encode("ascii")

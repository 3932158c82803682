"""What a safetensors file holds, from its header and its size alone; no tensor is read."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

_MAX_HEADER_BYTES = 100_000_000  # what the library takes


@dataclass(frozen=True)
class Entry:
    """One tensor: its dtype as the file names it, its shape, and where it lies in the file."""

    dtype: str
    shape: list[int]
    begin: int
    end: int


def read_entries(file: Path) -> dict[str, Entry]:
    """Name -> entry of each tensor in the order of the header; the file has all of their bytes and no more.

    Raises:
        ValueError: it is no whole safetensors file, or cannot be read; its text is the reason.
    """
    raw, size = _read_header(file)
    entries = _entries(raw, 8 + len(raw))
    last = max((entry.end for entry in entries.values()), default=8 + len(raw))
    if last != size:
        raise ValueError(f"its tensors end at byte {last} and the file at byte {size}")
    return entries


def read_metadata(file: Path) -> dict[str, str]:
    """What a safetensors file says of itself beside its tensors.

    Raises:
        ValueError: as `read_entries`.
    """
    raw, _ = _read_header(file)
    try:
        header = json.loads(raw)
        found = header.get("__metadata__", {})
        return {key: value for key, value in found.items() if isinstance(value, str)}
    except (ValueError, RecursionError, AttributeError):
        raise ValueError("its header is no JSON object") from None


def _read_header(file: Path) -> tuple[bytes, int]:
    """The header's bytes, and the size of the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if length > _MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            raw = stream.read(length)
    except OSError as exc:
        raise ValueError((exc.strerror or str(exc)).lower()) from None
    if len(start) < 8 or len(raw) < length:
        raise ValueError("it ends within its header")
    return raw, size


def _entries(raw: bytes, base: int) -> dict[str, Entry]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("its header is no JSON object") from None
    try:
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        found = {}
        for name, about in header.items():
            if name == "__metadata__":
                continue
            begin, end = about["data_offsets"]
            if not 0 <= begin <= end:
                raise ValueError(f"tensor {name!r} lies at [{begin}, {end})")
            found[name] = Entry(about["dtype"], list(about["shape"]), base + begin, base + end)
    except (KeyError, TypeError) as exc:
        raise ValueError(f"its header cannot be read: {type(exc).__name__} {exc}") from None
    return found

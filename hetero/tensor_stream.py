"""A safetensors file written tensor by tensor, so that a model of any size passes through little memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from hetero.tensor_files import Entry

CHUNK_BYTES = 1 << 22

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written.

    Attributes:
        key: its name in the file.
        dtype: as safetensors names it.
        shape: its sizes.
        write: puts its bytes into the file, in C order.
    """

    key: str
    dtype: str
    shape: Sequence[int]
    write: Callable[[BinaryIO], None]

    def num_bytes(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


def write_file(file: Path, planned: Sequence[Planned]) -> int:
    """Writes a safetensors file, one tensor after the other; gives the bytes of its tensors."""
    # Wide numbers first, as the library has it, so that each tensor is aligned.
    ordered = sorted(planned, key=lambda one: (-DTYPES[one.dtype].itemsize, one.key))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in ordered:
        header[one.key] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, at + one.num_bytes()]}
        at += one.num_bytes()
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("xb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for one in ordered:
            before = stream.tell()
            one.write(stream)
            assert stream.tell() - before == one.num_bytes(), one.key
    return at


def from_tensor(tensor: torch.Tensor) -> Callable[[BinaryIO], None]:
    """What writes a tensor on the host."""

    def write(out: BinaryIO) -> None:
        out.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    return write


def from_file(file: Path, entry: Entry, dtype: str) -> Callable[[BinaryIO], None]:
    """What copies a tensor out of another file, in pieces, as numbers of another float type where one is asked for."""

    def write(out: BinaryIO) -> None:
        with file.open("rb") as source:
            source.seek(entry.begin)
            left = entry.end - entry.begin
            while left:
                piece = source.read(min(left, CHUNK_BYTES))
                assert piece, f"{file} has become shorter"
                left -= len(piece)
                if dtype == entry.dtype:
                    out.write(piece)
                else:
                    numbers = torch.frombuffer(bytearray(piece), dtype=DTYPES[entry.dtype]).to(DTYPES[dtype])
                    from_tensor(numbers)(out)

    return write


def read_tensor(file: Path, entry: Entry) -> torch.Tensor:
    """One tensor of a file, in memory of its own."""
    with file.open("rb") as source:
        source.seek(entry.begin)
        raw = bytearray(entry.end - entry.begin)
        assert source.readinto(raw) == len(raw), f"{file} has become shorter"
    if not raw:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    return torch.frombuffer(raw, dtype=DTYPES[entry.dtype]).reshape(entry.shape)

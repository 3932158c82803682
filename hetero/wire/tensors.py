"""Tensors <-> payload: raw little-endian bytes without a copy, and the buffers that payloads are received into."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch

from hetero.wire.headers import STATE_CHUNK_BYTES, State, TensorEntry

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float64", "int64", "float32", "int32", "bfloat16", "float16", "int8", "uint8", "bool")
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack(tensors: dict[str, torch.Tensor]) -> tuple[list[TensorEntry], list[memoryview]]:
    """The table and the bytes of some tensors.

    The bytes are views of contiguous CPU tensors and copies of others; they must not change until they are sent.
    Wide elements come first, so that every tensor is aligned to its own element size without padding.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    table = [TensorEntry(name, NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in ordered]  # type: ignore[arg-type]
    return table, [as_bytes(tensor) for _, tensor in ordered if tensor.numel()]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor, a view where it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").reshape(-1)
    if flat.stride() != (1,):  # one element counts as contiguous whatever its stride
        flat = flat.contiguous().as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).numpy().data


def unpack(table: Sequence[TensorEntry], payload: memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a payload, as views of it."""
    tensors, offset = {}, 0
    for entry in table:
        dtype = DTYPES[entry.dtype]
        if entry.nbytes():
            count = entry.nbytes() // dtype.itemsize
            flat = torch.frombuffer(payload, dtype=dtype, count=count, offset=offset)
        else:
            flat = torch.empty(0, dtype=dtype)
        tensors[entry.name] = flat.view(entry.shape)
        offset += entry.nbytes()
    return tensors


def state_frames(tensors: dict[str, torch.Tensor]) -> list[tuple[State, list[memoryview]]]:
    """State of any size as (header, payload) of STATE frames of at most 1 MiB, so that heartbeats pass between them."""
    frames: list[tuple[State, list[memoryview]]] = []
    for index, (name, tensor) in enumerate(tensors.items()):
        entry = TensorEntry(name, NAMES[tensor.dtype], list(tensor.shape))  # type: ignore[arg-type]
        raw = as_bytes(tensor) if tensor.numel() else memoryview(b"")
        for offset in range(0, max(raw.nbytes, 1), STATE_CHUNK_BYTES):
            header = State(index=index, total=len(tensors), tensor=entry, offset=offset)
            frames.append((header, [raw[offset : offset + STATE_CHUNK_BYTES]] if raw.nbytes else []))
    return frames


# What a pool of receive buffers may hold unused.
MAX_KEPT_BYTES = 1 << 28


class BufferPool:
    """Receive buffers, 64-byte aligned, that return here by themselves once no tensor uses them.

    A fresh large allocation costs a page fault every 4 KiB, about as much as receiving the bytes; so buffers are kept.

    Args:
        max_kept_bytes: how much may lie here unused.
    """

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._kept_bytes = 0
        self._lock = threading.RLock()

    def take(self, num_bytes: int) -> memoryview:
        """A buffer of exactly `num_bytes`; tensors made of it by `unpack` keep it alive."""
        with self._lock:
            kept = self._kept.get(num_bytes)
            slab = kept.pop() if kept else None
            if slab is not None:
                self._kept_bytes -= num_bytes
                self._kept[num_bytes] = self._kept.pop(num_bytes)  # last in order: last to be let go
        if slab is None:
            slab = torch.empty(num_bytes, dtype=torch.uint8)
        lease = slab.numpy()
        weakref.finalize(lease, self._give_back, slab)
        return lease.data

    def _give_back(self, slab: torch.Tensor) -> None:
        with self._lock:
            self._kept.setdefault(slab.nbytes, []).append(slab)
            self._kept_bytes += slab.nbytes
            while self._kept_bytes > self._max_kept_bytes:  # sizes that no frame asks for any more go first
                oldest = next(iter(self._kept))
                if self._kept[oldest]:
                    self._kept_bytes -= self._kept[oldest].pop().nbytes
                else:
                    del self._kept[oldest]

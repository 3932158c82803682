"""State of a stage on the wire: tensors of any size from STATE frames of at most 1 MiB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hetero.errors import PeerError
from hetero.training_state import may_be_state
from hetero.wire.headers import State, TensorEntry
from hetero.wire.tensors import DTYPES, as_bytes

MAX_FOR_EACH = 12  # tensors of state for one that trains; AdamW has 4, one in 8 bits 8


class StateAssembler:
    """Puts the pieces of a sender's STATE frames together, each where it belongs and once.

    Args:
        expected: global key -> shape of every tensor that trains on the stage; nothing is allocated for what cannot be
            its state.
        total: how many tensors must come; None leaves that to the sender, who may send fewer than are expected.
    """

    def __init__(self, expected: Mapping[str, Sequence[int]], total: int | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._expected, self._total = expected, total
        self._entry: TensorEntry | None = None  # of the tensor that is half there
        self._next_index = 0
        self._next_offset = 0

    def add(self, header: State, payload: memoryview) -> bool:
        """Takes the next piece; True when all tensors of this sender are complete.

        Raises:
            PeerError: it is not the piece that must follow, or a tensor that is not expected.
        """
        if self._total is None:
            if header.total > MAX_FOR_EACH * len(self._expected):
                raise PeerError(f"announced {header.total} tensors of state for {len(self._expected)} that train")
            self._total = header.total
        if (header.index, header.offset, header.total) != (self._next_index, self._next_offset, self._total):
            raise PeerError("sent pieces of state out of order")
        if header.total == 0:
            return True
        entry = header.tensor
        if self._entry is None:
            self._begin(entry)
        elif entry != self._entry:
            raise PeerError(f"sent another tensor in the middle of {self._entry.name!r}")
        end = header.offset + payload.nbytes
        if end > entry.nbytes() or (payload.nbytes == 0 and entry.nbytes()):
            raise PeerError(f"sent state {entry.name!r} of the wrong size")
        if payload.nbytes:
            as_bytes(self.tensors[entry.name])[header.offset : end] = payload
        done = end == entry.nbytes()
        self._entry = None if done else entry
        self._next_index, self._next_offset = (header.index + 1, 0) if done else (header.index, end)
        return done and header.index == self._total - 1

    def _begin(self, entry: TensorEntry) -> None:
        if not may_be_state(entry, self._expected):
            raise PeerError(f"sent state {entry.name!r} {entry.dtype} {entry.shape}, which this run does not have")
        if entry.name in self.tensors:
            raise PeerError(f"sent state {entry.name!r} twice")
        self.tensors[entry.name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])

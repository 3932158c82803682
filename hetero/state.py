"""State of a stage on the wire: tensors of any size from STATE frames of at most 1 MiB."""

from __future__ import annotations

import torch

from hetero.errors import PeerError
from hetero.wire.headers import State
from hetero.wire.tensors import DTYPES, as_bytes


class StateAssembler:
    """Puts the pieces of a sender's STATE frames together, each where it belongs and once.

    Args:
        expected: name -> shape of every tensor that may come; None lets any through, within `max_bytes`.
        max_bytes: limit of all tensors together.
    """

    def __init__(self, expected: dict[str, list[int]] | None = None, max_bytes: int = 1 << 36) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._expected, self._left = expected, max_bytes
        self._next_index = 0
        self._next_offset = 0

    def add(self, header: State, payload: memoryview) -> bool:
        """Takes the next piece; True when all tensors of this sender are complete.

        Raises:
            PeerError: it is not the piece that must follow, or a tensor that is not expected.
        """
        entry = header.tensor
        if self._expected is not None and self._expected.get(entry.name) != list(entry.shape):
            raise PeerError(f"sent state {entry.name} {list(entry.shape)}, which this run does not have")
        if (header.index, header.offset) != (self._next_index, self._next_offset):
            raise PeerError("sent pieces of state out of order")
        if header.offset == 0:
            self._left -= entry.nbytes()
            if self._left < 0 or entry.name in self.tensors:
                raise PeerError(f"sent too much state, or {entry.name} twice")
            self.tensors[entry.name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        end = header.offset + payload.nbytes
        if end > entry.nbytes() or (payload.nbytes == 0 and entry.nbytes()):
            raise PeerError(f"sent state {entry.name} of the wrong size")
        if payload.nbytes:
            as_bytes(self.tensors[entry.name])[header.offset : end] = payload
        done = end == entry.nbytes()
        self._next_index, self._next_offset = (header.index + 1, 0) if done else (header.index, end)
        return done and header.index == header.total - 1

"""What a link may carry while text is generated: batch after batch of prompts, piece by piece, and their sizes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from hetero.errors import RemoteProtocolError
from hetero.wire.headers import Ended, Hidden, Prompt, TensorEntry


def pack_prompts(lengths: Sequence[int], numbers: Sequence[int]) -> bytes:
    """Tokens and number of each prompt as little-endian int32 [2, rows]."""
    return struct.pack(f"<{2 * len(lengths)}i", *lengths, *numbers)


def unpack_prompts(payload: bytes | memoryview) -> tuple[list[int], list[int]]:
    """What `pack_prompts` packed: lengths and numbers; the length must be a multiple of 8 bytes."""
    found = struct.unpack(f"<{len(payload) // 4}i", payload)
    return list(found[: len(found) // 2]), list(found[len(found) // 2 :])


class GenerationFlow:
    """Keeps count of a link's batches on either side, and refuses what the plan does not imply.

    Args:
        hidden_size: H of hidden [B, T, H].
        dtype: its dtype on this link.
        max_rows: most prompts of a batch.
        max_length: most tokens of a prompt and what follows it.
    """

    def __init__(self, *, hidden_size: int, dtype: str, max_rows: int, max_length: int) -> None:
        self._hidden_size, self._dtype = hidden_size, dtype
        self._max_rows, self._max_length = max_rows, max_length
        self._batch: Prompt | None = None
        self._next_batch = self._next_position = 0

    def begin(self, header: Prompt, payload: bytes | memoryview) -> None:
        """A PROMPT was sent or received.

        Raises:
            RemoteProtocolError: the batch before is not over, or this one is larger than the plan allows.
        """
        if self._batch is not None or header.batch != self._next_batch:
            raise RemoteProtocolError(
                f"PROMPT of batch {self._next_batch} may come once the one before is over, got batch {header.batch}"
            )
        if not (1 <= header.rows <= self._max_rows and header.length >= 1 and header.max_new_tokens >= 1):
            raise RemoteProtocolError(
                f"a batch has 1 to {self._max_rows} prompts of at least a token, and at least one that follows; got "
                f"{header.rows} of {header.length} and {header.max_new_tokens}"
            )
        if header.length + header.max_new_tokens > self._max_length:
            raise RemoteProtocolError(
                f"a prompt and what follows have at most {self._max_length} tokens, got {header.length} and "
                f"{header.max_new_tokens}"
            )
        if not math.isfinite(header.temperature):
            raise RemoteProtocolError("a temperature must be a finite number")
        if len(payload) != 8 * header.rows:
            raise RemoteProtocolError(
                f"PROMPT of {header.rows} rows carries {8 * header.rows} bytes, got {len(payload)}"
            )
        lengths, numbers = unpack_prompts(payload)
        if max(lengths) != header.length or min(lengths) < 1 or min(numbers) < 0:
            raise RemoteProtocolError(f"prompts have 1 to {header.length} tokens, the longest all of them")
        self._batch, self._next_position = header, 0

    def piece(self, header: Hidden, payload_bytes: int) -> None:
        """A HIDDEN is about to be sent or received.

        Raises:
            RemoteProtocolError: it is not the piece that must follow, in exactly this size.
        """
        batch = self._batch
        if batch is None or header.batch != batch.batch or header.position != self._next_position:
            raise RemoteProtocolError(
                f"HIDDEN of batch {'none' if batch is None else batch.batch} position {self._next_position} must "
                f"follow, got batch {header.batch} position {header.position}"
            )
        if header.position >= batch.max_new_tokens:
            raise RemoteProtocolError(f"at most {batch.max_new_tokens} tokens follow these prompts, got one more")
        shape = [batch.rows, 1 if header.position else batch.length, self._hidden_size]
        expected = TensorEntry("hidden", self._dtype, shape)  # type: ignore[arg-type]
        if header.tensor != expected or payload_bytes != expected.nbytes():
            raise RemoteProtocolError(
                f"HIDDEN must hold {expected.dtype} {expected.shape}, got {header.tensor.name[:60]!r} "
                f"{header.tensor.dtype} {header.tensor.shape} in {payload_bytes} bytes"
            )
        self._next_position += 1

    def end(self, header: Ended) -> None:
        """An ENDED was sent or received.

        Raises:
            RemoteProtocolError: there is no such batch.
        """
        if self._batch is None or header.batch != self._batch.batch:
            raise RemoteProtocolError(f"ENDED of batch {header.batch} came, which is not under way")
        self._batch = None
        self._next_batch += 1

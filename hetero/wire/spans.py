"""What a stage did when, in a step: spans <-> the tail of a READY's payload, every value checked."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence

from hetero.errors import RemoteProtocolError

# A name's place is its number on the wire. `sending`: handed over, and not all of it written when the step was over.
NAMES = (
    "forward",
    "backward",
    "wait forward",
    "wait backward",
    "send forward",
    "send backward",
    "receive forward",
    "receive backward",
    "sending forward",
    "sending backward",
)
MAX_SPANS = 4096  # of a stage in a step: 512 micro-batches
SPAN = struct.Struct("<ddII")  # start, end, kind, micro-batch: a multiple of 8 bytes, as the norms before it
_NUMBERS = {name: number for number, name in enumerate(NAMES)}

# Start and end in seconds on the clock of the process that did it, name, micro-batch.
WorkSpan = tuple[float, float, str, int]


def pack_spans(spans: Sequence[WorkSpan]) -> bytes:
    """The bytes of a stage's spans."""
    return b"".join(SPAN.pack(start, end, _NUMBERS[name], at) for start, end, name, at in spans)


def unpack_spans(payload: bytes | memoryview, num_micro_batches: int) -> list[WorkSpan]:
    """What `pack_spans` packed, of a step of so many micro-batches.

    Raises:
        RemoteProtocolError: a span that cannot be.
    """
    found: list[WorkSpan] = []
    for start, end, number, micro_batch in SPAN.iter_unpack(payload):
        if number >= len(NAMES) or micro_batch >= num_micro_batches:
            raise RemoteProtocolError(
                f"a span must be one of {len(NAMES)} kinds and {num_micro_batches} micro-batches, "
                f"got kind {number} and micro-batch {micro_batch}"
            )
        if not (math.isfinite(start) and math.isfinite(end) and start <= end):
            raise RemoteProtocolError(f"a span must end after its start, got {start} to {end}")
        found.append((start, end, NAMES[number], micro_batch))
    if repeated := [key for key, count in Counter((name, at) for _, _, name, at in found).items() if count > 1]:
        raise RemoteProtocolError(f"a span must stand once, {repeated[0][0]} of micro-batch {repeated[0][1]} does not")
    return found

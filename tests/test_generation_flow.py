"""What a link may carry of generation: order, sizes, and limits that the run's plan gives."""

from __future__ import annotations

import msgspec
import pytest
from peers import EXAMPLES, HIDDEN

from hetero.errors import RemoteProtocolError
from hetero.wire.generation_flow import GenerationFlow, pack_prompts, unpack_prompts
from hetero.wire.headers import Ended, FrameType, Hidden, Prompt, TensorEntry

PROMPT = EXAMPLES[FrameType.PROMPT][0]
assert isinstance(PROMPT, Prompt)
PAYLOAD = pack_prompts([3, 2], [0, 1])
NEXT = TensorEntry("hidden", "float32", [2, 1, 4])


def begun() -> GenerationFlow:
    flow = GenerationFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=6)
    flow.begin(PROMPT, PAYLOAD)
    return flow


def test_lengths_and_numbers_are_little_endian_int32() -> None:
    assert bytes([3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]) == PAYLOAD
    assert unpack_prompts(memoryview(PAYLOAD)) == ([3, 2], [0, 1])


def test_batches_that_go_as_planned_follow_one_another() -> None:
    flow = GenerationFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=6)
    for batch in range(3):
        flow.begin(msgspec.structs.replace(PROMPT, batch=batch), PAYLOAD)
        flow.piece(Hidden(batch, 0, HIDDEN), 96)
        for position in range(1, 1 + batch):
            flow.piece(Hidden(batch, position, NEXT), 32)
        flow.end(Ended(batch))


@pytest.mark.parametrize(
    ("changes", "payload", "says"),
    [
        ({"batch": 1}, PAYLOAD, "PROMPT of batch 0 may come"),
        ({"rows": 3}, pack_prompts([3, 3, 3], [0, 1, 2]), "1 to 2 prompts"),
        ({"rows": 0}, b"", "1 to 2 prompts"),
        ({"max_new_tokens": 0}, PAYLOAD, "at least one that follows"),
        ({"max_new_tokens": 4}, PAYLOAD, "at most 6 tokens, got 3 and 4"),
        ({"length": 4}, PAYLOAD, "at most 6 tokens|the longest all of them"),
        ({"length": 2}, PAYLOAD, "the longest all of them"),
        ({}, PAYLOAD[:-8], "carries 16 bytes, got 8"),
        ({}, pack_prompts([3, 0], [0, 1]), "1 to 3 tokens"),
        ({}, pack_prompts([3, 2], [0, -1]), "1 to 3 tokens"),
        ({"max_new_tokens": 2**53 - 1}, PAYLOAD, "at most 6 tokens"),
    ],
)
def test_a_batch_beyond_the_plan_is_refused(changes: dict[str, int], payload: bytes, says: str) -> None:
    flow = GenerationFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=6)
    with pytest.raises(RemoteProtocolError, match=says):
        flow.begin(msgspec.structs.replace(PROMPT, **changes), payload)


def test_a_batch_waits_for_the_end_of_the_one_before() -> None:
    flow = begun()
    with pytest.raises(RemoteProtocolError, match="once the one before is over"):
        flow.begin(msgspec.structs.replace(PROMPT, batch=1), PAYLOAD)
    with pytest.raises(RemoteProtocolError, match="not under way"):
        flow.end(Ended(1))
    flow.end(Ended(0))
    with pytest.raises(RemoteProtocolError, match="not under way"):
        flow.end(Ended(0))
    with pytest.raises(RemoteProtocolError, match="batch none"):
        flow.piece(Hidden(0, 0, HIDDEN), 96)


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        (Hidden(1, 0, HIDDEN), 96),
        (Hidden(0, 1, HIDDEN), 96),
        (Hidden(0, 0, NEXT), 32),
        (Hidden(0, 0, HIDDEN), 95),
        (Hidden(0, 0, TensorEntry("grad", "float32", [2, 3, 4])), 96),
        (Hidden(0, 0, TensorEntry("hidden", "bfloat16", [2, 3, 4])), 48),
        (Hidden(0, 0, TensorEntry("hidden", "float32", [2, 3, 2**39])), 96),
    ],
)
def test_a_piece_is_exactly_what_must_follow(header: Hidden, num_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match="HIDDEN"):
        begun().piece(header, num_bytes)


def test_no_more_pieces_than_the_batch_announced() -> None:
    flow = begun()
    flow.piece(Hidden(0, 0, HIDDEN), 96)
    for position in (1, 2):
        flow.piece(Hidden(0, position, NEXT), 32)
    with pytest.raises(RemoteProtocolError, match="at most 3 tokens follow"):
        flow.piece(Hidden(0, 3, NEXT), 32)

"""State from a peer that may send anything: refused by a PeerError, and nothing is allocated that was not expected."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import PeerError
from hetero.state import StateAssembler
from hetero.wire.headers import STATE_CHUNK_BYTES, State, TensorEntry
from hetero.wire.tensors import state_frames

EXPECTED = {"a": [2, 3], "b": [STATE_CHUNK_BYTES // 4 + 5], "c": []}
HUGE = (1 << 40) - 1
A = TensorEntry("adapter:a", "float32", [2, 3])


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"adapter:{key}": torch.randn(shape, generator=generator) for key, shape in EXPECTED.items()}


def pieces(values: dict[str, torch.Tensor]) -> list[tuple[State, memoryview]]:
    return [(header, memoryview(b"".join(payload))) for header, payload in state_frames(values)]


def assemble(found: list[tuple[State, memoryview]], total: int | None = None) -> StateAssembler:
    assembler = StateAssembler(EXPECTED, total)
    ends = [assembler.add(header, payload) for header, payload in found]
    assert ends == [False] * (len(ends) - 1) + [True]
    return assembler


def refused(header: State, payload: bytes = b"", assembler: StateAssembler | None = None) -> str:
    """The refusal of a piece; it has left no tensor."""
    assembler = assembler or StateAssembler(EXPECTED)
    before = set(assembler.tensors)
    with pytest.raises(PeerError) as caught:
        assembler.add(header, memoryview(payload))
    assert set(assembler.tensors) == before
    return str(caught.value)


@pytest.mark.parametrize("total", [None, 3])
def test_what_was_sent_comes_together_to_the_last_bit(total: int | None) -> None:
    values = tensors()
    assert len(pieces(values)) == 4  # one of them in two pieces
    found = assemble(pieces(values), total).tensors
    assert found.keys() == values.keys() and all(torch.equal(found[name], values[name]) for name in values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_that_trains_is_taken(dtype: torch.dtype) -> None:
    values = {"adapter:a": torch.arange(6, dtype=dtype).view(2, 3)}
    (header, payload) = pieces(values)[0]
    assembler = StateAssembler(EXPECTED)
    assert assembler.add(header, payload)
    assert torch.equal(assembler.tensors["adapter:a"], values["adapter:a"])


def test_sender_may_have_nothing_or_a_part_where_no_number_was_announced() -> None:
    nothing = State(0, 0, TensorEntry("nothing", "uint8", [0]), 0)
    assembler = StateAssembler(EXPECTED)
    assert assembler.add(nothing, memoryview(b"")) and assembler.tensors == {}
    part = {"adapter:c": tensors()["adapter:c"]}
    assert torch.equal(assemble(pieces(part)).tensors["adapter:c"], part["adapter:c"])


@pytest.mark.parametrize(
    "entry",
    [
        TensorEntry("adapter:a", "float32", [3, 2]),
        TensorEntry("adapter:a", "float32", [6]),
        TensorEntry("adapter:a", "float32", [2, 3, 1]),
        TensorEntry("adapter:a", "float32", []),
        TensorEntry("adapter:a", "float64", [2, 3]),
        TensorEntry("adapter:a", "int64", [2, 3]),
        TensorEntry("adapter:a", "bool", [2, 3]),
        TensorEntry("adapter:a", "float32", [HUGE] * 6),
        TensorEntry("adapter:d", "float32", [HUGE]),
        TensorEntry("adapter:d", "float32", [2, 3]),
        TensorEntry("", "float32", [2, 3]),
        TensorEntry("adapter:a\0", "float32", [2, 3]),
        TensorEntry("../../a", "float32", [2, 3]),
        TensorEntry("adapter:d", "float32", [0] * 6),
    ],
    ids=str,
)
def test_tensor_that_this_run_does_not_have_is_refused_before_allocation(
    entry: TensorEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: Any, **__: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(torch, "empty", allocate)
    text = refused(State(0, 1, entry, 0), bytes(24))
    assert "which this run does not have" in text and text.isprintable()


@pytest.mark.parametrize(
    "change",
    [
        {"index": 1},
        {"index": HUGE},
        {"offset": 4},
        {"offset": HUGE},
        {"total": 2},
        {"total": 0},
        {"total": HUGE},
    ],
    ids=str,
)
def test_piece_out_of_order_is_refused(change: dict[str, int]) -> None:
    header = msgspec.structs.replace(State(0, 1, A, 0), **change)
    assert "out of order" in refused(header, bytes(24), StateAssembler(EXPECTED, 1))


def test_number_of_tensors_may_not_change_on_the_way() -> None:
    assembler = StateAssembler(EXPECTED)
    assert not assembler.add(State(0, 2, A, 0), memoryview(bytes(24)))
    assert "out of order" in refused(State(1, 3, TensorEntry("adapter:c", "float32", []), 0), bytes(4), assembler)


def test_more_tensors_than_are_expected_can_not_come() -> None:
    assembler = StateAssembler({"a": [2, 3]})
    assert not assembler.add(State(0, 2, A, 0), memoryview(bytes(24)))
    assert "twice" in refused(State(1, 2, A, 0), bytes(24), assembler)


@pytest.mark.parametrize("size", [0, 25, 1 << 20])
def test_piece_of_the_wrong_size_is_refused(size: int) -> None:
    assembler = StateAssembler(EXPECTED)
    with pytest.raises(PeerError, match="wrong size"):
        assembler.add(State(0, 1, A, 0), memoryview(bytes(size)))


@pytest.mark.parametrize(
    "other",
    [
        TensorEntry("adapter:c", "float32", []),
        TensorEntry("adapter:a", "float32", [2, 4]),
        TensorEntry("adapter:a", "float16", [2, 3]),
    ],
    ids=str,
)
def test_other_tensor_in_the_middle_of_one_is_refused(other: TensorEntry) -> None:
    """The size that the first piece named stays the one that counts."""
    assembler = StateAssembler(EXPECTED)
    assert not assembler.add(State(0, 1, A, 0), memoryview(bytes(8)))
    with pytest.raises(PeerError, match="another tensor in the middle of 'adapter:a'"):
        assembler.add(State(0, 1, other, 8), memoryview(bytes(1)))


def test_piece_that_would_end_behind_the_tensor_is_refused() -> None:
    assembler = StateAssembler(EXPECTED)
    assert not assembler.add(State(0, 1, A, 0), memoryview(bytes(20)))
    with pytest.raises(PeerError, match="wrong size"):
        assembler.add(State(0, 1, A, 20), memoryview(bytes(5)))
    assert assembler.tensors["adapter:a"].nbytes == 24


def test_empty_pieces_do_not_go_on_for_ever() -> None:
    assembler = StateAssembler(EXPECTED)
    assert not assembler.add(State(0, 1, A, 0), memoryview(bytes(4)))
    with pytest.raises(PeerError, match="wrong size"):
        assembler.add(State(0, 1, A, 4), memoryview(b""))


def test_names_of_a_peer_are_shown_without_control_characters() -> None:
    text = refused(State(0, 1, TensorEntry("\x1b[2J\n", "float32", [1]), 0), bytes(4))
    assert text.isprintable()


def test_refused_state_costs_no_memory() -> None:
    draw = random.Random(3)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            shape = [draw.choice((0, 1, 3, 1 << 20, HUGE)) for _ in range(draw.randrange(7))]
            entry = TensorEntry(f"adapter:{draw.choice('abcd')}", draw.choice(("float32", "float64", "uint8")), shape)  # type: ignore[arg-type]
            if list(entry.shape) == EXPECTED.get(entry.name[-1]):
                continue
            assembler = StateAssembler(EXPECTED)
            with pytest.raises(PeerError):
                assembler.add(State(0, draw.choice((1, HUGE)), entry, 0), memoryview(b"12345678"))
            assert assembler.tensors == {}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


NAMES = st.sampled_from(["adapter:a", "adapter:b", "adapter:c", "adapter:d", "", "adapter:a\x00"])
ENTRIES = st.builds(
    TensorEntry,
    name=NAMES,
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "float64", "int64", "uint8", "bool"]),
    shape=st.sampled_from(list(EXPECTED.values())) | st.lists(st.integers(0, HUGE) | st.integers(0, 4), max_size=6),
)
HEADERS = st.builds(
    State,
    index=st.integers(0, 3) | st.integers(0, 1 << 52),
    total=st.integers(0, 3) | st.integers(0, 1 << 52),
    tensor=ENTRIES,
    offset=st.integers(0, 32) | st.integers(0, 1 << 52),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(HEADERS, st.binary(max_size=30)), max_size=6), st.none() | st.integers(0, 4))
def test_any_pieces_are_taken_or_refused_and_only_expected_tensors_exist(
    found: list[tuple[State, bytes]], total: int | None
) -> None:
    assembler, error = StateAssembler(EXPECTED, total), ""
    try:
        for header, payload in found:
            if assembler.add(header, memoryview(payload)):
                break
    except PeerError as exc:
        error = str(exc)
    assert error.isprintable()
    for name, tensor in assembler.tensors.items():
        assert list(tensor.shape) == EXPECTED[name.removeprefix("adapter:")]
        assert tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_one_change_to_what_was_sent_is_noticed_or_changes_numbers_alone(data: st.DataObject) -> None:
    sent = pieces(tensors())
    at = data.draw(st.integers(0, len(sent) - 1))
    change = data.draw(st.sampled_from(["drop", "double", "swap", "cut", "name", "header"]))
    header, payload = sent[at]
    if change == "drop":
        del sent[at]
    elif change == "double":
        sent.insert(at, sent[at])
    elif change == "swap":
        other = (at + 1) % len(sent)
        sent[at], sent[other] = sent[other], sent[at]
    elif change == "cut":
        sent[at] = (header, payload[: data.draw(st.integers(0, payload.nbytes - 1))])
    elif change == "name":
        sent[at] = (msgspec.structs.replace(header, tensor=msgspec.structs.replace(header.tensor, name="d")), payload)
    else:
        name = data.draw(st.sampled_from(["index", "total", "offset"]))
        sent[at] = (msgspec.structs.replace(header, **{name: getattr(header, name) + 1}), payload)
    assembler = StateAssembler(EXPECTED, 3)
    ends = []
    try:
        ends = [assembler.add(h, p) for h, p in sent]
    except PeerError:
        return
    assert not any(ends)  # a piece less: it waits for the rest

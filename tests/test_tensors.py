import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import Events

from hetero.transport.loopback import link_pair
from hetero.transport.tcp import TcpTransport
from hetero.wire.headers import DTYPE_BYTES, STATE_CHUNK_BYTES, FrameType, State, TensorEntry
from hetero.wire.tensors import DTYPES, NAMES, BufferPool, as_bytes, pack, state_frames, unpack


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Any bit pattern, NaNs with payloads and denormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def over_the_wire(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """What comes back from pack and unpack, and the payload's bytes."""
    table, payload = pack(tensors)
    raw = b"".join(payload)
    return unpack(table, memoryview(bytearray(raw))), len(raw)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "every second": lambda t: t[:, ::2],
    "from the middle": lambda t: t[1:, 1:3, 2:],
    "expanded": lambda t: t[:1].expand(5, -1, -1),
    "0-dim": lambda t: t[1, 2, 3],
    "one element": lambda t: t[1:2, 2:3, 3],
    "empty": lambda t: t[:, :0],
    "six dimensions": lambda t: t.reshape(1, 3, 1, 4, 5, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DTYPES)
def test_round_trip_is_exact_to_the_bit_and_as_small_as_the_numbers(name: str, layout: str) -> None:
    tensor = LAYOUTS[layout](random_bits((3, 4, 5), DTYPES[name]))
    back, num_bytes = over_the_wire({"x": tensor})
    assert same(back["x"], tensor)
    assert num_bytes == tensor.numel() * tensor.element_size()


def test_every_dtype_of_the_wire_has_its_size_and_its_name() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == DTYPE_BYTES
    assert {NAMES[dtype]: dtype for dtype in NAMES} == DTYPES


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=6)), min_size=1, max_size=8
    )
)
def test_many_tensors_share_a_payload_without_gaps_and_each_is_aligned(layouts: list[tuple[str, list[int]]]) -> None:
    tensors = {f"t{i}": random_bits(tuple(shape), DTYPES[name], i) for i, (name, shape) in enumerate(layouts)}
    table, payload = pack(tensors)
    assert all(part.nbytes for part in payload)
    offset = 0
    for entry in table:
        assert offset % DTYPE_BYTES[entry.dtype] == 0
        offset += entry.nbytes()
    assert offset == sum(part.nbytes for part in payload) == sum(t.numel() * t.element_size() for t in tensors.values())
    back, _ = over_the_wire(tensors)
    assert back.keys() == tensors.keys() and all(same(back[name], tensors[name]) for name in tensors)


def test_contiguous_tensor_is_packed_as_a_view_and_unpacked_as_a_view() -> None:
    tensor = torch.zeros(4)
    _, (raw,) = pack({"x": tensor})
    tensor[2] = 1.0
    assert bytes(raw[8:12]) == b"\0\0\x80\x3f"
    room = bytearray(16)
    back = unpack([TensorEntry("x", "float32", [4])], memoryview(room))["x"]
    room[8:12] = b"\0\0\x80\x3f"
    assert back.tolist() == [0, 0, 1, 0]


def test_tensor_of_a_graph_is_packed_without_it() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    back, _ = over_the_wire({"x": tensor})
    assert back["x"].tolist() == [2, 2] and not back["x"].requires_grad


def test_packed_bytes_outlive_their_tensor() -> None:
    raw = as_bytes(torch.full((1000,), 7.0))
    gc.collect()
    assert torch.frombuffer(bytearray(raw), dtype=torch.float32).eq(7).all()


def test_numbers_are_little_endian() -> None:
    assert bytes(as_bytes(torch.tensor([1], dtype=torch.int64))) == b"\1" + bytes(7)


# --- state in pieces ---------------------------------------------------------------------------------------------

STATE = {
    "small": random_bits((3, 4), torch.float32),
    "empty": torch.empty(0, 5),
    "one chunk": random_bits((STATE_CHUNK_BYTES,), torch.uint8, 2),
    "a byte more": random_bits((STATE_CHUNK_BYTES + 1,), torch.uint8, 3),
    "large": random_bits((701, 1031), torch.float32, 4).t(),
    "0-dim": torch.tensor(3.5, dtype=torch.bfloat16),
}


def assemble(pieces: list[tuple[State, bytes]]) -> dict[str, torch.Tensor]:
    """The tensors of STATE frames, put together the plain way."""
    found: dict[str, tuple[TensorEntry, bytearray]] = {}
    for header, payload in pieces:
        entry, raw = found.setdefault(header.tensor.name, (header.tensor, bytearray()))
        assert (entry, len(raw)) == (header.tensor, header.offset)
        raw += payload
    return {name: unpack([entry], memoryview(raw))[name] for name, (entry, raw) in found.items()}


def test_state_of_any_size_goes_in_pieces_of_at_most_a_mebibyte_and_comes_together() -> None:
    frames = state_frames(STATE)
    sizes = [sum(part.nbytes for part in payload) for _, payload in frames]
    assert max(sizes) == STATE_CHUNK_BYTES
    assert [header.index for header, _ in frames] == [0, 1, 2, 3, 3, 4, 4, 4, 5]
    assert {header.total for header, _ in frames} == {len(STATE)}
    back = assemble([(header, b"".join(payload)) for header, payload in frames])
    assert list(back) == list(STATE) and all(same(back[name], STATE[name]) for name in STATE)


def test_state_comes_together_on_the_other_side_of_a_connection() -> None:
    here, there = Events(), Events()
    coordinator, worker = link_pair(TcpTransport(io_timeout_s=20), here, there, purpose="control")
    coordinator.start()
    worker.start()
    try:
        frames = state_frames(STATE)
        for header, payload in frames:
            worker.send(FrameType.STATE, header, payload)
        there = here.num_frames(len(frames))
    finally:
        for link in (coordinator, worker):
            link.close()
        for link in (coordinator, worker):
            link.join(10)
    back = assemble([(frame.header, bytes(frame.payload)) for frame in there])  # type: ignore[misc]
    assert all(same(back[name], STATE[name]) for name in STATE)


# --- the buffer pool ---------------------------------------------------------------------------------------------


def address(buffer: memoryview) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 1000, 1 << 20, (1 << 20) + 1])
def test_buffer_has_the_size_that_was_asked_for_and_is_aligned(num_bytes: int) -> None:
    buffer = BufferPool().take(num_bytes)
    assert buffer.nbytes == num_bytes and not buffer.readonly
    assert address(buffer) % 64 == 0


def test_buffer_is_used_again_once_nothing_refers_to_it() -> None:
    pool = BufferPool()
    buffer = pool.take(5000)
    first = address(buffer)
    del buffer
    assert address(pool.take(5000)) == first


def test_buffer_in_use_is_never_handed_out() -> None:
    pool = BufferPool()
    buffer = pool.take(4096)
    first = address(buffer)
    tensor = unpack([TensorEntry("x", "float32", [1024])], buffer)["x"]
    part = tensor[100:].view(-1, 4).t()[1]
    del buffer, tensor
    gc.collect()
    part.fill_(7)
    others = [pool.take(4096) for _ in range(5)]
    assert first not in map(address, others)
    for other in others:
        other[:] = bytes(4096)
    assert part.eq(7).all()
    del part
    assert address(pool.take(4096)) == first


def test_every_way_to_hold_a_buffer_keeps_it_from_the_pool() -> None:
    holders: list[Callable[[memoryview], object]] = [
        lambda b: b,
        lambda b: b[10:20],
        lambda b: torch.frombuffer(b, dtype=torch.uint8, offset=8),
        lambda b: torch.frombuffer(b, dtype=torch.uint8).detach().view(torch.int32),
        lambda b: torch.frombuffer(b, dtype=torch.uint8).numpy()[3:],
        lambda b: torch.frombuffer(b, dtype=torch.uint8).untyped_storage(),
        lambda b: torch.utils.dlpack.from_dlpack(torch.frombuffer(b, dtype=torch.uint8)),
    ]
    for hold in holders:
        pool = BufferPool()
        buffer = pool.take(64)
        lent = address(buffer)
        held = hold(buffer)
        del buffer
        assert address(pool.take(64)) != lent
        del held


def test_pool_keeps_no_more_than_it_may_and_lets_old_sizes_go_first() -> None:
    pool = BufferPool(max_kept_bytes=10_000)
    for num_bytes in (6000, 3000, 2000, 11_000):
        del_me = pool.take(num_bytes)
        del del_me
        assert sum(size * len(kept) for size, kept in pool._kept.items()) == pool._kept_bytes <= 10_000
    lent = pool.take(2000)  # asked for last, so still here
    again = address(lent)
    del lent
    assert address(pool.take(2000)) == again


def test_size_that_is_used_again_stays_longer_than_one_that_is_not() -> None:
    pool = BufferPool(max_kept_bytes=10_000)
    first = address(pool.take(4000))
    for num_bytes in (4001, 4000, 4002):
        pool.take(num_bytes)
    assert [size for size, kept in pool._kept.items() if kept] == [4000, 4002]
    assert address(pool.take(4000)) == first


def test_sizes_that_change_for_ever_do_not_stop_the_pool_from_working() -> None:
    pool = BufferPool(max_kept_bytes=100_000)
    for num_bytes in range(1000, 3000, 10):
        pool.take(num_bytes)
    first = address(pool.take(50_000))
    assert address(pool.take(50_000)) == first


def test_pool_s_buffers_end_with_it() -> None:
    pool = BufferPool()
    pool.take(1000)
    slab = weakref.ref(next(iter(pool._kept.values()))[0])
    del pool
    gc.collect()
    assert slab() is None

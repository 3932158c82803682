import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peers import EXAMPLES, Memory, feed, hostile_blobs, raw_frame
from watched import nothing_is_run

from hetero.errors import LocalProtocolError, RemoteProtocolError
from hetero.wire.frames import PREFIX, VERSION, Frame, FrameReader, decode_header, encode
from hetero.wire.headers import (
    HEADERS,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    STATE_CHUNK_BYTES,
    Apply,
    FrameType,
    Gather,
    Header,
    Heartbeat,
    Reason,
)

LIMIT = 1 << 20
MANY = settings(max_examples=200, deadline=None)


def admit_all(type_: FrameType, header: Header, payload_bytes: int) -> None:
    """Lets everything pass."""


def make_reader(memory: Memory | None = None, limit: int = LIMIT) -> FrameReader:
    return FrameReader((memory or Memory()).take, admit_all, limit)


def prefix(
    length: int, *, version: int = VERSION, type_: int = FrameType.GATHER, flags: int = 0, header_bytes: int = 10
) -> bytes:
    return PREFIX.pack(length, version, type_, flags, header_bytes)


def with_header(type_: FrameType, header: bytes, payload: bytes = b"") -> bytes:
    return prefix(8 + len(header) + len(payload), type_=type_, header_bytes=len(header)) + header + payload


def refusal(raw: bytes) -> str:
    memory = Memory()
    with pytest.raises(RemoteProtocolError) as caught:
        feed(make_reader(memory), raw)
    assert memory.taken == []
    return str(caught.value)


def content(frames: list[Frame]) -> list[tuple[FrameType, Header, bytes]]:
    return [(frame.type, frame.header, bytes(frame.payload)) for frame in frames]


def test_prefix_is_laid_out_as_documented() -> None:
    raw = raw_frame(FrameType.STATE)
    header_bytes = len(raw) - 16 - 16
    assert raw[:16] == struct.pack(">QBBHI", len(raw) - 8, 1, 12, 0, header_bytes)
    assert json.loads(raw[16 : 16 + header_bytes])["tensor"] == {"name": "w", "dtype": "float32", "shape": [4]}


def test_there_is_an_example_of_every_frame_type() -> None:
    assert EXAMPLES.keys() == HEADERS.keys() == set(FrameType)


@pytest.mark.parametrize("type_", FrameType)
def test_every_frame_comes_back_as_it_was(type_: FrameType) -> None:
    header, payload = EXAMPLES[type_]
    assert content(feed(make_reader(), raw_frame(type_))) == [(type_, header, payload)]


@MANY
@given(st.lists(st.sampled_from(list(FrameType)), min_size=1, max_size=6), st.data())
def test_any_cut_of_the_stream_gives_the_same_frames(types: list[FrameType], data: st.DataObject) -> None:
    raw = b"".join(raw_frame(type_) for type_ in types)
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=20))
    assert content(feed(make_reader(), raw, cuts)) == [(type_, *EXAMPLES[type_]) for type_ in types]


def test_byte_by_byte_gives_the_same_frames() -> None:
    raw = b"".join(map(raw_frame, FrameType))
    assert content(feed(make_reader(), raw, range(len(raw)))) == [(type_, *EXAMPLES[type_]) for type_ in FrameType]


def test_border_is_known_everywhere_in_a_stream() -> None:
    reader, raw = make_reader(), raw_frame(FrameType.STATE)
    assert reader.at_frame_border()
    for at in range(len(raw)):
        finished = feed(reader, raw[at : at + 1])
        assert reader.at_frame_border() == bool(finished) == (at == len(raw) - 1)


def test_payload_is_received_in_place_and_sent_without_a_copy() -> None:
    room = memoryview(bytearray(16))
    frames = feed(FrameReader(lambda _: room, admit_all, LIMIT), raw_frame(FrameType.STATE, payload=bytes(range(16))))
    assert frames[0].payload is room and bytes(room) == bytes(range(16))
    assert encode(FrameType.STATE, EXAMPLES[FrameType.STATE][0], [room])[1] is room


def test_reader_holds_no_payload_after_it_gave_the_frame() -> None:
    buffers = []

    def take(num_bytes: int) -> memoryview:
        buffers.append(bytearray(num_bytes))
        return memoryview(buffers[-1])

    reader = FrameReader(take, admit_all, LIMIT)
    feed(reader, raw_frame(FrameType.STATE))
    buffers[0].extend(b"x")  # BufferError while a view of it exists


@pytest.mark.parametrize("length", [2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31)])
@pytest.mark.parametrize("type_", FrameType)
def test_oversized_frame_is_refused_before_allocation(type_: FrameType, length: int) -> None:
    text = refusal(prefix(length % 2**64, type_=type_))
    assert f"a {type_.name} frame may carry {MAX_PAYLOAD_BYTES.get(type_, LIMIT)} bytes" in text
    sized_by_plan = (FrameType.FORWARD, FrameType.BACKWARD, FrameType.HIDDEN)
    assert ("transport.max_frame_bytes" in text) == (type_ in sized_by_plan)


@pytest.mark.parametrize("type_", FrameType)
def test_payload_of_the_limit_is_taken_and_one_byte_more_is_not(type_: FrameType) -> None:
    header = b"".join(encode(type_, EXAMPLES[type_][0]))[PREFIX.size :]
    limit = MAX_PAYLOAD_BYTES.get(type_, LIMIT)
    start = prefix(8 + len(header) + limit, type_=type_, header_bytes=len(header)) + header
    memory = Memory()
    feed(make_reader(memory), start)
    assert memory.taken == ([limit] if limit else [])
    refusal(prefix(8 + len(header) + limit + 1, type_=type_, header_bytes=len(header)))


def test_state_travels_in_pieces_of_at_most_a_mebibyte() -> None:
    assert MAX_PAYLOAD_BYTES[FrameType.STATE] == STATE_CHUNK_BYTES == 1 << 20


@pytest.mark.parametrize("header_bytes", [0, 1, MAX_HEADER_BYTES + 1, 1 << 30, 2**32 - 1])
def test_header_of_an_impossible_size_is_refused_from_its_prefix(header_bytes: int) -> None:
    assert "a header has 2 to 16384 bytes" in refusal(prefix(8 + header_bytes, header_bytes=header_bytes))


def test_length_that_is_shorter_than_the_header_is_refused() -> None:
    for length in range(8 + 10):
        refusal(prefix(length, header_bytes=10))


def test_refused_sizes_cost_no_memory() -> None:
    draw = random.Random(3)
    prefixes = [
        prefix(draw.getrandbits(64) | 1 << 32, type_=draw.choice(list(FrameType)), header_bytes=draw.getrandbits(32))
        for _ in range(2000)
    ]
    refusal(prefixes[0])  # whatever is made once
    tracemalloc.start()
    try:
        for raw in prefixes:
            refusal(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_other_version_is_refused_and_both_are_shown() -> None:
    assert refusal(prefix(18, version=7)).startswith("the peer speaks protocol version 7, this side 1")


@pytest.mark.parametrize("number", [0, 18, 255])
def test_unknown_type_is_refused(number: int) -> None:
    assert refusal(prefix(18, type_=number)) == f"there is no frame type {number}"


@pytest.mark.parametrize("flags", [1, 0x8000, 0xFFFF])
def test_flags_are_refused(flags: int) -> None:
    assert "flags must be 0" in refusal(prefix(18, flags=flags))


@pytest.mark.parametrize(
    ("type_", "header", "why"),
    [
        (FrameType.GATHER, b'{"step":1,"step":1}', "a key stands twice"),
        (FrameType.CONTROL, b'{"payload":{"a":1,"a":2},"metadata":{}}', "a key stands twice"),
        (FrameType.GATHER, b'{"step":1,"other":2}', "unknown field `other`"),
        (FrameType.GATHER, b"{}", "missing required field `step`"),
        (FrameType.GATHER, b"[1]", "Expected `object`, got `array`"),
        (FrameType.GATHER, b"null", "Expected `object`"),
        (FrameType.GATHER, b'{"step":-1}', "Expected `int` >= 0"),
        (FrameType.GATHER, b'{"step":9007199254740992}', "Expected `int` <="),
        (FrameType.GATHER, b'{"step":true}', "got `bool`"),
        (FrameType.GATHER, b'{"step":1.0}', "got `float`"),
        (FrameType.GATHER, b'{"step":"1"}', "got `str`"),
        (FrameType.GATHER, b'{"step":1}x', "Extra data"),
        (FrameType.GATHER, b'{"step":1}\x00', "Extra data"),
        (FrameType.GATHER, b'{"step":1' + b"0" * 400 + b"}", "Expected `int` <="),
        (FrameType.GATHER, b'{"step":1' + b"0" * 9000 + b"}", "limit"),
        (FrameType.APPLY, b'{"step":1,"clip_factor":NaN}', "NaN is not a number"),
        (FrameType.APPLY, b'{"step":1,"clip_factor":Infinity}', "Infinity is not a number"),
        (FrameType.APPLY, b'{"step":1,"clip_factor":-Infinity}', "-Infinity is not a number"),
        (FrameType.APPLY, b'{"step":1,"clip_factor":1e999}', "1e999 is out of range"),
        (FrameType.APPLY, b'{"step":1,"clip_factor":1' + b"0" * 400 + b"}", "out of range"),
        (FrameType.CONTROL, b'{"payload":{"a":[1e999]},"metadata":{}}', "1e999 is out of range"),
        (FrameType.CONTROL, b'{"payload":{"a":' + b"[" * 8000, "recursion"),
        (FrameType.CONTROL, b'{"a":' * 3000, "recursion"),
        (FrameType.STOP, '{"reason":"a"}'.encode("utf-16"), "can't decode"),
        (FrameType.STOP, '{"reason":"a"}'.encode("utf-32"), ""),
        (FrameType.STOP, b'{"reason":"\xed\xa0\x80"}', "can't decode"),
        (FrameType.STOP, b'{"reason":"\\ud800"}', "surrogates not allowed"),
        (FrameType.STOP, b'{"\\udc00":"a"}', "surrogates not allowed"),
        (FrameType.STOP, b'{"reason":"\xff"}', "can't decode"),
        (FrameType.STOP, b'{"reason":"a\nb"}', "control character"),
        (FrameType.STOP, b'{"reason":"' + b"a" * 2001 + b'"}', "length <= 2000"),
        (FrameType.WELCOME, b'{"instance":"","versions":{}}', ">= 1"),
        (FrameType.WELCOME, b'{"instance":"..","versions":{}}', "matching regex"),
        (FrameType.WELCOME, b'{"instance":"a/b","versions":{}}', "matching regex"),
        (FrameType.WELCOME, b'{"instance":"a\\n","versions":{}}', "matching regex"),
        (FrameType.HELLO, b'{"purpose":"else"}', "Invalid enum value"),
        (FrameType.FORWARD, b'{"step":1,"micro_batch":0,"tensors":[{"name":"a","dtype":"object","shape":[]}]}', "enum"),
        (
            FrameType.FORWARD,
            b'{"step":1,"micro_batch":0,"tensors":[{"name":"a","dtype":"bool","shape":[1,1,1,1,1,1,1]}]}',
            "length <= 6",
        ),
        (
            FrameType.FORWARD,
            b'{"step":1,"micro_batch":0,"tensors":['
            + b",".join([b'{"name":"a","dtype":"bool","shape":[]}'] * 17)
            + b"]}",
            "length <= 16",
        ),
        (FrameType.FORWARD, b'{"step":1,"micro_batch":0,"tensors":[{"name":"a","dtype":"bool","shape":[-1]}]}', ">= 0"),
        (
            FrameType.FORWARD,
            b'{"step":1,"micro_batch":0,"tensors":[{"name":"a","dtype":"bool","shape":[1099511627776]}]}',
            "<= 1099511627775",
        ),
    ],
)
def test_header_outside_of_its_schema_is_refused(type_: FrameType, header: bytes, why: str) -> None:
    text = refusal(with_header(type_, header))
    assert text.startswith(f"the header of a {type_.name} frame is wrong: ") and why in text


def test_escaped_text_of_any_script_is_accepted() -> None:
    assert decode_header(FrameType.STOP, b'{"reason":"\\ud83d\\ude42 \\u00fc \xc3\xbc"}') == Reason("🙂 ü ü")


def test_wrong_or_long_header_is_the_sender_s_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="a APPLY frame takes Apply, got Gather"):
        encode(FrameType.APPLY, Gather(1))
    with pytest.raises(LocalProtocolError, match="a header may hold 16384 bytes, STOP has 20027"):
        encode(FrameType.STOP, Reason("x" * 20000))


def test_refusal_by_admit_comes_before_allocation() -> None:
    def refuse(type_: FrameType, header: Header, payload_bytes: int) -> None:
        assert (type_, header, payload_bytes) == (FrameType.STATE, EXAMPLES[FrameType.STATE][0], 16)
        raise RemoteProtocolError("not now")

    memory = Memory()
    with pytest.raises(RemoteProtocolError, match="not now"):
        feed(FrameReader(memory.take, refuse, LIMIT), raw_frame(FrameType.STATE))
    assert memory.taken == []


# --- hostile streams ---------------------------------------------------------------------------------------------

STREAM = b"".join(map(raw_frame, FrameType))


def survives(raw: bytes, limit: int = LIMIT) -> bool:
    """Only RemoteProtocolError may come of any bytes, and no buffer beyond the limit; True if nothing came."""
    memory = Memory()
    error = None
    try:
        feed(make_reader(memory, limit), raw)
    except RemoteProtocolError as exc:
        error = str(exc)
    assert error is None or error.isprintable()
    assert max(memory.taken, default=0) <= max(limit, STATE_CHUNK_BYTES)
    return error is None


def mutate(draw: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(changed))
        kind = draw.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[at] = draw.choice(b'\x00\xff"\\{}[],:0eE-.\x7f')
        elif kind == 2:
            del changed[at : at + draw.randrange(1, 9)]
        elif kind == 3:
            changed[at:at] = draw.randbytes(draw.randrange(1, 9))
        elif kind == 4:
            other = draw.randrange(len(changed))
            changed[at:at] = changed[other : other + draw.randrange(64)]
        else:
            changed[at : at + 8] = struct.pack(">Q", draw.choice((0, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
        if not changed:
            return b""
    return bytes(changed)


def test_mutated_streams_only_raise_the_protocol_s_error() -> None:
    draw = random.Random(11)
    frames = [raw_frame(type_) for type_ in FrameType]
    with nothing_is_run(may_read=False):
        outcomes = [survives(mutate(draw, draw.choice(frames))) for _ in range(60_000)]
    assert 3000 < sum(outcomes) < 57_000  # both ways are taken, so the mutations reach deep


@MANY
@given(st.binary(max_size=300))
@example(b"GET / HTTP/1.1\r\nHost: localhost:9999\r\n\r\n" * 3)
@example(b"SSH-2.0-OpenSSH_9.6\r\n")
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40))
def test_random_bytes_only_raise_the_protocol_s_error(raw: bytes) -> None:
    survives(raw)


@MANY
@given(st.sampled_from(list(FrameType)), st.binary(min_size=2, max_size=200))
def test_random_header_bytes_only_raise_the_protocol_s_error(type_: FrameType, header: bytes) -> None:
    survives(with_header(type_, header))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@MANY
@given(st.sampled_from(list(FrameType)), _JSON, st.data())
def test_any_json_in_any_field_only_raises_the_protocol_s_error(
    type_: FrameType, value: Any, data: st.DataObject
) -> None:
    header = b"".join(encode(type_, EXAMPLES[type_][0]))[PREFIX.size :]
    plain = json.loads(header)
    plain[data.draw(st.sampled_from(sorted(plain)))] = value
    survives(with_header(type_, json.dumps(plain).encode()))


def test_hostile_pickles_are_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for blob in hostile_blobs(marker):
        with nothing_is_run(may_read=False):
            assert not survives(blob + bytes(64))
            for type_ in FrameType:
                if len(blob) <= MAX_HEADER_BYTES:
                    assert not survives(with_header(type_, blob))
            header = b"".join(encode(FrameType.HELLO, EXAMPLES[FrameType.HELLO][0]))[PREFIX.size :]
            assert survives(with_header(FrameType.HELLO, header, blob))  # bytes, and nothing more
        assert not marker.exists()


def test_audit_hook_would_see_code_being_run() -> None:
    with pytest.raises(AssertionError), nothing_is_run(may_read=False):
        eval("1")


def test_numbers_survive_to_the_last_bit() -> None:
    for value in (0.1, 1e-308, 5e-324, 1.7976931348623157e308, -0.0, 1 / 3):
        frame = feed(make_reader(), raw_frame(FrameType.APPLY, Apply(2**53 - 1, value)))[0]
        assert struct.pack("d", frame.header.clip_factor) == struct.pack("d", value)  # type: ignore[attr-defined]
        assert frame.header.step == 2**53 - 1  # type: ignore[attr-defined]


def test_stream_of_a_thousand_heartbeats_takes_no_buffer() -> None:
    memory = Memory()
    raw = b"".join(raw_frame(FrameType.HEARTBEAT, Heartbeat(n)) for n in range(1000))
    assert len(feed(make_reader(memory), raw)) == 1000
    assert memory.taken == []

"""Bytes <-> frame; every size is checked before memory is taken for it.

    u64 length (big endian) | u8 version | u8 type | u16 flags | u32 header length | header (JSON) | payload

The length counts all that follows it. The header is JSON of a closed schema, one Struct per frame type; the payload
is raw little-endian tensor bytes (or, for HELLO, a JSON document).
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from hetero.errors import LocalProtocolError, RemoteProtocolError, printable
from hetero.wire.headers import HEADERS, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameType, Header

VERSION = 1
PREFIX = struct.Struct(">QBBHI")
_AFTER_LENGTH = PREFIX.size - 8

Allocate = Callable[[int], memoryview]
Admit = Callable[[FrameType, Header, int], None]


@dataclass(frozen=True)
class Frame:
    """One received message.

    Attributes:
        type: what it is.
        header: the Struct that `HEADERS` names for this type.
        payload: its bytes, in the buffer that was taken for them; empty where there are none.
    """

    type: FrameType
    header: Header
    payload: memoryview


def encode(type_: FrameType, header: Header, payload: Sequence[memoryview] = ()) -> list[memoryview]:
    """The buffers of a frame, in order; the payload's are passed on as they are, without a copy.

    Raises:
        LocalProtocolError: the header is not this type's, or is too long.
    """
    if type(header) is not HEADERS[type_]:
        raise LocalProtocolError(f"a {type_.name} frame takes {HEADERS[type_].__name__}, got {type(header).__name__}")
    encoded = msgspec.json.encode(header)
    if len(encoded) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"a header may hold {MAX_HEADER_BYTES} bytes, {type_.name} has {len(encoded)}")
    length = _AFTER_LENGTH + len(encoded) + sum(part.nbytes for part in payload)
    return [memoryview(PREFIX.pack(length, VERSION, type_, 0, len(encoded)) + encoded), *payload]


class FrameReader:
    """Turns a stream of bytes into frames, in place: ask `buffer`, put bytes there, say how many with `advance`.

    Args:
        allocate: gives a buffer of exactly n bytes for a payload.
        admit: called with type, header and payload size before the payload's buffer is taken; raises
            RemoteProtocolError for a frame that must not come now, or not in this size.
        max_payload_bytes: limit of a tensor frame's payload; other types have smaller ones of their own.
    """

    def __init__(self, allocate: Allocate, admit: Admit, max_payload_bytes: int) -> None:
        self._allocate, self._admit, self._max_payload_bytes = allocate, admit, max_payload_bytes
        self._parts = self._read_frames()
        self._wanted: memoryview = next(self._parts)
        self._filled = 0
        self._frame: Frame | None = None
        self._at_border = True

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return self._wanted[self._filled :]

    def advance(self, num_bytes: int) -> Frame | None:
        """Takes note of bytes written to `buffer`; the frame that they complete, if they do.

        Raises:
            RemoteProtocolError: these bytes cannot be, or must not come now.
        """
        self._filled += num_bytes
        self._at_border = False
        if self._filled < self._wanted.nbytes:
            return None
        self._filled = 0
        self._wanted = next(self._parts)
        frame, self._frame = self._frame, None
        if frame is not None:
            self._at_border = True
        return frame

    def at_frame_border(self) -> bool:
        """True when no frame is half read."""
        return self._at_border

    def _read_frames(self) -> Any:
        """Yields the buffers to fill, one after the other; leaves each finished frame in `_frame`."""
        prefix = memoryview(bytearray(PREFIX.size))
        header_room = memoryview(bytearray(MAX_HEADER_BYTES))
        while True:
            yield prefix
            type_, header_bytes, payload_bytes = self._check_prefix(prefix)
            raw = header_room[:header_bytes]
            yield raw
            header = decode_header(type_, bytes(raw))
            self._admit(type_, header, payload_bytes)
            payload = memoryview(b"")
            if payload_bytes:
                payload = self._allocate(payload_bytes)
                yield payload
            self._frame = Frame(type_, header, payload)
            del payload  # the frame alone holds its buffer now

    def _check_prefix(self, prefix: memoryview) -> tuple[FrameType, int, int]:
        length, version, number, flags, header_bytes = PREFIX.unpack(prefix)
        if version != VERSION:
            raise RemoteProtocolError(
                f"the peer speaks protocol version {version}, this side {VERSION}; update the older checkout"
            )
        try:
            type_ = FrameType(number)
        except ValueError:
            raise RemoteProtocolError(f"there is no frame type {number}") from None
        if flags:
            raise RemoteProtocolError(f"flags must be 0 in version {VERSION}, got {flags}")
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            raise RemoteProtocolError(f"a header has 2 to {MAX_HEADER_BYTES} bytes, {type_.name} says {header_bytes}")
        payload_bytes = length - _AFTER_LENGTH - header_bytes
        limit = MAX_PAYLOAD_BYTES.get(type_, self._max_payload_bytes)
        if not 0 <= payload_bytes <= limit:
            key = "" if type_ in MAX_PAYLOAD_BYTES else " (transport.max_frame_bytes)"
            raise RemoteProtocolError(f"a {type_.name} frame may carry {limit} bytes{key}, got {payload_bytes}")
        return type_, header_bytes, payload_bytes


def decode_header(type_: FrameType, raw: bytes) -> Header:
    """The checked header of a frame: closed schema, no duplicate keys, no NaN, bounded depth by its schema.

    Raises:
        RemoteProtocolError: it is not such a header.
    """
    with contextlib.suppress(ValueError, RecursionError):  # what the slow way below makes of it is told to the peer
        header: Header = msgspec.json.decode(raw, type=HEADERS[type_], strict=True)
        if msgspec.json.encode(header) == raw:  # as this program writes it, so nothing stands there twice or hides
            return header
    try:
        text = raw.decode()  # json would take UTF-16 and lone surrogates as well
        plain = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:  # an escape can be half of a surrogate pair, which no output can show
            json.dumps(plain, ensure_ascii=False).encode()
        return msgspec.convert(plain, HEADERS[type_], strict=True)
    except (ValueError, RecursionError) as exc:  # msgspec.ValidationError and UnicodeError are ValueErrors
        raise RemoteProtocolError(f"the header of a {type_.name} frame is wrong: {_one_line(str(exc))}") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value


def _one_line(text: str) -> str:
    """Text that may hold the peer's words, fit for a terminal: no control characters, and not endless."""
    return printable(text[:300])

"""One connection's state machine, sans-IO: no socket, no thread, no clock.

dialler                              listener
  HELLO  ------------------------------>
        <------------------------------  WELCOME (or REJECT, then close)
  then, by purpose, what `_MAY_SEND` lists for each side
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from hetero.errors import LocalProtocolError, RemoteProtocolError
from hetero.wire.flow import LinkFlow
from hetero.wire.frames import Allocate, Frame, FrameReader, encode
from hetero.wire.generation_flow import GenerationFlow
from hetero.wire.headers import Ended, FrameType, Header, Hello, Hidden, Prompt, Step, Tensors

_T = FrameType
_ALWAYS = {_T.HEARTBEAT, _T.ERROR}
_DOWNSTREAM = {_T.STEP, _T.FORWARD, _T.PROMPT, _T.HIDDEN, _T.ENDED}
# (purpose, is the sender the dialler) -> what it may send once the connection is open.
_MAY_SEND = {
    ("control", True): _ALWAYS | {_T.SYNC, _T.STATE, _T.APPLY, _T.GATHER, _T.ABORT, _T.STOP, _T.CONTROL},
    ("control", False): _ALWAYS | {_T.SYNCED, _T.STATE, _T.READY, _T.CHOSEN, _T.STOP, _T.CONTROL},
    ("link", True): _ALWAYS | _DOWNSTREAM,
    ("link", False): _ALWAYS | {_T.BACKWARD},
    ("relay", True): _ALWAYS | {_T.BACKWARD},
    ("relay", False): _ALWAYS | _DOWNSTREAM,
    ("probe", True): _ALWAYS | {_T.ECHO, _T.LOAD, _T.LOADED, _T.DRAW, _T.MEASURE},
    ("probe", False): _ALWAYS | {_T.ECHO, _T.LOAD, _T.LOADED, _T.RATE, _T.ABOUT, _T.MEASURED},
}
_OPENING = {True: {_T.HELLO, _T.ERROR}, False: {_T.WELCOME, _T.REJECT, _T.ERROR}}


class ConnectionState(enum.Enum):
    """Where a connection stands."""

    OPENING = "opening"  # nothing but HELLO and its answer
    OPEN = "open"
    CLOSED = "closed"


class Connection:
    """What may be said on one connection, by whom and when.

    Args:
        dialler: True on the side that dialled.
        allocate: gives a buffer of exactly n bytes for a payload.
        max_frame_bytes: limit of a tensor frame's payload.
    """

    def __init__(self, *, dialler: bool, allocate: Allocate, max_frame_bytes: int) -> None:
        self.dialler = dialler
        self.state = ConnectionState.OPENING
        self.purpose: str | None = None
        self.flow: LinkFlow | None = None
        self._reader = FrameReader(allocate, self._admit, max_frame_bytes)

    def send(self, type_: FrameType, header: Header, payload: Sequence[memoryview] = ()) -> list[memoryview]:
        """The buffers to write for a frame.

        Raises:
            LocalProtocolError: this side may not send that now.
        """
        try:
            return self._send(type_, header, payload)
        except RemoteProtocolError as exc:  # the same rules hold for both sides; here it is this one's fault
            raise LocalProtocolError(str(exc)) from None

    def _send(self, type_: FrameType, header: Header, payload: Sequence[memoryview]) -> list[memoryview]:
        if not self._may(type_, from_dialler=self.dialler):
            raise LocalProtocolError(f"{type_.name} may not be sent on a {self._shown()} connection")
        buffers = encode(type_, header, payload)
        if isinstance(header, Step) and self.flow is not None:
            self.flow.begin_step(header, b"".join(payload))
        if type_ in (_T.FORWARD, _T.BACKWARD) and self.flow is not None:
            self.flow.sent(type_)
        if isinstance(header, Hidden):
            self._generation(type_).piece(header, sum(part.nbytes for part in payload))
        self._note_generation(type_, header, b"".join(payload) if isinstance(header, Prompt) else b"")
        self._advance(type_, header)
        return buffers

    def receive_buffer(self) -> memoryview:
        """Where the next received bytes belong."""
        return self._reader.buffer()

    def received(self, num_bytes: int) -> Frame | None:
        """Takes note of bytes put into `receive_buffer`; the frame that they complete, if they do.

        Raises:
            RemoteProtocolError: the peer broke the protocol.
        """
        frame = self._reader.advance(num_bytes)
        if frame is None:
            return None
        if isinstance(frame.header, Step) and self.flow is not None:
            self.flow.begin_step(frame.header, frame.payload)
        self._note_generation(frame.type, frame.header, frame.payload)
        self._advance(frame.type, frame.header)
        return frame

    def at_frame_border(self) -> bool:
        """True while no incoming frame is half read."""
        return self._reader.at_frame_border()

    def received_eof(self) -> None:
        """The peer closed its side.

        Raises:
            RemoteProtocolError: in the middle of a frame.
        """
        self.state = ConnectionState.CLOSED
        if not self._reader.at_frame_border():
            raise RemoteProtocolError("the connection ended in the middle of a frame")

    def _admit(self, type_: FrameType, header: Header, payload_bytes: int) -> None:
        if not self._may(type_, from_dialler=not self.dialler):
            raise RemoteProtocolError(f"{type_.name} may not come on a {self._shown()} connection")
        if isinstance(header, Tensors | Step) and self.flow is None:
            raise RemoteProtocolError(f"{type_.name} came before its link was set up")
        if isinstance(header, Tensors) and self.flow is not None:
            self.flow.admit(type_, header, payload_bytes)
        if isinstance(header, Prompt | Ended):
            self._generation(type_)
        if isinstance(header, Hidden):
            self._generation(type_).piece(header, payload_bytes)

    def _note_generation(self, type_: FrameType, header: Header, payload: bytes | memoryview) -> None:
        """A batch of prompts begins or ends; the same on both sides."""
        if isinstance(header, Prompt):
            self._generation(type_).begin(header, payload)
        elif isinstance(header, Ended):
            self._generation(type_).end(header)

    def _generation(self, type_: FrameType) -> GenerationFlow:
        if self.flow is None or self.flow.generation is None:
            raise RemoteProtocolError(f"{type_.name} came on a link of a run that generates nothing")
        return self.flow.generation

    def _may(self, type_: FrameType, *, from_dialler: bool) -> bool:
        if self.state is ConnectionState.OPENING:
            return type_ in _OPENING[from_dialler]
        return self.state is ConnectionState.OPEN and type_ in _MAY_SEND[str(self.purpose), from_dialler]

    def _advance(self, type_: FrameType, header: Header) -> None:
        if isinstance(header, Hello):
            if self.purpose is not None:
                raise RemoteProtocolError("HELLO came twice")
            self.purpose = header.purpose
        elif type_ is _T.WELCOME:
            if self.purpose is None:
                raise RemoteProtocolError("WELCOME came before HELLO")
            self.state = ConnectionState.OPEN
        elif type_ is _T.REJECT:
            self.state = ConnectionState.CLOSED

    def _shown(self) -> str:
        return f"{self.state.value} {self.purpose or ''}".strip()

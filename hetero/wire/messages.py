"""The extension point: small JSON messages with a command, handled by a function registered under its name."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hetero.errors import LocalProtocolError, RemoteProtocolError
from hetero.wire.headers import Control, FrameType

MAX_DEPTH = 8


class MessageType(enum.IntEnum):
    """Message types that are open to extensions."""

    CONTROL = FrameType.CONTROL


@dataclass(frozen=True)
class Message:
    """A command for the other side of a control connection.

    Args:
        type: `MessageType.CONTROL`.
        payload: bounded JSON with the key `command`, the name of the function to call there.
        metadata: more bounded JSON.

    Raises:
        LocalProtocolError: it is not JSON, nested too deep, or has no command.
    """

    type: MessageType
    payload: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.payload.get("command"), str):
            raise LocalProtocolError("a message's payload must name its command")
        for part in (self.payload, self.metadata):
            if problem := _not_bounded_json(part, MAX_DEPTH):
                raise LocalProtocolError(f"a message must be JSON: {problem}")

    def header(self) -> Control:
        """The frame header that carries this message."""
        return Control(payload=self.payload, metadata=self.metadata)

    @classmethod
    def of(cls, header: Control) -> Message:
        """The message that a peer sent.

        Raises:
            RemoteProtocolError: it breaks the rules of a message.
        """
        try:
            return cls(type=MessageType.CONTROL, payload=header.payload, metadata=header.metadata)
        except LocalProtocolError as exc:
            raise RemoteProtocolError(str(exc)) from None


Command = Callable[[Message], None]


class CommandTable:
    """Functions by command name."""

    def __init__(self) -> None:
        self._functions: dict[str, Command] = {}

    def register(self, name: str, function: Command) -> None:
        """Lets `function` handle the messages whose command is `name`; called on the connection's I/O thread."""
        self._functions[name] = function

    def dispatch(self, message: Message) -> None:
        """Calls the function of a message's command.

        Raises:
            RemoteProtocolError: nothing is registered under that name.
        """
        name = message.payload["command"]
        if name not in self._functions:
            raise RemoteProtocolError(f"command {name!r} is unknown here, known: {sorted(self._functions)}")
        self._functions[name](message)


def _not_bounded_json(value: Any, depth: int) -> str | None:
    """What is wrong with a value that should be JSON of at most `depth` levels; None when it is."""
    if depth == 0:
        return f"nested deeper than {MAX_DEPTH}"
    if isinstance(value, dict):
        if not all(isinstance(key, str) and _is_text(key) for key in value):
            return "keys must be text"
        items = list(value.values())
    elif isinstance(value, list):
        items = value
    elif isinstance(value, str):
        return None if _is_text(value) else "text must be Unicode without lone surrogates"
    elif value is None or isinstance(value, bool):
        return None
    elif isinstance(value, int):
        return None if -(1 << 63) <= value < 1 << 63 else "an integer must fit in 64 bits"
    elif isinstance(value, float):
        return None if value == value and abs(value) != float("inf") else f"{value} is not a number"
    else:
        return f"a {type(value).__name__} is not JSON"
    return next((problem for item in items if (problem := _not_bounded_json(item, depth - 1))), None)


def _is_text(value: str) -> bool:
    """False for halves of surrogate pairs, which UTF-8 cannot carry."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)

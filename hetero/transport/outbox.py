"""Bytes that wait to be sent, with the borders of frames; not thread-safe by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes that wait; `begins` where they are a frame's first and none of them is sent, `mark` on a frame's last."""

    buffer: memoryview
    begins: bool
    mark: Any = None


class Outbox:
    """A queue of frames, and one of frames that are in no hurry; false while both are empty."""

    def __init__(self) -> None:
        self._parts: deque[_Part] = deque()
        self._unhurried: deque[Sequence[memoryview]] = deque()  # go one by one, when nothing else waits

    def __bool__(self) -> bool:
        return bool(self._parts) or bool(self._unhurried)

    def add(self, buffers: Sequence[memoryview], *, unhurried: bool = False, mark: Any = None) -> None:
        """Queues a frame; an unhurried one lets all others pass, and keeps its order among its like.

        `sent` gives `mark` back with the frame's last byte.
        """
        if unhurried:
            self._unhurried.append(buffers)
        else:
            last = len(buffers) - 1
            self._parts.extend(
                _Part(buffer, index == 0, mark if index == last else None) for index, buffer in enumerate(buffers)
            )

    def front(self, most: int) -> list[memoryview]:
        """The first buffers, `most` at most."""
        if not self._parts and self._unhurried:
            self.add(self._unhurried.popleft())
        return [self._parts[index].buffer for index in range(min(len(self._parts), most))]

    def sent(self, num_bytes: int) -> list[Any]:
        """Takes off what was sent of the front; gives the marks of the frames that are sent whole."""
        marks = []
        while self._parts and num_bytes >= self._parts[0].buffer.nbytes:
            part = self._parts.popleft()
            num_bytes -= part.buffer.nbytes
            if part.mark is not None:
                marks.append(part.mark)
        if num_bytes and self._parts:
            self._parts[0] = _Part(self._parts[0].buffer[num_bytes:], False, self._parts[0].mark)
        return marks

    def drop_unbegun(self) -> None:
        """Drops every frame but the rest of one that is half sent, without which the peer could read no more."""
        self._unhurried.clear()
        begun: deque[_Part] = deque()
        while self._parts and not self._parts[0].begins:
            begun.append(self._parts.popleft())
        self._parts = begun

    def clear(self) -> None:
        """Drops everything."""
        self._unhurried.clear()
        self._parts.clear()

"""Watches through Python's audit events that parsing runs no code and touches no file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FORBIDDEN = ("pickle.", "exec", "compile", "import", "subprocess.", "os.", "shutil.", "marshal.", "ctypes.", "socket.")

_watching: list[tuple[list[str], bool]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    seen, may_read = _watching[-1]
    opens = event == "open" and not (may_read and not args[2] & (os.O_WRONLY | os.O_RDWR))
    if opens or event.startswith(FORBIDDEN):
        seen.append(event)


sys.addaudithook(_audit)  # cannot be taken back; it listens only inside `nothing_is_run`


@contextmanager
def nothing_is_run(*, may_read: bool = True) -> Iterator[None]:
    """Fails where code was run, or a file opened for writing (or for reading, if it may not)."""
    seen: list[str] = []
    _watching.append((seen, may_read))
    try:
        yield
    finally:
        _watching.clear()
    assert seen == [], seen

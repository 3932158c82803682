"""A file of lines that grows with a run: written through at once, cut after a fault, whole in spite of a full disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


class LogFile:
    """Lines on the disk; where it takes none they wait here, and are written before the next line as soon as it does.

    Args:
        path: of the file, which is made anew.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b", buffering=0)
        self._size = 0  # of the whole lines on the disk
        self._waiting: list[bytes] = []
        self._trouble: OSError | None = None

    def write(self, line: str) -> None:
        """Adds a line; says once when the disk takes none."""
        self._waiting.append(line.encode() + b"\n")
        self._flush()

    def cut(self, keep: Callable[[str], bool]) -> None:
        """Takes out the first line that is not to be kept and all after it; needs no room on the disk."""
        kept = 0
        for line in self._path.read_bytes()[: self._size].splitlines(keepends=True):
            if not keep(line.decode().rstrip("\n")):
                self._waiting = []
                self._shorten(kept)
                return
            kept += len(line)
        for number, waiting in enumerate(self._waiting):
            if not keep(waiting.decode().rstrip("\n")):
                del self._waiting[number:]
                return

    def lines(self) -> list[str]:
        """All lines, on the disk or not."""
        return (self._path.read_bytes()[: self._size] + b"".join(self._waiting)).decode().splitlines()

    def close(self) -> None:
        """Closes the file, and says what it lacks."""
        self._flush()
        if self._waiting:
            log.warning("%s lacks its last %d lines: %s", self._path, len(self._waiting), self._trouble)
        self._file.close()

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._write_whole(self._waiting[0])
                self._size += len(self._waiting.pop(0))
        except OSError as exc:
            if self._trouble is None:
                log.warning(
                    "%s cannot be written (%s): the run goes on, and its lines are kept here until they can be",
                    self._path,
                    exc.strerror or exc,
                )
            self._trouble = exc
            self._shorten(self._size)  # no half line, whatever becomes of this process
        else:
            self._trouble = None

    def _write_whole(self, line: bytes) -> None:
        while line:
            line = line[self._file.write(line) or 0 :]

    def _shorten(self, size: int) -> None:
        self._size = size
        os.ftruncate(self._file.fileno(), size)
        self._file.seek(size)

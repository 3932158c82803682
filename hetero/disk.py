"""File operations that are on the disk when they return: what a checkpoint is made of."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class Disk:
    """The durable file operations; each raises `OSError` with the file's name in it.

    A file that was written is on the disk. Its name in the folder is, like every other making, renaming and removing,
    on the disk only after `sync_dir` of the folder. Tests put a recording or failing subclass in its place.
    """

    def make_dir(self, path: Path) -> None:
        """Makes a folder, which must not be there and whose parent must be."""
        path.mkdir()

    def make_dirs(self, path: Path) -> list[Path]:
        """Makes a folder with all that lead to it, as far as they are not there; their names are on the disk then.

        Returns:
            Those that were made, the innermost first.
        """
        missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
        for folder in reversed(missing):
            self.make_dir(folder)
            self.sync_dir(folder.parent)
        return missing

    def write(self, path: Path, data: bytes | memoryview) -> None:
        """Makes a file, which must not be there, and returns when all of its bytes are on the disk."""
        try:
            with path.open("xb", buffering=0) as stream:
                rest = memoryview(data).cast("B")
                while rest:
                    rest = rest[stream.write(rest) :]
                self.flush(stream.fileno())
        except OSError as exc:
            raise _named(exc, path) from None

    def sync_dir(self, path: Path) -> None:
        """Returns when the names in a folder are on the disk; does nothing where the system cannot do that."""
        if os.name == "nt":
            return
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                self.flush(descriptor)
            finally:
                os.close(descriptor)
        except OSError as exc:
            if exc.errno not in _CANNOT_SYNC:
                raise _named(exc, path) from None

    def rename(self, old: Path, new: Path) -> None:
        """Gives a file or folder another name beside it; nothing may have that name yet."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Removes a file or a symbolic link, never what the link points to."""
        path.unlink()

    def remove_dir(self, path: Path) -> None:
        """Removes a folder, which must be empty."""
        path.rmdir()

    def flush(self, descriptor: int) -> None:
        """Returns when what an open file or folder holds is on the disk; `write` and `sync_dir` end with it."""
        if sys.platform == "darwin":
            import fcntl

            try:  # there fsync leaves the data in the drive's own cache: fsync(2) of macOS
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
            except OSError as exc:  # network and foreign file systems may have fsync alone
                if exc.errno not in _CANNOT_SYNC | {errno.ENOTTY}:
                    raise
        os.fsync(descriptor)


def _named(exc: OSError, path: Path) -> OSError:
    """The error with the file's name, which those of an open file lack."""
    if exc.filename is None:
        exc.filename = str(path)
    return exc

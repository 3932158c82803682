"""One process at a time in a folder: a lock that the system takes back when its process ends, however that ends.

The lock is flock(2) on a small file in the folder, which says in words who has it and is removed with the lock. What a
killed process left of it holds nothing.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetero.disk import Disk
from hetero.errors import HeteroError, printable

log = logging.getLogger(__name__)

LOCK_FILE = "in-use"
_CANNOT_LOCK = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}
_MAX_HOLDER_BYTES = 2000
_TRIES, _TRY_AGAIN_S = 5, 0.05  # `holder_of` elsewhere has the lock for a moment


class FolderInUse(HeteroError):
    """Another process has the folder; the text says which."""


@contextmanager
def only_one(folder: Path, purpose: str) -> Iterator[None]:
    """Has a folder for this process alone; folders that had to be made for it and stay empty are removed again.

    Where the file system has no locks, this is said, and nothing keeps others out.

    Args:
        folder: made where it is not there.
        purpose: what others are told that this process does with it.

    Raises:
        FolderInUse: another process has it.
        OSError: the folder cannot be made or written.
    """
    made = Disk().make_dirs(folder)
    try:
        descriptor = _locked(folder / LOCK_FILE)
        try:
            text = f"process {os.getpid()} on {socket.gethostname()}, {purpose}"
            os.ftruncate(descriptor, 0)
            os.write(descriptor, text.encode("utf-8", "replace")[:_MAX_HOLDER_BYTES])
            yield
        finally:
            with suppress(OSError):  # removed while it is locked, so that nobody waits for a file that is gone
                (folder / LOCK_FILE).unlink()
            os.close(descriptor)
    finally:
        with suppress(OSError):  # one that holds something
            for empty in made:
                empty.rmdir()


def holder_of(folder: Path) -> str | None:
    """Which process has a folder for itself; None where no other one does, or that cannot be known."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _locked(file: Path) -> int:
    """The descriptor of a file that is locked and still has its name."""
    tries = 0
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(descriptor, file):
                return descriptor
        except BlockingIOError:
            tries += 1
            if tries == _TRIES:
                holder = _holder(descriptor)
                os.close(descriptor)
                raise FolderInUse(holder) from None
            time.sleep(_TRY_AGAIN_S)
        except OSError as exc:
            if exc.errno not in _CANNOT_LOCK:
                os.close(descriptor)
                raise
            log.warning("%s cannot be locked (%s): see to it that no other run uses that folder", file, exc.strerror)
            return descriptor
        os.close(descriptor)


def _is_same(descriptor: int, file: Path) -> bool:
    """Whether the open file is the one that has the name now; who had the lock before may have removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    return False


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, _MAX_HOLDER_BYTES, 0).decode("utf-8", "replace")
    return printable(text) or "another process"

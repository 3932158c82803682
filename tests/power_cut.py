"""Every state that a power cut can leave on a disk, from a record of what was done to it.

The model (ALICE, OSDI 2014): the bytes of a file are certain from the end of its fsync on, before they may be gone, cut
short or whole; what happened to the names in a folder (make, rename, remove) is certain from the folder's fsync on,
before any first part of it may have happened. Files and folders are one thing each, whatever their name is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from hetero.disk import Disk

Tree = tuple[tuple[str, "Tree | bytes"], ...]  # name and content of everything in a folder, in order
Entries = dict[str, "File | Folder"]


@dataclass
class File:
    """A file: its bytes and whether they are certain."""

    data: bytes
    synced: bool = False

    def possible(self) -> list[bytes]:
        return [self.data] if self.synced else sorted({b"", self.data[: len(self.data) // 2], self.data})


@dataclass
class Folder:
    """A folder: its names as they are now, and those that are certain with each state since."""

    now: Entries = field(default_factory=dict)
    since_sync: list[Entries] = field(default_factory=lambda: [{}])

    def change(self, entries: Entries) -> None:
        self.now = entries
        self.since_sync.append(entries)

    def sync(self) -> None:
        self.since_sync = [self.now]

    def possible(self) -> set[Tree]:
        return {tree for entries in self.since_sync for tree in _trees(entries)}


def _trees(entries: Entries) -> Iterator[Tree]:
    names = sorted(entries)
    for contents in product(*(entries[name].possible() for name in names)):
        yield tuple(zip(names, contents, strict=True))


class RecordingDisk(Disk):
    """A real disk in `root` of which all that a power cut could leave is kept: `states`, with what must be restorable.

    Args:
        root: the folder that all files are below; it is there and certain.
    """

    def __init__(self, root: Path) -> None:
        self.states: dict[Tree, int] = {}
        self.interrupt_renames = False  # as Ctrl-C does, or a kill: the rename is done, what follows it is not
        self.acknowledged = 0  # the newest step of which a save has returned
        self.root, self._top = root, Folder()
        self._syncing: File | Folder | None = None
        self._keep_states()

    def make_dir(self, path: Path) -> None:
        super().make_dir(path)
        parent = self._folder(path.parent)
        parent.change(parent.now | {path.name: Folder()})
        self._keep_states()

    def write(self, path: Path, data: bytes | memoryview) -> None:
        parent, self._syncing = self._folder(path.parent), File(bytes(data))
        parent.change(parent.now | {path.name: self._syncing})
        self._keep_states()
        super().write(path, data)

    def sync_dir(self, path: Path) -> None:
        self._syncing = self._folder(path) if path.is_relative_to(self.root) else None
        super().sync_dir(path)

    def flush(self, descriptor: int) -> None:
        # The record is of what this call promises; the test machine's own disk need not be waited for.
        if isinstance(self._syncing, File):
            self._syncing.synced = True
        elif self._syncing is not None:
            self._syncing.sync()
        self._keep_states()

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent and not new.exists()
        super().rename(old, new)
        parent = self._folder(old.parent)
        parent.change({new.name if name == old.name else name: item for name, item in parent.now.items()})
        self._keep_states()
        if self.interrupt_renames:
            raise KeyboardInterrupt

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._drop(path)

    def remove_dir(self, path: Path) -> None:
        super().remove_dir(path)
        self._drop(path)

    def acknowledge(self, step: int) -> None:
        """A save of this step has returned: from now on it must be restorable, or a newer one."""
        self.acknowledged = step
        self._keep_states()

    def _drop(self, path: Path) -> None:
        parent = self._folder(path.parent)
        parent.change({name: item for name, item in parent.now.items() if name != path.name})
        self._keep_states()

    def _folder(self, path: Path) -> Folder:
        found: File | Folder = self._top
        for name in path.relative_to(self.root).parts:
            assert isinstance(found, Folder)
            found = found.now[name]
        assert isinstance(found, Folder)
        return found

    def _keep_states(self) -> None:
        for tree in self._top.possible():
            self.states[tree] = max(self.acknowledged, self.states.get(tree, 0))


def put_on_disk(tree: Tree, folder: Path) -> None:
    """Makes a state real in an empty folder."""
    for name, content in tree:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            (folder / name).mkdir()
            put_on_disk(content, folder / name)

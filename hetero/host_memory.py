"""How much memory this machine has and has left, with the limits that a container or a service manager sets.

Linux's control groups are read in both versions: `memory.max` and `memory.current` of version 2,
`memory.limit_in_bytes` and `memory.usage_in_bytes` of version 1 (the kernel's admin-guide/cgroup-v2.rst and
cgroup-v1/memory.rst). A group's parents limit it as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_FILES = {  # version -> limit, use, and the part of the use that is file pages which can be dropped
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_ROOT = Path("/")


def total_bytes(root: Path = _ROOT) -> int:
    """Memory that this process may use at most.

    Args:
        root: of the file system; another one in tests.
    """
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits(root))])


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that this process may still take without anything being swapped or killed.

    Args:
        root: of the file system; another one in tests.
    """
    left = [max(0, limit - used) for limit, used in _limits(root)]
    return min([int(psutil.virtual_memory().available), *left])


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, use) of each control group that this process is in and that has a limit."""
    for version, group in _groups(root):
        limit_file, use_file, droppable = _FILES[version]
        limit, used = _number(group / limit_file), _number(group / use_file)
        if limit is not None and used is not None:
            yield limit, max(0, used - _droppable(group / "memory.stat", droppable))


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's memory group and of its parents; of those that can be seen."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # no Linux, or no control groups
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = top / name.strip("/")
        # In a container the name may be the host's; then the group is what is mounted as the top.
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield 1 if controllers else 2, folder


def _number(file: Path) -> int | None:
    """A limit or a use; None where there is none (`max`, or no such file)."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _droppable(stat: Path, key: str) -> int:
    try:
        lines = stat.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)

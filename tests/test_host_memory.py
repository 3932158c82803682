"""Limits of control groups, in both versions, from files that look as the kernel's."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hetero.host_memory import available_bytes, total_bytes

MIB = 1 << 20


def group(root: Path, line: str, files: dict[str, dict[str, str]]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"5:cpu:/other\n{line}\n")
    for folder, values in files.items():
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (root / "sys/fs/cgroup" / folder / name).write_text(f"{value}\n")
    return root


def test_machine_without_control_groups_has_what_the_system_says(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) == psutil.virtual_memory().total
    assert abs(available_bytes(tmp_path) - psutil.virtual_memory().available) < 512 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_limit_of_the_group_counts_and_pages_of_files_in_it_can_be_dropped(tmp_path: Path, version: int) -> None:
    limit, use, key = [
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("memory.max", "memory.current", "inactive_file"),
    ][version - 1]
    top = "memory/" if version == 1 else ""
    line = "4:memory:/a/b" if version == 1 else "0::/a/b"
    values = {limit: str(96 * MIB), use: str(64 * MIB), "memory.stat": f"anon 5\n{key} {16 * MIB}"}
    root = group(tmp_path, line, {f"{top}a/b": values})
    assert total_bytes(root) == 96 * MIB and available_bytes(root) == 48 * MIB


def test_smallest_limit_on_the_way_up_wins_and_max_is_none(tmp_path: Path) -> None:
    files = {
        "a": {"memory.max": str(64 * MIB), "memory.current": str(60 * MIB)},
        "a/b": {"memory.max": "max", "memory.current": str(10 * MIB)},
    }
    root = group(tmp_path, "0::/a/b", files)
    assert total_bytes(root) == 64 * MIB and available_bytes(root) == 4 * MIB


def test_group_named_as_outside_of_the_container_is_the_one_that_is_mounted(tmp_path: Path) -> None:
    files = {"memory": {"memory.limit_in_bytes": str(32 * MIB), "memory.usage_in_bytes": str(40 * MIB)}}
    root = group(tmp_path, "4:memory:/docker/0123", files)
    assert total_bytes(root) == 32 * MIB and available_bytes(root) == 0

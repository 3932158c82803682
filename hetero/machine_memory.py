"""Whose memory a stage uses, and how much that has."""

from __future__ import annotations

from hetero.device import Device
from hetero.device import resolve as resolve_device
from hetero.errors import ConfigError
from hetero.resolve import ResolvedRun
from hetero.roles import is_here, own_names
from hetero.spec import CoordinatorSpec, WorkerEntry


def machine_of(resolved: ResolvedRun, index: int) -> tuple[str, int | None, str]:
    """The machine of a stage, the bytes of its device's memory where they are known, and its kind of device."""
    stage, entry = resolved.stages[index], _entry_of(resolved, index)
    device = stage.device or "auto"
    given = None if entry.memory_gb is None else int(entry.memory_gb * 1e9)
    found = device_here(resolved, index)
    if found is None:
        return stage.id, given, "cpu" if device == "auto" else device.partition(":")[0]
    return f"{found} of this machine", given or found.total_memory_bytes(), found.torch_device.type


def device_here(resolved: ResolvedRun, index: int) -> Device | None:
    """The device of a stage that is on this machine; None for others, and where this machine has no such device."""
    hardware = resolved.config.hardware
    if hardware.launch != "local" and not is_here(_entry_of(resolved, index).host, own_names()):
        return None
    try:
        return resolve_device(resolved.stages[index].device or "auto")
    except ConfigError:  # the plan is for another machine, whatever its address says
        return None


def _entry_of(resolved: ResolvedRun, index: int) -> CoordinatorSpec | WorkerEntry:
    return resolved.config.hardware.coordinator if index == 0 else resolved.workers[index - 1]

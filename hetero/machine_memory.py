"""Whose memory a stage uses, and how much that has."""

from __future__ import annotations

from hetero.device import resolve as resolve_device
from hetero.errors import ConfigError
from hetero.resolve import ResolvedRun
from hetero.roles import is_here, own_names


def machine_of(resolved: ResolvedRun, index: int) -> tuple[str, int | None, str]:
    """The machine of a stage, the bytes of its device's memory where they are known, and its kind of device."""
    hardware, stage = resolved.config.hardware, resolved.stages[index]
    entry = hardware.coordinator if index == 0 else resolved.workers[index - 1]
    device = stage.device or "auto"
    given = None if entry.memory_gb is None else int(entry.memory_gb * 1e9)
    here = hardware.launch == "local" or is_here(entry.host, own_names())
    if not here:
        return stage.id, given, "cpu" if device == "auto" else device.partition(":")[0]
    try:
        found = resolve_device(device)
    except ConfigError:  # the plan is for another machine, whatever its address says
        return stage.id, given, device.partition(":")[0]
    return f"{found} of this machine", given or found.total_memory_bytes(), found.torch_device.type

"""What a run's report shows besides the records: the plan as it is now, devices, and how much memory these have."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from hetero.device import resolve as resolve_device
from hetero.errors import ConfigError
from hetero.gantt import gantt_svg
from hetero.report import Facts
from hetero.resolve import ResolvedRun
from hetero.roles import is_here, own_names
from hetero.run import Run
from hetero.spec import CoordinatorSpec, RunSpec, WorkerEntry


def facts_of(run: Run, resolved: ResolvedRun) -> Callable[[], Facts]:
    """A function that says what is known of a run at the moment, fit to be called from any thread."""
    names, known = own_names(), dict[str, list[int | None]]()

    def facts() -> Facts:
        result = run.result
        timeline = result.timeline
        spec, digest = result.spec, result.spec.digest()
        if digest not in known:
            known[digest] = _memory_of(spec, resolved, names)
        return Facts(
            devices=list(result.stages),
            stages=msgspec.to_builtins(spec.stages),
            memory_bytes=known[digest],
            stopped=result.stopped,
            timeline_svg=None if timeline is None else gantt_svg(timeline),
        )

    return facts


def _memory_of(spec: RunSpec, resolved: ResolvedRun, names: set[str]) -> list[int | None]:
    """Memory of each stage's device: as the hardware's entry says, or as this machine has."""
    hardware = resolved.config.hardware
    given = {worker.id: worker.memory_gb for worker in resolved.workers}
    entries: list[CoordinatorSpec | WorkerEntry] = [hardware.coordinator, *spec.workers]
    found: list[int | None] = []
    for index, entry in enumerate(entries):
        gigabytes = given.get(entry.id) if isinstance(entry, WorkerEntry) else entry.memory_gb
        here = index == 0 or hardware.launch == "local" or is_here(entry.host, names)
        if gigabytes is not None:
            found.append(int(gigabytes * 1e9))
        else:
            found.append(_of_device(spec.stages[index].device or entry.device) if here else None)
    return found


def _of_device(name: str) -> int | None:
    try:
        return resolve_device(name).total_memory_bytes()
    except ConfigError:  # the plan is for another machine, whatever its address says
        return None

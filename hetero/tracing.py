"""Keeps the timelines of a run's first and last steps, and leaves its trace and pictures in its folder."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hetero import folders
from hetero.errors import ConfigError
from hetero.gantt import gantt_svg
from hetero.spec import RunSpec
from hetero.step_times import simulated_as_measured
from hetero.timeline import Timeline
from hetero.trace import trace_json

log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """A step that will be drawn."""

    began_s: float
    step: int
    timeline: Callable[[], Timeline]


class Tracing:
    """The steps that a run's trace will hold.

    Args:
        num_steps: kept of the run's beginning, and as many of its end.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._first: list[Kept] = []
        self._last: deque[Kept] = deque(maxlen=num_steps)

    def add(self, began_s: float, step: int, timeline: Callable[[], Timeline]) -> None:
        """A step is done that began at `began_s` of `time.perf_counter`; its timeline is made when it is wanted."""
        (self._first if len(self._first) < self._num_steps else self._last).append(Kept(began_s, step, timeline))

    def rewind(self, step: int) -> None:
        """Steps after this one will be taken again, after a fault."""
        self._first = [kept for kept in self._first if kept.step <= step]
        self._last = deque((kept for kept in self._last if kept.step <= step), maxlen=self._num_steps)

    def write(self, run_dir: Path, spec: RunSpec) -> None:
        """Writes trace.json, timeline.svg (the last step) and timeline-simulated.svg, where a step was kept.

        Where they cannot be written that is said, and the run is as good as without them.
        """
        try:
            self._write(run_dir, spec)
        except ConfigError as exc:
            log.warning("no trace of this run: %s", exc)

    def _write(self, run_dir: Path, spec: RunSpec) -> None:
        kept = [*self._first, *self._last]
        if not kept:
            return
        steps = [(each.began_s, each.timeline()) for each in kept]
        plan = tuple(stage.id for stage in spec.stages)
        # Another plan has other rows: after a machine has left the run only the steps without it fit together.
        steps = [(began - steps[0][0], timeline) for began, timeline in steps if timeline.stages == plan]
        hosts = ["coordinator", *(worker.host for worker in spec.workers)]
        folders.write_text(run_dir / "trace.json", trace_json(steps, hosts))
        if not steps:
            return
        folders.write_text(run_dir / "timeline.svg", gantt_svg(steps[-1][1]))
        simulated = simulated_as_measured(steps[-1][1], spec.schedule)
        if simulated is None:
            log.info("no timeline-simulated.svg: spans of step %s are missing", steps[-1][1].step)
        else:
            folders.write_text(run_dir / "timeline-simulated.svg", gantt_svg(simulated))

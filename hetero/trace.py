"""Timelines as Chrome trace JSON, which Perfetto opens: a process a stage, its rows compute, send and receive.

The format: "Trace Event Format" of the Chromium project; times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hetero.timeline import Timeline

ROWS = {"forward": 0, "backward": 0, "wait": 0, "send": 1, "receive": 2}
ROW_NAMES = ("compute", "send", "receive")
MAX_EVENTS = 100_000  # about 15 MB


def trace_json(steps: Sequence[tuple[float, Timeline]], hosts: Sequence[str] = ()) -> str:
    """The text of a trace.

    Args:
        steps: for each its start in seconds since the first, and the step.
        hosts: of the stages, where they are known.
    """
    events: list[dict[str, Any]] = []
    left_out: list[int | None] = []
    if steps:
        events += _names(steps[0][1].stages, hosts)
    for began_s, timeline in steps:
        if len(events) + len(timeline.spans) > MAX_EVENTS:
            left_out.append(timeline.step)
            continue
        events += [_event(began_s, timeline, index) for index in range(len(timeline.spans))]
    about = {
        "steps": [_about(timeline) for _, timeline in steps],
        "steps_left_out_for_size": left_out,
    }
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, allow_nan=False, ensure_ascii=False
    )


def _names(stages: Sequence[str], hosts: Sequence[str]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for stage, name in enumerate(stages):
        shown = f"stage {stage}: {name}" + (f" on {hosts[stage]}" if hosts else "")
        events.append({"ph": "M", "name": "process_name", "pid": stage, "tid": 0, "args": {"name": shown}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": stage, "tid": 0, "args": {"sort_index": stage}})
        for row, row_name in enumerate(ROW_NAMES):
            events.append({"ph": "M", "name": "thread_name", "pid": stage, "tid": row, "args": {"name": row_name}})
    return events


def _event(began_s: float, timeline: Timeline, index: int) -> dict[str, Any]:
    span = timeline.spans[index]
    name = span.kind if span.of is None else f"{span.kind} {span.of}"
    return {
        "ph": "X",
        "name": f"{name} {span.micro_batch}",
        "cat": span.kind,
        "pid": span.stage,
        "tid": ROWS[span.kind],
        "ts": (began_s + span.start_s) * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"step": timeline.step, "micro_batch": span.micro_batch},
    }


def _about(timeline: Timeline) -> dict[str, Any]:
    return {
        "step": timeline.step,
        "duration": timeline.duration_s,
        "unit": timeline.unit,
        "simulated": timeline.simulated,
        "clock_error_s": timeline.clock_error_s,
        "notes": list(timeline.notes),
    }

"""The simulated step of a configuration, as a picture and as a trace: `times` of visualize.py."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from hetero import folders
from hetero.checked import convert
from hetero.errors import ConfigError
from hetero.gantt import gantt_svg
from hetero.memory import RunMemory
from hetero.resolve import ResolvedRun
from hetero.step_times import TimesSpec, planned_step
from hetero.timeline import Timeline
from hetero.trace import trace_json


def write_planned_step(resolved: ResolvedRun, timeline: Timeline, folder: Path) -> list[Path]:
    """Writes timeline.svg and timeline.json (a trace) of the simulated step; gives their absolute paths.

    Args:
        resolved: the run.
        timeline: its step, see `planned_timeline`.
        folder: for the files.

    Raises:
        ConfigError: a place that cannot be written.
    """
    hosts = [resolved.config.hardware.coordinator.host, *(worker.host for worker in resolved.workers)]
    texts = {"timeline.svg": gantt_svg(timeline), "timeline.json": trace_json([(0.0, timeline)], hosts)}
    for name, text in texts.items():
        folders.write_text(folder / name, text)
    return [(folder / name).absolute() for name in texts]


def planned_timeline(resolved: ResolvedRun, times: Any, memory: RunMemory) -> Timeline:
    """The simulated step.

    Args:
        resolved: the run.
        times: what stages and links cost, as configured: plain data for `TimesSpec`, or with `run` a run's folder.
        memory: its figures.

    Raises:
        ConfigError: times that cannot be.
    """
    given = dict(times or {})
    run = given.pop("run", None)
    if run is not None:
        given = _of_run(Path(str(run)).expanduser(), given)
    head = resolved.facts.vocab_size * resolved.facts.hidden_size
    tables = 1 if len(memory.stages) == 1 and resolved.facts.tie_word_embeddings else 2  # embedding and head
    layers = sum(stage.parameters for stage in memory.stages) - tables * head
    per_step = memory.micro_batches
    return planned_step(
        resolved.spec(total_steps=0),
        convert(given, TimesSpec, root="times"),
        num_micro_batches=per_step,
        layer_parameters=max(1, layers // resolved.facts.num_hidden_layers),
        head_parameters=head,
        link_bytes=[(link.forward / per_step, link.backward / per_step) for link in memory.links],
    )


def _of_run(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Times of each layer as its stage had them in the last step of a run's trace; the head's are in them.

    Raises:
        ConfigError: there is no such trace, or times are given as well.
    """
    if twice := [key for key in ("forward_s", "backward_s", "head_layers") if given.get(key) is not None]:
        raise ConfigError(f"times.run and times.{twice[0]} exclude one another, both are given")
    try:
        plan = json.loads((folder / "run.json").read_text(encoding="utf-8"))["spec"]["stages"]
        trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        last = max(event["args"]["step"] for event in events)
        layers: dict[str, list[float]] = {"forward": [], "backward": []}
        for index, stage in enumerate(plan):
            for kind, found in layers.items():
                mine = [e["dur"] for e in events if (e["pid"], e["cat"], e["args"]["step"]) == (index, kind, last)]
                count = stage["end"] - stage["start"]
                found += [fmean(mine) / 1e6 / count] * count
    except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError) as exc:
        raise ConfigError(
            f"times.run must be the folder of a run with run.json and trace.json (loop.trace_steps), got {folder} "
            f"({type(exc).__name__})"
        ) from None
    return given | {"forward_s": layers["forward"], "backward_s": layers["backward"], "head_layers": 0.0}

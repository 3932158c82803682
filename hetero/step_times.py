"""What stages and links cost in a step: given, measured, or by the work of a layer; and the step that this gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from hetero.errors import ConfigError
from hetero.schedule import LinkTime, Simulation, StageTime, policy_for, simulate
from hetero.spec import RunSpec, ScheduleSpec, StageSpec
from hetero.timeline import Direction, Timeline, timeline_of_simulation

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class TimesSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Times as configured (`times` of visualize.py).

    Attributes:
        forward_s: seconds of a layer's forward of one micro-batch; one number, or one for each layer.
        backward_s: the same backward.
        speed: by how much each stage's machine is faster; one number a stage.
        head_layers: what the head costs, in layers.
        link_mbit_s: rate of every link, or of each.
        latency_ms: of every link, or of each.
    """

    forward_s: Positive | list[Positive] | None = None
    backward_s: Positive | list[Positive] | None = None
    speed: list[Positive] | None = None
    head_layers: NotNegative | None = None
    link_mbit_s: Positive | list[Positive] | None = None
    latency_ms: NotNegative | list[NotNegative] = 0.0


def simulated_step(
    stages: Sequence[StageTime], links: Sequence[LinkTime], num_micro_batches: int, schedule: ScheduleSpec
) -> Simulation:
    """The step that these times would give under a policy."""
    count = len(stages)
    policies = [policy_for(schedule.name, i, count, num_micro_batches, schedule.max_in_flight) for i in range(count)]
    return simulate(stages, links, num_micro_batches, policies)


def simulated_as_measured(timeline: Timeline, schedule: ScheduleSpec) -> Timeline | None:
    """The step that the policy would have given with the times of a measured one; None where spans are missing."""
    measured = times_of(timeline)
    if measured is None:
        return None
    stages, links, count = measured
    notes = (f"simulated with the times measured in step {timeline.step}",)
    return timeline_of_simulation(simulated_step(stages, links, count, schedule), timeline.stages, notes=notes)


def times_of(timeline: Timeline) -> tuple[list[StageTime], list[LinkTime], int] | None:
    """What stages and links cost in a measured step, and the number of micro-batches; None where spans are missing.

    A link's latency is the mean of both directions' least, in which the clocks' difference cancels out.
    """
    count = len(timeline.stages)
    found = {(s.stage, s.kind, s.of, s.micro_batch): s for s in timeline.spans}
    num = 1 + max((s.micro_batch for s in timeline.spans), default=-1)
    try:
        stages = [
            StageTime(
                *(
                    tuple(found[i, op, None, m].end_s - found[i, op, None, m].start_s for m in range(num))
                    for op in ("forward", "backward")
                )
            )
            for i in range(count)
        ]
        links = []
        for i in range(count - 1):
            costs: list[tuple[float, ...]] = []
            least: list[float] = []
            ways: tuple[tuple[Direction, int, int], ...] = (("forward", i, i + 1), ("backward", i + 1, i))
            for of, sender, receiver in ways:
                came = [found[receiver, "receive", of, m] for m in range(num)]
                sent = [found[sender, "send", of, m] for m in range(num)]
                costs.append(tuple(s.end_s - s.start_s for s in came))
                least.append(min(b.start_s - a.start_s for a, b in zip(sent, came, strict=True)))
            links.append(LinkTime(costs[0], costs[1], latency_s=max(0.0, sum(least) / 2)))
    except KeyError:
        return None
    return stages, links, num


def planned_step(
    spec: RunSpec,
    times: TimesSpec,
    *,
    num_micro_batches: int,
    layer_parameters: int,
    head_parameters: int,
    link_bytes: Sequence[tuple[float, float]],
) -> Timeline:
    """The simulated step of a plan.

    Args:
        spec: the run.
        times: as configured; where they say nothing, relative ones by the work of a layer.
        num_micro_batches: of a step.
        layer_parameters: of one layer.
        head_parameters: of the head.
        link_bytes: for each link the bytes of a hidden and of a gradient of one micro-batch.

    Raises:
        ConfigError: times that do not fit the plan or one another.
    """
    notes: list[str] = []
    relative = times.forward_s is None
    if relative and (times.link_mbit_s is not None or times.backward_s is not None):
        raise ConfigError("times.forward_s must be given where times.backward_s or times.link_mbit_s are, got null")
    forward = _each(times.forward_s or 1.0, spec.num_hidden_layers, "times.forward_s", "layer")
    if times.backward_s is None:
        again = 0.0 if spec.loop.recompute == "none" else 1.0
        backward = [(1.0 + again) * seconds for seconds in forward]
        notes.append(f"a backward costs {1 + again:g} forwards (frozen weights{', and recomputation' * bool(again)})")
    else:
        backward = _each(times.backward_s, spec.num_hidden_layers, "times.backward_s", "layer")
    if relative:
        notes.append("no times given: layers alike by their work, in units of one layer's forward")
    head = times.head_layers
    if head is None:
        head = head_parameters / max(1, layer_parameters)
        notes.append(f"the head costs {head:.2g} layers, by its parameters")
    speed = times.speed or [1.0] * len(spec.stages)
    if times.speed is None and len(spec.stages) > 1:
        notes.append("machines equally fast (times.speed)")
    if len(speed) != len(spec.stages):
        raise ConfigError(f"times.speed must hold one number for each of {len(spec.stages)} stages, got {len(speed)}")
    stages = [
        StageTime(_stage_s(forward, stage, head, rate), _stage_s(backward, stage, head, rate))
        for stage, rate in zip(spec.stages, speed, strict=True)
    ]
    links = _links(times, link_bytes, notes)
    simulation = simulated_step(stages, links, num_micro_batches, spec.schedule)
    unit = "layer forwards" if relative else "s"
    return timeline_of_simulation(simulation, [stage.id for stage in spec.stages], unit=unit, notes=notes)


def _stage_s(layers: list[float], stage: StageSpec, head: float, speed: float) -> float:
    own = sum(layers[stage.start : stage.end])
    if stage.end == len(layers):
        own += head * layers[-1]
    return own / speed


def _links(times: TimesSpec, link_bytes: Sequence[tuple[float, float]], notes: list[str]) -> list[LinkTime]:
    count = len(link_bytes)
    latency = [ms / 1e3 for ms in _each(times.latency_ms, count, "times.latency_ms", "link")]
    if times.link_mbit_s is None:
        if count:
            notes.append("links taken as free (times.link_mbit_s)")
        return [LinkTime(latency_s=seconds) for seconds in latency]
    rates = [mbit * 125e3 for mbit in _each(times.link_mbit_s, count, "times.link_mbit_s", "link")]  # bytes a second
    return [
        LinkTime(hidden / rate, grad / rate, seconds)
        for (hidden, grad), rate, seconds in zip(link_bytes, rates, latency, strict=True)
    ]


def _each(value: float | list[float], count: int, key: str, what: str) -> list[float]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{key} must be one number, or one for each of {count} {what}s, got {len(value)}")
    return value

"""What every stage did when in one step, measured or simulated: spans, their sums, and what held the step up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hetero.schedule import Op, Simulation
from hetero.wire.spans import WorkSpan

Kind = Literal["forward", "backward", "send", "receive", "wait"]
Direction = Literal["forward", "backward"]

BUSY_ENOUGH = 0.75  # part of a step from which on whoever is occupied that long is what holds it up


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One thing that a stage did; seconds since the step began, on the coordinator's clock.

    `of`: what is sent, received or waited for: a hidden (forward) or a gradient (backward).
    """

    stage: int
    kind: Kind
    micro_batch: int
    start_s: float
    end_s: float
    of: Direction | None = None


@dataclass(frozen=True)
class Timeline:
    """A step.

    Attributes:
        step: its number; None where it is simulated.
        stages: their names, in order.
        spans: of all stages.
        duration_s: of the step.
        clock_error_s: by which spans of different machines may be shifted against one another, at most.
        simulated: nothing was measured.
        unit: of all times.
        notes: what was assumed, or left out.
    """

    step: int | None
    stages: tuple[str, ...]
    spans: tuple[TimelineSpan, ...]
    duration_s: float
    clock_error_s: float = 0.0
    simulated: bool = False
    unit: str = "s"
    notes: tuple[str, ...] = ()

    def of_stage(self, stage: int, *kinds: Kind) -> list[TimelineSpan]:
        """A stage's spans of these kinds, by start."""
        return sorted(
            (span for span in self.spans if span.stage == stage and span.kind in kinds), key=lambda span: span.start_s
        )

    def busy_s(self, stage: int) -> float:
        """Seconds of compute."""
        return sum(span.end_s - span.start_s for span in self.of_stage(stage, "forward", "backward"))

    def wait_s(self, stage: int) -> float:
        """Seconds of waiting for a neighbour."""
        return sum(span.end_s - span.start_s for span in self.of_stage(stage, "wait"))

    def idle_share(self, stage: int) -> float:
        """The part of the step without compute, 0 to 1."""
        return 1.0 - self.busy_s(stage) / self.duration_s if self.duration_s else 0.0


def timeline_of_spans(
    step: int,
    stages: Sequence[str],
    spans: Mapping[int, Sequence[WorkSpan]],
    offsets_s: Mapping[int, float],
    began_s: float,
    duration_s: float,
    *,
    clock_error_s: float = 0.0,
    notes: Sequence[str] = (),
) -> Timeline:
    """Puts the spans of all stages on the coordinator's clock.

    Args:
        step: its number.
        stages: their names.
        spans: stage -> what it did, on its own clock.
        offsets_s: stage -> its clock minus the coordinator's.
        began_s: when the step began, on the coordinator's clock.
        duration_s: of the step.
        clock_error_s: see `Timeline`.
        notes: see `Timeline`.
    """
    found = []
    for stage, own in spans.items():
        shift = began_s + offsets_s[stage]
        for start, end, name, micro_batch in own:
            what, _, of = name.partition(" ")
            found.append(TimelineSpan(stage, what, micro_batch, start - shift, end - shift, of or None))  # type: ignore[arg-type]
    closed = _with_ends(found)
    return Timeline(step, tuple(stages), tuple(closed), duration_s, clock_error_s, notes=tuple(notes))


def _with_ends(spans: list[TimelineSpan]) -> list[TimelineSpan]:
    """A frame that was on its way when its sender was done had been written when it was received."""
    came = {(span.stage, span.of, span.micro_batch): span.end_s for span in spans if span.kind == "receive"}
    closed = []
    for span in spans:
        if span.kind != "sending":  # type: ignore[comparison-overlap]
            closed.append(span)
            continue
        receiver = span.stage + (1 if span.of == "forward" else -1)
        end = came.get((receiver, span.of, span.micro_batch))
        if end is not None:
            end = max(span.start_s, end)  # the clocks' error may turn them round
            closed.append(TimelineSpan(span.stage, "send", span.micro_batch, span.start_s, end, span.of))
    return closed


def timeline_of_simulation(
    simulation: Simulation, stages: Sequence[str], *, unit: str = "s", notes: Sequence[str] = ()
) -> Timeline:
    """A simulated step; a stage waits wherever it does not compute before its last backward."""
    spans = [TimelineSpan(s.stage, s.op.value, s.micro_batch, s.start, s.end) for s in simulation.spans]
    arrivals: list[tuple[float, int, int, Direction]] = []
    for frame in simulation.transfers:
        ends = (frame.link, frame.link + 1) if frame.direction is Op.FORWARD else (frame.link + 1, frame.link)
        of: Direction = "forward" if frame.direction is Op.FORWARD else "backward"
        spans.append(TimelineSpan(ends[0], "send", frame.micro_batch, frame.start, frame.end, of))
        begun = min(frame.arrive, frame.start + (frame.arrive - frame.end))
        spans.append(TimelineSpan(ends[1], "receive", frame.micro_batch, begun, frame.arrive, of))
        arrivals.append((frame.arrive, ends[1], frame.micro_batch, of))
    for stage in range(len(stages)):
        now = 0.0
        for span in sorted((s for s in simulation.spans if s.stage == stage), key=lambda s: s.start):
            if span.start > now:
                last = max((a for a in arrivals if a[1] == stage and a[0] <= span.start), default=None)
                what = None if last is None else last[3]
                micro_batch = span.micro_batch if last is None else last[2]
                spans.append(TimelineSpan(stage, "wait", micro_batch, now, span.start, what))
            now = span.end
    return Timeline(
        None, tuple(stages), tuple(spans), simulation.makespan, simulated=True, unit=unit, notes=tuple(notes)
    )


@dataclass(frozen=True)
class Bottleneck:
    """What holds a step up, by name, and why."""

    name: str
    why: str


def bottleneck(timeline: Timeline) -> Bottleneck:
    """Whoever is occupied for three quarters of the step or more; else what lets the busiest stage be idle.

    That is a link where a frame is on it for half as long or more, and otherwise the pipe, which fills and drains.
    """
    length = timeline.duration_s or 1.0
    busiest = max(range(len(timeline.stages)), key=timeline.busy_s)
    name, share = timeline.stages[busiest], timeline.busy_s(busiest) / length
    links = {pair: _link_busy_s(timeline, *pair) / length for pair in _pairs(len(timeline.stages))}
    link = max(links, key=lambda pair: links[pair], default=None)
    if link is not None and links[link] > max(share, BUSY_ENOUGH):
        return Bottleneck(_link_name(timeline, link), f"a frame on it {links[link]:.0%} of the step")
    if share >= BUSY_ENOUGH or link is None:
        return Bottleneck(f"compute of stage {name}", f"busy {share:.0%} of the step")
    if links[link] > (1.0 - share) / 2:
        why = f"a frame on it {links[link]:.0%} of the step, and stage {name}, the busiest, idle {1 - share:.0%}"
        return Bottleneck(_link_name(timeline, link), why)
    why = f"stage {name}, the busiest, is idle {1 - share:.0%} of the step; more micro-batches a step shorten that"
    return Bottleneck("fill and drain", why)


def _pairs(num_stages: int) -> list[tuple[int, int]]:
    """Sender and receiver of every direction of every link."""
    return [pair for i in range(num_stages - 1) for pair in ((i, i + 1), (i + 1, i))]


def _link_name(timeline: Timeline, pair: tuple[int, int]) -> str:
    return f"link {timeline.stages[pair[0]]} -> {timeline.stages[pair[1]]}"


def _link_busy_s(timeline: Timeline, sender: int, receiver: int) -> float:
    """Seconds with at least one frame between its handing over and its last byte at the receiver."""
    of = "forward" if sender < receiver else "backward"
    began = {s.micro_batch: s.start_s for s in timeline.spans if (s.stage, s.kind, s.of) == (sender, "send", of)}
    ways = sorted(
        (began[s.micro_batch], s.end_s)
        for s in timeline.spans
        if (s.stage, s.kind, s.of) == (receiver, "receive", of) and s.micro_batch in began
    )
    total, until = 0.0, 0.0
    for start, end in ways:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total

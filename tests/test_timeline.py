"""Timelines: spans on the wire, clocks, the picture, the trace, and a simulated step beside a measured one."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import wait_until
from processes import composed
from test_runtime import Chain
from threads import hardware_of, worker_threads

from hetero import coordinate
from hetero.config import SHAPES_DIR
from hetero.errors import ConfigError, RemoteProtocolError
from hetero.gantt import gantt_svg
from hetero.memory import RunMemory, memory_of
from hetero.planned import planned_timeline
from hetero.resolve import ResolvedRun, resolve
from hetero.schedule import LinkTime, StageTime
from hetero.spec import ScheduleSpec
from hetero.step_times import simulated_as_measured, simulated_step, times_of
from hetero.summary import summary_lines
from hetero.timeline import Timeline, TimelineSpan, bottleneck, timeline_of_simulation, timeline_of_spans
from hetero.trace import trace_json
from hetero.transport.clock import PeerClock
from hetero.transport.loopback import link_pair
from hetero.transport.tcp import TcpTransport
from hetero.wire.spans import NAMES, SPAN, pack_spans, unpack_spans

# ---- spans on the wire


def test_spans_come_back_as_they_were() -> None:
    spans = [(1.5, 2.25, name, at) for at in range(3) for name in NAMES]
    assert unpack_spans(pack_spans(spans), 3) == spans


@pytest.mark.parametrize(
    ("span", "why"),
    [
        ((2.0, 1.0, 0, 0), "must end after its start"),
        ((math.nan, 1.0, 0, 0), "must end after its start"),
        ((0.0, math.inf, 0, 0), "must end after its start"),
        ((0.0, 1.0, len(NAMES), 0), "got kind 10"),
        ((0.0, 1.0, 0, 4), "micro-batch 4"),
    ],
)
def test_span_that_cannot_be_is_refused(span: tuple[float, float, int, int], why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        unpack_spans(SPAN.pack(*span), 4)


def test_span_that_stands_twice_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="must stand once, forward of micro-batch 1"):
        unpack_spans(pack_spans([(0.0, 1.0, "forward", 1), (1.0, 2.0, "forward", 1)]), 4)


# ---- clocks


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e6, 1e6), st.lists(st.tuples(*[st.floats(1e-6, 0.2)] * 3), min_size=1, max_size=9))
def test_error_of_a_clock_is_no_larger_than_said(offset: float, pings: list[tuple[float, float, float]]) -> None:
    """Whatever each way takes, and however long the answer is held."""
    clock, now = PeerClock(), 100.0
    for number, (way, held, back) in enumerate(pings):
        clock.asked(number, now)
        came = now + way
        clock.answered(number, came + offset, came + held + offset, came + held + back)
        now += way + held + back
    found = clock.offset(now)
    assert found is not None
    assert abs(found.offset_s - offset) <= found.error_s + 1e-8
    assert found.error_s <= min(way + back for way, _, back in pings) / 2 + 1e-4 * (now - 100.0) + 1e-8


def test_answers_that_nobody_asked_for_or_from_before_the_question_teach_nothing() -> None:
    clock = PeerClock()
    clock.answered(1, 5.0, 5.0, 9.0)
    clock.asked(2, 1.0)
    clock.answered(2, 5.0, 9.0, 1.5)
    clock.answered(2, 5.0, 5.0, 1.5)
    assert clock.offset(2.0) is None


def test_coordinator_learns_a_worker_s_clock_over_a_real_control_connection() -> None:
    """Both ends are in this process, so the offset is 0 within the error."""
    left, right = link_pair(TcpTransport(), lambda _: None, lambda _: None, purpose="control")
    try:
        left.start()
        right.start()
        wait_until(lambda: left.clock.offset(time.perf_counter()) is not None, 10)
        found = left.clock.offset(time.perf_counter())
        assert found is not None and abs(found.offset_s) <= found.error_s < 0.5
        assert right.clock.offset(time.perf_counter()) is None  # only the coordinator asks
    finally:
        for link in (left, right):
            link.close()
            link.join(5)


# ---- a measured step


class Timed(Chain):
    """Stages that take what they are told, by deadlines."""

    def __init__(self, times: list[tuple[float, float]], schedule: str = "1f1b") -> None:
        super().__init__([ScheduleSpec(name=schedule)] * len(times))
        for stage, (forward_s, backward_s) in zip(self.stages, times, strict=True):
            stage.forward = self._timed(stage.forward, forward_s)  # type: ignore[method-assign]
            stage.backward = self._timed(stage.backward, backward_s)  # type: ignore[method-assign]

    @staticmethod
    def _timed(work: Any, seconds: float) -> Any:
        def timed(*args: Any) -> Any:
            until = time.perf_counter() + seconds
            result = work(*args)
            time.sleep(max(0.0, until - time.perf_counter()))
            return result

        return timed

    def timeline(self, step: int, count: int) -> Timeline:
        began = time.perf_counter()
        self.run(step, [(1, 3)] * count)
        assert not self.errors
        ends = [span[1] for work in self.works.values() for span in work.spans if span[2] == "backward"]
        spans = {
            stage: unpack_spans(pack_spans(work.spans), count) if stage else work.spans
            for stage, work in self.works.items()
        }
        zero = dict.fromkeys(spans, 0.0)
        names = [f"m{i}" for i in range(len(self.stages))]
        return timeline_of_spans(step, names, spans, zero, began, max(ends) - began)


@pytest.fixture(scope="module")
def measured() -> tuple[list[tuple[float, float]], Timeline]:
    """The quickest of a few steps: other programs only make one longer."""
    times = [(0.03, 0.05), (0.06, 0.06), (0.03, 0.03)]
    chain = Timed(times)
    try:
        steps = [chain.timeline(step, 6) for step in (1, 2, 3)]
        return times, min(steps, key=lambda timeline: timeline.duration_s)
    finally:
        chain.close()


def test_idle_shares_of_timed_stages_are_those_of_the_simulation(
    measured: tuple[list[tuple[float, float]], Timeline],
) -> None:
    """Within 3 points with the times that they took; with those that they should take, more on a busy machine."""
    times, timeline = measured
    expected = simulated_step([StageTime(*pair) for pair in times], [LinkTime()] * 2, 6, ScheduleSpec())
    for stage, idle in enumerate(expected.idle_share):
        assert timeline.idle_share(stage) == pytest.approx(idle, abs=0.08)
    again = simulated_as_measured(timeline, ScheduleSpec())
    assert again is not None and again.simulated
    for stage in range(3):
        assert again.idle_share(stage) == pytest.approx(timeline.idle_share(stage), abs=0.03)


@pytest.mark.by_hand
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_idle_shares_agree_at_any_depth(schedule: str, count: int) -> None:
    times = [(0.04 + 0.02 * (i % 3), 0.06 + 0.02 * (i % 2)) for i in range(count)]
    chain = Timed(times, schedule)
    try:
        steps = [chain.timeline(step, 16) for step in (1, 2, 3)]
        timeline = min(steps, key=lambda timeline: timeline.duration_s)
    finally:
        chain.close()
    links = [LinkTime()] * (count - 1)
    expected = simulated_step([StageTime(*pair) for pair in times], links, 16, ScheduleSpec(name=schedule))
    for stage, idle in enumerate(expected.idle_share):
        assert timeline.idle_share(stage) == pytest.approx(idle, abs=0.03)


def test_every_micro_batch_is_computed_sent_and_received_once_and_in_the_order_of_cause_and_effect(
    measured: tuple[list[tuple[float, float]], Timeline],
) -> None:
    timeline = measured[1]
    found = {(s.stage, s.kind, s.of, s.micro_batch): s for s in timeline.spans if s.kind != "wait"}
    assert len(found) == sum(s.kind != "wait" for s in timeline.spans) == 6 * (2 * 3 + 2 * 2 * 2)
    for stage in range(3):
        for at in range(6):
            forward, backward = (found[stage, what, None, at] for what in ("forward", "backward"))
            assert forward.end_s <= backward.start_s
            if stage:
                sent, came = found[stage - 1, "send", "forward", at], found[stage, "receive", "forward", at]
                before = found[stage - 1, "forward", None, at]
                assert before.start_s <= sent.start_s <= came.start_s <= came.end_s <= forward.start_s
                sent, came = found[stage, "send", "backward", at], found[stage - 1, "receive", "backward", at]
                assert backward.start_s <= sent.start_s <= came.start_s <= came.end_s
                assert came.end_s <= found[stage - 1, "backward", None, at].start_s


def test_waits_and_computes_of_a_stage_do_not_overlap(measured: tuple[list[tuple[float, float]], Timeline]) -> None:
    timeline = measured[1]
    for stage in range(3):
        own = timeline.of_stage(stage, "forward", "backward", "wait")
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(own))
        assert timeline.busy_s(stage) + timeline.wait_s(stage) <= timeline.duration_s


def test_frame_on_its_way_at_the_end_ends_where_it_is_received() -> None:
    spans = {
        0: [(1.0, 2.0, "receive backward", 0)],
        1: [(100.5, 100.5, "sending backward", 0), (100.6, 100.6, "sending backward", 1)],
    }
    made = timeline_of_spans(3, ["a", "b"], spans, {0: 0.0, 1: 100.0}, 0.0, 3.0)
    (send,) = [span for span in made.spans if span.kind == "send"]
    assert send == TimelineSpan(1, "send", 0, pytest.approx(0.5), 2.0, "backward")  # type: ignore[arg-type]


def test_latency_of_a_link_does_not_depend_on_how_wrong_the_clocks_are() -> None:
    stages, links = [StageTime(1.0, 2.0)] * 2, [LinkTime(0.25, 0.5, 0.125)]
    right = timeline_of_simulation(simulated_step(stages, links, 4, ScheduleSpec()), ["a", "b"])
    wrong = [
        TimelineSpan(s.stage, s.kind, s.micro_batch, s.start_s + 7 * s.stage, s.end_s + 7 * s.stage, s.of)
        for s in right.spans
    ]
    for spans in (right.spans, tuple(wrong)):
        found = times_of(Timeline(1, ("a", "b"), spans, right.duration_s))
        assert found is not None
        (link,) = found[1]
        assert link.latency_s == pytest.approx(0.125)
        assert link.forward_occupancy_s == pytest.approx((0.25,) * 4)
        assert link.backward_occupancy_s == pytest.approx((0.5,) * 4)
        assert simulated_step(found[0], found[1], found[2], ScheduleSpec()).makespan == pytest.approx(right.duration_s)


# ---- the bottleneck


@pytest.mark.parametrize(
    ("stages", "link", "count", "name"),
    [
        ([(1, 1), (3, 3), (1, 1)], LinkTime(), 8, "compute of stage m1"),
        ([(1, 1), (1, 1), (1, 1)], LinkTime(3.0, 0.1), 8, "link m0 -> m1|link m1 -> m2"),
        ([(1, 1), (1, 1), (1, 1)], LinkTime(0.1, 3.0), 8, "link m1 -> m0|link m2 -> m1"),
        ([(1, 1)] * 4, LinkTime(), 2, "fill and drain"),
        ([(1, 1)], LinkTime(), 1, "compute of stage m0"),
    ],
)
def test_bottleneck_is_named(stages: list[tuple[float, float]], link: LinkTime, count: int, name: str) -> None:
    links = [link] * (len(stages) - 1)
    simulation = simulated_step([StageTime(*pair) for pair in stages], links, count, ScheduleSpec())
    found = bottleneck(timeline_of_simulation(simulation, [f"m{i}" for i in range(len(stages))]))
    assert re.fullmatch(name, found.name) and "%" in found.why


# ---- pictures and traces


class Event(msgspec.Struct, forbid_unknown_fields=True):
    """An event as the Trace Event Format describes X (complete) and M (metadata) events."""

    ph: str
    name: str
    pid: int
    tid: int
    args: dict[str, Any]
    cat: str | None = None
    ts: float | None = None
    dur: float | None = None


def events_of(text: str) -> list[Event]:
    """The events of a trace, each checked against the format."""
    trace = json.loads(text)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = msgspec.convert(trace["traceEvents"], list[Event])
    for event in events:
        if event.ph == "X":
            assert event.ts is not None and event.dur is not None and event.dur >= 0
        else:
            assert event.ph == "M" and event.ts is None
            assert event.name in ("process_name", "process_sort_index", "thread_name")
    return events


def test_trace_names_stages_and_rows_and_holds_every_span(
    measured: tuple[list[tuple[float, float]], Timeline],
) -> None:
    timeline = measured[1]
    events = events_of(trace_json([(0.0, timeline), (5.0, timeline)], ["one", "two", "three"]))
    names = [event.args["name"] for event in events if event.name == "process_name"]
    assert names == ["stage 0: m0 on one", "stage 1: m1 on two", "stage 2: m2 on three"]
    work = [event for event in events if event.ph == "X"]
    assert len(work) == 2 * len(timeline.spans)
    for stage in range(3):
        seconds = sum(e.dur or 0.0 for e in work if e.pid == stage and e.cat in ("forward", "backward")) / 2e6
        assert seconds == pytest.approx(timeline.busy_s(stage))


def test_steps_that_would_make_a_trace_too_large_are_named() -> None:
    spans = tuple(TimelineSpan(0, "forward", at, 0.0, 1.0) for at in range(20))
    with mock.patch("hetero.trace.MAX_EVENTS", 40):
        trace = json.loads(trace_json([(float(n), Timeline(n, ("a",), spans, 1.0)) for n in (1, 2, 3)]))
    assert trace["otherData"]["steps_left_out_for_size"] == [2, 3]


def test_picture_is_self_contained_svg_with_a_bar_for_every_span(
    measured: tuple[list[tuple[float, float]], Timeline],
) -> None:
    timeline = measured[1]
    odd = Timeline(1, ('<a> & "b" \'', "中文 🙂", "x" * 99), timeline.spans, timeline.duration_s, clock_error_s=0.002)
    text = gantt_svg(odd)
    assert text == gantt_svg(odd)
    root = ET.fromstring(text)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "title", "style", "rect", "text", "line"}
    assert "prefers-color-scheme:dark" in text and "url(" not in text and "@import" not in text
    assert not [a for e in root.iter() for a in e.attrib if "href" in a or a.startswith("on")]
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if len(e)]
    assert len(bars) == len(timeline.spans)
    shown = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert '<a> & "b" \'' in shown and "中文 🙂" in shown
    assert "clocks of different machines agree within 2 ms" in shown


def test_an_empty_step_is_drawn_too() -> None:
    ET.fromstring(gantt_svg(Timeline(None, ("a",), (), 0.0)))
    assert events_of(trace_json([])) == []


# ---- a plan


@functools.cache
def plan_of(*overrides: str) -> tuple[ResolvedRun, RunMemory]:
    resolved = resolve(composed(*overrides), shapes_dir=SHAPES_DIR, for_drawing=True)
    return resolved, memory_of(resolved, SHAPES_DIR)


def planned(times: dict[str, Any], *overrides: str) -> Timeline:
    resolved, memory = plan_of(*overrides)
    return planned_timeline(resolved, times, memory)


def test_plan_without_times_is_relative_and_says_what_was_assumed() -> None:
    timeline = planned({})
    assert timeline.unit == "layer forwards" and timeline.simulated
    text = " ".join(timeline.notes)
    assert "no times given" in text and "links taken as free" in text and "a backward costs 1 forwards" in text
    assert timeline.of_stage(0, "forward")[0].end_s == pytest.approx(3.0)


def test_given_times_speeds_and_links_are_those_of_the_simulated_step() -> None:
    times = {"forward_s": [0.1, 0.2, 0.3, 0.1, 0.1, 0.1], "backward_s": 0.4, "speed": [1.0, 2.0], "head_layers": 1.0}
    timeline = planned(times | {"link_mbit_s": 100.0, "latency_ms": 2.0})
    first, last = timeline.of_stage(0, "forward")[0], timeline.of_stage(1, "backward")[0]
    assert first.end_s == pytest.approx(0.6)
    assert last.end_s - last.start_s == pytest.approx((3 * 0.4 + 0.4) / 2)
    came = timeline.of_stage(1, "receive")[0]
    sent = timeline.of_stage(0, "send")[0]
    assert came.end_s - sent.end_s == pytest.approx(0.002) and sent.end_s > sent.start_s


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ({"forward_s": [1.0]}, "times.forward_s must be one number, or one for each of 6 layers, got 1"),
        ({"speed": [1.0]}, "times.speed must hold one number for each of 2 stages, got 1"),
        ({"link_mbit_s": 5.0}, "times.forward_s must be given where"),
        ({"forward_s": -1.0}, "times.forward_s must be"),
        ({"forwards": 1.0}, "times.forwards is not a key; did you mean forward_s"),
        ({"run": "/nowhere"}, "times.run must be the folder of a run"),
    ],
)
def test_times_that_cannot_be_are_refused(times: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        planned(times)


# ---- a run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("timeline")
    with worker_threads(1, folder) as ports:
        resolved = resolve(
            composed("loop.steps=4", "loop.trace_steps=1", "checkpoint=none", *hardware_of(ports)),
            shapes_dir=SHAPES_DIR,
        )
        return folder / "run", coordinate.coordinate(resolved, folder / "run")


def test_sums_of_a_run_s_trace_are_those_of_its_metrics(run: tuple[Path, Any]) -> None:
    folder, result = run
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    text = (folder / "trace.json").read_text(encoding="utf-8")
    about = json.loads(text)["otherData"]
    assert [step["step"] for step in about["steps"]] == [1, 4]  # the first and the last
    assert not [note for step in about["steps"] for note in step["notes"]]
    events = events_of(text)
    for step, shown in ((1, about["steps"][0]), (4, about["steps"][1])):
        record = records[step - 1]
        assert shown["duration"] == pytest.approx(record["step_time_s"], rel=0.01)
        for index, stage in enumerate(record["stages"]):
            mine = [e for e in events if e.ph == "X" and e.pid == index and e.args["step"] == step]
            busy = sum(e.dur or 0.0 for e in mine if e.cat in ("forward", "backward")) / 1e6
            wait = sum(e.dur or 0.0 for e in mine if e.cat == "wait") / 1e6
            assert busy == pytest.approx(stage["busy_s"], rel=0.01)
            assert wait == pytest.approx(stage["wait_s"], rel=0.01, abs=1e-6)
    assert result.timeline.step == 4


def test_frames_of_a_run_arrive_after_they_were_sent_within_the_clocks_error(run: tuple[Path, Any]) -> None:
    """Two processes' clocks are one here, but the run does not know that: it measures the offset."""
    timeline = run[1].timeline
    assert 0 < timeline.clock_error_s < 1
    sent = {(s.stage, s.of, s.micro_batch): s for s in timeline.spans if s.kind == "send"}
    came = [s for s in timeline.spans if s.kind == "receive"]
    assert len(came) == len(sent) == 2 * 4
    for span in came:
        sender = sent[span.stage + (-1 if span.of == "forward" else 1), span.of, span.micro_batch]
        assert sender.start_s <= span.start_s + timeline.clock_error_s
        assert span.end_s <= timeline.duration_s + timeline.clock_error_s


def test_run_leaves_pictures_and_names_its_bottleneck(run: tuple[Path, Any]) -> None:
    folder, result = run
    for name in ("timeline.svg", "timeline-simulated.svg"):
        ET.fromstring((folder / name).read_text(encoding="utf-8"))
    text = "\n".join(summary_lines(result))
    assert re.search(r"bottleneck: (compute of stage|link|fill and drain).*%", text)
    assert len(re.findall(r"idle \d+%", text)) == 2


def test_times_of_a_run_draw_another_plan(run: tuple[Path, Any]) -> None:
    folder, result = run
    one = planned({"run": str(folder)})
    busy = [sum(s.end_s - s.start_s for s in one.of_stage(i, "forward", "backward")) for i in range(2)]
    assert busy == pytest.approx([result.timeline.busy_s(i) for i in range(2)], rel=0.01)
    assert planned({"run": str(folder)}, "shard_plan.num_stages=1").busy_s(0) == pytest.approx(sum(busy), rel=0.01)
    with pytest.raises(ConfigError, match=r"times.run and times.forward_s exclude one another"):
        planned({"run": str(folder), "forward_s": 1.0})

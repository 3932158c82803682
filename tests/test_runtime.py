"""The event loop over real links, with stages that only count, so that many runs are cheap."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import Tiny, make_rows
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pipeline import make_spec, run_pipeline

from hetero import data, device
from hetero.errors import HeteroError, PeerError
from hetero.inbox import Inbox
from hetero.runtime import Runtime, StepPlan, StepWork, step_plan_of
from hetero.spec import ScheduleSpec
from hetero.transport.link import Closed, Link, Received
from hetero.transport.loopback import link_pair
from hetero.transport.tcp import TcpTransport
from hetero.wire.flow import LinkFlow, pack_shapes
from hetero.wire.frames import Frame
from hetero.wire.headers import FrameType, Step, Tensors
from hetero.wire.tensors import pack

HIDDEN = 4
WAIT_S = 20


@dataclass
class Counter:
    """Stands for a Stage: adds 1 to a hidden, doubles a gradient, and keeps a record."""

    is_first: bool
    is_last: bool
    pause: Callable[[], float] = lambda: 0.0
    device: Any = field(default_factory=lambda: device.resolve("cpu"))
    done: list[tuple[str, int, int]] = field(default_factory=list)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    riders: list[set[str]] = field(default_factory=list)
    grads: list[float] = field(default_factory=list)
    in_flight: int = 0
    peak: int = 0
    fault: Exception | None = None
    router: None = None

    def forward(self, step: int, micro_batch: int, batch: dict[str, torch.Tensor], label_tokens: int) -> Any:
        time.sleep(self.pause())
        if self.fault is not None:
            raise self.fault
        self.done.append(("forward", step, micro_batch))
        self.riders.append(set(batch))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        ids = batch["labels"]
        hidden = batch["hidden"] if "hidden" in batch else ids.float().unsqueeze(-1).repeat(1, 1, HIDDEN)
        self.inputs[micro_batch] = hidden
        return None if self.is_last else hidden + 1

    def backward(self, micro_batch: int, grad: torch.Tensor | None, router_grad: None) -> torch.Tensor | None:
        assert router_grad is None
        time.sleep(self.pause())
        self.done.append(("backward", 0, micro_batch))
        self.in_flight -= 1
        hidden = self.inputs.pop(micro_batch)
        out = torch.full_like(hidden, float(micro_batch + 1)) if grad is None else grad * 2
        assert out.shape == hidden.shape
        self.grads.append(float(out.flatten()[0]))
        return None if self.is_first else out


class Chain:
    """Runtimes of counting stages that are joined by real links."""

    def __init__(self, schedules: Sequence[ScheduleSpec], pause: Callable[[], float] = lambda: 0.0) -> None:
        count = len(schedules)
        self.stages = [Counter(i == 0, i == count - 1, pause) for i in range(count)]
        self.inboxes = [Inbox() for _ in schedules]
        self.links: list[Link] = []
        up: list[Link | None] = [None] * count
        down: list[Link | None] = [None] * count
        for i in range(count - 1):
            left, right = link_pair(TcpTransport(), self.deliver(i), self.deliver(i + 1))
            for end in (left, right):
                flow = LinkFlow(hidden_size=HIDDEN, dtype="float32", max_rows=8, max_length=64)
                end.connection.flow = flow
                end.start()
            down[i], up[i + 1] = left, right
            self.links += [left, right]
        self.runtimes = [
            Runtime(
                stage,  # type: ignore[arg-type]
                index=i,
                num_stages=count,
                schedule=schedules[i],
                vocab_size=1 << 20,
                inbox=self.inboxes[i],
                upstream=up[i],
                downstream=down[i],
            )
            for i, stage in enumerate(self.stages)
        ]
        self.errors: dict[int, BaseException] = {}
        self.works: dict[int, StepWork] = {}

    def deliver(self, index: int) -> Callable[[Received | Closed], None]:
        def put(event: Received | Closed) -> None:
            if isinstance(event, Closed):
                self.inboxes[index].fail(event.error or HeteroError("closed here"))
            else:
                self.inboxes[index].put(event)

        return put

    def run(self, step: int, shapes: Sequence[tuple[int, int]]) -> None:
        """One step on all stages; every one ends in time, or the test fails."""
        threads = [
            threading.Thread(target=self._run, args=(i, step, shapes), daemon=True) for i in range(len(self.stages))
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + WAIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads), [stage.done for stage in self.stages]

    def _run(self, index: int, step: int, shapes: Sequence[tuple[int, int]]) -> None:
        try:
            if index == 0:
                plan = StepPlan(step, 1, list(shapes))
                self.works[0] = self.runtimes[0].run_step(plan, batches(shapes))
            else:
                event = self.inboxes[index].get(is_step, timeout_s=WAIT_S)
                self.works[index] = self.runtimes[index].run_step(step_plan_of(event))
        except BaseException as exc:
            self.errors[index] = exc
            for link in self.links[max(0, 2 * index - 1) : 2 * index + 1]:
                link.close()

    def close(self) -> None:
        for link in self.links:
            link.close()
        for link in self.links:
            link.join(5)


def is_step(event: object) -> bool:
    return isinstance(event, Received) and isinstance(event.frame.header, Step)


def batches(shapes: Sequence[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
    made = []
    for number, shape in enumerate(shapes):
        batch = {"input_ids": torch.ones(shape, dtype=torch.int64), "labels": torch.full(shape, number)}
        if number % 2:
            batch["attention_mask"] = torch.ones(shape, dtype=torch.bool)
            batch["position_ids"] = torch.arange(shape[1]).repeat(shape[0], 1)
        made.append(batch)
    return made


SCHEDULES = st.builds(
    ScheduleSpec,
    name=st.sampled_from(["1f1b", "gpipe"]),
    max_in_flight=st.one_of(st.none(), st.integers(1, 9)),
)
SHAPES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=7)


# Without shrinking, since every example that hangs costs WAIT_S.
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(SCHEDULES, min_size=1, max_size=5), SHAPES, SHAPES, st.integers(0, 99))
def test_any_policies_and_caps_end_every_step(
    schedules: list[ScheduleSpec], first: list[tuple[int, int]], second: list[tuple[int, int]], seed: int
) -> None:
    """No deadlock over real links, whatever policy and cap each stage has; order, caps and values are right."""
    draw = random.Random(seed)
    chain = Chain(schedules, pause=lambda: draw.choice([0, 0, 0, 0.001]))
    try:
        for step, shapes in enumerate((first, second), 1):
            chain.run(step, shapes)
            assert not chain.errors
            count = len(shapes)
            for index, stage in enumerate(chain.stages):
                forwards = [entry for entry in stage.done if entry[0] == "forward"]
                backwards = [entry for entry in stage.done if entry[0] == "backward"]
                assert forwards == [("forward", step, number) for number in range(count)]
                assert [number for _, _, number in backwards] == list(range(count))
                assert stage.peak <= (schedules[index].max_in_flight or count)
                assert not stage.in_flight
                factor = 2 ** (len(schedules) - 1 - index)
                assert stage.grads == [factor * (number + 1) for number in range(count)]
                riders = {"hidden" if index else "input_ids", "labels"}
                more = riders | {"attention_mask", "position_ids"}
                assert stage.riders == [more if number % 2 else riders for number in range(count)]
                spans = [span for span in chain.works[index].spans if span[2] in ("forward", "backward")]
                assert len(spans) == 2 * count
                assert all(before <= after for before, after, _, _ in spans)
                assert [span[2] for span in spans] == [entry[0] for entry in stage.done]
                stage.done, stage.grads, stage.riders, stage.peak = [], [], [], 0
    finally:
        chain.close()


def test_values_pass_through_every_stage() -> None:
    chain = Chain([ScheduleSpec()] * 3)
    seen: list[torch.Tensor] = []
    forward = chain.stages[2].forward
    chain.stages[2].forward = lambda *args: (seen.append(args[2]["hidden"].clone()), forward(*args))[1]  # type: ignore[method-assign]
    try:
        chain.run(1, [(2, 3), (1, 5)])
        assert not chain.errors
        assert [hidden.shape for hidden in seen] == [(2, 3, HIDDEN), (1, 5, HIDDEN)]
        assert [float(hidden.max()) for hidden in seen] == [2.0, 3.0]
        assert all(bool((hidden == hidden.max()).all()) for hidden in seen)
    finally:
        chain.close()


# ---- faults


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_stage_ends_the_step_everywhere(failing: int) -> None:
    """Its neighbours' links close, so their waits end with a PeerError instead of lasting."""
    chain = Chain([ScheduleSpec()] * 3)
    chain.stages[failing].fault = ValueError("out of luck")
    try:
        chain.run(1, [(1, 3)] * 4)
        assert chain.errors.keys() == {0, 1, 2}
        assert isinstance(chain.errors[failing], ValueError)
        assert all(isinstance(error, HeteroError) for index, error in chain.errors.items() if index != failing)
        next_to_it = [i for i in (failing - 1, failing + 1) if 0 <= i <= 2]
        # Before the first STEP nobody holds more than a closed link; each tells of it or of its own closing.
        assert any(isinstance(chain.errors[i], PeerError) for i in next_to_it)
    finally:
        chain.close()


def test_a_failure_from_outside_ends_a_waiting_step() -> None:
    """Control's part: the coordinator's abort reaches a stage that waits for a neighbour."""
    chain = Chain([ScheduleSpec()] * 2)
    result: list[BaseException] = []

    def wait() -> None:
        try:
            chain.runtimes[0].run_step(StepPlan(1, 1, [(1, 3)]), batches([(1, 3)]))
        except BaseException as exc:
            result.append(exc)

    thread = threading.Thread(target=wait, daemon=True)
    try:
        thread.start()
        chain.inboxes[1].get(is_step, timeout_s=WAIT_S)  # stage 0 has begun; nobody answers
        error = PeerError("gone", stage=1, host="box", port=9999, step=1)
        chain.inboxes[0].fail(error)
        chain.inboxes[0].fail(HeteroError("later ones are ignored"))
        thread.join(WAIT_S)
        assert result == [error]
        with pytest.raises(PeerError, match="stage 1 at box:9999 in step 1: gone"):
            chain.inboxes[0].take(lambda _: True)
    finally:
        chain.close()


def test_a_neighbour_that_closes_its_link_ends_the_step() -> None:
    chain = Chain([ScheduleSpec()] * 2)
    try:
        chain.links[1].close()
        chain._run(0, 1, [(1, 3)])
        assert isinstance(chain.errors[0], PeerError)
        assert "closed the connection" in str(chain.errors[0])
    finally:
        chain.close()


# ---- between steps


def frame(link: Link, step: int, micro_batch: int, shape: tuple[int, int]) -> None:
    tensors = {"hidden": torch.full((*shape, HIDDEN), float(step)), "labels": torch.full(shape, 3)}
    table, payload = pack(tensors)
    link.send(FrameType.FORWARD, Tensors(step=step, micro_batch=micro_batch, tensors=table), payload)


def announce(link: Link, step: int, shapes: Sequence[tuple[int, int]]) -> None:
    link.send(FrameType.STEP, Step(step=step, label_tokens=1), [memoryview(pack_shapes(shapes))])


def test_work_of_the_next_step_waits_for_it() -> None:
    """A fast neighbour sends step 2 while this stage still ends step 1: its frames stay in the inbox."""
    chain = Chain([ScheduleSpec(), ScheduleSpec()])
    sender, last = chain.links[0], chain.runtimes[1]
    try:
        announce(sender, 1, [(1, 3)])
        frame(sender, 1, 0, (1, 3))
        first = chain.inboxes[1].get(is_step, timeout_s=WAIT_S)
        # All of step 1 is done and sent back before APPLY; the neighbour goes on at once.
        last.run_step(step_plan_of(first))
        chain.inboxes[0].get(lambda e: e.frame.type is FrameType.BACKWARD, timeout_s=WAIT_S)
        announce(sender, 2, [(2, 4), (1, 2)])
        frame(sender, 2, 0, (2, 4))
        frame(sender, 2, 1, (1, 2))
        second = chain.inboxes[1].get(is_step, timeout_s=WAIT_S)
        assert step_plan_of(second) == StepPlan(2, 1, [(2, 4), (1, 2)])
        last.run_step(step_plan_of(second))
        assert [entry for entry in chain.stages[1].done if entry[0] == "forward"] == [
            ("forward", 1, 0),
            ("forward", 2, 0),
            ("forward", 2, 1),
        ]
    finally:
        chain.close()


def test_frames_of_another_step_are_not_taken() -> None:
    """The same, with step 2 in the inbox before step 1's run: nothing of it is mixed in."""
    inbox = Inbox()
    stage = Counter(is_first=False, is_last=True)
    sent: list[tuple[FrameType, int, int]] = []

    class Upstream:
        def send(self, type_: FrameType, header: Tensors, payload: Sequence[memoryview] = ()) -> None:
            sent.append((type_, header.step, header.micro_batch))

        def written(self) -> list[tuple[int, int, float]]:
            return []

    runtime = Runtime(
        stage,  # type: ignore[arg-type]
        index=1,
        num_stages=2,
        schedule=ScheduleSpec(),
        vocab_size=1 << 20,
        inbox=inbox,
        upstream=Upstream(),  # type: ignore[arg-type]
    )
    for step, micro_batch in ((2, 0), (1, 0), (2, 1), (1, 1)):
        table, payload = pack({"hidden": torch.ones(1, 2, HIDDEN), "labels": torch.ones(1, 2, dtype=torch.int64)})
        header = Tensors(step=step, micro_batch=micro_batch, tensors=table)
        raw = memoryview(bytearray(b"".join(payload)))
        inbox.put(Received(None, Frame(FrameType.FORWARD, header, raw)))  # type: ignore[arg-type]
    inbox.put("an event for somebody else")
    watch = threading.Timer(WAIT_S, inbox.fail, [HeteroError("the step hangs")])
    watch.start()
    runtime.run_step(StepPlan(1, 1, [(1, 2)] * 2))
    assert sent == [(FrameType.BACKWARD, 1, 0), (FrameType.BACKWARD, 1, 1)]
    assert [entry for entry in stage.done if entry[0] == "forward"] == [("forward", 1, 0), ("forward", 1, 1)]
    runtime.run_step(StepPlan(2, 1, [(1, 2)] * 2))
    watch.cancel()
    assert sent[2:] == [(FrameType.BACKWARD, 2, 0), (FrameType.BACKWARD, 2, 1)]
    assert inbox.take(lambda _: True) == ["an event for somebody else"]


# ---- inbox


def test_inbox_gives_in_order_of_arrival_and_keeps_the_rest() -> None:
    inbox = Inbox()
    for event in ("a1", "b1", "a2", "b2"):
        inbox.put(event)
    assert inbox.get(lambda e: e[0] == "b") == "b1"
    assert inbox.take(lambda e: e[0] == "a") == ["a1", "a2"]
    assert inbox.take(lambda e: e[0] == "a") == []
    assert inbox.get(lambda e: True) == "b2"
    with pytest.raises(TimeoutError):
        inbox.get(lambda e: True, timeout_s=0.01)


def test_inbox_wakes_a_waiting_thread() -> None:
    inbox = Inbox()
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(inbox.get(lambda e: e == "this", timeout_s=WAIT_S)))
    thread.start()
    inbox.put("that")
    inbox.put("this")
    thread.join(WAIT_S)
    assert got == ["this"]
    assert inbox.failure() is None


# ---- real stages


def test_micro_batches_of_unequal_length(tiny: Tiny) -> None:
    """Nothing is sized from the first micro-batch: one token pair up to 40 tokens, in both orders."""
    rows = make_rows((0, 38, 3, 17, 1))
    losses = []
    for order in (rows, rows[::-1]):
        steps = [data.micro_batches(order, 1, padding_side="right", pad_id=0)]
        losses.append(run_pipeline(make_spec(tiny("llama"), (1, 4), lr=0.0), tiny("llama"), steps).losses[0])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)

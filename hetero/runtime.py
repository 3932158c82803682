"""One stage's event loop for one step: does the ready work that its policy prefers, and waits for the rest.

forward(m):  ready when its hidden is here (first stage: always), and fewer than K are in flight
backward(m): ready when its gradient is here (last stage: once its forward is done); in the order of forwards
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hetero.errors import RemoteProtocolError
from hetero.failpoints import hit
from hetero.inbox import Inbox
from hetero.schedule import Op, Policy, evaluation_policy, next_op, policy_for
from hetero.spec import ScheduleSpec
from hetero.stage import IGNORED_LABEL, Stage
from hetero.transport.link import Link, Received
from hetero.watchdog import Phase, Progress
from hetero.wire.flow import RIDERS, ROUTER_GRAD, pack_shapes, unpack_shapes
from hetero.wire.headers import FrameType, Step, Tensors
from hetero.wire.spans import WorkSpan
from hetero.wire.tensors import DTYPES, pack, unpack


@dataclass(frozen=True)
class StepPlan:
    """A step as its STEP frame announces it; `real_tokens` is 0 where the router loss is off.

    `evaluation` is the number of an evaluation after the step, 0 in the step itself.
    """

    step: int
    label_tokens: int
    shapes: list[tuple[int, int]]
    real_tokens: int = 0
    evaluation: int = 0


@dataclass
class StepWork:
    """What a stage did in a step: seconds computing, seconds waiting, and spans as `hetero.wire.spans` names them."""

    busy_s: float = 0.0
    wait_s: float = 0.0
    spans: list[WorkSpan] = field(default_factory=list)


class Runtime:
    """Runs the steps of one stage.

    Args:
        stage: what computes.
        index: of the stage.
        num_stages: of the run.
        schedule: the policy by name.
        vocab_size: of the model; labels that come from a peer are below it.
        inbox: where the links deliver.
        upstream: link to the stage before, None on the first.
        downstream: link to the stage after, None on the last.
        upstream_dtype: dtype of hidden and grad on the link to the stage before.
        downstream_dtype: the same towards the stage after.
        progress: told of each forward and backward.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        index: int,
        num_stages: int,
        schedule: ScheduleSpec,
        vocab_size: int,
        inbox: Inbox,
        upstream: Link | None = None,
        downstream: Link | None = None,
        upstream_dtype: str = "float32",
        downstream_dtype: str = "float32",
        progress: Progress | None = None,
    ) -> None:
        self.stage, self.inbox, self.vocab_size = stage, inbox, vocab_size
        self.progress = progress or Progress()
        self._index, self._num_stages, self._schedule = index, num_stages, schedule
        self._upstream, self._downstream = upstream, downstream
        self._upstream_dtype, self._downstream_dtype = DTYPES[upstream_dtype], DTYPES[downstream_dtype]

    def run_step(self, plan: StepPlan, batches: Sequence[dict[str, torch.Tensor]] | None = None) -> StepWork:
        """Runs forward and backward of all micro-batches of a step, or the forwards of an evaluation.

        Args:
            plan: the step.
            batches: on the first stage, its micro-batches: tensors as `Stage.forward` takes them.

        Raises:
            PeerError: a neighbour or the coordinator failed.
        """
        if self._downstream is not None:
            header = Step(plan.step, plan.label_tokens, plan.real_tokens, plan.evaluation)
            self._downstream.send(FrameType.STEP, header, [memoryview(pack_shapes(plan.shapes))])
        if plan.evaluation:
            with self.stage.evaluating():
                return _OneStep(self, plan, evaluation_policy(self._schedule.max_in_flight), batches).run()
        if self.stage.router is not None:
            self.stage.router.begin_step(plan.real_tokens)
        policy = policy_for(
            self._schedule.name, self._index, self._num_stages, len(plan.shapes), self._schedule.max_in_flight
        )
        return _OneStep(self, plan, policy, batches).run()


class _OneStep:
    """The state of one step on one stage."""

    def __init__(
        self, runtime: Runtime, plan: StepPlan, policy: Policy, batches: Sequence[dict[str, torch.Tensor]] | None
    ) -> None:
        self._rt, self._plan, self._policy = runtime, plan, policy
        self._forwards = deque(batches or ())
        self._grads: deque[dict[str, torch.Tensor]] = deque()
        self._num_forward = self._num_backward = 0
        self._work = StepWork()
        self._handed: dict[tuple[FrameType, int], float] = {}  # when a micro-batch's frame was handed to its link

    def run(self) -> StepWork:
        """Works until every micro-batch went backward; in an evaluation, until the next stage has taken them all."""
        total = len(self._plan.shapes)
        while self._num_backward < total:
            self._take_arrived()
            last = self._rt.stage.is_last
            op = next_op(
                self._policy,
                self._num_forward - self._num_backward,
                bool(self._forwards),
                self._num_backward < self._num_forward if last else bool(self._grads),
            )
            if op is None:
                self._wait()
            elif op is Op.FORWARD:
                self._timed(self._forward, "forward", self._num_forward)
            else:
                self._timed(self._backward, "backward", self._num_backward)
        self._add_sent(FrameType.FORWARD, self._rt._downstream)
        self._add_sent(FrameType.BACKWARD, self._rt._upstream)
        return self._work

    def _forward(self) -> None:
        batch = self._forwards.popleft()
        if self._plan.evaluation:
            hidden, router = self._rt.stage.evaluate(batch), None
        else:
            hidden = self._rt.stage.forward(self._plan.step, self._num_forward, batch, self._plan.label_tokens)
            router = self._rt.stage.router
        if self._rt._downstream is not None:
            assert hidden is not None
            riders = {name: batch[name] for name in RIDERS if name in batch}
            riders |= self._on_host(router.outgoing(self._num_forward)) if router is not None else {}
            self._send(self._rt._downstream, FrameType.FORWARD, self._num_forward, riders, hidden=hidden)
        if self._plan.evaluation and self._rt._upstream is not None:
            self._send(self._rt._upstream, FrameType.BACKWARD, self._num_forward, {})  # it is taken: room for another
        self._num_forward += 1
        if not self._rt.stage.is_first:
            hit("worker.evaluating" if self._plan.evaluation else "worker.forward_done")

    def _backward(self) -> None:
        if self._plan.evaluation:
            if not self._rt.stage.is_last:
                self._grads.popleft()
            self._num_backward += 1
            return
        stage, grads = self._rt.stage, {} if self._rt.stage.is_last else self._grads.popleft()
        grad_in = stage.backward(self._num_backward, grads.get("grad"), grads.get(ROUTER_GRAD))
        router_grad = None if stage.router is None else stage.router.end_backward(self._num_backward)
        if self._rt._upstream is not None:
            assert grad_in is not None
            riders = {} if router_grad is None else self._on_host({ROUTER_GRAD: router_grad})
            self._send(self._rt._upstream, FrameType.BACKWARD, self._num_backward, riders, grad=grad_in)
        self._num_backward += 1
        if not self._rt.stage.is_first:
            hit("worker.backward_done")

    def _send(
        self, link: Link, type_: FrameType, micro_batch: int, riders: dict[str, torch.Tensor], **large: torch.Tensor
    ) -> None:
        dtype = self._rt._downstream_dtype if type_ is FrameType.FORWARD else self._rt._upstream_dtype
        on_host = {name: self._rt.stage.device.to_host(tensor.to(dtype)) for name, tensor in large.items()}
        table, payload = pack(on_host | riders)
        self._handed[type_, micro_batch] = time.perf_counter()
        link.send(type_, Tensors(step=self._plan.step, micro_batch=micro_batch, tensors=table), payload)

    def _on_host(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._rt.stage.device.to_host(tensor) for name, tensor in tensors.items()}

    def _take_arrived(self) -> None:
        for event in self._rt.inbox.take(self._is_work):
            self._take(event)

    def _wait(self) -> None:
        """Until something comes; the span has its name, since that ended it."""
        before = time.perf_counter()
        event = self._rt.inbox.get(self._is_work)
        self._take(event)
        after = time.perf_counter()
        self._work.wait_s += after - before
        what, micro_batch = _name(event.frame.type), event.frame.header.micro_batch
        self._work.spans.append((before, after, f"wait {what}", micro_batch))

    def _add_sent(self, type_: FrameType, link: Link | None) -> None:
        """The spans of frames from their handing over until they were written; the last may be on its way yet."""
        if link is None:
            return
        what = _name(type_)
        ends = {micro_batch: end for step, micro_batch, end in link.written() if step == self._plan.step}
        for (kind, micro_batch), start in self._handed.items():
            if kind is type_:
                end = ends.get(micro_batch)
                name = "sending" if end is None else "send"
                self._work.spans.append((start, start if end is None else end, f"{name} {what}", micro_batch))

    def _is_work(self, event: object) -> bool:
        return (
            isinstance(event, Received)
            and isinstance(event.frame.header, Tensors)
            and event.frame.header.step == self._plan.step
        )

    def _take(self, event: object) -> None:
        assert isinstance(event, Received)
        assert isinstance(event.frame.header, Tensors)
        what, micro_batch = _name(event.frame.type), event.frame.header.micro_batch
        self._work.spans.append((event.begun_s, event.ended_s, f"receive {what}", micro_batch))
        tensors = unpack(event.frame.header.tensors, event.frame.payload)
        if event.frame.type is FrameType.FORWARD:
            if self._rt.stage.is_last:
                self._check_labels(tensors["labels"])
            self._forwards.append(tensors)
        else:
            self._grads.append(tensors)

    def _check_labels(self, labels: torch.Tensor) -> None:
        """Labels come from a peer, and index the logits: -100 or a token of the vocabulary."""
        wrong = ((labels < 0) & (labels != IGNORED_LABEL)) | (labels >= self._rt.vocab_size)
        if bool(wrong.any()):
            raise RemoteProtocolError(
                f"labels must be {IGNORED_LABEL} or below the vocabulary of {self._rt.vocab_size}, "
                f"got {int(labels[wrong][0])}"
            )

    def _timed(self, work: object, what: str, micro_batch: int) -> None:
        before = time.perf_counter()
        with self._rt.progress.doing(Phase.STEP, f"a {what}"):
            work()  # type: ignore[operator]
        after = time.perf_counter()
        self._work.busy_s += after - before
        self._work.spans.append((before, after, what, micro_batch))


def _name(type_: FrameType) -> str:
    return "forward" if type_ is FrameType.FORWARD else "backward"


def step_plan_of(event: Received) -> StepPlan:
    """The step that a received STEP frame announces."""
    header = event.frame.header
    assert isinstance(header, Step)
    shapes = unpack_shapes(event.frame.payload)
    return StepPlan(header.step, header.label_tokens, shapes, header.real_tokens, header.evaluate)

"""The run: for each step data -> runtime -> norm -> one decision for all stages -> log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero.control import StepReady
from hetero.data import Example, MicroBatch, indices_of_step, micro_batches
from hetero.errors import NumericError, PeerError
from hetero.failpoints import hit
from hetero.member import Member
from hetero.optim import clip_factor, global_norm
from hetero.runtime import StepPlan
from hetero.saving import Saver
from hetero.session import CoordinatorSession
from hetero.spec import DataSpec, RunSpec
from hetero.stopping import Stop
from hetero.wire.headers import Ready


@dataclass(frozen=True)
class Training:
    """What a loop works with, built and connected.

    Attributes:
        spec: the run.
        member: stage 0.
        session: the other stages.
        examples: the data set.
        data: its settings (order and padding side).
        pad_id: token that fills up short rows.
        on_step: gets each step's record, as `metrics.jsonl` holds it.
        first_step: that is to be run; earlier ones are in the state that all stages hold.
        stop: says whether the run is to end after the step that it is in.
        saver: saves everybody's state now and then.
        shapes: stage -> global key -> shape of what trains there.
    """

    spec: RunSpec
    member: Member
    session: CoordinatorSession
    examples: Sequence[Example]
    data: DataSpec
    pad_id: int
    on_step: Callable[[dict[str, Any]], None]
    saver: Saver
    first_step: int = 1
    stop: Stop = field(default_factory=Stop)
    shapes: Mapping[int, Mapping[str, Sequence[int]]] = field(default_factory=dict)


def train(training: Training) -> None:
    """Runs all steps of a run that are left, or as many as there is time for before it is to stop.

    Raises:
        PeerError: a worker failed; the step is named.
        NumericError: a loss or a gradient is not finite; no stage has taken the step.
    """
    for step in range(training.first_step, training.spec.total_steps + 1):
        if training.stop.reason is not None:
            return
        training.on_step(run_step(training, step))


def run_step(training: Training, step: int) -> dict[str, Any]:
    """One optimizer step on all stages; gives its record.

    Raises:
        PeerError, NumericError: as `train`.
    """
    started = time.perf_counter()
    batches = list(batches_of(training, step))
    label_tokens = sum(batch.label_tokens for batch in batches)
    shapes = [(batch.input_ids.shape[0], batch.input_ids.shape[1]) for batch in batches]
    real_tokens = sum(batch.real_tokens() for batch in batches) if training.spec.router_loss is not None else 0
    training.session.begin_step(step)
    hit("coordinator.step_begun")
    try:
        own, norms, _ = training.member.run_step(
            StepPlan(step, label_tokens, shapes, real_tokens), [batch.tensors() for batch in batches]
        )
        others = training.session.wait_ready()
    except PeerError as exc:
        raise exc.in_step(step) from exc
    hit("coordinator.all_ready")
    readies = {0: own} | (others.ready if others is not None else {})
    _refuse_non_finite(training.spec, step, readies)
    norm = global_norm([*norms.tolist(), *_other_norms(training.session, others)])
    factor = clip_factor(norm, training.spec.loop.max_grad_norm)
    save = None
    if training.saver.due(step, busy=training.session.is_saving()):
        save = training.saver.begin(step, training.shapes)
    training.session.apply(factor, save)
    hit("coordinator.decided")
    rate = training.member.apply(step, factor)
    hit("coordinator.applied")
    elapsed = time.perf_counter() - started
    return {
        "step": step,
        "loss": readies[len(readies) - 1].loss,
        **({} if training.spec.router_loss is None else {"router_loss": readies[len(readies) - 1].router_loss}),
        "lr": rate,
        "grad_norm": norm,
        "tokens": label_tokens,
        "rows": [row for batch in batches for row in batch.rows],
        "step_time_s": elapsed,
        "tokens_per_s": label_tokens / elapsed,
        "stages": [_stage_record(training.spec, index, ready) for index, ready in sorted(readies.items())],
    }


def batches_of(training: Training, step: int) -> Iterator[MicroBatch]:
    """The micro-batches of a step; a pure function of seed and step."""
    loop, data = training.spec.loop, training.data
    indices = indices_of_step(
        len(training.examples), loop.batch_size, step, seed=training.spec.seed, shuffle=data.shuffle
    )
    examples = [training.examples[index] for index in indices]
    yield from micro_batches(examples, loop.microbatch_size, padding_side=data.padding_side, pad_id=training.pad_id)


def _other_norms(session: CoordinatorSession, others: StepReady | None) -> list[float]:
    """Squared norms of the workers' trained tensors."""
    found: list[float] = []
    for stage, raw in others.norms.items() if others is not None else ():
        values = raw.cast("B").cast("d").tolist() if raw.nbytes else []
        if not all(0.0 <= value < math.inf for value in values):
            raise session.peer(stage).error("sent a squared gradient norm that is none")
        found += values
    return found


def _refuse_non_finite(spec: RunSpec, step: int, readies: dict[int, Ready]) -> None:
    bad = [index for index, ready in sorted(readies.items()) if not ready.finite]
    if not bad:
        return
    index = max(bad)  # backward runs from the last stage to the first, so the last one was first
    raise NumericError(
        f"stage {index} ({spec.stages[index].id}) has a loss or a gradient that is not finite in step {step}; no stage "
        "took the step. A lower optimizer.lr, lr_schedule.warmup_steps, or model.dtype=float32 may help"
    )


def _stage_record(spec: RunSpec, index: int, ready: Ready) -> dict[str, Any]:
    return {
        "id": spec.stages[index].id,
        "busy_s": ready.busy_s,
        "wait_s": ready.wait_s,
        "bytes_sent": ready.bytes_sent,
        "memory_bytes": ready.memory_bytes,
    }

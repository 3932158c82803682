"""The run: for each step data -> runtime -> norm -> one decision for all stages -> log."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero.control import StepReady
from hetero.data import BUCKET_MULTIPLE, Example, MicroBatch, indices_of_step, micro_batches
from hetero.errors import NumericError, PeerError, RemoteProtocolError
from hetero.evaluation import Evaluation, evaluate
from hetero.failpoints import hit
from hetero.member import Member
from hetero.optim import clip_factor, global_norm
from hetero.pace import Pace
from hetero.runtime import StepPlan
from hetero.saving import Saver
from hetero.session import CoordinatorSession
from hetero.spec import DataSpec, RunSpec
from hetero.stopping import Stop
from hetero.timeline import Timeline, timeline_of_spans
from hetero.transport.clock import Offset
from hetero.wire.headers import Ready
from hetero.wire.spans import MAX_SPANS, WorkSpan, unpack_spans

log = logging.getLogger(__name__)

# By which a worker's spans may lie outside the step before its clock is not believed: a little, and a
# clock that runs a little faster. One that was suspended in between is far outside.
CLOCK_SLACK_S, CLOCK_SLACK = 0.05, 0.001


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
        pace: knows how fast each stage usually is.
        evaluation: on which rows, if there are any.
        on_timeline: gets each step's start (`time.perf_counter`), its number and what makes its timeline, which most
            steps are not asked for, before `on_step` gets its record.
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
    pace: Pace = field(default_factory=Pace)
    evaluation: Evaluation | None = None
    on_timeline: Callable[[float, int, Callable[[], Timeline]], None] = lambda began_s, step, timeline: None


def train(training: Training) -> None:
    """Runs all steps of a run that are left, or as many as there is time for before it is to stop.

    Raises:
        PeerError: a worker failed; the step is named.
        NumericError: a loss or a gradient is not finite; no stage has taken the step.
    """
    evaluate_if_due(training, training.first_step - 1)
    for step in range(training.first_step, training.spec.total_steps + 1):
        if training.stop.reason is not None:
            return
        training.on_step(run_step(training, step))
        evaluate_if_due(training, step)


def evaluate_if_due(training: Training, step: int) -> None:
    """Evaluates what `step` has left, where that is wanted and was not done before a resume or a fault.

    Raises:
        PeerError: a worker failed.
    """
    evaluation = training.evaluation
    if evaluation is not None and evaluation.is_missing(step, training.spec.total_steps):
        evaluate(evaluation, training.member, training.session, step, training.stop)


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
        own, norms, work = training.member.run_step(
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
    training.saver.wait_for_save(step, training.session)
    if training.saver.due(step, busy=training.session.is_saving()):
        save = training.saver.begin(step, training.shapes)
    training.session.apply(factor, save)
    hit("coordinator.decided")
    rate = training.member.apply(step, factor)
    hit("coordinator.applied")
    elapsed = time.perf_counter() - started
    _tell_slow(training, step, readies, sum(rows * length for rows, length in shapes))
    spans = {0: work.spans[:MAX_SPANS]} | _other_spans(training.session, others, len(shapes))
    clocks = {stage: training.session.clock(stage) for stage in spans if stage}
    timeline = functools.partial(_timeline, training.spec, step, readies, spans, clocks, started, elapsed)
    training.on_timeline(started, step, functools.cache(timeline))
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
    spec, data, examples = training.spec, training.data, training.examples
    indices = indices_of_step(
        len(examples),
        spec.loop.batch_size,
        step,
        seed=spec.seed,
        shuffle=data.shuffle,
        length_of=(lambda index: len(examples[index].input_ids)) if data.bucket else None,
    )
    yield from micro_batches(
        [examples[index] for index in indices],
        spec.loop.microbatch_size,
        padding_side=data.padding_side,
        pad_id=training.pad_id,
        multiple_of=BUCKET_MULTIPLE if data.bucket else 1,
        max_length=spec.max_length,
    )


def _other_norms(session: CoordinatorSession, others: StepReady | None) -> list[float]:
    """Squared norms of the workers' trained tensors."""
    found: list[float] = []
    for stage, raw in others.norms.items() if others is not None else ():
        values = raw.cast("B").cast("d").tolist() if raw.nbytes else []
        if not all(0.0 <= value < math.inf for value in values):
            raise session.peer(stage).error("sent a squared gradient norm that is none")
        found += values
    return found


def _other_spans(
    session: CoordinatorSession, others: StepReady | None, num_micro_batches: int
) -> dict[int, list[WorkSpan]]:
    """What the workers did when, each on its own clock."""
    found = {}
    for stage, raw in others.spans.items() if others is not None else ():
        try:
            found[stage] = unpack_spans(raw, num_micro_batches)
        except RemoteProtocolError as exc:
            raise session.peer(stage).error(str(exc)) from None
    return found


def _timeline(
    spec: RunSpec,
    step: int,
    readies: dict[int, Ready],
    spans: dict[int, list[WorkSpan]],
    clocks: dict[int, Offset | None],
    began_s: float,
    duration_s: float,
) -> Timeline:
    """The step on the coordinator's clock; a stage whose clock is not known, or cannot be right, is left out."""
    ids = [stage.id for stage in spec.stages]
    offsets, errors, notes = {0: 0.0}, [0.0], []
    for stage, own in spans.items():
        if readies[stage].spans_left_out:
            notes.append(f"{readies[stage].spans_left_out} spans of {ids[stage]} are left out: too many micro-batches")
        clock = clocks.get(stage)
        if clock is None:
            if stage:
                notes.append(f"{ids[stage]} is left out: its clock is not known yet")
            continue
        room = clock.error_s + CLOCK_SLACK_S + CLOCK_SLACK * duration_s
        shift = began_s + clock.offset_s
        if any(start - shift < -room or end - shift > duration_s + room for start, end, _, _ in own):
            notes.append(f"{ids[stage]} is left out: its clock runs differently")
            continue
        offsets[stage] = clock.offset_s
        errors.append(clock.error_s)
    shown = {stage: own for stage, own in spans.items() if stage in offsets}
    return timeline_of_spans(step, ids, shown, offsets, began_s, duration_s, clock_error_s=max(errors), notes=notes)


def _refuse_non_finite(spec: RunSpec, step: int, readies: dict[int, Ready]) -> None:
    bad = [index for index, ready in sorted(readies.items()) if not ready.finite]
    if not bad:
        return
    index = max(bad)  # backward runs from the last stage to the first, so the last one was first
    raise NumericError(
        f"stage {index} ({spec.stages[index].id}) has a loss or a gradient that is not finite in step {step}; no stage "
        "took the step. A lower optimizer.lr, lr_schedule.warmup_steps, or model.dtype=float32 may help"
    )


def _tell_slow(training: Training, step: int, readies: dict[int, Ready], num_tokens: int) -> None:
    """Says which stages were much slower than they usually are; the run waits for them as for any."""
    for slow in training.pace.step({index: ready.busy_s for index, ready in readies.items()}, num_tokens):
        log.warning(
            "stage %s is slow: it computed for %.1f s in step %d, and for %.1f s usually (the median of the %d steps "
            "before); other programs, heat or too little memory there may be why, and the run goes on",
            training.spec.stages[slow.stage].id,
            slow.took_s,
            step,
            slow.median_s,
            slow.num_steps,
        )


def _stage_record(spec: RunSpec, index: int, ready: Ready) -> dict[str, Any]:
    return {
        "id": spec.stages[index].id,
        "busy_s": ready.busy_s,
        "wait_s": ready.wait_s,
        "bytes_sent": ready.bytes_sent,
        "memory_bytes": ready.memory_bytes,
    }

"""Evaluation through the pipeline: the mean loss over all label tokens of rows that are not trained on.

    step s --APPLY--> forwards of all evaluation rows on all stages --every stage's READY--> step s + 1

Nothing goes backward, so micro-batches stream through the stages. The last stage adds the losses of its label tokens in
float64; the sums' quotient is the same whatever the number of rows in a micro-batch. A router's balancing loss is a
training aid and no part of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.control import StepReady
from hetero.data import Example, MicroBatch, micro_batches
from hetero.errors import PeerError
from hetero.eval_rules import is_due
from hetero.failpoints import hit
from hetero.member import Member
from hetero.runtime import StepPlan
from hetero.session import CoordinatorSession
from hetero.spec import DataSpec, LoopSpec
from hetero.stopping import Stop

log = logging.getLogger(__name__)

# Between two passes of so many micro-batches the pipeline runs empty, and whoever wants the run to end is heard.
PASS_MICRO_BATCHES = 64


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated on, and who is told.

    Attributes:
        examples: the rows.
        loop: says how often and with how many rows at once.
        data: says where short rows are filled up.
        pad_id: token that fills them up.
        on_record: gets each evaluation's record, as `eval.jsonl` holds it.
        is_known: whether a step's evaluation has been done, before a resume or a fault.
        doing: gets what the run is busy with, for people.
    """

    examples: Sequence[Example]
    loop: LoopSpec
    data: DataSpec
    pad_id: int
    on_record: Callable[[dict[str, Any]], None]
    is_known: Callable[[int], bool] = lambda _: False
    doing: Callable[[str], None] = lambda _: None

    def is_missing(self, step: int, total_steps: int) -> bool:
        """Whether the run is to evaluate after this step and has not done so."""
        return is_due(self.loop, step, total_steps) and not self.is_known(step)


def evaluate(evaluation: Evaluation, member: Member, session: CoordinatorSession, step: int, stop: Stop) -> None:
    """Evaluates what all stages hold after `step`, unless somebody wants the run to end.

    Raises:
        PeerError: a worker failed.
    """
    began = time.perf_counter()
    evaluation.doing("evaluating")
    sums: list[float | None] = []
    tokens = 0
    for number, batches in enumerate(_passes(evaluation), 1):
        if stop.reason is not None:
            log.warning("the evaluation after step %d is left out, since the run is to end", step)
            return
        label_tokens = sum(batch.label_tokens for batch in batches)
        sums.append(_one_pass(member, session, StepPlan(step, label_tokens, _shapes(batches), 0, number), batches))
        tokens += label_tokens
    hit("coordinator.evaluated")
    record = record_of(step, sums, tokens)
    if record["eval_loss"] is None:
        log.warning("the evaluation after step %d gave a loss that is not finite", step)
    else:
        when = f"evaluation after step {step}" if step else "evaluation"
        log.info("%s: %s (%.1f s)", when, evaluation_shown(record), time.perf_counter() - began)
    evaluation.on_record(record)
    evaluation.doing("training")


def record_of(step: int, sums: Sequence[float | None], tokens: int) -> dict[str, Any]:
    """A line of `eval.jsonl`; null for a loss, or a perplexity, that is not finite."""
    known = [part for part in sums if part is not None]
    loss = math.fsum(known) / tokens if len(known) == len(sums) else None
    return {
        "step": step,
        "eval_loss": loss,
        "perplexity": None if loss is None or loss > math.log(1e300) else math.exp(loss),
        "tokens": tokens,
    }


def evaluation_shown(record: dict[str, Any]) -> str:
    """An evaluation's record for people."""
    loss, perplexity = record["eval_loss"], record["perplexity"]
    shown = "loss not finite" if loss is None else f"loss {loss:.4f}"
    if perplexity is not None:
        shown += f", perplexity {perplexity:.{2 if perplexity < 1e6 else 0}f}"
    return f"{shown} over {record['tokens']:,} label tokens"


def _passes(evaluation: Evaluation) -> Iterator[list[MicroBatch]]:
    """All rows, the longest first: rows of like length need little padding, and memory's peak comes at once."""
    examples = sorted(evaluation.examples, key=lambda example: -len(example.input_ids))
    rows = PASS_MICRO_BATCHES * evaluation.loop.eval_rows
    for start in range(0, len(examples), rows):
        yield micro_batches(
            examples[start : start + rows],
            evaluation.loop.eval_rows,
            padding_side=evaluation.data.padding_side,
            pad_id=evaluation.pad_id,
        )


def _shapes(batches: Sequence[MicroBatch]) -> list[tuple[int, int]]:
    return [(batch.input_ids.shape[0], batch.input_ids.shape[1]) for batch in batches]


def _one_pass(
    member: Member, session: CoordinatorSession, plan: StepPlan, batches: Sequence[MicroBatch]
) -> float | None:
    """The sum of the label tokens' losses; None where it is not finite."""
    session.begin_evaluation(plan.step, plan.evaluation)
    hit("coordinator.evaluating")
    try:
        own = member.evaluate(plan, [batch.tensors() for batch in batches])
        others: StepReady | None = session.wait_ready()
    except PeerError as exc:
        raise exc.in_step(plan.step) from exc
    return own.loss if others is None else others.ready[max(others.ready)].loss

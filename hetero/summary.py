"""The closing summary of a run."""

from __future__ import annotations

import logging
from typing import Any

from hetero.evaluation import evaluation_shown
from hetero.run_result import RunResult
from hetero.timeline import bottleneck

log = logging.getLogger(__name__)


def log_summary(result: RunResult) -> None:
    """Says what a run gave, where the time went, where the adapter is, and what to try next."""
    for line in summary_lines(result):
        log.info("%s", line)


def summary_lines(result: RunResult) -> list[str]:
    """The lines of the summary."""
    records = result.records
    lines = ["", *_evaluation_lines(result)]
    if result.task == "evaluate":
        return (
            lines if result.stopped is None else [*lines, f"stopped before the evaluation was over ({result.stopped})"]
        )
    if result.spec.total_steps == 0 and result.samples:
        return [*lines, *_sample_lines(result)]
    if records:
        elapsed = sum(record["step_time_s"] for record in records)
        tokens = sum(record["tokens"] for record in records)
        part = max(1, len(records) // 10)
        first, last = _mean_loss(records[:part]), _mean_loss(records[-part:])
        lines.append(
            f"{len(records)} steps in {elapsed:.1f} s, {tokens / elapsed:,.0f} label tokens/s; "
            f"loss {first:.2f} -> {last:.2f} (means of the first and last {part} steps)"
        )
        lines += [_stage_line(result, index) for index in range(len(result.spec.stages))]
        lines += _bottleneck_line(result)
    else:
        lines.append("0 steps: the adapter is the initial one")
    lines.append(f"adapter: {result.adapter_dir}")
    lines += _sample_lines(result)
    if result.stopped is not None:
        last = records[-1]["step"] if records else 0
        lines.append(
            f"stopped after step {last} of {result.spec.total_steps} ({result.stopped}), with a checkpoint; to go on: "
            "the same command with checkpoint.resume=latest"
        )
    else:
        lines.append("next: " + _next(result))
    return lines


def _evaluation_lines(result: RunResult) -> list[str]:
    """What the first and the last evaluation gave, and the best step where it is kept."""
    if not result.evaluations:
        return []
    first, last = result.evaluations[0], result.evaluations[-1]
    if first is last:
        return [f"evaluation: {evaluation_shown(last)}"]
    lines = [
        f"evaluation: {evaluation_shown(first)} after step {first['step']}",
        f"            {evaluation_shown(last)} after step {last['step']}",
    ]
    if result.best is not None:
        lines.append(
            f"best: step {result.best.step} with an evaluation loss of {result.best.eval_loss:.4f}, its adapter is in "
            f"{result.best_dir}{_worse_than_before(result)}"
        )
    return lines


def _worse_than_before(result: RunResult) -> str:
    """What was there before the first step is no candidate for the best; it is said where that was better."""
    before = [record["eval_loss"] for record in result.evaluations if record["step"] == 0]
    if result.best is None or not before or before[0] is None or before[0] >= result.best.eval_loss:
        return ""
    return f"; before the first step it was smaller, {before[0]:.4f}"


def _sample_lines(result: RunResult) -> list[str]:
    """What became of the prompts; the texts are on the screen and in the file already."""
    if not result.samples:
        return []
    samples = result.samples
    cut = [sample.finish for sample in samples if sample.finish != "end"]
    ended = f"{len(samples) - len(cut)} ended by themselves"
    reasons = "".join(f", {cut.count(reason)} cut by {reason}" for reason in dict.fromkeys(cut))
    tokens = sum(len(sample.output_ids) for sample in samples)
    prompts = "1 prompt" if len(samples) == 1 else f"{len(samples)} prompts"
    return [f"{prompts} answered with {tokens} tokens: {ended}{reasons}; texts: {result.samples_path}"]


def _mean_loss(records: list[dict[str, Any]]) -> float:
    return sum(float(record["loss"]) for record in records) / len(records)


def _stage_line(result: RunResult, index: int) -> str:
    """Of the steps on the plan that the run ended with."""
    plan, (device, dtype) = result.spec.stages[index], result.stages[index]
    ids = [stage.id for stage in result.spec.stages]
    records = [record for record in result.records if [stage["id"] for stage in record["stages"]] == ids]
    if not records:
        return f"  stage {index} {plan.id}: layers [{plan.start}, {plan.end}) on {device} in {plan.numbers(dtype)}"
    elapsed = sum(record["step_time_s"] for record in records)
    mine = [record["stages"][index] for record in records]
    busy, wait = sum(stage["busy_s"] for stage in mine), sum(stage["wait_s"] for stage in mine)
    sent = sum(stage["bytes_sent"] for stage in mine) / len(mine) / 2**20
    memory = max(stage["memory_bytes"] for stage in mine) / 2**20
    return (
        f"  stage {index} {plan.id}: layers [{plan.start}, {plan.end}) on {device} in {plan.numbers(dtype)}; "
        f"computing {busy / elapsed:.0%}, idle {1 - busy / elapsed:.0%} (waiting {wait / elapsed:.0%}); "
        f"sends {sent:.2f} MiB/step; "
        f"peak memory {memory:,.0f} MiB"
    )


def _bottleneck_line(result: RunResult) -> list[str]:
    """Of the last step, where all stages are in its timeline."""
    timeline = result.timeline
    if timeline is None or not all(timeline.busy_s(stage) for stage in range(len(timeline.stages))):
        return []
    found = bottleneck(timeline)
    return [f"  bottleneck: {found.name} ({found.why}; step {timeline.step})"]


def _next(result: RunResult) -> str:
    if result.spec.model.path == "tiny":
        return "python -m hetero.models fetch smollm2_135m && python train.py model=smollm2_135m loop.steps=20"
    points = [stage.start for stage in result.spec.stages[1:]]
    if not points:
        return "two stages: shard_plan=even"
    num_layers = result.spec.num_hidden_layers
    moved = [[point + shift for point in points] for shift in (-1, 0, 1)]
    moved = [option for option in moved if option[0] > 0 and option[-1] < num_layers]
    options = ",".join(str(option).replace(" ", "") for option in moved)
    return f"compare split points: python train.py -m ... shard_plan=split 'shard_plan.split_points={options}'"

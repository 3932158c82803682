"""What a run would need, shown before anything is downloaded or contacted, and what would help where it lacks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import rich
from rich.table import Table

from hetero.errors import ConfigError
from hetero.memory import RUNTIME_BYTES, RunMemory, StageMemory, memory_of, show_bytes
from hetero.resolve import ResolvedRun
from hetero.spec import Config
from hetero.wire.tensors import MAX_KEPT_BYTES

_COLUMNS = ("stage", "layers", "weights", "adapter", "in flight", "layer", "logits", "links", "total", "memory")
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Columns: from which on numbers do not wrap, and cells have room to spare.
_NARROW, _WIDE = 80, 104


def dry_run(resolved: ResolvedRun, shapes_dir: Path) -> None:
    """Shows the memory of each stage and the bytes on each link.

    Args:
        resolved: the run.
        shapes_dir: configurations of models whose weights are not here.

    Raises:
        ConfigError: a machine whose memory is known has too little; everything is shown before that.
    """
    memory, console = memory_of(resolved, shapes_dir), rich.get_console()
    console.print(table_of(resolved, memory, console.width))
    for line in notes_of(resolved, memory):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    lacking = memory.lacking()
    if not lacking:
        return
    for line in advice(resolved, memory, shapes_dir):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    machine, num_bytes = max(lacking.items(), key=lambda item: item[1])
    indices = ", ".join(str(stage.index) for stage in memory.stages if stage.machine == machine)
    raise ConfigError(
        f"shard_plan must fit the machines: {machine} (stage {indices}) lacks {show_bytes(num_bytes)}; "
        "see above for what would help"
    )


def table_of(resolved: ResolvedRun, memory: RunMemory, width: int = _WIDE) -> Table:
    """A row for each stage, all sizes in one unit.

    Args:
        resolved: the run.
        memory: its figures.
        width: of the terminal in columns; 80 are enough.
    """
    in_gib = max(stage.total for stage in memory.stages) >= 4 << 30
    table = Table(
        title=f"memory of each stage at its peak, in {'GiB' if in_gib else 'MiB'} ({resolved.config.model.path})",
        title_justify="left",
        padding=(0, 1 if width >= _WIDE else 0),
    )
    for column in _COLUMNS:
        words = column in ("stage", "layers")
        no_wrap = column != "stage" and width >= _NARROW
        table.add_column(column, justify="left" if words else "right", overflow="fold", no_wrap=no_wrap)

    def show(num_bytes: int) -> str:
        size = num_bytes / (1 << (30 if in_gib else 20))
        return f"{size:.2f}" if in_gib else f"{size:.1f}" if size < 1000 else f"{size:.0f}"

    for stage in memory.stages:
        plan = resolved.stages[stage.index]
        table.add_row(
            f"{stage.index} {stage.id}",
            f"{plan.start}-{plan.end - 1}",
            "\n".join(f"{_SHORT.get(kind, kind)} {show(size)}" for kind, size in sorted(stage.weights.items())),
            show(stage.learned),
            f"{stage.in_flight} x {show(stage.per_micro_batch)}",
            show(stage.layer_work),
            show(stage.logits) if stage.logits else "",
            show(stage.link_buffers),
            show(stage.total),
            "?" if stage.available is None else show(stage.available),
        )
    return table


def notes_of(resolved: ResolvedRun, memory: RunMemory) -> Iterator[str]:
    """What the columns mean, and what each link carries."""
    loop, shape, task = resolved.config.loop, memory.shape, resolved.config.task
    if task != "train":
        yield f"the figures are of task=train; task={task} holds no gradients and no optimizer state" + (
            ", and keys and values of all layers for each prompt" if task == "generate" else ""
        )
    yield (
        f"a step: {memory.micro_batches} micro-batches of {shape.rows} x {shape.length} tokens "
        f"(loop.microbatch_size x data.max_length); recompute: {loop.recompute}"
    )
    yield (
        "adapter: values, gradients, optimizer state and, in a host's memory, copies; in flight: micro-batches x the "
        "activations that each holds; layer, logits: work on one of them, of which the larger counts; "
        f"total: with {show_bytes(RUNTIME_BYTES)} for the programs"
    )
    if any("cpu" in stage.machine for stage in memory.stages):
        yield "on a CPU weights in the checkpoint's own numbers are mapped from the file and can be dropped again"
    if resolved.config.data.source != "pydocs" and len(memory.stages) > 1:
        yield (
            f"links: with receive buffers that are kept where rows differ in length, {show_bytes(MAX_KEPT_BYTES)} a "
            "machine at most"
        )
    if (loop.eval_batch_size or 0) > shape.rows:
        yield (
            f"an evaluation's micro-batches of {loop.eval_batch_size} rows (loop.eval_batch_size) are not in it; they "
            "hold no activations for a backward"
        )
    if any(stage.available is None for stage in memory.stages):
        yield "memory ?: give memory_gb in the machine's entry under hardware to have it compared"
    sharing = {stage.machine for stage in memory.stages}
    if len(sharing) < len(memory.stages):
        yield "stages on one machine share its memory: their totals are added"
    for link in memory.links:
        yield (
            f"link {link.index}-{link.index + 1}: {show_bytes(link.forward)} a step forward, "
            f"{show_bytes(link.backward)} back ({(link.forward + link.backward) * 8 / 1e9:.2g} s of 1 Gbit/s in all)"
        )


def advice(resolved: ResolvedRun, memory: RunMemory, shapes_dir: Path) -> Iterator[str]:
    """For each machine with too little memory: what one change at a time would make of it, by the same figures.

    Where no one of them would do, what all of them together would that leave the result as it is but for rounding and
    the 4 bits.
    """
    changes = list(_changes(resolved.config, memory))
    tried = [(text, memory_of(_with(resolved, config), shapes_dir)) for text, config in changes]
    if not any(set(memory.lacking()) - set(changed.lacking()) for _, changed in tried):
        text, config = _together(resolved.config, memory)
        tried.append((text, memory_of(_with(resolved, config), shapes_dir)))
    for machine, lack in memory.lacking().items():
        yield f"{machine} lacks {show_bytes(lack)}; one change at a time:"
        for text, changed in tried:
            left = changed.lacking().get(machine, 0)
            if left < lack:
                yield f"  {text}: {'fits' if not left else f'lacks {show_bytes(left)}'}"
        for stage in memory.stages:
            if stage.machine == machine and len(memory.lacking()) < len({other.machine for other in memory.stages}):
                yield _layers_to_move(resolved, stage, lack)


def _changes(config: Config, memory: RunMemory) -> Iterator[tuple[str, Config]]:
    """Knobs that are not turned yet."""
    loop, replace = config.loop, msgspec.structs.replace
    for more in ("layer", "stage")[("none", "layer", "stage").index(loop.recompute) :]:
        yield f"loop.recompute={more}", replace(config, loop=replace(loop, recompute=more))
    if memory.shape.rows > 1:
        yield "loop.microbatch_size=1", replace(config, loop=replace(loop, microbatch_size=1))
    if max(stage.in_flight for stage in memory.stages) > 1:
        yield "schedule.max_in_flight=1", replace(config, schedule=replace(config.schedule, max_in_flight=1))
    half = memory.shape.length // 2
    if half >= 2:
        yield f"data.max_length={half}", replace(config, data=replace(config.data, max_length=half))
    if any(kind != "nf4" for stage in memory.stages for kind in stage.weights) and config.model.quantization != "nf4":
        yield "model.quantization=nf4", replace(config, model=replace(config.model, quantization="nf4"))


def _together(config: Config, memory: RunMemory) -> tuple[str, Config]:
    """All knobs but the rows' length, turned one after the other."""
    said: list[str] = []
    wanted = ("loop.recompute=layer", "loop.microbatch_size=1", "schedule.max_in_flight=1", "model.quantization=nf4")
    for knob in wanted:
        turned = dict(_changes(config, memory))
        if knob in turned:
            config = turned[knob]
            said.append(knob)
    return " ".join(said), config


def _with(resolved: ResolvedRun, config: Config) -> ResolvedRun:
    """The run with another configuration of the same plan."""
    stages = resolved.stages
    if config.model.quantization != resolved.config.model.quantization:
        stages = [msgspec.structs.replace(stage, quantization=config.model.quantization) for stage in stages]
    length = config.data.max_length or resolved.max_length
    return dataclasses.replace(resolved, config=config, stages=stages, max_length=length)


def _layers_to_move(resolved: ResolvedRun, stage: StageMemory, lack: int) -> str:
    """How many layers fewer would do; all of a stage but its ends grows with its layers."""
    plan = resolved.stages[stage.index]
    count = plan.end - plan.start
    a_layer = (stage.training - stage.work - stage.link_buffers + sum(stage.weights.values())) / count
    moved = math.ceil(lack / a_layer)
    if moved < count:
        return f"  shard_plan: about {moved} of its {count} layers on another machine ({show_bytes(int(a_layer))} each)"
    return f"  shard_plan: even one of its {count} layers is too much beside what it holds besides"

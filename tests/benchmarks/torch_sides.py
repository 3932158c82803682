"""The other sides of `step_time.py`: torch.distributed.pipelining over gloo, and one process that holds it all.

    python torch_sides.py SETTINGS      a JSON object with the fields of `Settings`

Both use the modules that `hetero.stage.build_stage` makes (same weights, same adapter), the same rows, loss, clipping
and optimizer, but nothing of hetero's runtime, links or schedules.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import nn
from torch.distributed import pipelining

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from figures import on_core
from turns import Turns

from hetero import data, device, registry, store
from hetero.config import CONF_DIR, SHAPES_DIR
from hetero.resolve import ResolvedRun, resolve
from hetero.spec import RunSpec
from hetero.stage import Stage, build_stage

SCHEDULES: dict[str, Any] = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}


class Settings(msgspec.Struct):
    """What a process is told.

    Attributes:
        name: of this process, for the umpire.
        port: of the umpire.
        overrides: of hetero's configuration; the plan has the stages that `chunks` of all ranks number.
        core: to run on.
        schedule: one of `SCHEDULES`, or None for a process that holds the whole model.
        rank: among two.
        rendezvous: port for gloo.
        part: (i, n): this process has every n-th micro-batch, from the i-th.
    """

    name: str
    port: int
    overrides: list[str]
    core: int
    schedule: str | None = None
    rank: int = 0
    rendezvous: int = 0
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class StepRows:
    """A step's micro-batches, of one shape."""

    input_ids: torch.Tensor  # [M * B, T]
    labels: torch.Tensor  # [M * B, T]
    num_micro_batches: int
    label_tokens: int


class StageModule(nn.Module):
    """A stage as an ordinary module: token ids or hidden in, hidden or logits out."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage_model = stage.model
        self._is_first, self._is_last = stage.is_first, stage.is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T] or [B, T, H] -> [B, T, H], on the last stage logits [B, T - 1, V]."""
        name = "input_ids" if self._is_first else "inputs_embeds"
        hidden: torch.Tensor = self.stage_model.base_model(**{name: x}, use_cache=False).last_hidden_state
        if not self._is_last:
            return hidden
        logits: torch.Tensor = self.stage_model.get_output_embeddings()(hidden[:, :-1])
        return logits


def main() -> None:
    """Joins the umpire and takes turns until there are none."""
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    torch.set_num_threads(1)
    on_core(settings.core)
    resolved = _resolved(settings.overrides)
    spec = resolved.spec(total_steps=10_000)
    rows = _rows(resolved)
    run_step = _single(spec, settings, rows) if settings.schedule is None else _pipeline(spec, settings, rows)
    turns = Turns(settings.port, settings.name)
    step, num_steps = 1, 1
    while num_steps:
        started = time.perf_counter()
        losses = [run_step(step + i) for i in range(num_steps)]
        turns.report(time.perf_counter() - started, losses)
        step += num_steps
        num_steps = turns.next()
    if settings.schedule is not None:
        dist.destroy_process_group()


def _resolved(overrides: list[str]) -> ResolvedRun:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        raw = OmegaConf.to_container(compose("config", overrides), resolve=True)
    assert isinstance(raw, dict)
    return resolve(dict(raw), shapes_dir=SHAPES_DIR)  # type: ignore[arg-type]


def _rows(resolved: ResolvedRun) -> Callable[[int, tuple[int, int]], StepRows]:
    """(step, part) -> its rows, as a run with this configuration has them."""
    config, loop = resolved.config, resolved.config.loop
    limits = {"vocab_size": resolved.facts.vocab_size, "max_length": resolved.max_length}
    examples = data.load(config.data, None, **limits).examples

    def rows_of(step: int, part: tuple[int, int]) -> StepRows:
        picked = data.indices_of_step(
            len(examples), loop.batch_size, step, seed=config.seed, shuffle=config.data.shuffle
        )
        batches = data.micro_batches(
            [examples[i] for i in picked], loop.microbatch_size, padding_side="right", pad_id=0
        )[part[0] :: part[1]]
        return StepRows(
            torch.cat([batch.input_ids for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
            len(batches),
            sum(batch.label_tokens for batch in batches),
        )

    return rows_of


def _build(spec: RunSpec, index: int) -> Stage:
    return build_stage(spec, index, store.find_weights(spec.model.path), device.resolve("cpu"))


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over label tokens; [B, T - 1, V] and [B, T]."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def _apply(spec: RunSpec, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], scale: float) -> None:
    """Divides by the number of label tokens, clips by the norm over all ranks, and steps."""
    grads = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_mul_(grads, scale)
    squared = torch.stack([norm.double().square() for norm in torch._foreach_norm(grads)]).sum()
    if dist.is_initialized():
        dist.all_reduce(squared)
    if spec.loop.max_grad_norm:
        factor = min(1.0, spec.loop.max_grad_norm / (float(squared.sqrt()) + 1e-6))
        if factor < 1.0:
            torch._foreach_mul_(grads, factor)
    optimizer.step()
    optimizer.zero_grad()


def _pipeline(
    spec: RunSpec, settings: Settings, rows: Callable[[int, tuple[int, int]], StepRows]
) -> Callable[[int], float]:
    """A rank of torch.distributed.pipelining; stages go round the ranks."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{settings.rendezvous}", rank=settings.rank, world_size=2
    )
    num_stages = len(spec.stages)
    own = [_build(spec, index) for index in range(settings.rank, num_stages, 2)]
    stages = [
        pipelining.PipelineStage(StageModule(stage), settings.rank + 2 * i, num_stages, torch.device("cpu"))
        for i, stage in enumerate(own)
    ]
    num_micro_batches = rows(1, settings.part).num_micro_batches
    schedule = SCHEDULES[str(settings.schedule)](
        stages if settings.schedule == "interleaved" else stages[0], num_micro_batches, loss_fn=_loss, scale_grads=False
    )
    parameters = [p for stage in own for p in stage.trained.values()]
    optimizer = registry.build("optimizer", spec.optimizer.target)(parameters, **spec.optimizer.args)

    def run_step(step: int) -> float:
        batch = rows(step, settings.part)
        losses: list[torch.Tensor] = []
        arguments = (batch.input_ids,) if settings.rank == 0 else ()
        target = batch.labels if settings.rank == 1 else None
        schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        _apply(spec, optimizer, parameters, 1 / batch.label_tokens)
        return sum(float(loss.detach()) for loss in losses) / batch.label_tokens

    return run_step


def _single(
    spec: RunSpec, settings: Settings, rows: Callable[[int, tuple[int, int]], StepRows]
) -> Callable[[int], float]:
    """The whole model in one process, one micro-batch after the other."""
    stage = _build(spec, 0)
    module, parameters = StageModule(stage), list(stage.trained.values())
    optimizer = registry.build("optimizer", spec.optimizer.target)(parameters, **spec.optimizer.args)

    def run_step(step: int) -> float:
        batch = rows(step, settings.part)
        total = 0.0
        pieces = zip(
            batch.input_ids.chunk(batch.num_micro_batches), batch.labels.chunk(batch.num_micro_batches), strict=True
        )
        for input_ids, labels in pieces:
            loss = _loss(module(input_ids), labels)
            loss.backward()
            total += float(loss.detach())
        _apply(spec, optimizer, parameters, 1 / batch.label_tokens)
        return total / batch.label_tokens

    return run_step


if __name__ == "__main__":
    main()

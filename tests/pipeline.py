"""A whole pipeline in one process for tests: a thread a stage, the real wire format over socket pairs."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hetero import data, device, optim, registry
from hetero.errors import HeteroError
from hetero.facts import read_facts
from hetero.inbox import Inbox
from hetero.models import logit_scaling
from hetero.runtime import Runtime, StepPlan, step_plan_of
from hetero.schedule import evaluation_policy
from hetero.spec import (
    AdapterSpec,
    LoopSpec,
    LrScheduleSpec,
    ModelSpec,
    ObjectSpec,
    RouterLossSpec,
    RunSpec,
    ScheduleSpec,
    StageSpec,
    TransportSpec,
    WorkerEntry,
)
from hetero.stage import Stage, build_stage
from hetero.token_loss import logits_of
from hetero.transport.link import Closed, Deliver, Link, Received
from hetero.transport.loopback import link_pair
from hetero.transport.tcp import TcpTransport
from hetero.wire.flow import LinkFlow
from hetero.wire.headers import Step


def make_spec(
    model_dir: Path,
    cuts: Sequence[int] = (),
    *,
    adapter: AdapterSpec | None = None,
    schedule: str = "1f1b",
    max_in_flight: int | None = None,
    microbatch_size: int = 1,
    batch_size: int = 4,
    recompute: str = "none",
    seed: int = 7,
    steps: int = 3,
    dtypes: Sequence[str] | None = None,
    quantizations: Sequence[str] | None = None,
    attn_implementation: str | None = None,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    router_loss: RouterLossSpec | None = None,
) -> RunSpec:
    """A run over `len(cuts) + 1` stages of a local model."""
    facts = read_facts(json.loads((model_dir / "config.json").read_text()))
    edges = [0, *cuts, facts.num_hidden_layers]
    names = ["local", *(f"w{i}" for i in range(1, len(cuts) + 1))]
    stages = [
        StageSpec(
            id=names[i],
            start=edges[i],
            end=edges[i + 1],
            dtype=dtypes[i] if dtypes else None,  # type: ignore[arg-type]
            quantization=quantizations[i] if quantizations else None,  # type: ignore[arg-type]
        )
        for i in range(len(edges) - 1)
    ]
    return RunSpec(
        seed=seed,
        model=ModelSpec(path=model_dir.name, attn_implementation=attn_implementation),  # type: ignore[arg-type]
        local_model=True,
        num_hidden_layers=facts.num_hidden_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        max_length=min(1024, facts.max_position_embeddings or 1024),
        total_steps=steps,
        adapter=adapter or AdapterSpec(r=4, alpha=8, target_modules=["q_proj", "v_proj"]),
        stages=stages,
        workers=[WorkerEntry(id=name, host="127.0.0.1") for name in names[1:]],
        boundary_dtypes=[(dtypes[i] if dtypes else "float32") for i in range(len(cuts))],  # type: ignore[misc]
        transport=TransportSpec(),
        schedule=ScheduleSpec(name=schedule, max_in_flight=max_in_flight),
        stage=ObjectSpec("hetero.stage.build_stage"),
        optimizer=ObjectSpec(f"hetero.optim.{optimizer}", {"lr": lr}),
        lr_schedule=LrScheduleSpec(name="constant"),
        loop=LoopSpec(steps=steps, batch_size=batch_size, microbatch_size=microbatch_size, recompute=recompute),  # type: ignore[arg-type]
        router_loss=router_loss,
    )


@dataclass
class Outcome:
    """What a run gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    adapter: dict[str, torch.Tensor] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)


def run_pipeline(
    spec: RunSpec,
    model_dir: Path,
    batches_of_steps: Sequence[Sequence[data.MicroBatch]],
    *,
    initial: dict[str, torch.Tensor] | None = None,
    max_grad_norm: float | None = 1.0,
    evaluated: Sequence[data.MicroBatch] = (),
) -> Outcome:
    """Runs a step for each entry of `batches_of_steps` and gives losses, norms, gradients and the final adapter."""
    stages = build_stages(spec, model_dir)
    return run_stages(spec, stages, batches_of_steps, initial=initial, max_grad_norm=max_grad_norm, evaluated=evaluated)


def build_stages(spec: RunSpec, model_dir: Path) -> list[Stage]:
    """All stages of a run, on the CPU."""
    return [build_stage(spec, i, model_dir, device.resolve("cpu")) for i in range(len(spec.stages))]


def run_stages(
    spec: RunSpec,
    stages: list[Stage],
    batches_of_steps: Sequence[Sequence[data.MicroBatch]],
    *,
    initial: dict[str, torch.Tensor] | None = None,
    max_grad_norm: float | None = 1.0,
    evaluated: Sequence[data.MicroBatch] = (),
) -> Outcome:
    """`run_pipeline` over stages that are built already; with micro-batches to evaluate, does so around each step."""
    outcome = Outcome(stages=stages)
    inboxes = [Inbox() for _ in stages]
    transport = TcpTransport()
    upstream: list[Link | None] = [None] * len(stages)
    downstream: list[Link | None] = [None] * len(stages)
    links: list[Link] = []
    for i in range(len(stages) - 1):
        left, right = link_pair(transport, _deliver_to(inboxes[i]), _deliver_to(inboxes[i + 1]))
        for end in (left, right):
            end.connection.flow = LinkFlow(
                hidden_size=spec.hidden_size,
                dtype=spec.boundary_dtypes[i],
                max_rows=spec.loop.microbatch_size,
                max_length=spec.max_length,
                max_eval_rows=spec.loop.eval_rows,
                eval_cap=evaluation_policy(spec.schedule.max_in_flight).in_flight_cap,
                num_experts=spec.router_loss.num_experts if spec.router_loss is not None else 0,
            )
            end.start()
        downstream[i], upstream[i + 1] = left, right
        links += [left, right]
    runtimes = [
        Runtime(
            stage,
            index=i,
            num_stages=len(stages),
            schedule=spec.schedule,
            vocab_size=spec.vocab_size,
            inbox=inboxes[i],
            upstream=upstream[i],
            downstream=downstream[i],
            upstream_dtype=spec.boundary_dtypes[i - 1] if i else "float32",
            downstream_dtype=spec.boundary_dtypes[i] if i < len(stages) - 1 else "float32",
        )
        for i, stage in enumerate(stages)
    ]
    for stage in stages:
        if initial is not None:
            with torch.no_grad():
                for key, parameter in stage.trained.items():
                    parameter.copy_(initial[key])
        outcome.initial |= stage.state()
    make_optimizer = registry.build("optimizer", spec.optimizer.target)
    optimizers = [make_optimizer(s.trained.values(), **spec.optimizer.args) if s.trained else None for s in stages]
    with_router = spec.router_loss is not None
    try:
        _evaluate(runtimes, 0, evaluated, outcome)
        for number, micro_batches in enumerate(batches_of_steps, 1):
            _run_one_step(runtimes, plan_of(number, micro_batches, with_router), micro_batches)
            norm = optim.global_norm(float(n) for stage in stages for n in stage.squared_norms())
            outcome.losses.append(stages[-1].loss())
            outcome.norms.append(norm)
            named = [item for stage in stages for item in stage.trained.items()]
            outcome.grads.append({key: p.grad.clone() for key, p in named if p.grad is not None})
            for stage, optimizer in zip(stages, optimizers, strict=True):
                stage.scale_gradients(optim.clip_factor(norm, max_grad_norm))
                if optimizer is not None:
                    optimizer.step()
                stage.end_step()
            _evaluate(runtimes, number, evaluated, outcome)
    finally:
        for link in links:
            link.close()
        for link in links:
            link.join(5)
    for stage in stages:
        outcome.adapter |= stage.state()
    return outcome


def _deliver_to(inbox: Inbox) -> Deliver:
    """Frames go into the inbox, and a link that ends fails it, so that nothing waits for it."""

    def deliver(event: Received | Closed) -> None:
        if isinstance(event, Closed):
            inbox.fail(event.error or HeteroError("the link was closed"))
        else:
            inbox.put(event)

    return deliver


def plan_of(step: int, micro_batches: Sequence[data.MicroBatch], router_loss: bool, evaluation: int = 0) -> StepPlan:
    """What is announced of a step, or of an evaluation after it."""
    return StepPlan(
        step,
        sum(m.label_tokens for m in micro_batches),
        [tuple(m.input_ids.shape) for m in micro_batches],  # type: ignore[misc]
        sum(m.real_tokens() for m in micro_batches) if router_loss else 0,
        evaluation,
    )


def _evaluate(runtimes: list[Runtime], step: int, micro_batches: Sequence[data.MicroBatch], outcome: Outcome) -> None:
    if not micro_batches:
        return
    plan = plan_of(step, micro_batches, False, evaluation=1)
    _run_one_step(runtimes, plan, micro_batches)
    outcome.eval_losses.append(runtimes[-1].stage.loss() / plan.label_tokens)
    for runtime in runtimes:
        runtime.stage.end_step()


def _run_one_step(runtimes: list[Runtime], plan: StepPlan, micro_batches: Sequence[data.MicroBatch]) -> None:
    errors: list[BaseException] = []

    def work(index: int) -> None:
        torch.set_num_threads(1)
        try:
            if index == 0:
                runtimes[0].run_step(plan, [m.tensors() for m in micro_batches])
            else:
                event = runtimes[index].inbox.get(
                    lambda e: isinstance(e, Received) and isinstance(e.frame.header, Step), timeout_s=60
                )
                runtimes[index].run_step(step_plan_of(event))
        except BaseException as exc:
            errors.append(exc)
            for runtime in runtimes:
                runtime.inbox.fail(HeteroError(f"another stage failed: {exc}"))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(runtimes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(t.is_alive() for t in threads), "the pipeline hangs"
    if errors:
        raise errors[0]


def cycled_batches(
    examples: list[data.Example], *, steps: int, batch_size: int, microbatch_size: int, padding_side: str = "right"
) -> list[list[data.MicroBatch]]:
    """The steps of the reference: rows in file order, cycled."""
    return [
        data.micro_batches(
            [examples[(step * batch_size + k) % len(examples)] for k in range(batch_size)],
            microbatch_size,
            padding_side=padding_side,
            pad_id=0,
        )
        for step in range(steps)
    ]


def pipeline_logits(stages: Sequence[Stage], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits [B, T, V] of a micro-batch's tensors, stage by stage in this thread; dropout is off."""
    with torch.no_grad():
        riders = {name: inputs[name] for name in ("attention_mask", "position_ids") if name in inputs}
        first: dict[str, torch.Tensor] = {"input_ids": inputs["input_ids"]}
        for stage in stages:
            stage.model.eval()
            base = stage.model.base_model
            hidden = base(**first, **riders, use_cache=False).last_hidden_state  # [B, T, H]
            first = {"inputs_embeds": hidden}
            if stage.is_last:
                scaling = logit_scaling(stage.model.config)
                hidden = logits_of(stage.model.get_output_embeddings(), hidden, scaling)  # [B, T, V]
            stage.model.train()
    return hidden


def lively(initial: dict[str, torch.Tensor], seed: int = 3) -> dict[str, torch.Tensor]:
    """Initial adapter values whose B is not zero, so that every tensor has a gradient from the first step on."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: 0.05 * torch.randn(value.shape, generator=generator) if "lora_B" in key else value
        for key, value in sorted(initial.items())
    }


def same_bits(one: Outcome, other: Outcome) -> bool:
    """True where losses, norms, gradients and adapters are equal to the last bit."""
    return (
        one.losses == other.losses
        and one.norms == other.norms
        and _equal_tensors(one.adapter, other.adapter)
        and all(_equal_tensors(a, b) for a, b in zip(one.grads, other.grads, strict=True))
        and all(math.isfinite(loss) for loss in one.losses)
    )


def _equal_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())

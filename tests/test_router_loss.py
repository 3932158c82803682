"""Mixtures of experts: the router's balancing loss of any split is that of one process with the same micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from choosing import mostly_by_hand
from conftest import EXPERT_NAMES, LAYERS, ROUTERS, Tiny
from peers import make_flow
from pipeline import Outcome, build_stages, lively, make_spec, pipeline_logits, run_stages, same_bits
from processes import metrics, run_here, train_here
from reference import trained, whole_model
from transformers import AutoModelForCausalLM

from hetero import data
from hetero.data import Example, MicroBatch
from hetero.errors import ConfigError, RemoteProtocolError
from hetero.spec import AdapterSpec, RouterLossSpec, RunSpec, ScheduleSpec
from hetero.stage import Stage
from hetero.token_loss import token_loss
from hetero.transport.socket_link import SocketLink
from hetero.wire.flow import LinkFlow, pack_shapes
from hetero.wire.frames import encode
from hetero.wire.headers import FrameType, Ready, Step, TensorEntry, Tensors

COEFFICIENT = 0.3  # large enough to be seen beside the cross-entropy
ON = RouterLossSpec(num_experts=4, coefficient=COEFFICIENT)
SPLITS = ((), (3,), (1, 4), (1, 2, 3, 4, 5))
# Several rows of unequal length a micro-batch, so that micro-batches weigh differently and rows are padded.
CUTS: tuple[tuple[int, Any], ...] = ((1, "right"), (2, "left"), (3, "right"))
ATTENTION = ["q_proj", "v_proj"]


def cut(rows: Sequence[Example], microbatch_size: int, padding_side: Any) -> list[MicroBatch]:
    return data.micro_batches(rows, microbatch_size, padding_side=padding_side, pad_id=0)


def adapter_of(name: str, *, routers: bool, dropout: float = 0.0) -> AdapterSpec:
    """LoRA on attention, and whole routers beside it."""
    modules = [ROUTERS[name]] if routers else None
    return AdapterSpec(r=4, alpha=8, target_modules=ATTENTION, modules_to_save=modules, dropout=dropout)


def with_microbatch(spec: RunSpec, microbatch_size: int, schedule: str) -> RunSpec:
    loop = msgspec.structs.replace(spec.loop, microbatch_size=microbatch_size)
    return msgspec.structs.replace(spec, loop=loop, schedule=ScheduleSpec(name=schedule))


# ---- the reference: transformers' model and router loss in one process


@dataclass
class Whole:
    """Loss, router loss and gradients of a step."""

    loss: float = 0.0
    router_loss: float = 0.0
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


def whole(path: Path, micro_batches: Sequence[MicroBatch], lora: dict[str, Any], initial: Any, *, ours: bool) -> Whole:
    """One step of one process.

    Args:
        path: the model.
        micro_batches: of the step.
        lora: arguments of PEFT's LoraConfig.
        initial: adapter values by PEFT's keys.
        ours: cross-entropy by `token_loss`, so that only the router loss is compared; else all is transformers'.
    """
    model = whole_model(path, lora, initial)
    model.train()
    base = model.get_base_model()
    label_tokens = sum(batch.label_tokens for batch in micro_batches)
    real = [batch.input_ids.numel() if batch.attention_mask is None else int(batch.attention_mask.sum())
            for batch in micro_batches]  # fmt: skip
    found = Whole()
    parts, router_parts = [], []
    for batch, tokens in zip(micro_batches, real, strict=True):
        coefficient = COEFFICIENT * tokens / sum(real)
        inputs = {key: value for key, value in batch.tensors().items() if key != "labels"}
        options = {"output_router_logits": True, "use_cache": False}
        if ours:
            out = base(**inputs, **options, output_hidden_states=True)
            keep = batch.labels[:, 1:] != -100
            hidden = out.hidden_states[-1][:, :-1][keep]
            loss = token_loss(base.get_output_embeddings(), hidden, batch.labels[:, 1:][keep], label_tokens)
            loss = loss + coefficient * out.aux_loss
        else:
            base.router_aux_loss_coef = coefficient
            out = base(**inputs, **options, labels=batch.labels, num_items_in_batch=label_tokens)
            loss = out.loss
        loss.backward()
        parts.append(loss.item())
        router_parts.append((coefficient * out.aux_loss).item())
    found.loss, found.router_loss = math.fsum(parts), math.fsum(router_parts)
    found.grads = {key: p.grad for key, p in trained(model).items() if p.grad is not None}
    return found


def lora_of(spec: AdapterSpec) -> dict[str, Any]:
    return {"r": spec.r, "lora_alpha": spec.alpha, "target_modules": spec.target_modules} | {
        "modules_to_save": spec.modules_to_save
    }


def initial_of(stages: Sequence[Stage]) -> dict[str, torch.Tensor]:
    return lively({key: value for stage in stages for key, value in stage.state().items()})


def run_once(
    spec: RunSpec, stages: list[Stage], micro_batches: list[MicroBatch], initial: dict[str, torch.Tensor]
) -> tuple[Outcome, float]:
    """One step, and the router's part of its loss."""
    parts: list[float] = []
    router = stages[-1].router
    assert router is not None
    end_step = router.end_step
    router.end_step = lambda: parts.append(router.total()) or end_step()  # type: ignore[func-returns-value,method-assign]
    outcome = run_stages(spec, stages, [micro_batches], initial=initial)
    router.end_step = end_step  # type: ignore[method-assign]
    return outcome, parts[0]


# ---- any split is one process


@pytest.mark.parametrize(
    ("name", "routers"),
    mostly_by_hand(
        [*((name, True) for name in EXPERT_NAMES), ("mixtral", False)],
        [("mixtral", True), ("mixtral", False), ("qwen3_next", True)],
    ),
)
def test_router_loss_of_every_split_is_that_of_one_process(
    tiny: Tiny, rows: list[Example], name: str, routers: bool
) -> None:
    adapter = adapter_of(name, routers=routers)
    built = {}
    for cuts in SPLITS:
        spec = make_spec(tiny(name), cuts, adapter=adapter, router_loss=ON)
        built[cuts] = spec, build_stages(spec, tiny(name))
    initial = initial_of(built[()][1])
    assert any(f".{ROUTERS[name]}." in key for key in initial) == routers
    for microbatch_size, padding_side in CUTS:
        micro_batches = cut(rows[:5], microbatch_size, padding_side)
        expected = whole(tiny(name), micro_batches, lora_of(adapter), initial, ours=True)
        theirs = whole(tiny(name), micro_batches, lora_of(adapter), initial, ours=False)
        for cuts, schedule in [*((cuts, "1f1b") for cuts in SPLITS), ((1, 4), "gpipe")]:
            spec, stages = built[cuts]
            outcome, router_loss = run_once(
                with_microbatch(spec, microbatch_size, schedule), stages, micro_batches, initial
            )
            where = (cuts, schedule, microbatch_size, padding_side)
            assert outcome.losses == [expected.loss], where
            assert router_loss == expected.router_loss, where
            assert outcome.grads[0].keys() == expected.grads.keys()
            assert all(torch.equal(outcome.grads[0][key], grad) for key, grad in expected.grads.items()), where
        assert outcome.losses == pytest.approx([theirs.loss], abs=1e-6)
        for key, grad in theirs.grads.items():
            assert float((outcome.grads[0][key] - grad).norm()) <= 1e-5 * float(grad.norm()), key


@pytest.mark.parametrize("name", mostly_by_hand(EXPERT_NAMES, ["mixtral"]))
def test_without_the_router_loss_every_split_is_one_process(tiny: Tiny, rows: list[Example], name: str) -> None:
    """Off is off: no other loss, and nothing of the routers is kept."""
    adapter = adapter_of(name, routers=False)
    micro_batches = cut(rows[:5], 2, "left")
    outcomes = []
    for cuts in SPLITS:
        spec = make_spec(tiny(name), cuts, adapter=adapter, microbatch_size=2)
        stages = build_stages(spec, tiny(name))
        assert all(stage.router is None for stage in stages)
        initial = initial_of(stages)
        outcomes.append(run_stages(spec, stages, [micro_batches] * 2, initial=initial))
        assert same_bits(outcomes[-1], outcomes[0]), cuts
    model = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32)
    logits = pipeline_logits(
        build_stages(make_spec(tiny(name), (1, 4), router_loss=ON), tiny(name)), one(micro_batches)
    )
    with torch.no_grad():
        mine = model(**{k: v for k, v in one(micro_batches).items() if k != "labels"}, use_cache=False).logits
    assert torch.equal(logits, mine)


def one(micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    return micro_batches[0].tensors()


@pytest.mark.parametrize("name", mostly_by_hand(EXPERT_NAMES, ["mixtral", "qwen3_next"]))
def test_dropout_and_recomputation_change_nothing_between_splits(tiny: Tiny, rows: list[Example], name: str) -> None:
    steps = [cut(rows[:5], 2, "right"), cut(rows[5:10], 2, "right")]
    adapter = adapter_of(name, routers=True, dropout=0.2)
    outcomes = []
    for cuts, recompute, schedule in (
        ((), "none", "1f1b"),
        ((), "layer", "1f1b"),
        ((1, 4), "layer", "gpipe"),
        ((1, 4), "stage", "1f1b"),
        ((1, 2, 3, 4, 5), "layer", "1f1b"),
    ):
        spec = make_spec(
            tiny(name), cuts, adapter=adapter, recompute=recompute, schedule=schedule, microbatch_size=2, router_loss=ON
        )
        stages = build_stages(spec, tiny(name))
        by_layers = [recompute == "layer" or (recompute == "stage" and stage.is_last) for stage in stages]
        assert [stage.model.is_gradient_checkpointing for stage in stages] == by_layers
        outcomes.append(run_stages(spec, stages, steps, initial=initial_of(stages)))
        assert same_bits(outcomes[-1], outcomes[0]), (cuts, recompute)


def test_loss_is_the_papers_formula_over_all_layers_without_padding(tiny: Tiny, rows: list[Example]) -> None:
    """M07, by counting: no code of transformers but the routers' logits."""
    (batch,) = cut([rows[0], rows[3]], 2, "right")
    assert batch.attention_mask is not None
    model = AutoModelForCausalLM.from_pretrained(tiny("mixtral"), dtype=torch.float32)
    with torch.no_grad():
        out = model(batch.input_ids, attention_mask=batch.attention_mask, output_router_logits=True)
    real = batch.attention_mask.reshape(-1).tolist()
    count, probability, tokens = [0] * 4, [0.0] * 4, 0
    for logits in out.router_logits:
        for row, counts in zip(torch.softmax(logits.double(), -1).tolist(), real, strict=True):
            if counts:
                tokens += 1
                for expert in sorted(range(4), key=row.__getitem__)[-2:]:
                    count[expert] += 1
                for expert, value in enumerate(row):
                    probability[expert] += value
    assert tokens == LAYERS * sum(real) < LAYERS * len(real)
    balance = 4 * sum(count[e] / tokens * probability[e] / tokens for e in range(4))
    spec = make_spec(tiny("mixtral"), (1,), microbatch_size=2, router_loss=ON)
    stages = build_stages(spec, tiny("mixtral"))
    initial = {key: value for stage in stages for key, value in stage.state().items()}  # B is 0: the base itself
    outcome, router_loss = run_once(spec, stages, [batch], initial)
    assert router_loss == pytest.approx(COEFFICIENT * balance, abs=1e-6)
    off = make_spec(tiny("mixtral"), (1,), microbatch_size=2)
    without = run_stages(off, build_stages(off, tiny("mixtral")), [[batch]])
    assert outcome.losses[0] == pytest.approx(without.losses[0] + COEFFICIENT * balance, abs=1e-5)
    assert balance > 2.01  # a balanced router of 2 experts a token has 2


def test_a_micro_batch_without_a_label_still_balances(tiny: Tiny, rows: list[Example]) -> None:
    """Routers see its tokens; the pipeline stays in step."""
    blind = Example(0, rows[1].input_ids, (-100,) * len(rows[1].labels))
    micro_batches = cut([rows[0], blind], 1, "right")
    assert micro_batches[1].label_tokens == 0
    adapter = adapter_of("mixtral", routers=True)
    spec = make_spec(tiny("mixtral"), (2, 4), adapter=adapter, router_loss=ON)
    stages = build_stages(spec, tiny("mixtral"))
    initial = initial_of(stages)
    outcome, _ = run_once(spec, stages, micro_batches, initial)
    expected = whole(tiny("mixtral"), micro_batches, lora_of(adapter), initial, ours=True)
    assert outcome.losses == [expected.loss]
    assert all(torch.equal(outcome.grads[0][key], grad) for key, grad in expected.grads.items())


def test_a_step_leaves_nothing_of_the_routers(tiny: Tiny, rows: list[Example]) -> None:
    spec = make_spec(tiny("mixtral"), router_loss=ON)
    (stage,) = build_stages(spec, tiny("mixtral"))
    assert stage.router is not None
    (batch,) = cut(rows[:1], 1, "right")
    stage.router.begin_step(batch.real_tokens())
    stage.forward(1, 0, batch.tensors(), batch.label_tokens)
    assert stage.router.total() > 0
    stage.end_step()
    assert stage.router.total() == 0
    with pytest.raises(KeyError):
        stage.router.outgoing(0)


# ---- on the wire


def test_sums_travel_in_float32_whatever_the_hidden_states_do(
    tiny: Tiny, rows: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: set[tuple[str, str, str]] = set()
    send = SocketLink.send

    def spy(self: SocketLink, type_: FrameType, header: Any, payload: Any = ()) -> None:
        if isinstance(header, Tensors):
            sent.update((type_.name, entry.name, entry.dtype) for entry in header.tensors)
        send(self, type_, header, payload)

    monkeypatch.setattr(SocketLink, "send", spy)
    spec = make_spec(tiny("mixtral"), (2, 4), dtypes=("bfloat16",) * 3, router_loss=ON)
    stages = build_stages(spec, tiny("mixtral"))
    outcome, router_loss = run_once(spec, stages, cut(rows[:2], 1, "right"), initial_of(stages))
    assert math.isfinite(outcome.losses[0]) and router_loss > 0
    assert sent == {
        ("FORWARD", "labels", "int64"),
        ("FORWARD", "hidden", "bfloat16"),
        ("FORWARD", "router_tokens", "float32"),
        ("FORWARD", "router_probs", "float32"),
        ("FORWARD", "router_rows", "float32"),
        ("BACKWARD", "grad", "bfloat16"),
        ("BACKWARD", "router_grad", "float32"),
    }


def test_headers_of_other_models_are_what_they_were() -> None:
    assert bytes(encode(FrameType.STEP, Step(3, 12))[0]).endswith(b'}{"step":3,"label_tokens":12}'[1:])
    ready = bytes(encode(FrameType.READY, Ready(1, True, 2.5, 0.1, 0.2, 10, 20))[0])
    assert b"router" not in ready and ready.endswith(b'"memory_bytes":20}')


HIDDEN = TensorEntry("hidden", "float32", [2, 3, 4])
GRAD = TensorEntry("grad", "float32", [2, 3, 4])
LABELS = TensorEntry("labels", "int64", [2, 3])
TOKENS = TensorEntry("router_tokens", "float32", [5])
PROBS = TensorEntry("router_probs", "float32", [5])
COUNTED = TensorEntry("router_rows", "float32", [1])
ROUTER_GRAD = TensorEntry("router_grad", "float32", [5])
SUMS = [LABELS, HIDDEN, TOKENS, PROBS, COUNTED]


def flow_in_step() -> LinkFlow:
    flow = LinkFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=3, num_experts=5)
    flow.begin_step(Step(1, 4, 6), pack_shapes([(2, 3), (1, 2)]))
    return flow


def admit(flow: LinkFlow, type_: FrameType, tensors: list[TensorEntry]) -> None:
    flow.admit(type_, Tensors(1, 0, tensors), sum(entry.nbytes() for entry in tensors))


def test_frames_of_the_router_loss_are_admitted() -> None:
    flow = flow_in_step()
    admit(flow, FrameType.FORWARD, SUMS)
    flow = flow_in_step()
    flow.sent(FrameType.FORWARD)
    admit(flow, FrameType.BACKWARD, [GRAD, ROUTER_GRAD])


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param([LABELS, HIDDEN], id="no sums"),
        pytest.param([LABELS, HIDDEN, TOKENS, PROBS], id="no rows"),
        pytest.param([LABELS, HIDDEN, PROBS, COUNTED], id="no tokens"),
        pytest.param([LABELS, TOKENS, PROBS, COUNTED], id="no hidden"),
        pytest.param([*SUMS, PROBS], id="twice"),
        pytest.param([*SUMS, ROUTER_GRAD], id="the gradient forwards"),
        pytest.param([LABELS, HIDDEN, TOKENS, TensorEntry("router_probs", "float32", [6]), COUNTED], id="too many"),
        pytest.param([LABELS, HIDDEN, TOKENS, TensorEntry("router_probs", "float32", [0]), COUNTED], id="none"),
        pytest.param([LABELS, HIDDEN, TOKENS, TensorEntry("router_probs", "float32", [1, 5]), COUNTED], id="deeper"),
        pytest.param(
            [LABELS, HIDDEN, TOKENS, TensorEntry("router_probs", "float32", [1 << 39]), COUNTED], id="endless"
        ),
        pytest.param([LABELS, HIDDEN, TensorEntry("router_tokens", "int32", [5]), PROBS, COUNTED], id="integers"),
        pytest.param([LABELS, TensorEntry("router_tokens", "float64", [5]), HIDDEN, PROBS, COUNTED], id="float64"),
        pytest.param([LABELS, HIDDEN, TOKENS, PROBS, TensorEntry("router_rows", "float32", [])], id="a scalar"),
    ],
)
def test_forward_with_other_sums_is_refused(tensors: list[TensorEntry]) -> None:
    flow = flow_in_step()
    with pytest.raises(RemoteProtocolError, match=r"FORWARD must hold|stands twice"):
        admit(flow, FrameType.FORWARD, tensors)
    admit(flow, FrameType.FORWARD, SUMS)  # the refused frame was not counted


@pytest.mark.parametrize(
    "tensors",
    [
        [GRAD],
        [ROUTER_GRAD],
        [GRAD, PROBS],
        [GRAD, TensorEntry("router_grad", "float32", [4])],
        [GRAD, TensorEntry("router_grad", "bfloat16", [5])],
    ],
)
def test_backward_with_another_gradient_of_the_sums_is_refused(tensors: list[TensorEntry]) -> None:
    flow = flow_in_step()
    flow.sent(FrameType.FORWARD)
    with pytest.raises(RemoteProtocolError, match="BACKWARD must hold"):
        admit(flow, FrameType.BACKWARD, tensors)


def test_sums_on_a_link_without_router_loss_are_refused() -> None:
    for type_, tensors in ((FrameType.FORWARD, SUMS), (FrameType.BACKWARD, [GRAD, ROUTER_GRAD])):
        flow = make_flow()
        flow.begin_step(Step(1, 4), pack_shapes([(2, 3)]))
        if type_ is FrameType.BACKWARD:
            flow.sent(FrameType.FORWARD)
        with pytest.raises(RemoteProtocolError, match=f"{type_.name} must hold"):
            admit(flow, type_, tensors)
    with pytest.raises(RemoteProtocolError, match="must have 0 to 0 real_tokens, got 6"):
        make_flow().begin_step(Step(1, 4, 6), pack_shapes([(2, 3)]))


@pytest.mark.parametrize("real_tokens", [0, 3, 9, 2**53 - 1])
def test_real_tokens_are_between_the_labels_and_all_tokens(real_tokens: int) -> None:
    flow = LinkFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=3, num_experts=5)
    with pytest.raises(RemoteProtocolError, match=f"must have 4 to 8 real_tokens, got {real_tokens}"):
        flow.begin_step(Step(1, 4, real_tokens), pack_shapes([(2, 3), (1, 2)]))


def test_a_stage_of_another_number_of_experts_is_refused(tiny: Tiny) -> None:
    spec = make_spec(tiny("mixtral"), router_loss=RouterLossSpec(num_experts=5, coefficient=0.1))
    with pytest.raises(ConfigError, match="has 5 experts, found one with 4"):
        build_stages(spec, tiny("mixtral"))


# ---- whole runs


@pytest.mark.by_hand
def test_three_processes_log_the_routers_part_and_equal_one(
    tmp_path: Path, tiny: Tiny, rows: list[Example], rows_file: Path
) -> None:
    same = ["data=jsonl", f"data.path={rows_file}", f"model.path={tiny('mixtral')}", "loop.steps=2"]
    same += ["loop.batch_size=5", "loop.microbatch_size=2", f"model.router_aux_loss={COEFFICIENT}"]
    three = train_here(tmp_path / "three", *same, "shard_plan=split", "shard_plan.split_points=[1,4]")
    single = [*same, "shard_plan=single", f"outputs={tmp_path}"]
    on = run_here("train", *single, f"hydra.run.dir={tmp_path / 'on'}")
    off = run_here("train", *single, f"hydra.run.dir={tmp_path / 'off'}", "model.router_aux_loss=off")
    assert f"router loss: on, coefficient {COEFFICIENT}, over 6 layers of 4 experts" in on.text
    assert "router loss: off (model.router_aux_loss=off)" in off.text
    one, without = metrics(tmp_path / "on"), metrics(tmp_path / "off")
    for key in ("loss", "router_loss", "grad_norm"):
        assert [record[key] for record in three] == [record[key] for record in one]
    assert one[0]["loss"] == pytest.approx(without[0]["loss"] + one[0]["router_loss"], abs=1e-5)
    assert "router_loss" not in without[0]
    micro_batches = cut([rows[index] for index in one[0]["rows"]], 2, "right")
    expected = whole(tiny("mixtral"), micro_batches, {"r": 8, "target_modules": ATTENTION}, None, ours=False)
    assert one[0]["router_loss"] == pytest.approx(expected.router_loss, abs=1e-6)  # B is 0 before the first step
    assert one[0]["loss"] == pytest.approx(expected.loss, abs=1e-5)


# ---- LoRA on a router


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_next"])
def test_lora_on_a_router_is_that_of_one_process(tiny: Tiny, rows: list[Example], name: str) -> None:
    """A router holds its weight itself, as experts do: it is a target by `target_parameters`, no linear module."""
    parameters = ["mlp.gate.weight"]
    adapter = AdapterSpec(r=4, alpha=8, target_modules=["q_proj"], target_parameters=parameters)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": parameters}
    micro_batches = cut(rows[:5], 2, "right")
    expected, initial = None, None
    for cuts in ((), (1, 4)):
        spec = make_spec(tiny(name), cuts, adapter=adapter, router_loss=ON)
        stages = build_stages(spec, tiny(name))
        initial = initial or initial_of(stages)
        expected = expected or whole(tiny(name), micro_batches, lora, initial, ours=True)
        assert any(".gate.lora_A" in key and float(grad.norm()) > 0 for key, grad in expected.grads.items())
        outcome, router_loss = run_once(with_microbatch(spec, 2, "1f1b"), stages, micro_batches, initial)
        assert outcome.losses == [expected.loss] and router_loss == expected.router_loss, cuts
        assert outcome.grads[0].keys() == expected.grads.keys()
        assert all(torch.equal(outcome.grads[0][key], grad) for key, grad in expected.grads.items()), cuts


@pytest.mark.parametrize("name", EXPERT_NAMES)
def test_router_as_a_target_module_is_refused(tiny: Tiny, name: str) -> None:
    adapter = AdapterSpec(r=4, alpha=8, target_modules=["q_proj", ROUTERS[name]])
    with pytest.raises(ConfigError, match=r"adapter\.target_modules") as refused:
        build_stages(make_spec(tiny(name), (3,), adapter=adapter), tiny(name))
    assert "\n" not in str(refused.value) and ROUTERS[name] in str(refused.value)

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from conftest import Tiny, make_rows
from pipeline import build_stages, lively, make_spec, run_pipeline, run_stages
from torch import nn

from hetero import data
from hetero import stage as stage_module
from hetero.data import Example, MicroBatch
from hetero.spec import AdapterSpec
from hetero.stage import Stage
from hetero.transport.socket_link import SocketLink
from hetero.wire.headers import FrameType, Tensors

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def one_by_one(rows: list[Example]) -> list[MicroBatch]:
    return data.micro_batches(rows, 1, padding_side="right", pad_id=0)


def base_hashes(stage: Stage) -> dict[str, str]:
    """Name -> hash of every tensor that is not LoRA's, 4-bit statistics included."""
    tensors = stage.model.state_dict() | dict(stage.model.named_buffers())
    return {
        name: hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
        if "lora_" not in name
    }


# ---- what trains


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "gpt2"])
def test_only_the_adapter_changes(tiny: Tiny, rows: list[Example], name: str) -> None:
    """N09: the bytes of every base tensor on every stage before and after 3 steps."""
    adapter = AdapterSpec(r=4, alpha=8, target_modules="all-linear")
    spec = make_spec(tiny(name), (1, 4), adapter=adapter, lr=0.05)
    stages = build_stages(spec, tiny(name))
    before = [base_hashes(stage) for stage in stages]
    outcome = run_stages(spec, stages, [one_by_one(rows[i : i + 2]) for i in (0, 2, 4)])
    assert [base_hashes(stage) for stage in stages] == before
    assert all(len(hashes) > 5 for hashes in before)
    assert not any(torch.equal(value, outcome.initial[key]) for key, value in outcome.adapter.items())
    for stage in stages:
        assert all("lora_" in key for key in stage.trained)
        assert {id(p) for p in stage.model.parameters() if p.requires_grad} == {id(p) for p in stage.trained.values()}


# ---- one micro-batch at a time


@pytest.fixture
def pair(tiny: Tiny) -> list[Stage]:
    spec = make_spec(tiny("llama"), (3,), adapter=AdapterSpec(r=4, alpha=8))
    stages = build_stages(spec, tiny("llama"))
    initial = lively({key: value for stage in stages for key, value in stage.state().items()})
    with torch.no_grad():
        for stage in stages:
            for key, parameter in stage.trained.items():
                parameter.copy_(initial[key])
    return stages


def forward(stages: list[Stage], batch: MicroBatch, label_tokens: int, micro_batch: int = 0) -> torch.Tensor:
    hidden = stages[0].forward(1, micro_batch, batch.tensors(), label_tokens)
    assert hidden is not None
    assert stages[1].forward(1, micro_batch, {"hidden": hidden, "labels": batch.labels}, label_tokens) is None
    return hidden


def backward(stages: list[Stage], micro_batch: int = 0) -> None:
    grad = stages[1].backward(micro_batch, None)
    assert stages[0].backward(micro_batch, grad) is None


def test_hidden_and_grad_have_one_shape_and_no_graph(pair: list[Stage], rows: list[Example]) -> None:
    (batch,) = one_by_one(rows[:1])
    hidden = forward(pair, batch, batch.label_tokens)
    assert hidden.shape == (*batch.input_ids.shape, 32)
    assert not hidden.requires_grad
    grad = pair[1].backward(0, None)
    assert grad is not None
    assert grad.shape == hidden.shape
    assert float(grad.norm()) > 0


def test_gradients_add_up_over_micro_batches(pair: list[Stage], rows: list[Example]) -> None:
    batches = one_by_one(rows[:2])
    tokens = sum(batch.label_tokens for batch in batches)
    separate = []
    for batch in batches:
        forward(pair, batch, tokens)
        backward(pair)
        separate.append({k: p.grad.clone() for s in pair for k, p in s.trained.items() if p.grad is not None})
        for stage in pair:
            stage.end_step()
    losses = []
    for number, batch in enumerate(batches):
        forward(pair, batch, tokens, number)
        losses.append(pair[1].loss())
    for number in range(2):
        backward(pair, number)
    for stage in pair:
        for key, parameter in stage.trained.items():
            assert torch.equal(parameter.grad, separate[0][key] + separate[1][key])  # type: ignore[arg-type]
    assert 0 < losses[0] < losses[1]


def test_micro_batch_without_a_label_is_neutral(pair: list[Stage], rows: list[Example]) -> None:
    """D01: no NaN, a loss of zero and gradients of zero."""
    row = Example(0, rows[0].input_ids, (-100,) * len(rows[0].labels))
    (batch,) = one_by_one([row])
    assert batch.label_tokens == 0
    for label_tokens in (0, 5):
        forward(pair, batch, label_tokens)
        backward(pair)
        assert pair[1].loss() == 0.0
        assert all(float(stage.squared_norms().sum()) == 0.0 for stage in pair)
        for stage in pair:
            stage.end_step()


def test_end_of_a_step_leaves_nothing(pair: list[Stage], rows: list[Example]) -> None:
    (batch,) = one_by_one(rows[:1])
    forward(pair, batch, batch.label_tokens)
    backward(pair)
    assert all(float(stage.squared_norms().sum()) > 0 for stage in pair)
    forward(pair, batch, batch.label_tokens, 1)  # an aborted step leaves micro-batches in flight
    for stage in pair:
        stage.end_step()
        assert all(p.grad is None for p in stage.trained.values())
        assert float(stage.squared_norms().sum()) == 0.0
    assert pair[1].loss() == 0.0
    with pytest.raises(KeyError):
        pair[1].backward(1, None)


def test_norms_are_exact_in_float64_and_scaling_is_that_of_clipping(pair: list[Stage], rows: list[Example]) -> None:
    (batch,) = one_by_one(rows[:1])
    forward(pair, batch, batch.label_tokens)
    backward(pair)
    for stage in pair:
        norms = stage.squared_norms()
        assert norms.dtype is torch.float64
        before = [p.grad.clone() for p in stage.trained.values() if p.grad is not None]
        assert norms.tolist() == [float(grad.double().square().sum()) for grad in before]
        stage.scale_gradients(0.5)
        for parameter, grad in zip(stage.trained.values(), before, strict=True):
            assert torch.equal(parameter.grad, grad * 0.5)  # type: ignore[arg-type]


def test_state_is_a_copy(pair: list[Stage]) -> None:
    state = pair[0].state()
    for value in state.values():
        value.fill_(9)
    assert not any(bool((p == 9).any()) for p in pair[0].trained.values())


def test_logits_are_taken_where_labels_are(
    pair: list[Stage], rows: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head sees as many positions as there are labels, which bounds the memory of a large vocabulary."""
    seen: list[torch.Size] = []
    whole = stage_module.token_loss
    monkeypatch.setattr(
        stage_module, "token_loss", lambda head, h, *rest, **more: seen.append(h.shape) or whole(head, h, *rest, **more)
    )
    (batch,) = data.micro_batches(rows[:3], 3, padding_side="right", pad_id=0)
    riders = {name: tensor for name, tensor in batch.tensors().items() if name != "input_ids"}
    hidden = pair[0].forward(1, 0, batch.tensors(), batch.label_tokens)
    assert hidden is not None
    pair[1].forward(1, 0, {"hidden": hidden, **riders}, batch.label_tokens)
    assert seen == [(batch.label_tokens, 32)]


# ---- unequal numbers


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_each_stage_computes_in_its_own_dtype(
    tiny: Tiny, rows: list[Example], dtypes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """N10: gradients come back in the dtype that the hidden was sent in; loss within 2e-2 of fp32."""
    sent: dict[FrameType, set[str]] = {}
    arrived: list[torch.dtype] = []
    send, backward_of = SocketLink.send, Stage.backward

    def spy(self: SocketLink, type_: FrameType, header: Any, payload: Any = ()) -> None:
        if isinstance(header, Tensors):
            sent.setdefault(type_, set()).update(e.dtype for e in header.tensors if e.name in ("hidden", "grad"))
        send(self, type_, header, payload)

    def spy_backward(self: Stage, micro_batch: int, grad: torch.Tensor | None, *rest: Any) -> torch.Tensor | None:
        if grad is not None:
            arrived.append(grad.dtype)
        return backward_of(self, micro_batch, grad, *rest)

    monkeypatch.setattr(SocketLink, "send", spy)
    monkeypatch.setattr(Stage, "backward", spy_backward)
    steps = [one_by_one(rows[:4]), one_by_one(rows[4:8])]
    adapter = AdapterSpec(r=4, alpha=8, target_modules=LINEAR)
    exact = run_pipeline(make_spec(tiny("llama"), (3,), adapter=adapter), tiny("llama"), steps)
    sent.clear(), arrived.clear()
    mixed = run_pipeline(make_spec(tiny("llama"), (3,), adapter=adapter, dtypes=dtypes), tiny("llama"), steps)
    assert sent == {FrameType.FORWARD: {dtypes[0]}, FrameType.BACKWARD: {dtypes[0]}}
    assert set(arrived) == {getattr(torch, dtypes[0])}
    for stage, dtype in zip(mixed.stages, dtypes, strict=True):
        assert stage.dtype is getattr(torch, dtype)
        own = {id(p) for p in stage.trained.values()}
        assert {p.dtype for p in stage.model.parameters() if id(p) not in own} == {getattr(torch, dtype)}
        assert {p.dtype for p in stage.trained.values()} == {torch.float32}
    assert mixed.losses == pytest.approx(exact.losses, abs=2e-2)
    assert mixed.losses != exact.losses
    assert mixed.norms == pytest.approx(exact.norms, rel=0.1)


# ---- 4 bits


@pytest.mark.parametrize("quantizations", [("nf4", "none"), ("none", "nf4"), ("nf4", "nf4")])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_4_bit_stage_beside_a_bf16_stage(
    tiny: Tiny, rows: list[Example], name: str, quantizations: tuple[str, str]
) -> None:
    """P09: 2 steps without a dtype error, finite; the base stays 4-bit and as it was, the adapter is fp32."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    spec = make_spec(
        tiny(name),
        (3,),
        adapter=AdapterSpec(r=4, alpha=8, target_modules=LINEAR),
        dtypes=("bfloat16", "bfloat16"),
        quantizations=quantizations,
    )
    stages = build_stages(spec, tiny(name))
    before = [base_hashes(stage) for stage in stages]
    steps = [one_by_one(rows[:2]), one_by_one(rows[2:4])]
    outcome = run_stages(spec, stages, steps)
    assert [base_hashes(stage) for stage in stages] == before
    assert all(0 < norm < 100 for norm in outcome.norms)
    assert all(bool(value.isfinite().all()) for value in outcome.adapter.values())
    exact = run_pipeline(
        make_spec(tiny(name), (3,), adapter=AdapterSpec(r=4, alpha=8, target_modules=LINEAR)), tiny(name), steps
    )
    assert outcome.losses == pytest.approx(exact.losses, rel=0.05)
    for stage, quantization in zip(stages, quantizations, strict=True):
        layers = [m for m in stage.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
        assert len(layers) == (3 * 7 if quantization == "nf4" else 0)
        assert all(layer.weight.dtype is torch.uint8 for layer in layers)
        assert all(layer.weight.quant_state.quant_type == "nf4" and layer.weight.quant_state.nested for layer in layers)
        assert {p.dtype for p in stage.trained.values()} == {torch.float32}
        if stage.is_last:
            assert stage.model.get_output_embeddings().weight.dtype is torch.bfloat16


def test_4_bit_weights_do_not_depend_on_the_split(tiny: Tiny, rows: list[Example]) -> None:
    pytest.importorskip("bitsandbytes")
    outcomes = []
    for cuts in ((), (1, 4)):
        stages = len(cuts) + 1
        adapter = AdapterSpec(r=4, alpha=8, target_modules=LINEAR)
        spec = make_spec(tiny("llama"), cuts, adapter=adapter, quantizations=["nf4"] * stages, microbatch_size=2)
        steps = [data.micro_batches(rows[:4], 2, padding_side="right", pad_id=0)] * 2
        outcomes.append(run_pipeline(spec, tiny("llama"), steps))
    assert outcomes[0].losses == outcomes[1].losses
    assert outcomes[0].norms == outcomes[1].norms


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_evaluation_does_not_spoil_4_bit_gradients(tiny: Tiny, rows: list[Example], dtype: str) -> None:
    """On CPUs with AVX512-BF16 bitsandbytes repacks weights in an evaluation; that layout has no gradient."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    adapter = AdapterSpec(r=4, alpha=8, target_modules=LINEAR)
    spec = make_spec(tiny("llama"), adapter=adapter, dtypes=[dtype], quantizations=["nf4"], lr=0.0)
    stages = build_stages(spec, tiny("llama"))
    assert all(
        module.support_avx512bf16_for_cpu is False
        for module in stages[0].model.modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    )
    initial = lively(stages[0].state())
    before = run_stages(spec, stages, [one_by_one(rows[:2])], initial=initial)
    hashes = base_hashes(stages[0])
    stages[0].model.eval()
    with torch.no_grad():
        stages[0].model(input_ids=torch.arange(3, 20).unsqueeze(0), use_cache=False)
    stages[0].model.train()
    assert base_hashes(stages[0]) == hashes
    after = run_stages(spec, stages, [one_by_one(rows[:2])], initial=initial)
    for key, grad in before.grads[0].items():
        torch.testing.assert_close(after.grads[0][key], grad, rtol=0, atol=0)


def test_dropout_is_off_in_evaluation_and_on_again(tiny: Tiny) -> None:
    """N12: a stage is in training mode when it is built, and modes do not stick to its adapter."""
    (stage,) = build_stages(make_spec(tiny("llama"), adapter=AdapterSpec(r=4, alpha=8, dropout=0.5)), tiny("llama"))
    dropouts = [m for m in stage.model.modules() if isinstance(m, nn.Dropout)]
    assert dropouts
    assert all(m.training for m in stage.model.modules())
    stage.model.eval()
    assert not any(m.training for m in dropouts)
    stage.model.train()
    assert all(m.training for m in dropouts)


def test_rows_fixture_has_masked_and_short_rows(rows: list[Example]) -> None:
    """What the comparisons above rely on."""
    assert len({len(row.input_ids) for row in rows}) > 8
    assert sum(row.labels[1] == -100 for row in rows) > 3
    assert make_rows((5, 9)) == make_rows((5, 9))

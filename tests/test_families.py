"""Every verified family against plain transformers in one process; and what is refused, and why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import FAMILY_NAMES, LAYERS, Tiny, family_of_model, make_rows
from transformers import AutoModelForCausalLM

from hetero import data, device
from hetero.data import MicroBatch
from hetero.models import load_stage
from hetero.stage import Stage

SPLITS = ((), (2, 4), (1, 2, 5))
# Rows longer than the small models' window of 4.
PADDINGS: dict[str, tuple[tuple[int, ...], Any]] = {
    "none": ((9, 9), "right"),
    "right": ((10, 4), "right"),
    "left": ((10, 4), "left"),
}
CASES = [
    (name, attention)
    for name in FAMILY_NAMES
    for attention in (("eager",) if family_of_model(name).eager_only else ("sdpa", "eager"))
]


def micro_batch(padding: str) -> MicroBatch:
    lengths, side = PADDINGS[padding]
    (batch,) = data.micro_batches(make_rows(lengths), 2, padding_side=side, pad_id=0)
    assert (batch.attention_mask is None) == (padding == "none")
    return batch


def stages_of(path: Path, cuts: Sequence[int], *, train: bool, recompute: str = "none", **options: Any) -> list[Stage]:
    """Stages without an adapter; with `train` every weight has a gradient."""
    edges = [0, *cuts, LAYERS]
    stages = []
    for start, end in itertools.pairwise(edges):
        model = load_stage(path, start, end, dtype=torch.float32, device=torch.device("cpu"), **options)
        model.requires_grad_(train)
        where = {"start": start, "end": end, "num_layers": LAYERS, "device": device.resolve("cpu")}
        stages.append(Stage(model, None, **where, dtype=torch.float32, seed=7, recompute=recompute))  # type: ignore[arg-type]
    return stages


@dataclass
class Found:
    """Loss, hidden states [B, T, H] of the last stage's input, gradients by global name and of that input."""

    loss: float
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    hidden_grad: torch.Tensor | None = None


def run(stages: list[Stage], batch: MicroBatch) -> Found:
    """One forward and backward through all stages; gradients of tied copies are summed."""
    tensors = batch.tensors()
    riders = {key: value for key, value in tensors.items() if key != "input_ids"}
    given: dict[str, torch.Tensor] = {"input_ids": batch.input_ids}
    for stage in stages:
        hidden = stage.forward(1, 0, {**given, **riders}, batch.label_tokens)
        if hidden is not None:
            given = {"hidden": hidden}
    found = Found(stages[-1].loss())
    grad = None
    for stage in reversed(stages):
        grad = stage.backward(0, grad)
        if stage.is_last:
            found.hidden_grad = grad
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                found.grads[name] = found.grads[name] + parameter.grad if name in found.grads else parameter.grad
                parameter.grad = None
        stage.end_step()
    return found


def run_whole(model: Any, batch: MicroBatch) -> Found:
    """transformers' own logits and autograd."""
    inputs = {key: value for key, value in batch.tensors().items() if key != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, batch.labels[:, 1:].reshape(-1), reduction="sum") / batch.label_tokens
    loss.backward()
    found = Found(loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    return found


def assert_close(found: Found, expected: Found, rel: float) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=rel)
    assert found.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        difference = float((found.grads[name] - grad).norm())
        assert difference <= rel * float(grad.norm()) + 1e-8, (name, difference, float(grad.norm()))


# ---- what a split computes


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_every_family_is_one_process_at_uneven_cuts(tiny: Tiny, name: str, attention: str) -> None:
    """M02, M05, M06: bit-equal among splits; loss and every gradient are those of transformers."""
    options = {"attn_implementation": attention, "dtype": torch.float32}
    whole = AutoModelForCausalLM.from_pretrained(tiny(name), **options).train()
    batches = {padding: micro_batch(padding) for padding in PADDINGS}
    expected = {padding: run_whole(whole, batch) for padding, batch in batches.items()}
    first: dict[str, Found] = {}
    for cuts in SPLITS:
        stages = stages_of(tiny(name), cuts, train=True, attn_implementation=attention)
        for padding, batch in batches.items():
            found = run(stages, batch)
            assert_close(found, expected[padding], 1e-5)
            other = first.setdefault(padding, found)
            assert found.loss == other.loss, (cuts, padding)
            assert all(torch.equal(grad, other.grads[key]) for key, grad in found.grads.items()), (cuts, padding)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_frozen_head_gives_the_same_loss_and_gradient(tiny: Tiny, name: str) -> None:
    """The head's scaling, cap and bias are in the path without autograd too; recomputation changes nothing."""
    batch = micro_batch("left")
    trained = run(stages_of(tiny(name), (2, 4), train=True), batch)
    for recompute in ("none", "layer"):
        frozen = run(stages_of(tiny(name), (2, 4), train=False, recompute=recompute), batch)
        assert frozen.loss == pytest.approx(trained.loss, rel=1e-6)
        assert frozen.hidden_grad is not None and trained.hidden_grad is not None
        torch.testing.assert_close(frozen.hidden_grad, trained.hidden_grad, rtol=1e-4, atol=1e-6)

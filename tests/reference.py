"""The independent reference: plain transformers and peft in one process, one row at a time, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM

from hetero.data import Example

_OPTIMIZERS: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass
class Reference:
    """What a run gave: loss, norm (before clipping) and gradients of each step, the final adapter by PEFT's keys."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    adapter: dict[str, torch.Tensor] = field(default_factory=dict)


def run_reference(
    model_dir: Path,
    steps: Sequence[Sequence[Example]],
    *,
    lora: dict[str, Any],
    initial: dict[str, torch.Tensor] | None = None,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    max_grad_norm: float | None = 1.0,
    **options: Any,
) -> Reference:
    """Trains an adapter on the rows of each step.

    Args:
        model_dir: the base model, held in fp32.
        steps: the rows of each optimizer step.
        lora: arguments of PEFT's LoraConfig.
        initial: adapter values by PEFT's keys; None for PEFT's own.
        optimizer: `adamw` (no weight decay) or `sgd`.
        lr: constant.
        max_grad_norm: of `torch.nn.utils.clip_grad_norm_`; None for no clipping.
        options: for `from_pretrained`.
    """
    model = whole_model(model_dir, lora, initial, **options)
    model.train()
    named = trained(model)
    weight_decay = {"weight_decay": 0.0}
    stepper = _OPTIMIZERS[optimizer](named.values(), lr=lr, **weight_decay)
    outcome = Reference()
    for rows in steps:
        outcome.losses.append(_accumulate(model, rows))
        outcome.grads.append({key: p.grad.clone() for key, p in named.items() if p.grad is not None})
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        outcome.norms.append(float(nn.utils.clip_grad_norm_(named.values(), limit)))
        stepper.step()
        stepper.zero_grad()
    outcome.adapter = {key: p.detach().clone() for key, p in named.items()}
    return outcome


def whole_model(
    model_dir: Path, lora: dict[str, Any], initial: dict[str, torch.Tensor] | None = None, **options: Any
) -> Any:
    """The PEFT model of the whole base, with these adapter values."""
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, **options)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **lora))
    if initial is not None:
        assert initial.keys() == trained(model).keys()
        set_peft_model_state_dict(model, {key: value.clone() for key, value in initial.items()})
    return model


def trained(model: Any) -> dict[str, nn.Parameter]:
    """PEFT's key -> parameter, for all that trains."""
    by_storage = {p.data_ptr(): p for p in model.parameters() if p.requires_grad}
    named = {
        key: by_storage[t.data_ptr()]
        for key, t in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    assert len(named) == len(by_storage)
    return named


def _accumulate(model: Any, rows: Sequence[Example]) -> float:
    """Backward of sum(token losses) / number of label tokens over all rows; the loss."""
    total = sum(sum(label != -100 for label in row.labels[1:]) for row in rows)
    loss = 0.0
    for row in rows:
        ids, labels = torch.tensor([row.input_ids]), torch.tensor([row.labels])
        logits = model(input_ids=ids, use_cache=False).logits.float()
        targets = labels[:, 1:].reshape(-1)
        part = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="sum") / total
        part.backward()
        loss += part.item()
    return loss

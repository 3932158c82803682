"""Optimizers, the learning rate as a function of the step, and the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hetero.spec import LrScheduleSpec


def adamw(
    params: Iterable[torch.nn.Parameter],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """torch's AdamW (Loshchilov and Hutter, 2019)."""
    return torch.optim.AdamW(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay)


def sgd(
    params: Iterable[torch.nn.Parameter],
    lr: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """torch's SGD."""
    return torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


def learning_rate(step: int, total_steps: int, peak: float, schedule: LrScheduleSpec) -> float:
    """The learning rate of a step.

    It rises linearly over the warm-up (the last warm-up step has the peak), then stays, or falls along a half cosine
    from the peak to `min_lr_ratio` of it, which the step after the last would have.

    Args:
        step: from 1.
        total_steps: of the run.
        peak: the optimizer's `lr`.
        schedule: shape and warm-up.
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    done = (step - 1 - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * cosine)


def global_norm(squared_norms: Iterable[float]) -> float:
    """The norm of all gradients, from the squared norm of each trained tensor.

    `math.fsum` is exact, so the result does not depend on how the tensors are divided among stages.
    """
    try:
        return math.sqrt(math.fsum(squared_norms))
    except OverflowError:  # a finite sum that float64 cannot hold
        return math.inf


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What all gradients are multiplied with, as `torch.nn.utils.clip_grad_norm_` does; no clipping for None or 0."""
    if not max_norm:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))

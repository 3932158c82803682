import itertools
import math
import random

import pytest
import torch

from hetero.optim import adamw, clip_factor, global_norm, learning_rate, sgd
from hetero.spec import LrScheduleSpec


def rates(total: int, **schedule: object) -> list[float]:
    spec = LrScheduleSpec(**schedule)  # type: ignore[arg-type]
    return [learning_rate(step, total, 2.0, spec) for step in range(1, total + 1)]


def test_constant_rate_is_the_peak_from_the_first_step() -> None:
    assert rates(4, name="constant") == [2.0] * 4


def test_warm_up_rises_in_equal_steps_and_ends_at_the_peak() -> None:
    assert rates(6, name="constant", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(6, name="cosine", warmup_steps=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_cosine_starts_at_the_peak_and_would_end_at_zero_after_the_last_step() -> None:
    assert rates(4) == pytest.approx([2.0, 1 + math.cos(math.pi / 4), 1.0, 1 - math.cos(math.pi / 4)])
    assert learning_rate(5, 4, 2.0, LrScheduleSpec()) == 0.0
    assert learning_rate(50, 4, 2.0, LrScheduleSpec()) == 0.0


@pytest.mark.parametrize("least", [0.0, 0.1])
@pytest.mark.parametrize(("total", "warmup"), [(10, 0), (10, 3), (100, 10), (7, 6)])
def test_cosine_is_that_of_torch(total: int, warmup: int, least: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=2.0 * least)
    theirs = []
    for _ in range(total - warmup):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ours = rates(total, warmup_steps=warmup, min_lr_ratio=least)
    assert ours[warmup:] == pytest.approx(theirs, abs=1e-12)
    assert ours[:warmup] == [2.0 * step / warmup for step in range(1, warmup + 1)]


def test_cosine_falls_to_the_least_ratio_and_never_rises() -> None:
    found = rates(50, warmup_steps=5, min_lr_ratio=0.25)
    assert all(later < earlier for earlier, later in itertools.pairwise(found[5:]))
    assert min(found[5:]) > 0.5
    assert learning_rate(51, 50, 2.0, LrScheduleSpec(warmup_steps=5, min_lr_ratio=0.25)) == 0.5
    assert rates(8, min_lr_ratio=1.0) == [2.0] * 8


@pytest.mark.parametrize(("total", "warmup"), [(0, 0), (1, 0), (1, 1), (3, 3), (3, 10)])
def test_short_runs_have_a_rate_in_every_step(total: int, warmup: int) -> None:
    found = [
        learning_rate(step, total, 2.0, LrScheduleSpec(warmup_steps=warmup)) for step in range(1, max(total, 1) + 1)
    ]
    assert all(0 < rate <= 2.0 for rate in found)


def test_rate_is_a_function_of_the_step_alone() -> None:
    spec = LrScheduleSpec(warmup_steps=3)
    forward = [learning_rate(step, 20, 1e-3, spec) for step in range(1, 21)]
    assert [learning_rate(step, 20, 1e-3, spec) for step in range(20, 0, -1)] == forward[::-1]


def squares(count: int, spread: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.random() * 10 ** draw.uniform(-spread, spread) for _ in range(count)]


@pytest.mark.parametrize("spread", [0, 3, 30])
def test_norm_does_not_depend_on_the_order_to_the_last_bit(spread: float) -> None:
    values = squares(500, spread, seed=5)
    draw, found, plain = random.Random(1), set(), set()
    for _ in range(50):
        draw.shuffle(values)
        found.add(global_norm(values))
        plain.add(math.sqrt(sum(values)))
    assert len(found) == 1
    if spread == 3:
        assert len(plain) > 1  # so the plain sum would not do


def test_norm_is_that_of_all_gradients_together() -> None:
    grads = [torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(1, 30)]
    together = torch.cat(grads).norm().item()
    assert global_norm(g.square().sum().item() for g in grads) == pytest.approx(together, rel=1e-14)
    assert global_norm([]) == 0.0


def test_norm_that_is_not_finite_is_seen() -> None:
    assert global_norm([1.0, math.inf]) == math.inf
    assert math.isnan(global_norm([1.0, math.nan]))
    assert global_norm([1e308] * 10) == math.inf


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("max_norm", [0.01, 1.0, 50.0])
def test_clipping_is_that_of_torch(scale: float, max_norm: float) -> None:
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((3, 4), (5,), (2, 2, 2))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * scale
    grads = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    norm = global_norm(grad.square().sum().item() for grad in grads)
    factor = clip_factor(norm, max_norm)
    theirs = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert norm == pytest.approx(theirs.item(), rel=1e-14)
    for grad, parameter in zip(grads, parameters, strict=True):
        torch.testing.assert_close(grad * factor, parameter.grad, rtol=1e-14, atol=0)


def test_no_clipping_without_a_limit_or_below_it() -> None:
    assert clip_factor(1e9, None) == clip_factor(1e9, 0) == clip_factor(1e9, 0.0) == 1.0
    assert clip_factor(0.5, 1.0) == clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(math.inf, 1.0) == 0.0


def test_optimizers_are_torch_s_with_the_same_arguments() -> None:
    def run(make: object) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer: torch.optim.Optimizer = make([parameter])  # type: ignore[operator]
        for step in range(5):
            parameter.grad = torch.linspace(-1, 1, 7).mul(step).sin()
            optimizer.step()
        return parameter.detach()

    ours = run(lambda p: adamw(p, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2))
    theirs = run(lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, run(lambda p: adamw(p, lr=0.1, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.2)))  # type: ignore[arg-type]
    ours = run(lambda p: sgd(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2))
    theirs = run(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2))
    assert torch.equal(ours, theirs)

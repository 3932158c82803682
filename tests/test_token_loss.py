"""The loss of a frozen head by chunks: against plain cross-entropy through autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hetero import token_loss as subject


def parts(dtype: torch.dtype = torch.float32, n: int = 37) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    head = nn.Linear(24, 211, bias=False, dtype=dtype).requires_grad_(False)
    head.weight.copy_(torch.randn(211, 24, generator=draw))
    hidden = torch.randn(n, 24, generator=draw).to(dtype).requires_grad_()
    return head, hidden, torch.randint(0, 211, (n,), generator=draw)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("chunk_elements", [1, 211 * 10, 1 << 25])
@pytest.mark.parametrize("n", [1, 37])
def test_loss_and_gradient_are_those_of_cross_entropy(
    dtype: torch.dtype, tolerance: float, chunk_elements: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "CHUNK_ELEMENTS", chunk_elements)
    head, hidden, targets = parts(dtype, n)
    loss = subject.token_loss(head, hidden, targets, 101)
    (loss * 2).backward()
    got, hidden.grad = hidden.grad, None
    wanted = F.cross_entropy(head(hidden).float(), targets, reduction="sum") / 101
    (wanted * 2).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, hidden.grad, rtol=tolerance, atol=tolerance)


def test_large_logits_do_not_overflow() -> None:
    head, hidden, targets = parts()
    with torch.no_grad():
        hidden *= 1e4
    loss = subject.token_loss(head, hidden, targets, 1)
    torch.testing.assert_close(loss, F.cross_entropy(head(hidden), targets, reduction="sum"))


def test_what_is_not_finite_shows() -> None:
    head, hidden, targets = parts()
    with torch.no_grad():
        hidden[0, 0] = float("nan")
    assert not torch.isfinite(subject.token_loss(head, hidden, targets, 1))


def test_nothing_as_large_as_the_logits_is_kept() -> None:
    head, hidden, targets = parts()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        subject.token_loss(head, hidden, targets, 1)
    assert kept
    assert max(kept) == hidden.numel()


SCALINGS = [subject.PLAIN, subject.Scaling(0.25), subject.Scaling(1.0, 3.0), subject.Scaling(0.5, 2.0)]


def logits_by_hand(head: nn.Module, hidden: torch.Tensor, scaling: subject.Scaling) -> torch.Tensor:
    logits = head(hidden) * scaling.factor
    return logits if scaling.cap is None else torch.tanh(logits / scaling.cap) * scaling.cap


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("chunk_elements", [1, 211 * 10, 1 << 25])
@pytest.mark.parametrize("which", ["frozen", "bias", "trained", "trained_bias", "wrapped", "lora"])
def test_every_head_and_scaling_is_cross_entropy(
    which: str, chunk_elements: int, scaling: subject.Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, gradient of the hidden states and of whatever trains in the head."""
    monkeypatch.setattr(subject, "CHUNK_ELEMENTS", chunk_elements)
    head, hidden, targets = parts()
    module: nn.Module = head
    if "bias" in which:
        head.bias = nn.Parameter(torch.linspace(-1, 1, 211), requires_grad=False)
    if "trained" in which:
        head.requires_grad_(True)
    if which == "wrapped":
        module = nn.Sequential(head, nn.Tanh())
    if which == "lora":
        module = nn.Sequential()
        module.add_module("lm_head", head)
        module = inject_adapter_in_model(LoraConfig(r=2, target_modules=["lm_head"]), module)
        nn.init.normal_(module.lm_head.lora_B["default"].weight)
    trained = [p for p in module.parameters() if p.requires_grad]
    found = subject.token_loss(module, hidden, targets, 10, scaling=scaling)
    (found * 2).backward()
    got = [p.grad for p in (hidden, *trained)]
    for p in (hidden, *trained):
        p.grad = None
    expected = F.cross_entropy(logits_by_hand(module, hidden, scaling), targets, reduction="sum") / 10
    (expected * 2).backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(got, [p.grad for p in (hidden, *trained)], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(subject.logits_of(module, hidden, scaling), logits_by_hand(module, hidden, scaling))


@pytest.mark.parametrize("which", ["frozen", "trained"])
def test_no_tensor_as_large_as_all_logits_exists(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither kept for the backward nor made on the way."""
    monkeypatch.setattr(subject, "CHUNK_ELEMENTS", 211 * 5)
    head, hidden, targets = parts(n=60)
    head.requires_grad_(which == "trained")

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    with Largest() as seen:
        subject.token_loss(head, hidden, targets, 1, scaling=subject.Scaling(0.5, 2.0)).backward()
    assert 0 < seen.numel <= head.weight.numel() < 60 * 211


def test_dropout_on_a_head_is_seeded_once_a_pass_and_drawn_again_in_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks draw masks of their own; the backward sees those of the forward."""
    monkeypatch.setattr(subject, "CHUNK_ELEMENTS", 211 * 5)
    head, hidden, targets = parts()
    head.requires_grad_(True)
    masks: list[torch.Tensor] = []

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            masks.append(torch.rand(x.shape) < 0.5)
            return self.head(x * masks[-1])  # type: ignore[no-any-return]

    loss = subject.token_loss(Dropped(), hidden, targets, 1, seed=lambda: torch.manual_seed(5))
    torch.manual_seed(99)
    loss.backward()
    count = len(masks) // 2
    assert count == 8
    assert all(torch.equal(one, two) for one, two in zip(masks[:count], masks[count:], strict=True))
    assert not torch.equal(masks[0], masks[1])
    mask = torch.cat(masks[:count])
    expected = F.cross_entropy(head(hidden * mask), targets, reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(head.weight.grad, torch.autograd.grad(expected, head.weight)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["frozen", "trained"])
def test_hidden_states_without_a_gradient_and_no_tokens_will_do(which: str) -> None:
    head, hidden, targets = parts()
    head.requires_grad_(which == "trained")
    loss = subject.token_loss(head, hidden.detach(), targets, 1)
    assert loss.requires_grad == (which == "trained")
    torch.testing.assert_close(loss, F.cross_entropy(head(hidden), targets, reduction="sum"))
    if which == "trained":
        loss.backward()
        assert head.weight.grad is not None
    empty = subject.token_loss(head, hidden[:0], targets[:0], 0)
    empty.backward()
    assert empty.item() == 0.0 and hidden.grad is not None and not hidden.grad.any()

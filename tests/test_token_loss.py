"""The loss of a frozen head by chunks: against plain cross-entropy through autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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


@pytest.mark.parametrize("which", ["trained", "bias", "wrapped"])
def test_other_heads_go_through_autograd(which: str) -> None:
    head, hidden, targets = parts()
    module: nn.Module = head
    if which == "trained":
        head.weight.requires_grad_(True)
    elif which == "bias":
        head.bias = nn.Parameter(torch.ones(211), requires_grad=False)
    else:
        module = nn.Sequential(head, nn.Tanh())
    loss = subject.token_loss(module, hidden, targets, 10)
    torch.testing.assert_close(loss, F.cross_entropy(module(hidden), targets, reduction="sum") / 10)
    loss.backward()
    assert hidden.grad is not None
    assert (head.weight.grad is not None) == (which == "trained")

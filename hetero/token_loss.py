"""Cross-entropy from hidden states: logits exist for one chunk of tokens at a time, and nothing of them is kept.

For a frozen head the forward already makes the gradient of the hidden states, in the chunk's own memory, so that a
micro-batch in flight holds [N, H] instead of two tensors [N, V]; a head that trains computes its chunks once more in
the backward. torch's own `linear_cross_entropy` does the former by chunks, but took 16 times as long as the two calls
it replaces on a CPU (torch 2.13.0, [127, 576] x 49,152).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# Elements of a chunk's logits: 128 MiB in float32, some hundred tokens of a large vocabulary.
CHUNK_ELEMENTS = 1 << 25


class Scaling(NamedTuple):
    """What a family does to the head's output: `cap * tanh(factor * x / cap)`, or `factor * x` without a cap."""

    factor: float = 1.0
    cap: float | None = None


PLAIN = Scaling()


def logits_of(head: nn.Module, hidden: torch.Tensor, scaling: Scaling = PLAIN) -> torch.Tensor:
    """The model's float32 logits [..., V] of hidden states [..., H]."""
    logits: torch.Tensor = head(hidden).float()
    if scaling.factor != 1.0:
        logits = logits * scaling.factor
    return logits if scaling.cap is None else scaling.cap * torch.tanh(logits / scaling.cap)


def token_loss(
    head: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    label_tokens: int,
    *,
    scaling: Scaling = PLAIN,
    seed: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """The sum of the tokens' cross-entropies / `label_tokens`.

    Args:
        head: from hidden to logits before `scaling`; a plain frozen `nn.Linear` is the fastest.
        hidden: [N, H].
        targets: [N] int64, below the vocabulary.
        label_tokens: of the whole step.
        scaling: of the logits.
        seed: called before the head draws random numbers (dropout of an adapter on it), in the backward again.

    Returns:
        A float32 scalar. Its backward adds to the gradients of the head's trained parameters itself.
    """
    scale = 1.0 / max(1, label_tokens)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    loss: torch.Tensor
    if type(head) is nn.Linear and not trained:
        loss = _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, scale, scaling
        )
    else:
        loss = _AnyHeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, targets, scale, _Head(head, scaling, seed), *trained
        )
    return loss


def token_losses(
    head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, *, scaling: Scaling = PLAIN
) -> torch.Tensor:
    """Each token's cross-entropy, float32 [N], without a gradient; arguments as for `token_loss`."""
    with torch.no_grad():
        return torch.cat(
            [
                F.cross_entropy(logits_of(head, hidden[rows], scaling), targets[rows], reduction="none")
                for rows in _chunks(hidden.shape[0], _vocabulary(head))
            ]
        )


class _FrozenHeadLoss(torch.autograd.Function):
    """(hidden [N, H], weight [V, H], bias [V] or None, targets [N], scale, scaling) -> loss.

    Differentiable once, in `hidden` alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        scaling: Scaling,
    ) -> Any:
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            logits = F.linear(hidden[rows], weight, bias).float()  # [C, V], and everything below happens in it
            logits, slope = _scale_in_place(logits, scaling)
            picked = targets[rows, None]
            logits -= logits.amax(dim=-1, keepdim=True)
            at_target = logits.gather(1, picked)
            sums = logits.exp_().sum(dim=-1, keepdim=True)
            total += (sums.log() - at_target).sum()
            if grad is not None:
                logits.mul_(scale / sums)  # the softmax, scaled
                logits.scatter_add_(1, picked, at_target.new_full(at_target.shape, -scale))
                logits.mul_(slope)
                torch.mm(logits.to(weight.dtype), weight, out=grad[rows])
            del logits, slope  # before the next chunk's are made
        ctx.save_for_backward(grad)
        return total * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grad_loss.to(grad.dtype), None, None, None, None, None


def _scale_in_place(logits: torch.Tensor, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scaled logits in the memory of the plain ones, and their slope; only a cap needs a second tensor for it."""
    if scaling.cap is None:
        return (logits if scaling.factor == 1.0 else logits.mul_(scaling.factor)), scaling.factor
    logits.mul_(scaling.factor / scaling.cap).tanh_()
    slope = torch.addcmul(logits.new_tensor(scaling.factor), logits, logits, value=-scaling.factor)
    return logits.mul_(scaling.cap), slope


class _Head(NamedTuple):
    """A head that is called chunk by chunk."""

    module: nn.Module
    scaling: Scaling
    seed: Callable[[], None]

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows and the sum of their losses, of chunks as large as the vocabulary allows; the same in each pass."""
        self.seed()
        for rows in _chunks(hidden.shape[0], _vocabulary(self.module)):
            yield (
                rows,
                F.cross_entropy(logits_of(self.module, hidden[rows], self.scaling), targets[rows], reduction="sum"),
            )


class _AnyHeadLoss(torch.autograd.Function):
    """(hidden [N, H], targets [N], scale, head, *its trained parameters) -> loss; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, targets: torch.Tensor, scale: float, head: _Head, *trained: torch.Tensor
    ) -> Any:
        ctx.save_for_backward(hidden, targets)
        ctx.scale, ctx.head, ctx.num_trained = scale, head, len(trained)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for _, loss in head.losses(hidden, targets):
            total += loss
        return total * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Any:
        hidden, targets = ctx.saved_tensors
        leaf = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            for _, loss in ctx.head.losses(leaf, targets):
                torch.autograd.backward(loss, grad_loss * ctx.scale)
                del loss  # one chunk's logits are alive at a time
        return leaf.grad, *(None for _ in range(3 + ctx.num_trained))


def _chunks(num_tokens: int, vocab_size: int) -> Iterator[slice]:
    """Of all tokens in order; an empty one where there are none, so that gradients are zero and not absent."""
    chunk = max(1, CHUNK_ELEMENTS // vocab_size)
    for begin in range(0, max(1, num_tokens), chunk):
        yield slice(begin, min(begin + chunk, num_tokens))


def _vocabulary(head: nn.Module) -> int:
    """Rows of the head's weight; the largest dimension of any parameter where it is no plain linear module."""
    weight = getattr(head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return weight.shape[0]
    return max(parameter.shape[0] for parameter in head.parameters())

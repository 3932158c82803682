"""Which token comes next: the most likely one, or one that is drawn by a key of its own.

A draw depends on (seed, number of the prompt, position) alone, never on what was drawn before, so neither the split of
the model, nor which prompts go through it together, nor their order changes a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.keys import key64


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: only so many most likely tokens are drawn from; 0: all.
        top_p: only the most likely tokens whose probabilities reach this sum are drawn from.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def choose(logits: torch.Tensor, sampling: Sampling, prompts: Sequence[int], position: int) -> torch.Tensor:
    """The next token of each row, int64 [B] on the host.

    Args:
        logits: [B, V] float32.
        sampling: how.
        prompts: number of each row's prompt.
        position: of the new token among the new ones, from 0.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1).to("cpu")
    rows = logits.to("cpu").double()
    return torch.tensor([_draw(row, sampling, prompt, position) for row, prompt in zip(rows, prompts, strict=True)])


def _draw(logits: torch.Tensor, sampling: Sampling, prompt: int, position: int) -> int:
    """Inverse transform sampling: the first token, in the vocabulary's order, whose cumulative sum exceeds a draw."""
    probabilities = _allowed(logits / sampling.temperature, sampling).softmax(-1)  # [V] float64
    generator = torch.Generator().manual_seed(key64(sampling.seed, "sample", prompt, position))
    draw = torch.rand((), generator=generator, dtype=torch.float64)
    sums = probabilities.cumsum(-1)
    found = int(torch.searchsorted(sums, draw * sums[-1], right=True))
    return min(found, int(probabilities.nonzero()[-1]))  # rounding can put the draw on the last sum


def _allowed(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[V]: the logits with those of tokens that may not be drawn at minus infinity; ties go to the lower id."""
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return logits
    ordered, ids = logits.sort(descending=True, stable=True)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1.0:
        probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= probabilities.cumsum(-1) - probabilities < sampling.top_p  # the one that reaches the sum is in
    return logits.masked_fill(torch.zeros_like(keep).scatter(0, ids[~keep], True), -torch.inf)

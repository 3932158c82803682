"""Which token comes next: against an independent sampler, and against nothing but its own key."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from hetero.sampling import Sampling, choose

LOGITS = torch.randn(3, 50, generator=torch.Generator().manual_seed(5)) * 2


def sampled_by_hand(
    logits: list[float], *, temperature: float, top_k: int, top_p: float, seed: int, prompt: int, position: int
) -> int:
    """The definition, token by token in plain Python: sort, cut, normalise, and walk up to the draw."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    kept = order[: top_k or len(order)]
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in kept}
    total, reached, nucleus = sum(weights.values()), 0.0, []
    for token in kept:
        if reached >= top_p:
            break
        nucleus.append(token)
        reached += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    digest = hashlib.sha256(f"{seed}:sample:{prompt}:{position}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    draw, reached = float(torch.rand((), generator=generator, dtype=torch.float64)), 0.0
    for token in sorted(nucleus):
        reached += weights[token] / total
        if draw < reached:
            return token
    return max(nucleus)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.6), (7, 0.5), (1, 1.0), (0, 1e-9), (99, 0.9)])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_a_draw_is_the_definition_s(temperature: float, top_k: int, top_p: float) -> None:
    for position in range(20):
        found = choose(LOGITS, Sampling(temperature, top_k, top_p, seed=4), [8, 0, 3], position)
        expected = [
            sampled_by_hand(
                LOGITS[row].double().tolist(),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=4,
                prompt=prompt,
                position=position,
            )
            for row, prompt in enumerate([8, 0, 3])
        ]
        assert found.tolist() == expected


def test_temperature_0_takes_the_most_likely_token() -> None:
    assert torch.equal(choose(LOGITS, Sampling(), [0, 1, 2], 0), LOGITS.argmax(-1))


def test_a_draw_does_not_depend_on_the_others_or_on_what_was_drawn_before() -> None:
    sampling = Sampling(1.0, seed=2)
    whole = choose(LOGITS, sampling, [0, 1, 2], 6).tolist()
    torch.rand(10)
    for row in (2, 0, 1):
        assert choose(LOGITS[row : row + 1], sampling, [row], 6).tolist() == whole[row : row + 1]


@pytest.mark.parametrize("other", [(3, 0, 6), (2, 9, 6), (2, 0, 7)])
def test_seed_prompt_and_position_each_change_a_draw(other: tuple[int, int, int]) -> None:
    flat = torch.zeros(1, 10**6)
    seed, prompt, position = other
    assert choose(flat, Sampling(1.0, seed=2), [0], 6) != choose(flat, Sampling(1.0, seed=seed), [prompt], position)


def test_many_draws_have_the_softmax_s_frequencies() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    draws = [int(choose(logits, Sampling(1.0), [prompt], 0)) for prompt in range(4000)]
    found = np.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(found, logits.softmax(-1)[0].numpy(), atol=0.03)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((1, 8), -torch.inf)
    logits[0, 3] = 0.0
    assert all(int(choose(logits, Sampling(1.0, seed=s), [0], 0)) == 3 for s in range(50))

"""A stage's cache of keys and values, for every verified family against transformers' own generate()."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from choosing import mostly_by_hand
from conftest import FAMILY_NAMES, LAYERS, Tiny, family_of_model
from transformers import AutoModelForCausalLM

from hetero import device, kv_cache
from hetero.decoding import Decoder
from hetero.models import load_stage
from hetero.stage import Stage

LENGTHS = (9, 3, 6)  # longer than the small models' window of 4
NUM_NEW = 8
CASES = [
    (name, attention)
    for name in FAMILY_NAMES
    for attention in (("eager",) if family_of_model(name).eager_only else ("sdpa", "eager"))
]
# Kinds of cache and positions: full, windows, grouped heads, absolute and ALiBi positions, states, experts.
QUICK = ("llama", "gemma3_text", "gpt2", "bloom", "mistral", "falcon", "phi3", "qwen3_next", "deepseek_v3", "mixtral")


def stages_of(path: Path, cuts: Sequence[int], **options: Any) -> list[Stage]:
    """Stages without an adapter, in evaluation mode."""
    stages = []
    for start, end in itertools.pairwise([0, *cuts, LAYERS]):
        model = load_stage(path, start, end, dtype=torch.float32, device=torch.device("cpu"), **options)
        where = {"start": start, "end": end, "num_layers": LAYERS, "device": device.resolve("cpu")}
        stages.append(Stage(model, None, **where, dtype=torch.float32, seed=7))  # type: ignore[arg-type]
        model.eval()
    return stages


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [B, T] of prompts of unequal length, padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids, mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64), torch.zeros(len(LENGTHS), max(LENGTHS))
    for row, length in enumerate(LENGTHS):
        ids[row, -length:] = torch.randint(3, 128, (length,), generator=generator)
        mask[row, -length:] = 1
    return ids, mask.long()


def expected_of(path: Path, **options: Any) -> Any:
    """Tokens and logits of generate(do_sample=False)."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    ids, mask = prompts()
    settings = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(
        ids, attention_mask=mask, **settings, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )


def decoded(stages: list[Stage]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Greedy tokens [B, N], and the logits [B, V] of each position."""
    decoders = [Decoder(stage, LENGTHS) for stage in stages]
    piece, _ = prompts()
    tokens, logits = [], []
    for _ in range(NUM_NEW):
        for decoder in decoders:
            piece = decoder.forward(piece)
        logits.append(piece)
        tokens.append(piece.argmax(-1))
        piece = tokens[-1][:, None]
    return torch.stack(tokens, 1), logits


def check(path: Path, splits: Sequence[Sequence[int]], **options: Any) -> None:
    expected = expected_of(path, **options)
    for cuts in splits:
        tokens, logits = decoded(stages_of(path, cuts, **options))
        assert torch.equal(tokens, expected.sequences[:, max(LENGTHS) :]), cuts
        for found, whole in zip(logits, expected.logits, strict=True):
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", mostly_by_hand(FAMILY_NAMES, QUICK))
def test_every_family_s_tokens_are_those_of_generate(tiny: Tiny, name: str) -> None:
    """With a stage of one layer, which has only one kind of attention where a model has two."""
    check(tiny(name), [(1, 2, 5)])


@pytest.mark.by_hand
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_every_family_at_every_split_with_every_attention(tiny: Tiny, name: str, attention: str) -> None:
    check(tiny(name), [(), (2, 4), (1, 2, 5), (1, 2, 3, 4, 5)], attn_implementation=attention)


def test_without_the_alias_a_later_stage_is_wrong(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: entries of foreign layers that read as empty give other tokens."""
    monkeypatch.setattr(kv_cache, "own_layers", lambda model: list(range(LAYERS)))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(tiny("llama"), [(1, 2, 5)])


def test_rows_do_not_depend_on_the_rows_beside_them(tiny: Tiny) -> None:
    tokens, _ = decoded(stages_of(tiny("gemma3_text"), (2, 4)))
    model = AutoModelForCausalLM.from_pretrained(tiny("gemma3_text"), dtype=torch.float32).eval()
    ids, _ = prompts()
    for row, length in enumerate(LENGTHS):
        alone = model.generate(
            ids[row : row + 1, -length:], max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens[row].tolist() == alone[0, length:].tolist()

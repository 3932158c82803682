"""Packed rows: who shares a row, and that documents in a row train as if each were alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from choosing import mostly_by_hand
from conftest import FAMILY_NAMES, MODEL_NAMES, Tiny, family_of_model, make_rows
from hypothesis import given
from hypothesis import strategies as st
from pipeline import build_stages, lively, make_spec, run_pipeline, run_stages, same_bits
from reference import run_reference
from transformers import AutoModelForCausalLM

from hetero import data
from hetero.data import Example, MicroBatch
from hetero.families import FAMILIES
from hetero.packing import bins, pack, positions
from hetero.spec import AdapterSpec


@given(st.lists(st.integers(1, 12), max_size=40))
def test_every_item_is_in_one_bin_and_no_bin_is_over_full(lengths: list[int]) -> None:
    found = bins(lengths, 12)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in bin_) <= 12 for bin_ in found)
    assert found == sorted(sorted(bin_) for bin_ in found)
    assert found == bins(lengths, 12)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=7))
def test_bins_are_at_most_eleven_ninths_of_the_fewest(lengths: list[int]) -> None:
    """Brute force; best-fit decreasing has the bound of first-fit decreasing, 11/9 OPT + 6/9 (Dosa 2007)."""

    def fewest(index: int, loads: tuple[int, ...]) -> int:
        if index == len(lengths):
            return len(loads)
        best = fewest(index + 1, (*loads, lengths[index]))
        for i, load in enumerate(loads):
            if load + lengths[index] <= 7 and load not in loads[:i]:
                best = min(best, fewest(index + 1, (*loads[:i], load + lengths[index], *loads[i + 1 :])))
        return best

    assert 9 * len(bins(lengths, 7)) <= 11 * fewest(0, ()) + 6


def test_a_million_rows_are_packed_in_a_moment_and_nearly_full() -> None:
    draws = torch.randint(1, 1025, (100_000,), generator=torch.Generator().manual_seed(0)).tolist()
    found = bins(draws, 1024)
    assert sum(draws) / (len(found) * 1024) > 0.99


def test_positions_restart_at_each_document_and_at_the_padding() -> None:
    assert positions([0, 3], 0, 5, 8) == [0, 1, 2, 0, 1, 0, 1, 2]
    assert positions([0, 3], 3, 8, 8) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert positions([0], 0, 3, 3) == [0, 1, 2]


def test_a_packed_row_says_what_is_in_it() -> None:
    first, second, third = (
        Example(4, (5, 6, 7), (5, 6, 7)),
        Example(6, (8, 9), (-100, 9)),
        Example(9, (1,) * 5, (1,) * 5),
    )
    packed = pack([first, second, third], 5)
    assert packed == (
        Example(4, (5, 6, 7, 8, 9), (-100, 6, 7, -100, 9), ((4, 0), (6, 3))),
        Example(9, (1,) * 5, (-100, 1, 1, 1, 1), ((9, 0),)),
    )
    (batch,) = data.micro_batches(packed, 2, padding_side="right", pad_id=0)
    assert batch.rows == (4, 6, 9)
    assert batch.label_tokens == 7
    assert batch.attention_mask is None


QUICK = [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa"), ("qwen3", "sdpa")]


@pytest.mark.parametrize(
    ("name", "attention"), mostly_by_hand(itertools.product(MODEL_NAMES, ["sdpa", "eager"]), QUICK)
)
def test_documents_in_one_row_train_as_if_each_were_alone(tiny: Tiny, name: str, attention: str) -> None:
    """Loss, norms and gradients of one process that sees each document by itself, for any split, padding and policy."""
    family = FAMILIES[name.partition("_")[0]]
    if not family.isolates_documents:
        pytest.skip("refused for this family")
    documents = make_rows((9, 4, 1, 6, 2, 11, 3))
    adapter = AdapterSpec(r=4, alpha=8, target_modules=list(family.linear_modules))
    spec = make_spec(tiny(name), adapter=adapter, attn_implementation=attention)
    initial = lively({key: value for stage in build_stages(spec, tiny(name)) for key, value in stage.state().items()})
    lora: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": list(family.linear_modules)}
    lora["fan_in_fan_out"] = name == "gpt2"
    reference = run_reference(tiny(name), [documents] * 2, lora=lora, initial=initial, attn_implementation=attention)
    for cuts, size, side in (((), 1, "right"), ((1, 4), 2, "right"), ((3,), 2, "left")):
        packed = data.micro_batches(pack(documents, 20), size, padding_side=side, pad_id=0)  # type: ignore[arg-type]
        assert sum(batch.label_tokens for batch in packed) == sum(
            label != -100 for document in documents for label in document.labels[1:]
        )
        assert max(len(batch.rows) / len(batch.input_ids) for batch in packed) > 1
        spec = make_spec(tiny(name), cuts, adapter=adapter, microbatch_size=size, attn_implementation=attention)
        outcome = run_pipeline(spec, tiny(name), [packed] * 2, initial=initial)
        assert outcome.losses == pytest.approx(reference.losses, abs=1e-5), (cuts, size, side)
        assert outcome.norms == pytest.approx(reference.norms, rel=1e-5)
        for ours, theirs in zip(outcome.grads, reference.grads, strict=True):
            for key, grad in theirs.items():
                assert float((ours[key] - grad).norm()) <= 1e-4 * float(grad.norm()), key


def test_packed_rows_are_equal_to_the_bit_on_any_split(tiny: Tiny) -> None:
    packed = data.micro_batches(pack(make_rows((9, 4, 1, 6, 2, 11, 3)), 20), 1, padding_side="right", pad_id=0)
    outcomes = []
    for cuts, recompute in (((), "none"), ((1, 4), "stage"), ((3,), "layer")):
        spec = make_spec(tiny("llama"), cuts, recompute=recompute)
        stages = build_stages(spec, tiny("llama"))
        initial = lively({key: value for stage in stages for key, value in stage.state().items()})
        outcomes.append(run_stages(spec, stages, [packed, packed], initial=initial))
        assert same_bits(outcomes[-1], outcomes[0]), (cuts, recompute)


# ---- rows of like length


LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=300)


@given(LENGTHS, st.integers(1, 9), st.booleans(), st.integers(0, 2))
def test_a_bucketed_epoch_holds_every_row_once(lengths: list[int], batch_size: int, shuffle: bool, epoch: int) -> None:
    def steps(epoch: int, seed: int = 3) -> list[list[int]]:
        num = data.steps_per_epoch(len(lengths), batch_size)
        return [
            data.indices_of_step(
                len(lengths), batch_size, epoch * num + i + 1, seed=seed, shuffle=shuffle, length_of=lengths.__getitem__
            )
            for i in range(num)
        ]

    found = steps(epoch)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))
    assert [len(step) for step in found[:-1]] == [batch_size] * (len(found) - 1)
    assert found == steps(epoch)
    for step in found:
        assert [lengths[i] for i in step] == sorted((lengths[i] for i in step), reverse=True)


def test_bucketed_rows_need_less_padding_and_few_widths() -> None:
    lengths = [1 + (7 * i * i) % 500 for i in range(1000)]
    examples = [Example(row, (1,) * length, (1,) * length) for row, length in enumerate(lengths)]

    def batches(bucket: bool, multiple_of: int) -> list[MicroBatch]:
        found = []
        for step in range(1, data.steps_per_epoch(len(examples), 8) + 1):
            indices = data.indices_of_step(
                len(examples), 8, step, seed=0, shuffle=True, length_of=lengths.__getitem__ if bucket else None
            )
            found += data.micro_batches(
                [examples[i] for i in indices],
                2,
                padding_side="right",
                pad_id=0,
                multiple_of=multiple_of,
                max_length=500,
            )
        return found

    plain, bucketed = batches(False, 1), batches(True, data.BUCKET_MULTIPLE)
    assert sum(batch.label_tokens for batch in plain) == sum(batch.label_tokens for batch in bucketed)
    padded = [sum(batch.input_ids.numel() for batch in found) - sum(lengths) for found in (plain, bucketed)]
    assert padded[1] < padded[0] / 4
    widths = {batch.input_ids.shape[1] for batch in bucketed}
    assert widths <= {*range(32, 500, 32), 500}


def test_the_first_epochs_of_two_seeds_differ_when_bucketed() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return data.indices_of_step(400, 4, 100 * epoch + 1, seed=seed, shuffle=True, length_of=lambda index: index % 5)

    assert len({tuple(first(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


# ---- which families can


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_family_says_whether_its_documents_are_isolated(tiny: Tiny, name: str) -> None:
    """Logits of each document in a padded pack against those of the document alone."""
    documents = make_rows((6, 3, 8, 2))
    (batch,) = data.micro_batches(pack(documents, 16), 2, padding_side="right", pad_id=0)
    model = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32).eval()
    worst = 0.0
    with torch.no_grad():
        both = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        for packed, logits in zip(pack(documents, 16), both, strict=True):
            for row, start in packed.packed:
                ids = torch.tensor([documents[row].input_ids])
                alone = model(ids, use_cache=False).logits[0]
                worst = max(worst, float((logits[start : start + ids.shape[1]] - alone).abs().max()))
    assert (worst < 1e-4) == family_of_model(name).isolates_documents, worst

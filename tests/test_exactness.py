"""The first promise: whatever the split, the schedule and the micro-batch size, it is what one process computes.

Covered for every family of `hetero.families.FAMILIES` and a tied Llama: the full product of
1, 2, 3 and 6 stages x 1f1b and gpipe x micro-batch 1, 2 and 4 of 5 unequal rows (so the last micro-batch is short)
x right and left padding (micro-batch 1 has no padding). Each is compared with plain transformers + peft, and bit for
bit with one stage under 1f1b for the same micro-batches. Dropout, recomputation, caps and the adapter's options are
tried on fewer splits each.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from choosing import mostly_by_hand
from conftest import LAYERS, MODEL_NAMES, Tiny, make_rows
from pipeline import Outcome, build_stages, lively, make_spec, run_pipeline, run_stages, same_bits
from reference import Reference, run_reference

from hetero import data, store
from hetero.data import Example, MicroBatch
from hetero.families import FAMILIES
from hetero.keys import key64
from hetero.spec import AdapterSpec, RunSpec, ScheduleSpec
from hetero.stage import Stage

SPLITS = ((), (3,), (1, 4), (1, 2, 3, 4, 5))
BATCHES = ((1, "right"), (2, "right"), (2, "left"), (4, "right"), (4, "left"))
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}
QV = LORA | {"target_modules": ["q_proj", "v_proj"]}  # the default of `make_spec`


def cut(
    steps: Sequence[Sequence[Example]], microbatch_size: int, padding_side: Any = "right"
) -> list[list[MicroBatch]]:
    return [data.micro_batches(rows, microbatch_size, padding_side=padding_side, pad_id=0) for rows in steps]


def assert_matches(outcome: Outcome, reference: Reference) -> None:
    """Loss within 1e-5, norm within 1e-5 relative, gradients within 1e-4 relative, final adapter within 1e-5."""
    assert outcome.losses == pytest.approx(reference.losses, abs=1e-5)
    assert outcome.norms == pytest.approx(reference.norms, rel=1e-5)
    assert_same_gradients(outcome.grads, reference.grads)
    assert outcome.adapter.keys() == reference.adapter.keys()
    for key, value in reference.adapter.items():
        torch.testing.assert_close(outcome.adapter[key], value, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def assert_same_gradients(
    found: Sequence[dict[str, torch.Tensor]], expected: Sequence[dict[str, torch.Tensor]], rel: float = 1e-4
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, grad in theirs.items():
            assert float((ours[key] - grad).norm()) <= rel * float(grad.norm()), key


def targets_of(name: str) -> list[str]:
    return list(FAMILIES[name if name in FAMILIES else name.partition("_")[0]].linear_modules)


def with_microbatch(spec: RunSpec, microbatch_size: int, schedule: str, max_in_flight: int | None = None) -> RunSpec:
    return msgspec.structs.replace(
        spec,
        loop=msgspec.structs.replace(spec.loop, microbatch_size=microbatch_size),
        schedule=ScheduleSpec(name=schedule, max_in_flight=max_in_flight),
    )


# ---- the product


@pytest.mark.parametrize("name", mostly_by_hand(MODEL_NAMES, ["llama", "llama_tied", "gpt2"]))
def test_every_split_schedule_micro_batch_and_padding_is_one_process(
    tiny: Tiny, rows: list[Example], name: str
) -> None:
    steps = [rows[:5], rows[5:10]]
    adapter = AdapterSpec(r=4, alpha=8, target_modules=targets_of(name))
    built: dict[tuple[int, ...], tuple[RunSpec, list[Stage]]] = {}
    for cuts in SPLITS:
        spec = make_spec(tiny(name), cuts, adapter=adapter)
        built[cuts] = spec, build_stages(spec, tiny(name))
    initial = lively({key: value for stage in built[()][1] for key, value in stage.state().items()})
    lora = LORA | {"target_modules": targets_of(name), "fan_in_fan_out": name == "gpt2"}
    reference = run_reference(tiny(name), steps, lora=lora, initial=initial)
    for microbatch_size, padding_side in BATCHES:
        first: Outcome | None = None
        for cuts, schedule in itertools.product(SPLITS, ("1f1b", "gpipe")):
            spec, stages = built[cuts]
            outcome = run_stages(
                with_microbatch(spec, microbatch_size, schedule),
                stages,
                cut(steps, microbatch_size, padding_side),
                initial=initial,
            )
            if first is None:
                first = outcome
                assert_matches(outcome, reference)
            assert same_bits(outcome, first), (cuts, schedule, microbatch_size, padding_side)


@pytest.mark.parametrize("name", mostly_by_hand([*MODEL_NAMES, "gpt2_dropout"], ["llama", "gpt2_dropout"]))
def test_dropout_and_recomputation_do_not_depend_on_the_split(tiny: Tiny, rows: list[Example], name: str) -> None:
    """N06, N07: bit equality among splits and policies, with and without recomputation; it differs from no dropout."""
    steps = [rows[:5], rows[5:10]]
    outcomes = []
    for cuts, recompute, schedule in (
        ((), "none", "1f1b"),
        ((3,), "layer", "gpipe"),
        ((1, 4), "none", "gpipe"),
        ((1, 2, 3, 4, 5), "layer", "1f1b"),
        ((1, 4), "stage", "gpipe"),
    ):
        adapter = AdapterSpec(r=4, alpha=8, dropout=0.2, target_modules=targets_of(name))
        spec = make_spec(tiny(name), cuts, adapter=adapter, recompute=recompute, schedule=schedule, microbatch_size=2)
        stages = build_stages(spec, tiny(name))
        initial = lively({key: value for stage in stages for key, value in stage.state().items()})
        outcomes.append(run_stages(spec, stages, cut(steps, 2), initial=initial))
        assert same_bits(outcomes[-1], outcomes[0]), (cuts, recompute, schedule)
    spec = make_spec(tiny(name), adapter=AdapterSpec(r=4, alpha=8, target_modules=targets_of(name)), microbatch_size=2)
    without = run_pipeline(spec, tiny(name), cut(steps, 2), initial=initial)
    assert abs(without.losses[0] - outcomes[0].losses[0]) > 1e-4


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recomputation_changes_nothing(tiny: Tiny, rows: list[Example], name: str, dropout: float) -> None:
    """N07: loss and every gradient are equal with and without, on the stage with the frozen embedding as well."""
    adapter = AdapterSpec(r=4, alpha=8, dropout=dropout, target_modules=targets_of(name))
    outcomes = []
    for recompute in ("none", "layer", "stage"):
        spec = make_spec(tiny(name), (3,), adapter=adapter, recompute=recompute, microbatch_size=2)
        outcomes.append(run_pipeline(spec, tiny(name), cut([rows[:4], rows[4:8]], 2)))
        stages = outcomes[-1].stages
        by_layer = [recompute == "layer", recompute != "none"]  # the last stage recomputes by layers in any case
        assert [stage.model.is_gradient_checkpointing for stage in stages] == by_layer
        assert same_bits(outcomes[-1], outcomes[0])
    assert outcomes[0].grads[0].keys() == {key for stage in stages for key in stage.trained}


def test_any_legal_cap_gives_the_same_bits(tiny: Tiny, rows: list[Example]) -> None:
    draw = random.Random(5)
    steps = [rows[:7], rows[7:12]]
    adapter = AdapterSpec(r=4, alpha=8, dropout=0.1)
    first: Outcome | None = None
    for cuts in ((2,), (1, 4), (1, 2, 5)):
        spec = make_spec(tiny("llama"), cuts, adapter=adapter)
        stages = build_stages(spec, tiny("llama"))
        initial = {key: value for stage in stages for key, value in stage.state().items()}
        for _ in range(4):
            schedule, cap = draw.choice(["1f1b", "gpipe"]), draw.choice([1, 2, 3, 7, 100])
            outcome = run_stages(with_microbatch(spec, 1, schedule, cap), stages, cut(steps, 1), initial=initial)
            first = first or outcome
            assert same_bits(outcome, first), (cuts, schedule, cap)


def test_eager_attention_is_one_process(tiny: Tiny, rows: list[Example]) -> None:
    spec = make_spec(tiny("qwen2"), (2, 4), attn_implementation="eager", microbatch_size=2)
    outcome = run_pipeline(spec, tiny("qwen2"), cut([rows[:5]], 2, "left"))
    reference = run_reference(
        tiny("qwen2"),
        [rows[:5]],
        lora=QV,
        initial=outcome.initial,
        attn_implementation="eager",
    )
    assert_matches(outcome, reference)


# ---- what trains


ADAPTERS: dict[str, tuple[AdapterSpec, dict[str, Any]]] = {
    "rslora": (AdapterSpec(r=4, alpha=8, use_rslora=True), {"use_rslora": True}),
    "dora": (AdapterSpec(r=4, alpha=8, use_dora=True), {"use_dora": True}),
    "patterns": (
        AdapterSpec(
            r=4, alpha=8, target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3.0}
        ),
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3.0}},
    ),
    "one_layer": (
        AdapterSpec(r=4, alpha=8, target_modules=["q_proj"], layers_to_transform=[4]),
        {"target_modules": ["q_proj"], "layers_to_transform": [4]},
    ),
    "head_saved": (
        AdapterSpec(r=4, alpha=8, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "norms_saved": (
        AdapterSpec(r=4, alpha=8, target_modules=["q_proj"], modules_to_save=["input_layernorm"]),
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
    ),
    "both_ends": (
        AdapterSpec(r=4, alpha=8, target_modules=["embed_tokens", "down_proj", "lm_head"]),
        {"target_modules": ["embed_tokens", "down_proj", "lm_head"]},
    ),
    "regex": (
        AdapterSpec(r=4, alpha=8, target_modules=r".*layers\.[13]\..*_proj"),
        {"target_modules": r".*layers\.[13]\..*_proj"},
    ),
    "all_linear": (AdapterSpec(r=4, alpha=8, target_modules="all-linear"), {"target_modules": "all-linear"}),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_of_adapter_is_one_process(tiny: Tiny, rows: list[Example], kind: str) -> None:
    # SGD, since AdamW turns the rounding of a gradient near zero into a step of its own.
    spec, lora = ADAPTERS[kind]
    lora = {"target_modules": list(FAMILIES["llama"].default_targets)} | LORA | lora
    steps = [rows[:4], rows[4:8]]
    outcomes = []
    for cuts in ((), (2, 4)):
        run = make_spec(tiny("llama"), cuts, adapter=spec, microbatch_size=2, optimizer="sgd", lr=1.0)
        stages = build_stages(run, tiny("llama"))
        initial = lively({key: value for stage in stages for key, value in stage.state().items()})
        outcomes.append(run_stages(run, stages, cut(steps, 2), initial=initial))
    assert same_bits(*outcomes)
    reference = run_reference(tiny("llama"), steps, lora=lora, initial=initial, optimizer="sgd", lr=1.0)
    assert_matches(outcomes[0], reference)


def test_a_stage_without_a_target_is_a_frozen_relay(tiny: Tiny, rows: list[Example]) -> None:
    adapter = AdapterSpec(r=4, alpha=8, target_modules=["q_proj"], layers_to_transform=[2])
    spec = make_spec(tiny("llama"), (2, 4), adapter=adapter)
    outcome = run_pipeline(spec, tiny("llama"), cut([rows[:4]], 1))
    assert [len(stage.trained) for stage in outcome.stages] == [0, 2, 0]
    for stage in (outcome.stages[0], outcome.stages[2]):
        assert not any(p.requires_grad for p in stage.model.parameters())
        assert stage.squared_norms().shape == (0,)
        assert stage.squared_norms().dtype is torch.float64
    assert outcome.norms[0] > 0


# ---- counting


def test_rows_weigh_by_their_label_tokens(tiny: Tiny) -> None:
    """N01: a row with 1 label and one with 60, as two micro-batches or as one."""
    rows = [Example(row.row, row.input_ids, row.input_ids) for row in make_rows((0, 59))]
    assert [len(row.labels) - 1 for row in rows] == [1, 60]
    reference = run_reference(tiny("llama"), [rows], lora=QV)
    alone = [run_reference(tiny("llama"), [[row]], lora=QV).losses[0] for row in rows]
    expected = (alone[0] + 60 * alone[1]) / 61
    assert abs(sum(alone) / 2 - expected) > 1e-3  # a mean of means would show
    outcomes = []
    for microbatch_size in (1, 2):
        spec = make_spec(tiny("llama"), (3,), microbatch_size=microbatch_size, lr=0.0)
        outcomes.append(run_pipeline(spec, tiny("llama"), cut([rows], microbatch_size)))
        assert outcomes[-1].losses == pytest.approx([expected], abs=1e-5)
        assert outcomes[-1].losses == pytest.approx(reference.losses, abs=1e-5)
    assert_same_gradients(outcomes[0].grads, outcomes[1].grads)


def test_loss_does_not_scale_with_accumulation(tiny: Tiny, rows: list[Example]) -> None:
    """N14: 8 rows as 1, 2, 4 and 8 micro-batches."""
    spec = make_spec(tiny("llama"), (3,), lr=0.0)
    stages = build_stages(spec, tiny("llama"))
    losses = []
    for count in (1, 2, 4, 8):
        micro_batches = cut([rows[:8]], 8 // count)
        assert len(micro_batches[0]) == count
        losses += run_stages(with_microbatch(spec, 8 // count, "1f1b"), stages, micro_batches).losses
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)


def test_last_window_of_an_epoch_is_divided_by_its_own_labels(tiny: Tiny, rows: list[Example]) -> None:
    """N02: 5 rows in steps of 4 are 2 steps an epoch, and nothing crosses the epoch's border."""
    order = [data.indices_of_step(5, 4, step, seed=7, shuffle=False) for step in (1, 2, 3, 4)]
    assert data.steps_per_epoch(5, 4) == 2
    assert order == [[0, 1, 2, 3], [4], [0, 1, 2, 3], [4]]
    steps = [[rows[i] for i in indices] for indices in order]
    outcome = run_pipeline(make_spec(tiny("llama"), (3,), lr=0.0), tiny("llama"), cut(steps, 1))
    alone = run_reference(tiny("llama"), [[rows[4]]], lora=QV, initial=outcome.initial, lr=0.0)
    assert_same_gradients([outcome.grads[1]], alone.grads)
    assert outcome.losses[1] == pytest.approx(alone.losses[0], abs=1e-5)
    assert outcome.losses[:2] == outcome.losses[2:]
    assert_same_gradients(outcome.grads[:2], outcome.grads[2:], rel=0.0)


@pytest.mark.parametrize("num_rows", [7, 1])
def test_short_last_micro_batch(tiny: Tiny, rows: list[Example], num_rows: int) -> None:
    """N03: 7 rows in steps of 4, micro-batch 2 (the last step is 2 + 1); and fewer rows than a micro-batch."""
    num_steps = data.steps_per_epoch(num_rows, 4)
    order = [data.indices_of_step(num_rows, 4, step + 1, seed=7, shuffle=True) for step in range(num_steps)]
    assert sorted(i for indices in order for i in indices) == list(range(num_rows))
    steps = [[rows[i] for i in indices] for indices in order]
    outcome = run_pipeline(make_spec(tiny("llama"), (1, 4), microbatch_size=2), tiny("llama"), cut(steps, 2))
    assert_matches(outcome, run_reference(tiny("llama"), steps, lora=QV, initial=outcome.initial))


def test_clipping_uses_the_norm_of_all_stages(tiny: Tiny, rows: list[Example]) -> None:
    """N04: one SGD step with lr 1; the weights tell the factor of each stage."""
    outcomes = []
    for cuts in ((), (3,), (1, 4)):
        spec = make_spec(tiny("llama"), cuts, optimizer="sgd", lr=1.0)
        outcomes.append(run_pipeline(spec, tiny("llama"), cut([rows[:4]], 1), max_grad_norm=0.5))
        assert same_bits(outcomes[-1], outcomes[0])
    assert outcomes[0].norms[0] > 0.6  # so that it clips
    reference = run_reference(
        tiny("llama"),
        [rows[:4]],
        lora=QV,
        initial=outcomes[0].initial,
        optimizer="sgd",
        lr=1.0,
        max_grad_norm=0.5,
    )
    assert_matches(outcomes[0], reference)
    change = [outcomes[0].adapter[k] - v for k, v in outcomes[0].initial.items()]
    assert float(torch.stack([c.norm() for c in change]).norm()) == pytest.approx(0.5, rel=1e-4)


# ---- padding


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_mask_and_positions_reach_every_stage(tiny: Tiny, name: str, padding_side: str) -> None:
    """M02: rows of 3 and 9 tokens together and one by one."""
    rows = make_rows((1, 7))
    adapter = AdapterSpec(r=4, alpha=8, target_modules=targets_of(name))
    spec = make_spec(tiny(name), (1, 2, 3, 4, 5), adapter=adapter, microbatch_size=2)
    stages = build_stages(spec, tiny(name))
    together = cut([rows], 2, padding_side)
    assert together[0][0].input_ids.shape == (2, 9)
    padded = run_stages(spec, stages, together)
    single = run_stages(spec, stages, cut([rows], 1), initial=padded.initial)
    assert padded.losses == pytest.approx(single.losses, abs=1e-5)
    assert_same_gradients(padded.grads, single.grads, rel=1e-5)


# ---- random numbers


def test_initial_adapter_is_keyed_by_global_name(tiny: Tiny) -> None:
    """N06: lora_A is the same on every split to the bit, and no two modules share theirs; another seed is another."""
    adapter = AdapterSpec(r=4, alpha=8, target_modules=["q_proj", "k_proj"])
    initial = []
    for cuts in (*SPLITS, (1,), (5,)):
        stages = build_stages(make_spec(tiny("llama"), cuts, adapter=adapter), tiny("llama"))
        initial.append({key: value for stage in stages for key, value in stage.state().items()})
        assert initial[-1].keys() == initial[0].keys()
        assert all(torch.equal(value, initial[0][key]) for key, value in initial[-1].items())
    a = [value for key, value in initial[0].items() if "lora_A" in key]
    assert len(a) == 2 * LAYERS
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(a, 2))
    assert all(not value.any() for key, value in initial[0].items() if "lora_B" in key)
    (other,) = build_stages(make_spec(tiny("llama"), adapter=adapter, seed=8), tiny("llama"))
    assert not any(torch.equal(value, initial[0][key]) for key, value in other.state().items() if "lora_A" in key)


def dropout_masks(stages: list[Stage], micro_batches: list[list[MicroBatch]], spec: RunSpec) -> dict[Any, torch.Tensor]:
    """(step, micro-batch, module) -> what LoRA dropout kept."""
    found: dict[Any, torch.Tensor] = {}
    handles = []
    for stage in stages:
        for name, module in stage.model.named_modules():
            if "lora_dropout" in name and isinstance(module, torch.nn.Dropout):

                def keep(_: Any, args: Any, out: torch.Tensor, stage: Stage = stage, name: str = name) -> None:
                    found.setdefault((*stage._now, name), out != 0)

                handles.append(module.register_forward_hook(keep))
    run_stages(spec, stages, micro_batches)
    for handle in handles:
        handle.remove()
    return found


def test_dropout_masks_differ_and_repeat(tiny: Tiny) -> None:
    """N06: masks differ between layers, micro-batches and steps; the same seed repeats them on any split."""
    row = make_rows((10,))[0]
    adapter = AdapterSpec(r=4, alpha=8, dropout=0.5, target_modules=["q_proj", "v_proj"])
    masks = []
    for cuts, seed in (((3,), 7), ((3,), 7), ((1, 4), 7), ((3,), 8)):
        spec = make_spec(tiny("llama"), cuts, adapter=adapter, lr=0.0, seed=seed)
        masks.append(dropout_masks(build_stages(spec, tiny("llama")), cut([[row, row], [row, row]], 1), spec))
    assert len(masks[0]) == 2 * 2 * LAYERS * 2
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(masks[0].values(), 2))
    for again in masks[1:3]:
        assert again.keys() == masks[0].keys()
        assert all(torch.equal(again[key], mask) for key, mask in masks[0].items())
    assert not any(torch.equal(masks[3][key], mask) for key, mask in masks[0].items())


def test_dropout_leaves_the_callers_random_numbers_alone(tiny: Tiny, rows: list[Example]) -> None:
    adapter = AdapterSpec(r=4, alpha=8, dropout=0.5)
    spec = make_spec(tiny("llama"), (3,), adapter=adapter)
    before = torch.get_rng_state()
    run_pipeline(spec, tiny("llama"), cut([rows[:2]], 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_of_draws_are_distinct() -> None:
    keys = {key64(7, "dropout", step, m, layer) for step in range(9) for m in range(9) for layer in [*range(9), "head"]}
    assert len(keys) == 9 * 9 * 10
    assert all(0 <= key < 2**63 for key in keys)


# ---- a real model


@pytest.fixture(scope="session")
def smol() -> Path:
    folder = store.fetched_folder("HuggingFaceTB/SmolLM2-135M-Instruct")
    if not (folder / "model.safetensors").is_file():
        pytest.skip("needs SmolLM2-135M: python -m hetero.models fetch smollm2_135m")
    return folder


def tokenised(folder: Path, texts: Sequence[str]) -> list[Example]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = [tuple(tokenizer(text).input_ids) for text in texts]
    return [Example(row, ids, ids) for row, ids in enumerate(encoded)]


@pytest.mark.by_hand
@pytest.mark.smol
def test_smol_two_rows_weigh_by_their_labels(smol: Path) -> None:
    """N01: row losses 4.38463 (1 label) and 1.21100 (60 labels) give 1.26303, not the mean of means 2.79782."""
    rows = tokenised(smol, ["Hi.", "The quick brown fox jumps over the lazy dog. " * 6])
    assert [len(row.input_ids) - 1 for row in rows] == [1, 60]
    outcomes = []
    for microbatch_size in (1, 2):
        spec = make_spec(smol, (15,), microbatch_size=microbatch_size, lr=0.0)
        outcomes.append(run_pipeline(spec, smol, cut([rows, rows[:1], rows[1:]], microbatch_size)))
        assert outcomes[-1].losses == pytest.approx([1.26303, 4.38463, 1.21100], abs=1e-3)
    assert_same_gradients(outcomes[0].grads, outcomes[1].grads)


@pytest.mark.smol
@pytest.mark.slow
def test_smol_steps_are_those_of_one_process(smol: Path) -> None:
    """M01: the tied head is right from step 0 on (a random one gives 10.80), with 2 and 3 stages; N06 between them."""
    texts = ["Hi.", "What is the capital of France? Paris.", "One, two, three, four, five.", "The fox is quick."]
    rows = tokenised(smol, texts)
    steps = [rows[:2], rows[2:], rows[1:3]]
    outcomes = []
    for cuts in ((15,), (7, 20)):
        spec = make_spec(smol, cuts, microbatch_size=2)
        outcomes.append(run_pipeline(spec, smol, cut(steps, 2)))
        assert outcomes[-1].losses[0] < 6
        assert same_bits(outcomes[-1], outcomes[0])
    reference = run_reference(smol, steps, lora=QV, initial=outcomes[0].initial)
    assert outcomes[0].losses == pytest.approx(reference.losses, abs=1e-4)
    assert outcomes[0].losses[0] == pytest.approx(reference.losses[0], abs=1e-5)
    assert outcomes[0].norms == pytest.approx(reference.norms, rel=1e-4)
    assert_same_gradients(outcomes[0].grads[:1], reference.grads[:1])


@pytest.mark.by_hand
@pytest.mark.smol
@pytest.mark.slow
def test_smol_steps_in_4_bits_are_those_of_one_process(smol: Path) -> None:
    """P07: 3 stages; the base is quantised tensor by tensor, so no split changes a bit of it."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    prose = (
        "A bicycle has two wheels, one behind the other. The rider sits on a saddle, turns the pedals with the feet, "
        "and a chain carries the force to the rear wheel. The first bicycles were made in Europe in the nineteenth "
        "century, and today there are more than a billion of them in the world."
    )
    rows = tokenised(smol, [prose, "What is the capital of France? Paris.", "One, two, three.", "The fox is quick."])
    steps = [rows[:2], rows[2:], rows[1:3]]
    spec = make_spec(smol, (7, 20), microbatch_size=1, batch_size=2, quantizations=["nf4"] * 3)
    outcome = run_pipeline(spec, smol, cut(steps, 1))
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    options = {"quantization_config": quantised, "device_map": {"": "cpu"}}
    reference = run_reference(smol, steps, lora=QV, initial=outcome.initial, **options)
    exact = run_pipeline(make_spec(smol, (15,), batch_size=2), smol, cut(steps[:1], 1))
    assert outcome.losses == pytest.approx(reference.losses, abs=1e-4)
    assert outcome.losses[0] == pytest.approx(reference.losses[0], abs=1e-5)
    assert outcome.norms == pytest.approx(reference.norms, rel=1e-3)
    assert_same_gradients(outcome.grads[:1], reference.grads[:1], rel=1e-3)
    assert outcome.adapter.keys() == reference.adapter.keys()
    # After three steps: off by at most 2 % of what was learned. AdamW divides by the gradient's own size, so a gradient
    # near zero that differs in its last bits moves a single value the other way.
    learned = sum(float((value - outcome.initial[key]).square().sum()) for key, value in reference.adapter.items())
    off = sum(float((value - outcome.adapter[key]).square().sum()) for key, value in reference.adapter.items())
    print(f"adapter: off by {(off / learned) ** 0.5:.4f} of what was learned")
    assert off <= 0.02**2 * learned
    assert outcome.losses[0] == pytest.approx(exact.losses[0], rel=0.05)

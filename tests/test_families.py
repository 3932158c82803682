"""Every verified family against plain transformers in one process; and what is refused, and why."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from choosing import mostly_by_hand
from conftest import FAMILY_NAMES, LAYERS, Tiny, family_of_model, make_rows
from peft import PeftModel
from pipeline import build_stages, lively, make_spec, pipeline_logits, run_stages, same_bits
from processes import composed
from reference import run_reference
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from hetero import adapters, data, device
from hetero.adapter_files import check_adapter, save_adapter
from hetero.data import MicroBatch
from hetero.errors import ConfigError
from hetero.facts import read_facts
from hetero.families import FAMILIES, check_attention, check_target_names, family_of_config, layer_of
from hetero.models import PassThrough, layers_of, load_stage, meta_model
from hetero.resolve import resolve
from hetero.shards import holds
from hetero.spec import AdapterSpec
from hetero.stage import Stage

SPLITS = ((), (2, 4), (1, 2, 5))
# Rows longer than the small models' window of 4.
PADDINGS: dict[str, tuple[tuple[int, ...], Any]] = {
    "none": ((9, 9), "right"),
    "right": ((10, 4), "right"),
    "left": ((10, 4), "left"),
}
# Families whose shared experts and dense layers have linear modules of names that PEFT takes for the routed experts'.
WITH_EXPERTS = ("deepseek_v3", "qwen3_next", "qwen2_moe", "qwen3_moe")
CASES = [
    (name, attention)
    for name in FAMILY_NAMES
    for attention in (("eager",) if family_of_model(name).eager_only else ("sdpa", "eager"))
]

# Every family in one kind of attention each time; both kinds for these, by hand for all.
BOTH = ("llama", "gemma3_text", "gpt2", "bloom")
QUICK = [
    (name, attention) for name, attention in CASES if attention == "sdpa" or name in BOTH or (name, "sdpa") not in CASES
]
FROZEN_HEADS = ("llama", "gpt2", "cohere", "gemma3_text", "granite", "nemotron", "mixtral")


def micro_batch(padding: str) -> MicroBatch:
    lengths, side = PADDINGS[padding]
    (batch,) = data.micro_batches(make_rows(lengths), 2, padding_side=side, pad_id=0)
    assert (batch.attention_mask is None) == (padding == "none")
    return batch


def stages_of(path: Path, cuts: Sequence[int], *, train: bool, recompute: str = "none", **options: Any) -> list[Stage]:
    """Stages without an adapter; with `train` every weight has a gradient."""
    edges = [0, *cuts, LAYERS]
    stages = []
    for start, end in itertools.pairwise(edges):
        model = load_stage(path, start, end, dtype=torch.float32, device=torch.device("cpu"), **options)
        model.requires_grad_(train)
        where = {"start": start, "end": end, "num_layers": LAYERS, "device": device.resolve("cpu")}
        stages.append(Stage(model, None, **where, dtype=torch.float32, seed=7, recompute=recompute))  # type: ignore[arg-type]
    return stages


@dataclass
class Found:
    """Loss, hidden states [B, T, H] of the last stage's input, gradients by global name and of that input."""

    loss: float
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    hidden_grad: torch.Tensor | None = None


def run(stages: list[Stage], batch: MicroBatch) -> Found:
    """One forward and backward through all stages; gradients of tied copies are summed."""
    tensors = batch.tensors()
    riders = {key: value for key, value in tensors.items() if key != "input_ids"}
    given: dict[str, torch.Tensor] = {"input_ids": batch.input_ids}
    for stage in stages:
        hidden = stage.forward(1, 0, {**given, **riders}, batch.label_tokens)
        if hidden is not None:
            given = {"hidden": hidden}
    found = Found(stages[-1].loss())
    grad = None
    for stage in reversed(stages):
        grad = stage.backward(0, grad)
        if stage.is_last:
            found.hidden_grad = grad
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                found.grads[name] = found.grads[name] + parameter.grad if name in found.grads else parameter.grad
                parameter.grad = None
        stage.end_step()
    return found


def run_whole(model: Any, batch: MicroBatch) -> Found:
    """transformers' own logits and autograd."""
    inputs = {key: value for key, value in batch.tensors().items() if key != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, batch.labels[:, 1:].reshape(-1), reduction="sum") / batch.label_tokens
    loss.backward()
    found = Found(loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    return found


def assert_close(found: Found, expected: Found, rel: float) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=rel)
    assert found.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        difference = float((found.grads[name] - grad).norm())
        assert difference <= rel * float(grad.norm()) + 1e-8, (name, difference, float(grad.norm()))


# ---- what a split computes


@pytest.mark.parametrize(("name", "attention"), mostly_by_hand(CASES, QUICK))
def test_every_family_is_one_process_at_uneven_cuts(tiny: Tiny, name: str, attention: str) -> None:
    """M02, M05, M06: bit-equal among splits; loss and every gradient are those of transformers."""
    options = {"attn_implementation": attention, "dtype": torch.float32}
    whole = AutoModelForCausalLM.from_pretrained(tiny(name), **options).train()
    batches = {padding: micro_batch(padding) for padding in PADDINGS}
    expected = {padding: run_whole(whole, batch) for padding, batch in batches.items()}
    first: dict[str, Found] = {}
    for cuts in SPLITS:
        stages = stages_of(tiny(name), cuts, train=True, attn_implementation=attention)
        for padding, batch in batches.items():
            found = run(stages, batch)
            assert_close(found, expected[padding], 1e-5)
            other = first.setdefault(padding, found)
            assert found.loss == other.loss, (cuts, padding)
            assert all(torch.equal(grad, other.grads[key]) for key, grad in found.grads.items()), (cuts, padding)


@pytest.mark.parametrize("name", mostly_by_hand(FAMILY_NAMES, FROZEN_HEADS))
def test_a_frozen_head_gives_the_same_loss_and_gradient(tiny: Tiny, name: str) -> None:
    """The head's scaling, cap and bias are in the path without autograd too; recomputation changes nothing."""
    batch = micro_batch("left")
    trained = run(stages_of(tiny(name), (2, 4), train=True), batch)
    for recompute in ("none", "layer"):
        frozen = run(stages_of(tiny(name), (2, 4), train=False, recompute=recompute), batch)
        assert frozen.loss == pytest.approx(trained.loss, rel=1e-6)
        assert frozen.hidden_grad is not None and trained.hidden_grad is not None
        torch.testing.assert_close(frozen.hidden_grad, trained.hidden_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["phi_dropout", "gpt_neox_dropout", "starcoder2_dropout"])
def test_dropout_after_the_embedding_does_not_depend_on_the_split(tiny: Tiny, name: str) -> None:
    """It is drawn on the first stage only, and with the same key."""
    batch = micro_batch("none")
    found = [run(stages_of(tiny(name), cuts, train=True), batch) for cuts in SPLITS]
    without = run(stages_of(tiny(name.removesuffix("_dropout")), (), train=True), batch)
    assert abs(found[0].loss - without.loss) > 1e-4
    for other in found[1:]:
        assert other.loss == found[0].loss
        assert all(torch.equal(grad, found[0].grads[key]) for key, grad in other.grads.items())


# ---- what a stage holds


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_stage_holds_its_own_tensors_and_buffers_of_a_fresh_module(tiny: Tiny, name: str) -> None:
    """M03, M13: global names, nothing foreign, and nothing left as memory happened to be."""
    path, family = tiny(name), family_of_model(name)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    stored = whole.state_dict()
    fresh = dict(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).named_buffers())
    computed = {key for key in fresh if key not in stored}
    tied = bool(whole.config.tie_word_embeddings)
    for start, end in ((0, 2), (2, 4), (4, 6)):
        model = load_stage(path, start, end, dtype=torch.float32, device=torch.device("cpu"))
        assert len(layers_of(model)) == LAYERS
        assert [isinstance(layer, PassThrough) for layer in layers_of(model)] == [
            not start <= index < end for index in range(LAYERS)
        ]
        held = model.state_dict()
        assert set(held) == {key for key in stored if holds(key, family, start, end, num_layers=LAYERS, tied=tied)} - (
            {"lm_head.weight"} if tied and end < LAYERS else set()
        )
        assert all(torch.equal(value, stored[key]) for key, value in held.items())
        buffers = dict(model.named_buffers())
        assert {key for key in buffers if key not in stored} <= computed
        assert all(torch.equal(buffers[key], fresh[key]) for key in computed & set(buffers))
        assert {key for key in computed if "rotary" in key} <= set(buffers)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_table_names_the_modules(tiny: Tiny, name: str) -> None:
    model, family = meta_model(tiny(name)), family_of_model(name)
    base = model.base_model
    assert model.get_input_embeddings() is getattr(base, family.embedding)
    assert model.get_output_embeddings() is model.lm_head
    assert model.get_decoder() is base
    assert isinstance(getattr(base, family.final_norm), nn.Module)
    linear = {n.rpartition(".")[2] for n, m in base.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    experts = {"gate_proj", "up_proj", "down_proj"} if family.model_type in WITH_EXPERTS else set()
    assert linear | set(family.optional_modules) == set(family.linear_modules) | experts
    for module, _ in layers_of(model).named_modules():
        if module:
            key = f"base_model.model.{model.base_model_prefix}.{family.layers}.{module}.lora_A.weight"
            assert layer_of(key) == int(module.partition(".")[0])
    check_target_names(list(family.linear_modules), family)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_auto_targets_are_those_that_the_model_has(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """`part_of` shares them out without a rest; the folder that a run leaves is taken for its own."""
    path, family, spec = tiny(name), family_of_model(name), AdapterSpec(r=4, alpha=8)
    whole = adapters.resolve(meta_model(path), spec, name)
    assert set(whole.config.target_modules) <= set(family.default_targets)
    assert set(family.default_targets) - set(whole.config.target_modules) <= set(family.optional_modules)
    stages = make_spec(path, (1, 4)).stages
    parts = [adapters.part_of(whole.shapes, stages, index) for index in range(3)]
    assert sum(map(len, parts)) == len(whole.shapes)
    assert {key for part in parts for key in part} == set(whole.shapes)
    save_adapter(tmp_path, whole, {key: torch.zeros(shape) for key, shape in whole.shapes.items()})
    facts = read_facts(json.loads((path / "config.json").read_text()))
    assert facts.num_hidden_layers == LAYERS
    check_adapter(tmp_path, spec, facts, family)


# ---- adapters of families whose names are unlike Llama's


ADAPTED: list[tuple[str, list[str]]] = [
    ("gpt_neox", ["embed_in", "lm_head"]),
    ("falcon_40b", ["word_embeddings"]),
    ("phi3", []),
    ("granite", ["lm_head"]),
    ("qwen3_5_text", []),
    ("falcon", ["lm_head"]),
    ("bloom", []),
    ("phi", ["lm_head"]),
    ("gemma3_text", []),
    ("cohere", []),
    ("deepseek_v3", []),
]


@pytest.mark.parametrize(
    ("name", "ends"),
    mostly_by_hand(ADAPTED, ADAPTED[:5]),
)
def test_an_adapter_is_one_process_and_peft_loads_it(tiny: Tiny, tmp_path: Path, name: str, ends: list[str]) -> None:
    """2 steps on 3 stages; the head and the embedding as targets too."""
    path, rows = tiny(name), make_rows((5, 9, 12, 7))
    whole = adapters.resolve(meta_model(path), AdapterSpec(r=4, alpha=8), name)
    spec = AdapterSpec(r=4, alpha=8, target_modules=[*whole.config.target_modules, *ends])
    whole = adapters.resolve(meta_model(path), spec, name)
    outcomes = []
    for cuts in ((), (1, 4)):
        run_spec = make_spec(path, cuts, adapter=spec, optimizer="sgd", lr=0.5)
        stages = build_stages(run_spec, path)
        initial = lively({key: value for stage in stages for key, value in stage.state().items()})
        steps = [data.micro_batches(rows[i : i + 2], 1, padding_side="right", pad_id=0) for i in (0, 2)]
        outcomes.append(run_stages(run_spec, stages, steps, initial=initial))
    assert same_bits(*outcomes)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": spec.target_modules}
    reference = run_reference(path, [rows[:2], rows[2:]], lora=lora, initial=initial, optimizer="sgd", lr=0.5)
    assert outcomes[0].losses == pytest.approx(reference.losses, abs=1e-5)
    for key, value in reference.adapter.items():
        torch.testing.assert_close(outcomes[0].adapter[key], value, rtol=0, atol=1e-5)
    save_adapter(tmp_path, whole, outcomes[1].adapter)
    ids = torch.tensor([list(range(3, 15)), list(range(40, 52))])
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        plain = base(ids).logits
        theirs = PeftModel.from_pretrained(base, tmp_path).eval()(ids).logits
    ours = pipeline_logits(outcomes[1].stages, {"input_ids": ids})
    assert float((plain - ours).abs().max()) > 1e-3
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


# ---- names in files


def rewritten(path: Path, folder: Path, change: dict[str, Any], *, drop: Sequence[str] = ()) -> Path:
    """A copy of a model with another configuration."""
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in drop} | change
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tensors_that_the_model_lacks_belong_to_no_stage() -> None:
    for key in ("mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight", "model.visual.patch_embed.proj.weight"):
        held = [holds(key, FAMILIES["qwen3_5_text"], a, b, num_layers=6, tied=False) for a, b in ((0, 3), (3, 6))]
        assert held == [False, False], key


def test_the_head_of_old_gpt_neox_files_belongs_to_the_last_stage() -> None:
    family = FAMILIES["gpt_neox"]
    for key in ("embed_out.weight", "lm_head.weight"):
        assert [holds(key, family, a, b, num_layers=6, tied=False) for a, b in ((0, 3), (3, 6))] == [False, True]


# ---- rope


LINEAR = {"factor": 4.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


# Phi-3's: a factor for each frequency, the long ones for rows of more than the original length.
LONG = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 9.0], "factor": 32.0}
LONG["original_max_position_embeddings"] = 8


@pytest.mark.parametrize(
    ("kind", "values"), [("linear", LINEAR), ("yarn", YARN), ("dynamic", LINEAR), ("longrope", LONG)]
)
def test_rope_scaling_is_the_same_in_every_spelling(
    tiny: Tiny, tmp_path: Path, kind: str, values: dict[str, Any]
) -> None:
    """`rope_scaling` of old files with `type` or `rope_type`, `rope_parameters` of new ones, on every stage."""
    spellings = {
        "type": {"rope_scaling": {"type": kind, **values}, "rope_theta": 10000.0},
        "rope_type": {"rope_scaling": {"rope_type": kind, **values}, "rope_theta": 10000.0},
        "parameters": {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}},
    }
    batch = micro_batch("left")
    plain = run(stages_of(tiny("llama"), (2, 4), train=False), batch)
    found = {}
    for name, change in spellings.items():
        folder = rewritten(tiny("llama"), tmp_path / name, change, drop=("rope_parameters", "rope_scaling"))
        stages = stages_of(folder, (2, 4), train=False)
        rotary = [stage.model.base_model.rotary_emb for stage in stages]
        expected = type(rotary[0])(config=AutoConfig.from_pretrained(folder)).inv_freq
        assert all(torch.equal(module.inv_freq, expected) for module in rotary)
        found[name] = run(stages, batch)
        assert read_facts(json.loads((folder / "config.json").read_text())).max_position_embeddings == 256
    assert found["type"].loss == found["rope_type"].loss == found["parameters"].loss
    if kind != "dynamic":  # which changes nothing in rows of up to max_position_embeddings
        assert abs(found["type"].loss - plain.loss) > 1e-5


# ---- what is refused


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma3n_text"}, "reads embeddings of the token ids"),
    ({"model_type": "gemma4_text"}, "hidden_size_per_layer_input > 0"),
    ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2}, "num_kv_shared"),
    ({"model_type": "t5"}, "encoder-decoder"),
    ({"model_type": "bart", "is_encoder_decoder": True}, "encoder-decoder"),
    ({"model_type": "newcomer", "is_encoder_decoder": True}, "encoder-decoder"),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "multimodal"),
    ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, "multimodal"),
    ({"model_type": "qwen3_5", "text_config": {}}, "multimodal"),
    ({"model_type": "llama4_text"}, "chunked attention"),
    ({"model_type": "opt"}, "inside its base model"),
    ({"model_type": "mamba"}, "verified family"),
    ({"model_type": "newcomer"}, "verified family"),
    ({"model_type": "newcomer", "auto_map": {"AutoModelForCausalLM": "modeling.Boom"}}, "is never run"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_cut_is_refused_by_name_and_reason(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    """Before weights, by the configuration as a whole and by whoever loads a stage or sizes the model."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling.py").write_text("raise SystemExit('ran')")
    for refuse in (
        lambda: family_of_config(config),
        lambda: resolve(composed(f"model.path={tmp_path}"), shapes_dir=tmp_path),
        lambda: load_stage(tmp_path, 0, 1, dtype=torch.float32, device=torch.device("cpu")),
        lambda: meta_model(tmp_path),
    ):
        with pytest.raises(ConfigError) as caught:
            refuse()
        message = str(caught.value)
        assert "\n" not in message
        assert reason in message and repr(config["model_type"]) in message


def test_every_other_type_that_transformers_knows_is_refused() -> None:
    for model_type in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAMILIES)):
        with pytest.raises(ConfigError, match=f"'{model_type}'"):
            family_of_config({"model_type": model_type})
    assert set(FAMILIES) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_code_that_comes_with_a_verified_model_is_not_run(tiny: Tiny, tmp_path: Path) -> None:
    """Phi-3's and Falcon's own repositories have some: transformers' class is used, without a question."""
    auto_map = {"AutoConfig": "modeling.Boom", "AutoModelForCausalLM": "modeling.Boom"}
    folder = rewritten(tiny("phi3"), tmp_path / "phi3", {"auto_map": auto_map})
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    batch = micro_batch("none")
    assert run(stages_of(folder, (2, 4), train=False), batch).loss == (
        run(stages_of(tiny("phi3"), (2, 4), train=False), batch).loss
    )
    assert type(meta_model(folder)).__module__.startswith("transformers.")


def test_eager_only_families_say_so_and_choose_it(tiny: Tiny) -> None:
    for model_type, family in FAMILIES.items():
        check_attention(None, family)
        check_attention("eager", family)
        if not family.eager_only:
            check_attention("sdpa", family)
            continue
        with pytest.raises(ConfigError, match=f"must be eager for model_type '{model_type}'.*got sdpa"):
            check_attention("sdpa", family)
        (stage,) = stages_of(tiny(model_type), (), train=False)
        assert stage.model.config._attn_implementation == "eager"
        with pytest.raises(ConfigError, match="must be eager"):
            stages_of(tiny(model_type), (), train=False, attn_implementation="sdpa")
    assert {"gemma2", "bloom"} <= {name for name, family in FAMILIES.items() if family.eager_only}


# ---- sizes


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_facts_are_those_of_transformers(tiny: Tiny, name: str) -> None:
    raw = json.loads((tiny(name) / "config.json").read_text())
    facts, config = read_facts(raw), AutoConfig.from_pretrained(tiny(name))
    assert (facts.hidden_size, facts.vocab_size, facts.num_hidden_layers) == (32, 128, LAYERS)
    assert facts.num_attention_heads == config.num_attention_heads
    assert facts.tie_word_embeddings == config.tie_word_embeddings
    assert facts.max_position_embeddings == (None if name in ("bloom", "falcon_alibi") else 256)
    assert facts.intermediate_size == (128 if family_of_model(name).model_type in ("falcon", "bloom", "gpt2") else 48)


def test_original_falcon_and_bloom_files_are_read() -> None:
    """They leave out what their classes assume, and use names of their own."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 99}
    falcon = read_facts({"model_type": "falcon", "hidden_size": 64, "multi_query": True, **shape})
    assert (falcon.max_position_embeddings, falcon.intermediate_size, falcon.num_key_value_heads) == (2048, 256, 1)
    assert falcon.tie_word_embeddings
    new = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 100}
    falcon = read_facts({"model_type": "falcon", "n_embed": 64, **shape, **new})
    assert (falcon.hidden_size, falcon.intermediate_size, falcon.num_key_value_heads) == (64, 100, 2)
    assert (
        read_facts({"model_type": "falcon", "hidden_size": 64, "alibi": True, **shape}).max_position_embeddings is None
    )
    bloom = read_facts({"model_type": "bloom", "n_embed": 64, "n_layer": 3, "n_head": 4, "vocab_size": 99})
    assert (bloom.hidden_size, bloom.num_hidden_layers, bloom.num_attention_heads, bloom.head_dim) == (64, 3, 4, 16)
    assert bloom.max_position_embeddings is None
    assert set(FAMILIES) <= set(CONFIG_MAPPING)

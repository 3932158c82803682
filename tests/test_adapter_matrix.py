"""Each option of an adapter is what PEFT makes of it: on any split, in the file, and in one process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from adapter_matrix import CASES, CUTS, NOT_MERGED, QV, Matrix, gathered
from conftest import LAYERS, Tiny, make_rows
from peft import LoraConfig
from pipeline import Outcome, build_stages, lively, make_spec, run_stages, same_bits
from reference import run_reference
from safetensors.torch import load_file

from hetero import data
from hetero.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from hetero.adapter_on_base import check_on_base, consists_of
from hetero.adapter_whole import check_modules, check_names
from hetero.adapters import lora_config
from hetero.families import FAMILIES
from hetero.merge import RECORD
from hetero.models import meta_model
from hetero.spec import AdapterSpec
from hetero.tensor_files import read_metadata


@pytest.mark.parametrize("name", CASES)
def test_peft_loads_the_saved_adapter_and_gives_the_same_logits(matrix: Matrix, name: str) -> None:
    """P01, P05: on the plain base in a fresh process, without a warning."""
    case = matrix.trained[name]
    assert name not in matrix.faults
    assert case.moved > 1e-3
    torch.testing.assert_close(matrix.loaded[name], case.logits, rtol=0, atol=1e-5)


def peft_arguments(base: Path, spec: AdapterSpec) -> dict[str, Any]:
    """What a user of PEFT alone would give to LoraConfig."""
    family = FAMILIES[json.loads((base / "config.json").read_text())["model_type"]]
    wanted = lora_config(spec, family, meta_model(base))
    lora: dict[str, Any] = {
        f.name: getattr(wanted, f.name) for f in dataclasses.fields(LoraConfig) if f.init and f.name != "task_type"
    }
    lora = {key: value for key, value in lora.items() if value != getattr(LoraConfig(), key, None)}
    lora.pop("peft_type", None)
    if spec.target_modules == [] and not spec.target_parameters:
        lora["target_modules"] = "dummy-target-modules"
    return lora


def assert_as_one_process(base: Path, spec: AdapterSpec, outcome: Outcome, **options: Any) -> None:
    """Losses, norms and trained values are those of plain transformers and PEFT, from the same initial values."""
    rows = make_rows((5, 9, 12, 7))
    reference = run_reference(
        base,
        [rows[:2], rows[2:]],
        lora=peft_arguments(base, spec),
        initial=outcome.initial,
        optimizer="sgd",
        lr=0.5,
        **options,
    )
    assert outcome.losses == pytest.approx(reference.losses, abs=1e-5)
    assert outcome.norms == pytest.approx(reference.norms, rel=1e-4)
    assert outcome.adapter.keys() == reference.adapter.keys()
    for key, value in reference.adapter.items():
        torch.testing.assert_close(outcome.adapter[key], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_training_equals_peft_in_one_process(matrix: Matrix, name: str) -> None:
    case = matrix.trained[name]
    assert case.outcome.adapter.keys() == case.resolved.shapes.keys()
    assert_as_one_process(case.base, CASES[name][1], case.outcome)


IN_4_BITS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("llama", {"use_dora": True}),
    "dora_of_the_embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "lora_bias": ("llama_bias", {"lora_bias": True}),
    "bias_all": ("llama_bias", {"bias": "all"}),
    "head_and_norm": ("llama", {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["norm"]}),
    "gaussian": ("llama", {"init_lora_weights": "gaussian", "use_rslora": True}),
    "experts": ("qwen3_moe", {"target_modules": "all-linear"}),
    "gpt2_dora": ("gpt2", {"target_modules": ["c_attn"], "use_dora": True, "bias": "lora_only"}),
}


@pytest.mark.parametrize("name", IN_4_BITS)
def test_options_over_4_bits_equal_peft_in_one_process(tiny: Tiny, name: str) -> None:
    """P07: the same on one stage and on three, and what PEFT does on a whole base in 4 bits."""
    from transformers import BitsAndBytesConfig

    base, spec = tiny(IN_4_BITS[name][0]), msgspec.structs.replace(QV, **IN_4_BITS[name][1])
    rows = make_rows((5, 9, 12, 7))
    steps = [data.micro_batches(rows[i : i + 2], 1, padding_side="right", pad_id=0) for i in (0, 2)]
    outcomes = []
    for cuts in ((), CUTS):
        run = make_spec(base, cuts, adapter=spec, optimizer="sgd", lr=0.5, quantizations=["nf4"] * (len(cuts) + 1))
        stages = build_stages(run, base)
        outcomes.append(run_stages(run, stages, steps, initial=lively(gathered(stages))))
    assert same_bits(*outcomes)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head"],
    )
    assert_as_one_process(base, spec, outcomes[0], quantization_config=config, device_map={"": "cpu"})


@pytest.mark.parametrize(
    "name", ["both_ends", "gaussian", "not_zero", "orthogonal", "pissa_dora", "olora", "dora_gpt2"]
)
def test_initial_values_are_the_same_on_every_split(tiny: Tiny, matrix: Matrix, name: str) -> None:
    """Keyed by the module's name, whatever else is on the stage; and what is taken from the base is equal too."""
    model_name, spec = CASES[name]
    found = []
    for cuts in ((), CUTS, (1, 2, 3, 4, 5)):
        found.append(gathered(build_stages(make_spec(tiny(model_name), cuts, adapter=spec), tiny(model_name))))
    for other in found[1:]:
        assert other.keys() == found[0].keys() == matrix.trained[name].resolved.shapes.keys()
        assert all(torch.equal(value, found[0][key]) for key, value in other.items())


def test_saved_adapter_is_complete_and_numbered_globally(matrix: Matrix) -> None:
    """P01, P02."""
    folder = matrix.trained["plain"].folder
    tensors = load_file(folder / WEIGHTS_FILE)
    assert set(tensors) == {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{part}.weight"
        for layer in range(LAYERS)
        for module in ("q_proj", "v_proj")
        for part in "AB"
    }
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert (config["base_model_name_or_path"], config["exclude_modules"]) == ("llama", None)
    assert config["inference_mode"] is True
    assert sorted(p.name for p in folder.iterdir()) == sorted([CONFIG_FILE, WEIGHTS_FILE])


def test_dora_magnitudes_are_saved(matrix: Matrix) -> None:
    """P05."""
    keys = load_file(matrix.trained["dora"].folder / WEIGHTS_FILE).keys()
    assert sum(key.endswith("lora_magnitude_vector") for key in keys) == LAYERS * 7
    assert len(keys) == LAYERS * 7 * 3


def test_the_configuration_that_is_saved_is_the_whole_models(matrix: Matrix) -> None:
    """P03: options as they were asked for, never a stage's expanded names."""
    config = json.loads((matrix.trained["all_linear_but"].folder / CONFIG_FILE).read_text())
    assert config["exclude_modules"] == ["k_proj", "layers.0.mlp.up_proj"]
    assert "lm_head" not in config["target_modules"]
    config = json.loads((matrix.trained["patterns_by_full_name"].folder / CONFIG_FILE).read_text())
    assert config["rank_pattern"] == CASES["patterns_by_full_name"][1].rank_pattern
    config = json.loads((matrix.trained["pissa"].folder / CONFIG_FILE).read_text())
    assert config["init_lora_weights"] == "pissa"


# ---- merged with its base


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_MERGED])
def test_full_merge_gives_the_trained_logits(matrix: Matrix, name: str) -> None:
    """P14, P05: by AutoModelForCausalLM, offline, in a fresh process, without a warning."""
    assert f"{name}.full" not in matrix.faults
    torch.testing.assert_close(matrix.merged[name], matrix.trained[name].logits, rtol=0, atol=1e-5)


def test_full_merge_has_the_files_of_its_base(matrix: Matrix, tiny: Tiny) -> None:
    """P14: same shards, an index, the metadata that loaders want, and what else the base came with."""
    case = matrix.trained["plain"]
    shards = sorted(file.name for file in case.base.glob("*.safetensors"))
    assert len(shards) > 3
    assert sorted(file.name for file in case.full.glob("*.safetensors")) == shards
    assert all(read_metadata(case.full / name) == {"format": "pt"} for name in shards)
    index = json.loads((case.full / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((case.base / "model.safetensors.index.json").read_text())["weight_map"]
    assert (case.full / "generation_config.json").read_bytes() == (case.base / "generation_config.json").read_bytes()
    record = json.loads((case.full / RECORD).read_text())
    assert (record["base_weights"], record["dtype"], record["untied_head"]) == ("original", "float32", False)
    assert "llama" in (case.full / "README.md").read_text()


def test_a_trained_head_of_a_tied_model_becomes_a_matrix_of_its_own(matrix: Matrix) -> None:
    for name in ("tied_head", "tied_head_saved"):
        folder = matrix.trained[name].full
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
        tensors = load_file(folder / "model.safetensors")
        assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    base = load_file(matrix.trained["tied_head"].base / "model.safetensors")
    assert torch.equal(base["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])


def test_tensors_without_an_adapter_are_copied_to_the_bit(matrix: Matrix) -> None:
    case = matrix.trained["layers_of_one_stage"]
    base: dict[str, torch.Tensor] = {}
    merged: dict[str, torch.Tensor] = {}
    for file in case.base.glob("*.safetensors"):
        base |= load_file(file)
        merged |= load_file(case.full / file.name)
    changed = {key for key in base if not torch.equal(base[key], merged[key])}
    assert changed == {f"model.layers.5.self_attn.{module}.weight" for module in ("q_proj", "v_proj")}


@pytest.mark.parametrize("name", CASES)
def test_every_adapter_passes_for_whole_on_its_base_and_without_it(matrix: Matrix, name: str) -> None:
    case = matrix.trained[name]
    config, tensors = json.loads((case.folder / CONFIG_FILE).read_text()), load_file(case.folder / WEIGHTS_FILE)
    check_modules(config, tensors, "RUN")
    check_names(config, tensors, "RUN", None)
    expected = consists_of(config, case.base, "RUN")
    check_on_base(tensors, expected, case.base, "RUN")
    assert expected.shapes == case.resolved.shapes

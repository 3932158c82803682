"""4-bit bases: on load, from checkpoints that are 4-bit already, beside other stages, and where they cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, Tiny
from pipeline import Outcome, build_stages, lively, make_spec, run_stages
from processes import run_here
from reference import Reference, run_reference

from hetero import data, models
from hetero import device as devices
from hetero.data import Example, MicroBatch
from hetero.errors import ConfigError
from hetero.facts import read_facts
from hetero.families import family_of
from hetero.member import check_device
from hetero.quantization import check_nf4, check_stored, quantised_in_pieces, stored_quantization
from hetero.shards import INDEX, holds
from hetero.spec import AdapterSpec

bitsandbytes = pytest.importorskip("bitsandbytes")

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {"llama": LINEAR, "qwen2": LINEAR, "gpt2": ["c_attn"]}
EXTRA = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map", ".quant_state.bitsandbytes__nf4")
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def nf4_config(dtype: torch.dtype, **options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        **options,
    )


def one_by_one(rows: list[Example]) -> list[MicroBatch]:
    return data.micro_batches(rows, 1, padding_side="right", pad_id=0)


def linear_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]


@pytest.fixture(scope="module")
def in_4_bits(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> folder of the small model as transformers saves it in 4 bits; its maker computed in float16."""
    root = tmp_path_factory.mktemp("in_4_bits")

    def make(name: str) -> Path:
        from transformers import AutoModelForCausalLM

        folder = root / name
        if not folder.is_dir():
            options = {"quantization_config": nf4_config(torch.float16), "device_map": {"": "cpu"}}
            model = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32, **options)
            model.save_pretrained(folder, max_shard_size="20KB")
        return folder

    return make


def trained(
    model_dir: Path, rows: list[Example], name: str, cuts: tuple[int, ...], quantization: str = "nf4", **options: Any
) -> Outcome:
    """Two steps over the stages, in fp32 unless told otherwise."""
    adapter = AdapterSpec(r=4, alpha=8, target_modules=TARGETS[name])
    spec = make_spec(model_dir, cuts, adapter=adapter, quantizations=[quantization] * (len(cuts) + 1), **options)
    stages = build_stages(spec, model_dir)
    return run_stages(spec, stages, [one_by_one(rows[:2]), one_by_one(rows[2:4])])


def one_process(model_dir: Path, rows: list[Example], name: str, outcome: Outcome, **options: Any) -> Reference:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS[name]}
    steps = [rows[:2], rows[2:4]]
    return run_reference(model_dir, steps, lora=lora, initial=outcome.initial, device_map={"": "cpu"}, **options)


# ---- it is what one process computes


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_steps_are_those_of_one_process(tiny: Tiny, rows: list[Example], name: str) -> None:
    """Conv1D of GPT-2 included, which becomes a linear layer in 4 bits."""
    outcome = trained(tiny(name), rows, name, (1, 4))
    options = {"quantization_config": nf4_config(torch.float32, llm_int8_skip_modules=["lm_head"])}
    reference = one_process(tiny(name), rows, name, outcome, **options)
    assert outcome.losses == pytest.approx(reference.losses, abs=1e-6)
    assert outcome.norms == pytest.approx(reference.norms, rel=1e-5)
    assert outcome.adapter.keys() == reference.adapter.keys()
    for key, value in reference.adapter.items():
        torch.testing.assert_close(outcome.adapter[key], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(96, 128), (100, 100), (3, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_quantised_in_pieces_are_those_of_bitsandbytes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Several pieces, a last block that is not full, and statistics that are compressed over the whole matrix."""

    def made() -> Any:
        linear = bitsandbytes.nn.Linear4bit(shape[1], shape[0], bias=False, quant_type="nf4", compress_statistics=True)
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)
        linear.weight = bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=True, module=linear
        )
        return linear.to("cpu").state_dict()

    expected = made()
    with quantised_in_pieces(1024):
        found = made()
    assert found.keys() == expected.keys() and len(found) == 6
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert torch.equal(made()["weight"], expected["weight"])


# ---- checkpoints that are in 4 bits already


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_stages_of_a_4_bit_checkpoint_are_those_quantised_on_load(
    tiny: Tiny, in_4_bits: Any, rows: list[Example], name: str
) -> None:
    """Its maker computed in float16; the stages compute in what the plan says."""
    made, stored = trained(tiny(name), rows, name, (3,)), trained(in_4_bits(name), rows, name, (3,))
    assert stored.losses == made.losses and stored.norms == made.norms
    assert all(torch.equal(value, made.adapter[key]) for key, value in stored.adapter.items())
    for stage in stored.stages:
        layers = linear_layers(stage.model)
        assert layers and all(layer.weight.dtype is torch.uint8 for layer in layers)
        assert {layer.compute_dtype for layer in layers} == {torch.float32}
        assert not any(layer.support_avx512bf16_for_cpu for layer in layers)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_stage_of_a_4_bit_checkpoint_reads_its_own_files_only(in_4_bits: Any, tmp_path: Path, name: str) -> None:
    """M13 for the statistics of the 4-bit weights: they belong to their layer."""
    folder = shutil.copytree(in_4_bits(name), tmp_path / name)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    facts = read_facts(json.loads((folder / "config.json").read_text()))
    family = family_of(facts.model_type)
    extent = {"num_layers": LAYERS, "tied": facts.tie_word_embeddings}
    own = {key for key in weight_map if holds(key, family, 2, 4, **extent)}  # type: ignore[arg-type]
    for extra in EXTRA:
        assert {key.removesuffix(extra) for key in own if key.endswith(extra)} <= own
        assert any(key.endswith(extra) for key in own)
    files = {weight_map[key] for key in own}
    assert files < set(weight_map.values())
    for file in set(weight_map.values()) - files:
        (folder / file).unlink()
    model = models.load_stage(folder, 2, 4, dtype=torch.float32, device=torch.device("cpu"), quantization="nf4")
    assert linear_layers(model)
    (folder / min(files)).unlink()
    with pytest.raises(ConfigError, match=min(files)):
        models.load_stage(folder, 2, 4, dtype=torch.float32, device=torch.device("cpu"), quantization="nf4")


def test_16_bit_stage_of_a_4_bit_checkpoint_is_refused_before_anything_runs(in_4_bits: Any, tmp_path: Path) -> None:
    folder = in_4_bits("llama")
    args = [f"model.path={folder}", f"outputs={tmp_path}", "data.max_length=64"]
    line = run_here("train", *args).one_line()
    assert "shard_plan.stages[0].quantization must be nf4" in line and "got 'none'" in line
    assert "model.quantization=nf4" in line
    plan = "shard_plan.stages=[{id: local, start: 0, end: 3}, {id: w, start: 3, end: 6, quantization: none}]"
    plan_args = ["model.quantization=nf4", plan, "shard_plan.num_stages=null"]
    assert "shard_plan.stages[1].quantization must be nf4" in run_here("train", *args, *plan_args).one_line()
    with pytest.raises(ConfigError, match="must be nf4"):
        models.load_stage(folder, 0, 2, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("about", "held"),
    [
        ({"quant_method": "gptq", "bits": 4}, "method 'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "method 'bitsandbytes'"),
        (NF4 | {"bnb_4bit_quant_type": "fp4"}, "type 'fp4'"),
        ("odd", "method None"),
    ],
)
def test_checkpoint_in_other_numbers_is_refused(about: Any, held: str) -> None:
    with pytest.raises(ConfigError, match=held) as refused:
        check_stored(about, ["nf4"])
    assert "\n" not in str(refused.value)


def test_checkpoint_says_what_it_holds() -> None:
    assert stored_quantization(None) == "none" and stored_quantization(NF4) == "nf4"
    check_stored(None, ["none", "nf4"])
    check_stored(NF4, ["nf4", "nf4"])


# ---- a plan's stages differ


def test_none_on_a_stage_overrides_the_models_4_bits(tiny: Tiny, tmp_path: Path) -> None:
    from processes import composed

    from hetero.config import SHAPES_DIR
    from hetero.resolve import resolve

    raw = composed(f"model.path={tiny('llama')}", "model.quantization=nf4", "hardware=local", f"outputs={tmp_path}")
    stages = [{"id": "local", "start": 0, "end": 3}, {"id": "w", "start": 3, "end": 6, "quantization": "none"}]
    raw["shard_plan"] = {"stages": stages}
    run = resolve(raw, shapes_dir=SHAPES_DIR)
    spec = run.spec(total_steps=1)
    assert [stage.quantization for stage in spec.stages] == ["nf4", "none"]
    built = build_stages(spec, tiny("llama"))
    assert [len(linear_layers(stage.model)) for stage in built] == [3 * 7, 0]


# ---- the layout that has no gradient


@pytest.mark.parametrize("stored", [False, True])
def test_gradients_after_an_evaluation_are_those_before(tmp_path: Path, rows: list[Example], stored: bool) -> None:
    """On CPUs with AVX512-BF16 bitsandbytes repacks weights in an evaluation, and takes no gradient through them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not bitsandbytes.functional.has_avx512bf16():
        pytest.skip("this CPU has no AVX512-BF16, so bitsandbytes never repacks")
    # Wide enough for the other layout: narrower weights do not fit into it at all.
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=128, num_key_value_heads=2, **sizes)
    model_dir = tmp_path / "wide"
    AutoModelForCausalLM.from_config(config).save_pretrained(model_dir)
    if stored:
        options = {"quantization_config": nf4_config(torch.bfloat16), "device_map": {"": "cpu"}}
        AutoModelForCausalLM.from_pretrained(model_dir, **options).save_pretrained(tmp_path / "stored")
        model_dir = tmp_path / "stored"
    adapter = AdapterSpec(r=4, alpha=8, target_modules=LINEAR)
    spec = make_spec(model_dir, adapter=adapter, dtypes=["bfloat16"], quantizations=["nf4"], lr=0.0)
    stages = build_stages(spec, model_dir)
    initial = lively(stages[0].state())
    before = run_stages(spec, stages, [one_by_one(rows[:2])], initial=initial)
    stages[0].model.eval()
    with torch.no_grad():
        stages[0].model(input_ids=torch.arange(3, 20).unsqueeze(0), use_cache=False)
    stages[0].model.train()
    after = run_stages(spec, stages, [one_by_one(rows[:2])], initial=initial)
    assert after.losses == before.losses
    assert all(torch.equal(after.grads[0][key], grad) for key, grad in before.grads[0].items())


# ---- where it cannot be


def fault(device: str) -> str:
    with pytest.raises(ConfigError) as refused:
        check_nf4(torch.device(device), where="stage 1 (mac)")
    line = str(refused.value)
    assert "\n" not in line and f"stage 1 (mac), device {device}" in line and "bitsandbytes" in line
    return line


def test_mac_needs_a_late_torch_and_a_late_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.mac_ver", lambda: ("14.1", ("", "", ""), "arm64"))
    check_nf4(torch.device("mps"), where="stage 1 (mac)")
    monkeypatch.setattr("platform.mac_ver", lambda: ("13.6.1", ("", "", ""), "arm64"))
    assert "macOS 14 or later" in fault("mps") and "13.6.1" in fault("mps")
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert "torch 2.9 or later" in fault("mps") and "2.8.0" in fault("mps")


def test_package_without_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitsandbytes, "supported_torch_devices", {"cpu", "cuda"})
    assert bitsandbytes.__version__ in fault("mps")
    check_nf4(torch.device("cpu"), where="stage 0 (local)")


def test_old_card_is_refused_and_rocm_has_no_such_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (5, 2))
    assert "6.0 or higher" in fault("cuda") and "got 5.2" in fault("cuda")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    check_nf4(torch.device("cuda"), where="stage 0 (local)")


def test_device_that_cannot_is_found_before_anything_is_loaded(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(tiny("llama"), (3,), quantizations=["none", "nf4"])
    assert check_device(spec, 1, "cpu").torch_device.type == "cpu"
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    assert check_device(spec, 0, "cpu").torch_device.type == "cpu"
    with pytest.raises(ConfigError, match=r"nf4 on stage 1 \(w1\), device cpu needs the package bitsandbytes"):
        check_device(spec, 1, "cpu")
    with pytest.raises(ConfigError, match=r"shard_plan\.stages\[1\]\.device must be auto or one of cpu"):
        check_device(spec, 1, "mps" if "mps" not in devices.available_types() else "xpu")

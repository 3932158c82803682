from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from choosing import mostly_by_hand
from conftest import LAYERS, MODEL_NAMES, Tiny, make_rows
from peft import LoraConfig, get_peft_model
from pipeline import build_stages, lively, make_spec, run_stages, same_bits
from reference import run_reference, trained, whole_model
from safetensors.torch import load_file, save_file

from hetero import adapters, data
from hetero.adapter_files import CONFIG_FILE, WEIGHTS_FILE, check_complete, read_adapter, save_adapter
from hetero.adapter_rules import check_options
from hetero.adapters import ResolvedAdapter
from hetero.errors import ConfigError
from hetero.families import FAMILIES
from hetero.models import meta_model
from hetero.spec import AdapterSpec
from hetero.stage import Stage
from hetero.training_state import as_state, put_state

QV = AdapterSpec(r=4, alpha=8, target_modules=["q_proj", "v_proj"])
SPLITS = ((), (3,), (1, 4), (1, 2, 3, 4, 5))


def resolved(path: Path, spec: AdapterSpec) -> ResolvedAdapter:
    return adapters.resolve(meta_model(path), spec, path.name)


def gathered(stages: list[Stage]) -> dict[str, torch.Tensor]:
    return {key: value for stage in stages for key, value in stage.state().items()}


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_saving_replaces_an_older_adapter(tiny: Tiny, tmp_path: Path) -> None:
    whole = resolved(tiny("llama"), QV)
    for fill in (1.0, 2.0):
        save_adapter(tmp_path / "adapter", whole, {key: torch.full(shape, fill) for key, shape in whole.shapes.items()})
    assert all(bool((value == 2).all()) for value in read_adapter(tmp_path / "adapter", whole).values())


# ---- the same adapter on every split


@pytest.mark.parametrize("name", mostly_by_hand(MODEL_NAMES, ["llama_tied", "gpt2"]))
def test_all_linear_is_the_same_set_on_every_split(tiny: Tiny, name: str) -> None:
    """P03: without the head, and as on the whole model; N09: the count is the sum of r x (in + out)."""
    spec = AdapterSpec(r=4, alpha=8, target_modules="all-linear")
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "fan_in_fan_out": name == "gpt2"}
    expected = {key: list(value.shape) for key, value in trained(whole_model(tiny(name), lora)).items()}
    whole = resolved(tiny(name), spec)
    assert whole.shapes == expected
    assert not any("lm_head" in key for key in expected)
    for cuts in SPLITS:
        stages = build_stages(make_spec(tiny(name), cuts, adapter=spec), tiny(name))
        assert {key: list(value.shape) for key, value in gathered(stages).items()} == expected
        assert sum(len(stage.trained) for stage in stages) == len(expected)
        count = sum(p.numel() for stage in stages for p in stage.model.parameters() if p.requires_grad)
        assert count == whole.num_trained() == _lora_parameters(tiny(name), 4)


def _lora_parameters(path: Path, r: int) -> int:
    """The sum of r x (in + out) over the linear modules of all layers."""
    family = FAMILIES[json.loads((path / "config.json").read_text())["model_type"]]
    modules = [m for n, m in meta_model(path).named_modules() if n.rpartition(".")[2] in family.linear_modules]
    return sum(r * sum(module.weight.shape) for module in modules)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_auto_targets_are_those_of_the_family(tiny: Tiny, name: str) -> None:
    family = FAMILIES[name.partition("_")[0]]
    whole = resolved(tiny(name), AdapterSpec(r=4, alpha=8))
    assert set(whole.config.target_modules) == set(family.default_targets)
    assert len(whole.shapes) == LAYERS * len(family.default_targets) * 2


def test_initial_values_are_as_peft_draws_them(tiny: Tiny) -> None:
    """B is zero; A is uniform within its bounds and not constant (Kaiming, as in PEFT's own)."""
    (stage,) = build_stages(make_spec(tiny("llama"), adapter=QV), tiny("llama"))
    own = trained(get_peft_model(whole_base(tiny("llama")), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])))
    for key, value in stage.state().items():
        assert value.dtype is torch.float32
        if "lora_B" in key:
            assert not value.any()
        else:
            assert float(value.std()) == pytest.approx(float(own[key].detach().std()), rel=0.3)
            assert float(value.abs().max()) <= 32**-0.5


def whole_base(path: Path) -> Any:
    return whole_model(path, {"r": 1, "target_modules": ["q_proj"]}).unload()


@pytest.mark.parametrize("kind", ["saved", "lora"])
def test_head_of_a_tied_model_may_train(tiny: Tiny, kind: str) -> None:
    """Only the last stage has a head; the embedding stays as it is."""
    rows = make_rows((5, 9, 12, 7))
    lora: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    if kind == "saved":
        lora["modules_to_save"] = ["lm_head"]
    else:
        lora["target_modules"] = ["q_proj", "lm_head"]
    spec = AdapterSpec(r=4, alpha=8, target_modules=lora["target_modules"], modules_to_save=lora.get("modules_to_save"))
    outcomes = []
    steps = [rows[:2], rows[2:]]
    for cuts in ((), (3,)):
        run = make_spec(tiny("llama_tied"), cuts, adapter=spec, optimizer="sgd", lr=1.0)
        stages = build_stages(run, tiny("llama_tied"))
        cut = [data.micro_batches(step, 1, padding_side="right", pad_id=0) for step in steps]
        outcomes.append(run_stages(run, stages, cut, initial=lively(gathered(stages))))
    assert same_bits(*outcomes)
    reference = run_reference(
        tiny("llama_tied"), steps, lora=lora, initial=outcomes[0].initial, optimizer="sgd", lr=1.0
    )
    assert outcomes[0].losses == pytest.approx(reference.losses, abs=1e-5)
    for key, value in reference.adapter.items():
        torch.testing.assert_close(outcomes[0].adapter[key], value, rtol=0, atol=1e-5)


# ---- wrong names


@pytest.mark.parametrize(
    ("targets", "wrong"),
    [
        (["q_porj"], ["q_porj"]),
        (["q_proj", "typo"], ["typo"]),
        (["c_attn"], ["c_attn"]),
        (["q_proj", "layers"], ["layers"]),
        (["nope", "nada"], ["nope", "nada"]),
    ],
)
def test_targets_that_are_no_module_are_listed(tiny: Tiny, targets: list[str], wrong: list[str]) -> None:
    """P10: with what there is; one wrong name among right ones as well."""
    spec = AdapterSpec(r=4, alpha=8, target_modules=targets)
    message = refusal(lambda: build_stages(make_spec(tiny("llama"), (3,), adapter=spec), tiny("llama")))
    assert "adapter.target_modules" in message
    assert all(name in message for name in [*wrong, *FAMILIES["llama"].linear_modules])
    assert not any(f"'{name}'" in message for name in set(targets) - set(wrong))


@pytest.mark.parametrize("targets", [["layers.9.self_attn.q_proj"], r".*no_such_.*"])
def test_targets_that_match_nothing_are_refused(tiny: Tiny, targets: Any) -> None:
    message = refusal(lambda: resolved(tiny("llama"), AdapterSpec(r=4, alpha=8, target_modules=targets)))
    assert "adapter.target_modules" in message
    assert str(targets if isinstance(targets, str) else targets[0]) in message


def test_one_full_name_without_a_match_is_refused(tiny: Tiny) -> None:
    spec = AdapterSpec(r=4, alpha=8, target_modules=["layers.2.self_attn.q_proj", "layers.9.self_attn.q_proj"])
    assert "layers.9.self_attn.q_proj" in refusal(lambda: resolved(tiny("llama"), spec))


def test_a_target_of_one_stage_only_is_fine(tiny: Tiny) -> None:
    """P10: judged over all stages together."""
    for spec in (
        msgspec.structs.replace(QV, layers_to_transform=[5]),
        AdapterSpec(r=4, alpha=8, target_modules=["layers.2.self_attn.q_proj", "layers.5.mlp.up_proj"]),
    ):
        stages = build_stages(make_spec(tiny("llama"), (1, 4), adapter=spec), tiny("llama"))
        assert gathered(stages).keys() == resolved(tiny("llama"), spec).shapes.keys()


@pytest.mark.parametrize("layers", [[6], [0, 99]])
def test_layers_that_the_model_lacks_are_refused(tiny: Tiny, layers: list[int]) -> None:
    spec = msgspec.structs.replace(QV, layers_to_transform=layers)
    message = refusal(lambda: resolved(tiny("llama"), spec))
    assert "adapter.layers_to_transform" in message
    assert str(layers[-1]) in message


def test_saved_modules_that_the_model_lacks_are_refused(tiny: Tiny) -> None:
    spec = msgspec.structs.replace(QV, modules_to_save=["lm_haed"])
    message = refusal(lambda: resolved(tiny("llama"), spec))
    assert "adapter.modules_to_save" in message
    assert "lm_haed" in message


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama_tied", {"modules_to_save": ["embed_tokens"]}),
        ("llama_tied", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}),
        ("gpt2", {"target_modules": ["c_attn", "wte"]}),
        ("llama_tied", {"target_modules": r".*(q_proj|embed_tokens)"}),
        ("llama_tied", {"modules_to_save": ["model.embed_tokens"]}),
    ],
)
def test_training_a_tied_embedding_is_refused(tiny: Tiny, name: str, more: dict[str, Any]) -> None:
    """M01: two stages would train two copies of one matrix."""
    message = refusal(lambda: resolved(tiny(name), msgspec.structs.replace(QV, **more)))
    assert "tie_word_embeddings" in message


# ---- init_from


def saved(tiny: Tiny, folder: Path, spec: AdapterSpec = QV) -> tuple[ResolvedAdapter, dict[str, torch.Tensor]]:
    whole = resolved(tiny("llama"), spec)
    generator = torch.Generator().manual_seed(1)
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in whole.shapes.items()}
    save_adapter(folder, whole, tensors)
    return whole, tensors


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})


def test_an_adapter_is_read_back_as_it_was_saved(tiny: Tiny, tmp_path: Path) -> None:
    whole, tensors = saved(tiny, tmp_path)
    found = read_adapter(tmp_path, whole)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(value, tensors[key]) for key, value in found.items())
    for cuts in ((), (1, 4)):
        stages = build_stages(make_spec(tiny("llama"), cuts, adapter=QV), tiny("llama"))
        for stage in stages:
            put_state(stage.trained, None, as_state(found))
        assert all(torch.equal(value, tensors[key]) for key, value in gathered(stages).items())


def test_an_adapter_of_peft_itself_is_read(tiny: Tiny, tmp_path: Path) -> None:
    model = whole_model(tiny("llama"), {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]})
    model.save_pretrained(tmp_path)
    found = read_adapter(tmp_path, resolved(tiny("llama"), QV))
    assert all(torch.equal(value, trained(model)[key]) for key, value in found.items())


def test_a_missing_tensor_is_named(tiny: Tiny, tmp_path: Path) -> None:
    whole, tensors = saved(tiny, tmp_path)
    key = sorted(tensors)[5]
    rewrite(tmp_path, lambda t: t.pop(key))
    message = refusal(lambda: read_adapter(tmp_path, whole))
    assert "adapter.init_from" in message
    assert key in message


def test_a_left_over_tensor_is_named(tiny: Tiny, tmp_path: Path) -> None:
    whole, _ = saved(tiny, tmp_path)
    rewrite(tmp_path, lambda t: t.update({"base_model.model.model.layers.9.x": torch.zeros(2)}))
    assert "layers.9.x" in refusal(lambda: read_adapter(tmp_path, whole))


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"r": 8}, "adapter.r"),
        ({"alpha": 16}, "adapter.alpha"),
        ({"use_rslora": True}, "adapter.use_rslora"),
        ({"use_dora": True}, "adapter.use_dora"),
        ({"alpha_pattern": {"q_proj": 3.0}}, "adapter.alpha_pattern"),
        ({"target_modules": ["q_proj"]}, "adapter.init_from"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "adapter.init_from"),
        ({"layers_to_transform": [1]}, "adapter.init_from"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tiny: Tiny, tmp_path: Path, other: dict[str, Any], key: str) -> None:
    """Both ways round: never scaled otherwise, never in part."""
    spec = msgspec.structs.replace(QV, **other)
    saved(tiny, tmp_path / "other", spec)
    saved(tiny, tmp_path / "plain")
    assert key in refusal(lambda: read_adapter(tmp_path / "other", resolved(tiny("llama"), QV)))
    assert key in refusal(lambda: read_adapter(tmp_path / "plain", resolved(tiny("llama"), spec)))


def test_the_same_r_in_another_pattern_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    saved(tiny, tmp_path, msgspec.structs.replace(QV, rank_pattern={"q_proj": 2}))
    assert "adapter.r" in refusal(lambda: read_adapter(tmp_path, resolved(tiny("llama"), QV)))


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("content", [None, b"", b"\xff" * 99, b"[]"])
def test_a_damaged_folder_is_refused(tiny: Tiny, tmp_path: Path, name: str, content: bytes | None) -> None:
    whole, _ = saved(tiny, tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    message = refusal(lambda: read_adapter(tmp_path, whole))
    assert "adapter.init_from" in message
    assert str(tmp_path) in message


def test_a_pickled_adapter_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """S05."""
    whole, tensors = saved(tiny, tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    torch.save(tensors, tmp_path / "adapter_model.bin")
    assert "adapter_model.bin" in refusal(lambda: read_adapter(tmp_path, whole))


def test_incomplete_gathering_is_noticed(tiny: Tiny) -> None:
    whole = resolved(tiny("llama"), QV)
    tensors = {key: torch.zeros(shape) for key, shape in whole.shapes.items()}
    check_complete(whole, tensors)
    tensors.popitem()
    with pytest.raises(AssertionError):
        check_complete(whole, tensors)


# ---- options that would give a wrong adapter


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "pissa_niter": ("llama", {"init_lora_weights": "pissa_niter_4"}, ("init_lora_weights", "at random again")),
    "loftq": ("llama", {"init_lora_weights": "loftq"}, ("init_lora_weights", "'loftq'")),
    "odd_rank": ("llama", {"init_lora_weights": "orthogonal", "rank_pattern": {"q_proj": 3}}, ("rank_pattern", "3")),
    "pissa_tied_head": (
        "llama_tied",
        {"target_modules": ["lm_head"], "init_lora_weights": "pissa"},
        ("tie_word_embeddings",),
    ),
    "pissa_embedding": ("llama", {"target_modules": ["embed_tokens"], "init_lora_weights": "pissa"}, ("embed_tokens",)),
    "olora_embedding": (
        "llama",
        {"target_modules": r".*(q_proj|embed_tokens)", "init_lora_weights": "olora"},
        ("embed_tokens",),
    ),
    "bias_of_dora": ("llama", {"lora_bias": True, "use_dora": True}, ("lora_bias", "use_dora")),
    "bias_of_gaussian": ("llama", {"lora_bias": True, "init_lora_weights": "gaussian"}, ("lora_bias", "gaussian")),
    "bias_of_embedding": ("llama", {"lora_bias": True, "target_modules": ["embed_tokens"]}, ("lora_bias",)),
    "bias_saved_twice": (
        "gpt2",
        {"target_modules": ["c_attn"], "bias": "all", "modules_to_save": ["ln_f"]},
        ("adapter.bias", "modules_to_save"),
    ),
    "layers_of_a_regex": (
        "llama",
        {"target_modules": r".*q_proj", "layers_to_transform": [1]},
        ("layers_to_transform",),
    ),
    "layers_of_all": ("llama", {"target_modules": "all-linear", "layers_to_transform": [1]}, ("layers_to_transform",)),
    "no_layer": ("llama", {"layers_to_transform": []}, ("layers_to_transform",)),
    "nothing": ("llama", {"target_modules": []}, ("target_modules", "empty")),
    "no_regex": ("llama", {"target_modules": r".*(q_proj"}, ("target_modules", "regular expression")),
    "no_pattern": ("llama", {"rank_pattern": {"(q": 2}}, ("rank_pattern", "regular expression")),
    "rank_of_nothing": ("llama", {"rank_pattern": {"q_proj": 2, "k_proj": 3}}, ("rank_pattern", "'k_proj'", "v_proj")),
    "alpha_of_nothing": ("llama", {"alpha_pattern": {"layers.9.self_attn.q_proj": 3.0}}, ("alpha_pattern", "layers.9")),
    "exclude_nothing": (
        "llama",
        {"exclude_modules": ["layers.0.self_attn.q_proj", "q_porj"]},
        ("exclude_modules", "'q_porj'"),
    ),
    "exclude_no_match": ("llama", {"exclude_modules": r".*nope.*"}, ("exclude_modules", "nope")),
    "exclude_all": ("llama", {"exclude_modules": ["q_proj", "v_proj"]}, ("target_modules",)),
    "parameters_of_nothing": ("llama", {"target_parameters": ["mlp.experts.down_proj"]}, ("target_parameters",)),
    "parameters_dropped": ("llama", {"target_parameters": ["x"], "dropout": 0.1}, ("dropout", "target_parameters")),
    "parameters_dora": ("llama", {"target_parameters": ["x"], "use_dora": True}, ("use_dora", "target_parameters")),
    "parameters_bias": ("llama", {"target_parameters": ["x"], "bias": "all"}, ("adapter.bias", "target_parameters")),
    "parameters_init": (
        "llama",
        {"target_parameters": ["x"], "init_lora_weights": "orthogonal"},
        ("init_lora_weights", "target_parameters"),
    ),
    "parameters_layers": (
        "llama",
        {"target_parameters": ["x"], "layers_to_transform": [1]},
        ("layers_to_transform", "target_parameters"),
    ),
    "experts_dropped": ("qwen3_moe", {"target_modules": "all-linear", "dropout": 0.1}, ("dropout", "all-linear")),
    "experts_dora": ("mixtral", {"target_modules": "all-linear", "use_dora": True}, ("use_dora", "all-linear")),
    "experts_of_some_layers": (
        "qwen3_moe",
        {"target_modules": r".*layers\.[1-5]\..*_proj"},
        ("target_modules", "some layers", "layers.0.self_attn.q_proj"),
    ),
    "experts_of_some_layers_alone": (
        "mixtral",
        {"target_modules": r".*layers\.1\.mlp\.experts\.(w1|w2|w3)"},
        ("target_modules", "some layers", "layers.0.mlp.experts"),
    ),
    "parameters_saved": (
        "qwen3_moe",
        {"target_parameters": ["mlp.experts.down_proj"], "modules_to_save": ["mlp"]},
        ("modules_to_save", "mlp with", "experts.down_proj"),
    ),
    "saved_list": ("llama", {"modules_to_save": ["layers"]}, ("modules_to_save", "'layers'", "lm_head")),
    "saved_whole": ("llama", {"modules_to_save": ["model"]}, ("modules_to_save", "'model'", "lm_head")),
    "saved_by_a_letter": ("llama", {"modules_to_save": ["s"]}, ("modules_to_save", "'s'", "lm_head")),
    "saved_without_weights": ("llama", {"modules_to_save": ["rotary_emb"]}, ("modules_to_save", "'rotary_emb'")),
    "parameters_gpt2": ("gpt2", {"target_parameters": ["x"]}, ("target_parameters",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_be_right_are_refused_with_the_reason(tiny: Tiny, name: str) -> None:
    """By one line that names the option; judged on the whole model, so no split decides."""
    model, changes, words = REFUSED[name]
    message = refusal(lambda: resolved(tiny(model), msgspec.structs.replace(QV, **changes)))
    assert message.startswith("adapter.") or "adapter." in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "orthogonal"},
        {"modules_to_save": ["layers.3.mlp.up_proj"]},
        {"modules_to_save": ["mlp"]},
        {"target_parameters": ["mlp.experts.down_proj"]},
    ],
)
def test_what_4_bits_cannot_be_is_refused_where_any_stage_is_in_them(changes: dict[str, Any]) -> None:
    spec, family = msgspec.structs.replace(QV, **changes), FAMILIES["llama"]
    check_options(spec, family, tied=False, quantizations=["none", "none"])
    message = refusal(lambda: check_options(spec, family, tied=False, quantizations=["none", "nf4"]))
    assert "quantization" in message


def test_a_stage_in_4_bits_refuses_to_train_its_weights_in_full(tiny: Tiny) -> None:
    """Whatever the names that the user gave."""
    spec = msgspec.structs.replace(QV, modules_to_save=["layers.3"])
    run = make_spec(tiny("llama"), (3,), adapter=spec, quantizations=["none", "nf4"])
    assert "layers.3 out" in refusal(lambda: build_stages(run, tiny("llama")))


def test_a_pattern_of_another_stages_module_is_no_fault(tiny: Tiny, recwarn: pytest.WarningsRecorder) -> None:
    """Judged over all stages together; and no stage warns of what is on another one."""
    spec = msgspec.structs.replace(QV, rank_pattern={"layers.0.self_attn.q_proj": 2, "layers.5.self_attn.v_proj": 3})
    stages = build_stages(make_spec(tiny("llama"), (1, 4), adapter=spec), tiny("llama"))
    shapes = {key: list(value.shape) for key, value in gathered(stages).items()}
    assert shapes == resolved(tiny("llama"), spec).shapes
    assert shapes["base_model.model.model.layers.5.self_attn.v_proj.lora_A.weight"] == [3, 32]
    assert not [warning for warning in recwarn if "pattern" in str(warning.message)]


def test_a_bias_that_cannot_be_merged_is_said(tiny: Tiny) -> None:
    note = resolved(tiny("llama"), msgspec.structs.replace(QV, lora_bias=True)).notes
    assert len(note) == 1
    assert "lora_bias" in note[0]
    assert not resolved(tiny("llama_bias"), msgspec.structs.replace(QV, lora_bias=True)).notes


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_on_a_changed_base_starts_only_a_run_like_it(tiny: Tiny, tmp_path: Path, init: str) -> None:
    """Its values mean something else on the base as it is."""
    spec = msgspec.structs.replace(QV, init_lora_weights=init)
    saved(tiny, tmp_path, spec)
    read_adapter(tmp_path, resolved(tiny("llama"), spec))
    assert init in refusal(lambda: read_adapter(tmp_path, resolved(tiny("llama"), QV)))

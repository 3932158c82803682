import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.facts import _WHEN_ABSENT, num_parameters, read_facts

SHAPES = Path(__file__).parents[1] / "conf" / "shapes"
OPTIONAL = ("tie_word_embeddings", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias")
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 128,
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "intermediate_size": 344,
    "num_attention_heads": 4,
}
GPT2 = {"model_type": "gpt2", "n_layer": 6, "n_embd": 48, "vocab_size": 100, "n_positions": 64, "n_head": 4}
# Sizes that no two of which are equal, so that a mix-up shows.
SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
COUNTED = [
    pytest.param({"model_type": "llama", **SMALL}, id="llama"),
    pytest.param({"model_type": "llama", **SMALL, "tie_word_embeddings": True}, id="llama-tied"),
    pytest.param({"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param({"model_type": "mistral", **SMALL}, id="mistral"),
    pytest.param({"model_type": "mistral", **SMALL, "attention_bias": True, "mlp_bias": True}, id="mistral-no-biases"),
    pytest.param({"model_type": "qwen2", **SMALL}, id="qwen2"),
    pytest.param(
        {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True, "attention_bias": True}, id="qwen2-tied"
    ),
    pytest.param({"model_type": "qwen3", **SMALL}, id="qwen3"),
    pytest.param({"model_type": "qwen3", **SMALL, "attention_bias": True}, id="qwen3-biases"),
    pytest.param(GPT2, id="gpt2"),
    pytest.param({**GPT2, "n_inner": 80, "tie_word_embeddings": False}, id="gpt2-inner-untied"),
]


def transformers_config(config: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[config["model_type"]](**{key: value for key, value in config.items() if key != "model_type"})


def test_llama_is_read_under_its_own_names() -> None:
    facts = read_facts(LLAMA)
    assert (facts.num_hidden_layers, facts.hidden_size, facts.intermediate_size) == (6, 128, 344)
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.head_dim) == (4, 4, 32)
    assert not facts.tie_word_embeddings


def test_gpt2_is_read_under_its_own_names() -> None:
    facts = read_facts({**GPT2, "n_inner": None})
    assert (facts.num_hidden_layers, facts.hidden_size, facts.max_position_embeddings) == (6, 48, 64)
    assert (facts.intermediate_size, facts.num_attention_heads, facts.head_dim) == (192, 4, 12)
    assert facts.tie_word_embeddings


@pytest.mark.parametrize("model_type", sorted(_WHEN_ABSENT))
def test_what_is_absent_is_what_transformers_assumes(model_type: str) -> None:
    names = {"hidden_size": 1024, "num_attention_heads": 128}
    if model_type == "gpt2":
        names = {"n_embd": 1024, "n_head": 128}
    if model_type == "gemma4_text":
        names |= {"hidden_size_per_layer_input": 0, "global_head_dim": 256}
    config = transformers_config({"model_type": model_type, **names})
    facts = read_facts({key: value for key, value in config.to_dict().items() if key not in OPTIONAL})
    assert facts.tie_word_embeddings == config.tie_word_embeddings
    heads = 1 if model_type == "falcon" else 128  # multi_query
    assert facts.num_key_value_heads == (getattr(config, "num_key_value_heads", None) or heads)
    assert facts.head_dim == (getattr(config, "head_dim", None) or 8)


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "model_type"])
def test_missing_size_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json of model_type 'llama' must hold '{key}'"):
        read_facts({name: value for name, value in LLAMA.items() if name != key})


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "n_positions", "n_head"])
def test_missing_size_of_gpt2_is_refused_by_its_own_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"must hold '{key}'"):
        read_facts({name: value for name, value in GPT2.items() if name != key})


@pytest.mark.parametrize("value", [True, 0, -1, 1.5, "12", [12]])
def test_size_that_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'num_hidden_layers' in config.json must be a whole number >= 1"):
        read_facts({**LLAMA, "num_hidden_layers": value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "must name its model_type, got None"),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 8}}, "multimodal model_type 'gemma3'"),
        ({"num_attention_heads": 3}, "'hidden_size' in config.json must be a multiple"),
        ({"num_key_value_heads": 3}, "must be a multiple of 'num_key_value_heads', got 4 and 3"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' in config.json must be true or false, got 1"),
        ({"model_type": "newcomer"}, "must say 'tie_word_embeddings'"),
    ],
)
def test_config_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_facts({**LLAMA, **change})


def test_head_dim_of_the_file_need_not_divide_the_hidden_size() -> None:
    assert read_facts({**LLAMA, "num_attention_heads": 3, "head_dim": 64}).head_dim == 64


@pytest.mark.parametrize("config", COUNTED)
def test_parameters_are_those_of_the_transformers_model(config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(config))
    inner = model.base_model
    gpt2 = config["model_type"] == "gpt2"
    embedding = [inner.wte, inner.wpe] if gpt2 else [inner.embed_tokens]
    layers, norm = (inner.h, inner.ln_f) if gpt2 else (inner.layers, inner.norm)
    counts = num_parameters(read_facts(config))
    assert counts.embedding == sum(module.weight.numel() for module in embedding)
    assert [counts.layer] * len(layers) == [sum(p.numel() for p in layer.parameters()) for layer in layers]
    assert counts.norm == sum(p.numel() for p in norm.parameters())
    assert counts.head == model.lm_head.weight.numel()
    assert counts.total == sum(p.numel() for p in model.parameters())


def test_parameters_of_another_family_are_refused() -> None:
    facts = read_facts({**LLAMA, "model_type": "gemma2", "tie_word_embeddings": True})
    with pytest.raises(ConfigError, match=r"must be one of gpt2, llama, mistral, qwen2, qwen3 .* got 'gemma2'"):
        num_parameters(facts)


# The parameter counts that the models' pages on the hub give.
@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("meta-llama--Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama--Llama-3.3-70B-Instruct", 70_553_706_496),
        ("HuggingFaceTB--SmolLM2-135M-Instruct", 134_515_008),
        ("Qwen--Qwen3-14B", 14_768_307_200),
        ("Qwen--Qwen3-32B", 32_762_123_264),
    ],
)
def test_shipped_shapes_are_those_of_the_real_models(name: str, total: int) -> None:
    config = json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8"))
    assert num_parameters(read_facts(config)).total == total
    rope = transformers_config(config).rope_parameters
    if name.startswith("meta-llama"):
        assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("llama3", 500000.0, 8.0)
    else:
        theta = 1_000_000 if name.startswith("Qwen") else 100_000
        assert (rope["rope_type"], rope["rope_theta"]) == ("default", theta)


def test_facts_need_neither_torch_nor_transformers() -> None:
    program = "import sys, hetero.facts; sys.exit(bool({'torch', 'transformers', 'socket'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=SHAPES.parents[1], check=False).returncode == 0

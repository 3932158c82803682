"""What config.json says about experts, and what `model.router_aux_loss` makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import EXPERT_NAMES, LAYERS, ROUTERS, Tiny
from pipeline import build_stages, make_spec
from processes import composed
from torch import nn
from transformers import AutoConfig

from hetero.config import SHAPES_DIR
from hetero.errors import ConfigError
from hetero.experts import _NUM_EXPERTS, Experts, read_experts, router_loss_line, router_loss_of
from hetero.families import FAMILIES
from hetero.models import PassThrough, layers_of, meta_model
from hetero.resolve import ResolvedRun, resolve
from hetero.resume import settings_of
from hetero.spec import AdapterSpec, RouterLossSpec, RunSpec


@pytest.mark.parametrize("model_type", _NUM_EXPERTS)
def test_what_config_json_leaves_out_is_what_transformers_assumes(model_type: str) -> None:
    theirs = AutoConfig.for_model(model_type)
    found = read_experts({"model_type": model_type, "num_hidden_layers": 3})
    assert found == Experts(theirs.num_experts, 3, theirs.router_aux_loss_coef, theirs.output_router_logits)
    for key in ("num_experts", "num_local_experts"):
        named = AutoConfig.for_model(model_type, **{key: 6})
        mine = read_experts({"model_type": model_type, "num_hidden_layers": 3, key: 6})
        assert mine is not None and mine.num_experts == named.num_experts
    assert model_type not in FAMILIES or read_experts({"model_type": "llama", "num_hidden_layers": 3}) is None


@pytest.mark.parametrize("name", EXPERT_NAMES)
def test_experts_of_a_saved_model_are_read_and_their_layers_counted(tiny: Tiny, name: str) -> None:
    found = read_experts(json.loads((tiny(name) / "config.json").read_text()))
    model = meta_model(tiny(name))
    routers = [n for n, m in model.named_modules() if type(m).__name__.endswith("TopKRouter")]
    assert found == Experts(4, len(routers), 0.001, False)
    assert len(routers) == {"qwen2_moe": 5, "qwen3_moe": 3}.get(name, LAYERS)


@pytest.mark.parametrize("name", EXPERT_NAMES)
def test_targets_of_the_table_are_linear_modules_and_experts_stay_whole(tiny: Tiny, name: str) -> None:
    family = FAMILIES[name]
    linear = {n.rpartition(".")[2] for n, m in meta_model(tiny(name)).named_modules() if isinstance(m, nn.Linear)}
    assert set(family.linear_modules) <= linear
    spec = make_spec(tiny(name), (1, 4), adapter=AdapterSpec(r=4, alpha=8))
    for plan, stage in zip(spec.stages, build_stages(spec, tiny(name)), strict=True):
        assert not any("expert" in key or f".{ROUTERS[name]}." in key for key in stage.trained)
        for index, layer in enumerate(layers_of(stage.model)):
            assert isinstance(layer, PassThrough) == (not plan.start <= index < plan.end)


FOUR = Experts(4, 6, 0.001, False)
ASKS = Experts(4, 6, 0.02, True)


@pytest.mark.parametrize(
    ("wanted", "experts", "coefficient", "line"),
    [
        ("auto", FOUR, None, "off, since config.json does not ask for it"),
        ("auto", ASKS, 0.02, "on, coefficient 0.02, over 6 layers of 4 experts"),
        ("auto", Experts(4, 6, 0.0, True), None, "off, since its coefficient is 0"),
        ("on", FOUR, 0.001, "on, coefficient 0.001"),
        (True, FOUR, 0.001, "(model.router_aux_loss=on)"),
        ("off", ASKS, None, "off (model.router_aux_loss=off)"),
        (False, ASKS, None, "off (model.router_aux_loss=off)"),
        (0.5, FOUR, 0.5, "on, coefficient 0.5"),
        (1.0, FOUR, 1.0, "on, coefficient 1,"),
        (0.0, ASKS, None, "off, since its coefficient is 0 (model.router_aux_loss=0.0)"),
    ],
)
def test_router_loss_is_what_the_key_says(wanted: Any, experts: Experts, coefficient: float | None, line: str) -> None:
    found = router_loss_of(wanted, experts)
    assert found == (None if coefficient is None else RouterLossSpec(experts.num_experts, coefficient))
    assert line in router_loss_line(wanted, experts, found)


def resolved(*overrides: str) -> ResolvedRun:
    return resolve(composed(*overrides), shapes_dir=SHAPES_DIR)


def test_key_on_the_command_line_reaches_every_machine(tiny: Tiny) -> None:
    model = f"model.path={tiny('mixtral')}"
    assert resolved(model).spec(total_steps=1).router_loss is None
    for value, coefficient in (("on", 0.001), ("true", 0.001), ("0.25", 0.25), ("1", 1.0)):
        spec = resolved(model, f"model.router_aux_loss={value}").spec(total_steps=1)
        assert spec.router_loss == RouterLossSpec(4, coefficient)
        assert RunSpec.from_json(spec.to_json()) == spec
        settings = settings_of(spec, "rows", True)
        assert settings["router_loss"] == {"num_experts": 4, "coefficient": coefficient}
    assert "router_loss" not in settings_of(resolved(model).spec(total_steps=1), "rows", True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.router_aux_loss=on"], "auto or off for a model that transformers has no router loss for, got on"),
        (["model.router_aux_loss=0.1"], "auto or off for a model that transformers has no router loss for, got 0.1"),
        (["model.router_aux_loss=-1"], "model.router_aux_loss must be"),
        (["model.router_aux_loss=maybe"], "model.router_aux_loss must be one of auto, on, off"),
        (["model.router_aux_loss=null"], "model.router_aux_loss must be"),
    ],
)
def test_value_that_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(*overrides)


def test_gpt_oss_has_eager_attention_only(tiny: Tiny) -> None:
    model = f"model.path={tiny('gpt_oss')}"
    for choice in ("null", "eager"):
        resolved(model, f"model.attn_implementation={choice}")
    with pytest.raises(ConfigError, match="must be eager for model_type 'gpt_oss'"):
        resolved(model, "model.attn_implementation=sdpa")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef' in config.json must be a number of at least 0"),
        ({"router_aux_loss_coef": "0.1"}, "router_aux_loss_coef"),
        ({"output_router_logits": "yes"}, "output_router_logits' in config.json must be true or false"),
        ({"num_experts": -4}, "num_experts' in config.json must be a whole number"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
    ],
)
def test_config_json_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_experts({"model_type": "qwen2_moe", "num_hidden_layers": 6} | change)


def test_a_model_whose_layers_are_all_dense_has_no_experts() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "mlp_only_layers": [0, 1]}
    assert read_experts(config) is None
    assert read_experts(config | {"mlp_only_layers": [], "num_experts": 0}) is None

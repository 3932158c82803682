"""An adapter that is only used is described by its own folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Tiny
from processes import composed

from hetero import adapters, models
from hetero.adapter_config import CONFIG_FILE
from hetero.adapter_files import StagePart, read_adapter, save_adapter
from hetero.config import SHAPES_DIR
from hetero.errors import ConfigError
from hetero.resolve import resolve

USED = ("task=generate", "prompts=[a]")


def adapter_of(model: Path, *overrides: str) -> adapters.ResolvedAdapter:
    """What the configuration asks for on the whole model."""
    spec = resolve(composed(f"model.path={model}", *overrides), shapes_dir=SHAPES_DIR).spec(total_steps=1)
    return adapters.resolve(models.meta_model(model), spec.adapter, str(model))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", ["adapter.r=4", "adapter.alpha=5", "adapter.use_rslora=true", "adapter.dropout=0.1"]),
        ("llama", ["adapter.target_modules=all-linear", "adapter.use_dora=true", "adapter.modules_to_save=[lm_head]"]),
        (
            "llama",
            [
                "adapter.rank_pattern={q_proj: 2}",
                "adapter.alpha_pattern={q_proj: 3}",
                "adapter.layers_to_transform=[1]",
            ],
        ),
        ("llama", ["adapter.target_modules='.*self_attn.[qv]_proj'", "adapter.exclude_modules=[v_proj]"]),
        ("llama", ["adapter.init_lora_weights=pissa", "adapter.r=2"]),
        ("llama", ["adapter.init_lora_weights=gaussian", "adapter.bias=all"]),
        ("llama", ["adapter.target_modules=[]", "adapter.modules_to_save=[lm_head]"]),
        ("gpt2", ["adapter.lora_bias=true", "adapter.bias=lora_only", "adapter.target_modules=[c_attn]"]),
    ],
)
def test_adapter_that_is_only_used_needs_none_of_its_options(
    family: str, options: list[str], tiny: Tiny, tmp_path: Path
) -> None:
    trained = adapter_of(tiny(family), *options)
    tensors = {key: torch.zeros(shape) for key, shape in trained.shapes.items()}
    save_adapter(tmp_path / "adapter", trained, tensors)
    where = f"adapter.init_from={tmp_path / 'adapter'}"
    used = adapter_of(tiny(family), *USED, where)
    assert used.shapes == trained.shapes and used.targets == trained.targets
    ours, theirs = used.config.to_dict(), trained.config.to_dict()
    if "pissa" not in options[0]:
        ours["init_lora_weights"] = theirs["init_lora_weights"] = True
    assert ours == theirs
    assert read_adapter(tmp_path / "adapter", used).keys() == tensors.keys()
    typed_again = composed(f"model.path={tiny(family)}", *USED, where, *options)
    assert resolve(typed_again, shapes_dir=SHAPES_DIR).spec(total_steps=1).adapter.r == trained.config.r


@pytest.mark.parametrize(
    ("changes", "args", "message"),
    [
        (
            {},
            ["adapter.r=16"],
            "adapter.r must be as in adapter.init_from, got 16, there 4: task=generate takes it from there",
        ),
        ({}, ["adapter.target_modules=[q_proj]"], "adapter.target_modules must be as in adapter.init_from, got"),
        ({}, ["adapter.init_lora_weights=pissa"], "adapter.init_lora_weights must be as in adapter.init_from, got"),
        ({"alora_invocation_tokens": [3]}, [], "an adapter without alora_invocation_tokens, which is not done here"),
        ({"layer_replication": [[0, 2]]}, [], "an adapter without layer_replication"),
        ({"peft_type": "IA3"}, [], "must be the folder of a LoRA adapter"),
        ({"r": "many"}, [], "must have options that are done here, in its adapter_config.json: adapter.r"),
        ({"init_lora_weights": "loftq"}, [], "adapter.init_lora_weights must be true, false"),
        ({"base_model_name_or_path": "tiny"}, [], "model.path must be the base of adapter.init_from"),
        ({"base_model_name_or_path": "A/B"}, ["model.path=tiny"], "there A/B: model.path=A/B, or model=NAME"),
    ],
)
def test_adapter_that_is_not_what_was_asked_for_is_refused_in_one_line(
    changes: dict[str, object], args: list[str], message: str, tiny: Tiny, tmp_path: Path
) -> None:
    trained = adapter_of(tiny("llama"), "adapter.r=4")
    save_adapter(tmp_path, trained, {})
    file = tmp_path / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        adapter_of(tiny("llama"), *USED, f"adapter.init_from={tmp_path}", *args)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_runs_folder_and_a_stages_part_are_told_from_an_adapter(tiny: Tiny, tmp_path: Path) -> None:
    """Both stand beside it in a run's folder."""
    trained = adapter_of(tiny("llama"), "adapter.r=4")
    for name, part in (("adapter", None), ("adapter-stage", StagePart("run", 1, 0, 0, 1, 2))):
        save_adapter(tmp_path / name, trained, {}, part)
    with pytest.raises(ConfigError, match=r"found no adapter_config.json in .*; did you mean .*/adapter\?"):
        read_adapter(tmp_path, trained)
    with pytest.raises(ConfigError, match="must be a whole adapter, got a stage's part"):
        read_adapter(tmp_path / "adapter-stage", trained)

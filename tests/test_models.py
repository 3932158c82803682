from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, MODEL_NAMES, Tiny, make_rows
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hetero import data
from hetero.errors import ConfigError
from hetero.families import FAMILIES, family_of
from hetero.models import PassThrough, embedding_of, layers_of, load_stage, meta_model
from hetero.shards import INDEX, holds

CPU = torch.device("cpu")
EVERY_CUT: list[tuple[int, ...]] = [*((i,) for i in range(1, LAYERS)), (1, 2, 3, 4, 5), (2, 3)]


def load(path: Path, start: int, end: int, **options: Any) -> Any:
    return load_stage(path, start, end, **{"dtype": torch.float32, "device": CPU} | options)


def load_split(path: Path, cuts: Sequence[int], **options: Any) -> list[Any]:
    edges = [0, *cuts, LAYERS]
    return [load(path, edges[i], edges[i + 1], **options) for i in range(len(edges) - 1)]


def logits_of(models: Sequence[Any], input_ids: torch.Tensor, **riders: torch.Tensor) -> torch.Tensor:
    """[B, T, V] through all stages."""
    first: dict[str, torch.Tensor] = {"input_ids": input_ids}
    with torch.no_grad():
        for model in models:
            hidden = model.base_model(**first, **riders, use_cache=False).last_hidden_state
            first = {"inputs_embeds": hidden}
        return models[-1].get_output_embeddings()(hidden)


def whole(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what a split computes


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_logits_are_the_whole_models_at_every_split(tiny: Tiny, name: str, attn_implementation: str) -> None:
    """M02, M06: every cut and one-layer stages, rows longer than the sliding window, left and right padding."""
    cuts = EVERY_CUT if attn_implementation == "sdpa" else [(1, 2, 3, 4, 5)]
    batches = []
    for side in ("right", "left"):
        (batch,) = data.micro_batches(make_rows((10, 4)), 2, padding_side=side, pad_id=0)  # type: ignore[arg-type]
        tensors = batch.tensors()
        real = batch.input_ids if batch.attention_mask is None else batch.attention_mask
        batches.append(({k: v for k, v in tensors.items() if k != "labels"}, real.bool()))
    reference = whole(tiny(name), attn_implementation=attn_implementation)
    with torch.no_grad():
        expected = [reference(**inputs, use_cache=False).logits for inputs, _ in batches]
    for cut in cuts:
        models = load_split(tiny(name), cut, attn_implementation=attn_implementation)
        for (inputs, real), logits in zip(batches, expected, strict=True):
            found = logits_of(models, **inputs)
            torch.testing.assert_close(found[real], logits[real], rtol=0, atol=1e-5, msg=lambda m, c=cut: f"{c}: {m}")


@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_the_sliding_window_of_the_small_models_matters(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Else the test above could not see a lost window."""
    ids = torch.arange(3, 15).unsqueeze(0)
    wide = shutil.copytree(tiny(name), tmp_path / name)
    config = json.loads((wide / "config.json").read_text())
    config["sliding_window"] = 256
    (wide / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        difference = whole(tiny(name))(ids).logits - whole(wide)(ids).logits
    assert float(difference.abs().max()) > 1e-2


# ---- what a stage holds


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_stage_holds_its_own_parameters_only(tiny: Tiny, name: str) -> None:
    """M13, and the weights are those of the files under their global names."""
    path = tiny(name)
    family = family_of(name.partition("_")[0])
    tied = AutoConfig.from_pretrained(path).tie_word_embeddings
    expected = dict(whole(path).named_parameters(remove_duplicate=False))
    held: dict[int, set[str]] = {}
    for index, model in enumerate(load_split(path, (2, 3))):
        found = dict(model.named_parameters(remove_duplicate=False))
        assert all(torch.equal(value, expected[key]) for key, value in found.items())
        assert not any(p.requires_grad or p.is_meta for p in model.parameters())
        assert model.training
        assert len(layers_of(model)) == LAYERS
        held[index] = set(found)
    start, middle, end = held[0], held[1], held[2]
    assert start | middle | end == set(expected)
    embedding = {key for key in expected if f".{family.embedding}." in f".{key}"}
    head = {key for key in expected if key.startswith("lm_head.")}
    norm = {key for key in expected if f".{family.final_norm}." in f".{key}" and ".layers." not in key}
    assert {key for key in middle if f".{family.layers}.2." not in key} == set()
    assert embedding <= start
    assert not (head | norm) & start
    assert head | norm <= end
    assert (start & end) == (embedding if tied else set())
    for part in (start, end):
        layers = {int(key.split(f".{family.layers}.")[1].split(".")[0]) for key in part if f".{family.layers}." in key}
        assert layers == ({0, 1} if part is start else {3, 4, 5})


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3", "gpt2"])
def test_tied_head_is_the_embedding_of_the_file(tiny: Tiny, name: str) -> None:
    """M01: the file holds one tensor; first and last stage have it, and the last one's two uses share memory."""
    first, last = load_split(tiny(name), (3,))
    embedding = f"{FAMILIES[name.partition('_')[0]].embedding}.weight"
    (stored,) = [v for k, v in load_file(tiny(name) / "model.safetensors").items() if k.endswith(embedding)]
    assert not any(k.startswith("lm_head") for k in load_file(tiny(name) / "model.safetensors"))
    assert torch.equal(embedding_of(first).weight, stored)
    assert torch.equal(last.get_output_embeddings().weight, stored)
    assert last.get_output_embeddings().weight.data_ptr() == embedding_of(last).weight.data_ptr()
    assert isinstance(first.get_output_embeddings(), PassThrough)


def test_an_untied_head_is_not_the_embedding(tiny: Tiny) -> None:
    first, last = load_split(tiny("llama"), (3,))
    assert isinstance(embedding_of(last), PassThrough)
    assert not torch.equal(embedding_of(first).weight, last.get_output_embeddings().weight)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_buffers_equal_those_of_a_fresh_module(tiny: Tiny, name: str) -> None:
    """M03: nothing is left as memory happened to be, on any stage, five times."""
    config = AutoConfig.from_pretrained(tiny(name))
    expected = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    for _ in range(5):
        for model in load_split(tiny(name), (2, 4)):
            buffers = dict(model.named_buffers())
            assert buffers.keys() == expected.keys()
            assert all(torch.equal(value, expected[key]) for key, value in buffers.items())
            if name != "gpt2":
                rotary = model.base_model.rotary_emb
                assert torch.equal(rotary.inv_freq, type(rotary)(config=config).inv_freq)
                assert rotary.inv_freq[0] == 1.0


def test_weights_are_cast_and_attention_is_chosen(tiny: Tiny) -> None:
    model = load(tiny("llama"), 2, 4, dtype=torch.bfloat16, attn_implementation="eager")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.base_model.rotary_emb.inv_freq.dtype is torch.float32
    assert model.config._attn_implementation == "eager"


def test_meta_model_takes_no_memory(tiny: Tiny) -> None:
    model = meta_model(tiny("llama"))
    assert all(p.is_meta for p in model.parameters())
    assert {k: p.shape for k, p in model.named_parameters()} == {
        k: p.shape for k, p in whole(tiny("llama")).named_parameters()
    }


def test_pass_through_gives_its_first_argument() -> None:
    x = torch.ones(2)
    assert PassThrough()(x, 1) is x
    assert PassThrough()(hidden_states=x) is x


# ---- which files it reads


def sharded(tiny: Tiny, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    folder = shutil.copytree(tiny("llama"), tmp_path / "sharded")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) > LAYERS
    return folder, weight_map


def files_of(weight_map: dict[str, str], *parts: str) -> set[str]:
    return {file for key, file in weight_map.items() if any(part in key for part in parts)}


@pytest.mark.parametrize(
    ("start", "end", "parts"),
    [
        (0, 2, ("embed_tokens.", "layers.0.", "layers.1.")),
        (2, 4, ("layers.2.", "layers.3.")),
        (4, 6, ("layers.4.", "layers.5.", "model.norm.", "lm_head.")),
    ],
)
@pytest.mark.parametrize("fate", ["garbage", "gone"])
def test_files_without_a_needed_tensor_are_not_opened(
    tiny: Tiny, tmp_path: Path, start: int, end: int, parts: tuple[str, ...], fate: str
) -> None:
    """M13: they may hold anything, or be missing."""
    folder, weight_map = sharded(tiny, tmp_path)
    foreign = set(weight_map.values()) - files_of(weight_map, *parts)
    assert foreign
    for file in foreign:
        (folder / file).unlink() if fate == "gone" else (folder / file).write_bytes(b"\xff" * 64)
    found = dict(load(folder, start, end).named_parameters())
    expected = dict(whole(tiny("llama")).named_parameters())
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        p.name for p in tiny("llama").iterdir() if fate == "garbage" or p.name not in foreign
    )


def test_a_missing_file_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder, weight_map = sharded(tiny, tmp_path)
    (file, *_) = sorted(files_of(weight_map, "layers.3."))
    (folder / file).unlink()
    message = refusal(folder, 2, 4)
    assert file in message
    assert "[2, 4)" in message
    assert str(folder) in message


def test_a_damaged_file_is_a_config_error(tiny: Tiny, tmp_path: Path) -> None:
    folder, weight_map = sharded(tiny, tmp_path)
    for file in files_of(weight_map, "layers.3."):
        (folder / file).write_bytes(b"\xff" * 64)
    assert str(folder) in refusal(folder, 2, 4)


def test_missing_weights_are_named_where_a_stage_needs_them(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("mistral"), tmp_path / "lacking")
    tensors = load_file(folder / "model.safetensors")
    gone = "model.layers.3.mlp.up_proj.weight"
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert gone in refusal(folder, 2, 4)
    load(folder, 0, 2)
    load(folder, 4, 6)


def test_weights_of_another_shape_are_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("mistral"), tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.3.mlp.up_proj.weight"
    tensors[key] = torch.zeros(7, 7)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert key in refusal(folder, 2, 4)


def test_a_folder_without_weights_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("mistral"), tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    assert str(folder) in refusal(folder, 0, 2)


def test_pickled_weights_are_not_loaded(tiny: Tiny, tmp_path: Path) -> None:
    """S05: a stage is built from safetensors or not at all."""
    folder = shutil.copytree(tiny("mistral"), tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert str(folder) in refusal(folder, 0, 2)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_tensor_belongs_to_a_stage_and_only_ends_share(tiny: Tiny, model_type: str) -> None:
    keys = list(whole(tiny(model_type)).state_dict())
    for tied in (True, False):
        of = [
            {k for k in keys if holds(k, FAMILIES[model_type], a, b, num_layers=LAYERS, tied=tied)}
            for a, b in ((0, 2), (2, 4), (4, 6))
        ]
        assert of[0] | of[1] | of[2] == set(keys)
        assert not of[1] & (of[0] | of[2])
        assert bool(of[0] & of[2]) == tied


# ---- what is refused


@pytest.mark.parametrize("model_type", ["mamba", "xglm", "ctrl"])
def test_a_model_of_another_family_is_refused_before_its_weights(tmp_path: Path, model_type: str) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    message = refusal(tmp_path, 0, 2)
    assert f"'{model_type}'" in message
    assert all(name in message for name in FAMILIES)


def test_a_stage_beyond_the_last_layer_is_refused(tiny: Tiny) -> None:
    assert "6 layers" in refusal(tiny("llama"), 4, 7)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "unheard_of", "rope_theta": 1e4}},
        {"hidden_act": "unheard_of"},
        {"rope_parameters": "x"},
        {"num_attention_heads": 0},
        {"vocab_size": -3},
    ],
    ids=str,
)
def test_a_configuration_that_no_model_can_be_built_of_is_one_line(
    tiny: Tiny, tmp_path: Path, change: dict[str, object]
) -> None:
    about = json.loads((tiny("llama") / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(about | change), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.path must have a config\.json of values") as refused:
        meta_model(tmp_path)
    assert "\n" not in str(refused.value)

"""Digests of base models: equal where the models are, different where one byte of what is looked at differs."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, MODEL_NAMES, Tiny
from safetensors.torch import load_file, save_file

from hetero.errors import ConfigError
from hetero.fingerprint import SAMPLE_BYTES, difference, fingerprint


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a small model, in one file."""
    return Path(shutil.copytree(tiny("llama_tied"), tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def changed_parts(folder: Path, before: dict[str, str]) -> set[str]:
    now = fingerprint(folder)
    return {part for part in now.keys() | before.keys() if now.get(part) != before.get(part)}


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(content), encoding="utf-8")


def with_header(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_layer_has_a_part_and_a_copy_has_the_same(name: str, tiny: Tiny, tmp_path: Path) -> None:
    found = fingerprint(tiny(name))
    prefix = "h" if name == "gpt2" else "layers"
    assert {f"{prefix}.{layer}" for layer in range(LAYERS)} | {"config"} <= found.keys()
    assert len(found) > LAYERS + 2  # embedding and final norm as well
    copy = shutil.copytree(tiny(name), tmp_path / "copy")
    assert fingerprint(copy) == found and difference(found, fingerprint(copy)) is None


def test_how_the_weights_are_cut_into_files_does_not_matter(folder: Path) -> None:
    before = fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for number in range(3):
        save_file({name: tensors[name] for name in names[number::3]}, folder / f"model-{number}.safetensors")
    assert fingerprint(folder) == before


def test_one_changed_number_shows_in_its_layer_alone(folder: Path) -> None:
    before = fingerprint(folder)
    rewrite(folder, lambda tensors: tensors["model.layers.3.self_attn.q_proj.weight"].view(-1)[0].add_(1e-3))
    assert changed_parts(folder, before) == {"layers.3"}
    text = difference(before, fingerprint(folder))
    assert text is not None and text.startswith("layers.3 has the digest ")
    assert before["layers.3"] in text and fingerprint(folder)["layers.3"] in text


@pytest.mark.parametrize("at", [0, SAMPLE_BYTES - 1, -SAMPLE_BYTES, -1])
def test_byte_at_each_edge_of_what_is_sampled_counts(folder: Path, at: int) -> None:
    save_file({"model.layers.0.w": torch.zeros(9000, dtype=torch.uint8)}, folder / "model.safetensors")
    before = fingerprint(folder)
    rewrite(folder, lambda tensors: tensors["model.layers.0.w"][at].fill_(1))
    assert changed_parts(folder, before) == {"layers.0"}


def test_middle_of_a_large_tensor_is_not_read(folder: Path) -> None:
    """As SECURITY.md says: mistakes are found, not forgeries."""
    save_file({"model.layers.0.w": torch.zeros(9000, dtype=torch.uint8)}, folder / "model.safetensors")
    before = fingerprint(folder)
    rewrite(folder, lambda tensors: tensors["model.layers.0.w"][SAMPLE_BYTES].fill_(1))
    assert fingerprint(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].view(-1, 2)}),
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].view(torch.int32)}),
        lambda t: t.pop("model.norm.weight"),
    ],
    ids=["shape", "dtype", "gone"],
)
def test_shape_and_dtype_count_though_the_bytes_are_the_same(folder: Path, change: Callable[..., object]) -> None:
    before = fingerprint(folder)
    rewrite(folder, change)
    assert changed_parts(folder, before) == {"model.norm.weight"}


def test_tensors_of_a_layer_that_change_their_names_show(folder: Path) -> None:
    before = fingerprint(folder)

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        one, other = (f"model.layers.2.mlp.{name}_proj.weight" for name in ("gate", "up"))
        tensors[one], tensors[other] = tensors[other], tensors[one]

    rewrite(folder, swap)
    assert changed_parts(folder, before) == {"layers.2"}


def test_configuration_counts_and_what_tools_write_for_themselves_does_not(folder: Path) -> None:
    before = fingerprint(folder)
    edit_json(folder / "config.json", transformers_version="0.0", _name_or_path="elsewhere", use_cache=False)
    assert fingerprint(folder) == before
    edit_json(folder / "config.json", rms_norm_eps=1e-3)
    assert changed_parts(folder, before) == {"config"}


def test_order_of_the_configuration_s_keys_does_not_matter(folder: Path) -> None:
    before = fingerprint(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7), encoding="utf-8")
    assert fingerprint(folder) == before


def test_tokenizer_counts_where_there_is_one(folder: Path) -> None:
    (folder / "tokenizer.json").unlink(missing_ok=True)
    before = fingerprint(folder)
    (folder / "tokenizer.json").write_bytes(b"{}")
    with_one = fingerprint(folder)
    (folder / "tokenizer.json").write_bytes(b"{ }")
    assert "tokenizer" not in before and difference(before, with_one) is None
    assert changed_parts(folder, with_one) == {"tokenizer"}


def test_machines_that_hold_different_layers_compare_what_both_hold(tiny: Tiny, tmp_path: Path) -> None:
    whole = fingerprint(tiny("llama_tied"))
    tensors = load_file(tiny("llama_tied") / "model.safetensors")
    parts = {"low": {0, 1, 2}, "middle": {2, 3}, "high": {3, 4, 5}}
    found = {}
    for name, layers in parts.items():
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(tiny("llama_tied") / "config.json", folder)
        own = {key: value for key, value in tensors.items() if any(f"layers.{layer}." in key for layer in layers)}
        if name == "high":
            own["model.layers.5.mlp.up_proj.weight"] += 1
        save_file(own, folder / "model.safetensors")
        found[name] = fingerprint(folder)
        assert found[name].keys() == {f"layers.{layer}" for layer in layers} | {"config"}
    assert difference(found["low"], found["high"]) is None and difference(found["middle"], found["high"]) is None
    assert difference(found["low"], whole) is None
    text = difference(whole, found["high"])
    assert text is not None and text.startswith("layers.5 has the digest ")


def test_quantized_or_pickled_files_beside_it_are_not_read(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    assert fingerprint(folder) == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        b"\x80\x04N.........",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        with_header(b"[]"),
        with_header(b"3"),
        with_header(b'{"a":1}'),
        with_header(b'{"a":{}}'),
        with_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-99,4]}}'),
        with_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,"x"]}}'),
        with_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[99,4]}}'),
        with_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}'),
        with_header(b'{"a":{"shape":[1],"data_offsets":[0,4]}}'),
        with_header(b'{"a":{"dtype":"F32","data_offsets":[0,4]}}'),
        with_header(b"[" * 60_000),
    ],
)
def test_what_is_no_safetensors_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors must be a safetensors file .*; copy it again"):
        fingerprint(folder)


def test_file_that_was_cut_off_is_named(folder: Path) -> None:
    raw = (folder / "model.safetensors").read_bytes()
    for content in (raw[: len(raw) // 2], raw[:-1], raw + b"x"):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"end at byte {len(raw)} and the file at byte {len(content)}\); copy"):
            fingerprint(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_damaged_configuration_is_named(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        fingerprint(folder)

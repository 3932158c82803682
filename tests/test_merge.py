"""An adapter out of what a run leaves, and base and adapter as one model."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from adapter_matrix import QV, load_elsewhere, probe, resolved
from conftest import Tiny
from pipeline import build_stages, make_spec
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hetero.adapter_files import (
    CONFIG_FILE,
    PART_FOLDER,
    PART_KEY,
    WEIGHTS_FILE,
    part_of_stage,
    read_adapter,
    save_adapter,
)
from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.errors import ConfigError
from hetero.fingerprint import fingerprint
from hetero.merge import RECORD, main, merge_adapter, merge_full
from hetero.merge_sources import find_source, find_stages
from hetero.resume_settings import about_of
from hetero.spec import AdapterSpec, RunSpec
from hetero.tensor_files import read_metadata
from hetero.training_state import as_state


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def values(shapes: Mapping[str, list[int]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {key: 0.3 * torch.randn(shape, generator=generator) for key, shape in sorted(shapes.items())}


def an_adapter(base: Path, folder: Path, spec: AdapterSpec = QV) -> dict[str, torch.Tensor]:
    whole = resolved(base, spec)
    tensors = values(whole.shapes)
    save_adapter(folder, whole, tensors)
    return tensors


# ---- base and adapter as one model


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_is_that_of_every_number(tiny: Tiny, tmp_path: Path, dtype: str) -> None:
    """The merged values are rounded once: they equal the fp32 merge, cast."""
    an_adapter(tiny("llama"), tmp_path / "adapter")
    source = find_source(tmp_path / "adapter", None)
    exact = merge_full(source, tmp_path / "exact", base=str(tiny("llama")))
    small = merge_full(source, tmp_path / "small", base=str(tiny("llama")), dtype=dtype)
    assert json.loads((small / "config.json").read_text())["dtype"] == dtype
    for file in exact.glob("*.safetensors"):
        there = load_file(small / file.name)
        for key, value in load_file(file).items():
            assert torch.equal(there[key], value.to(getattr(torch, dtype)))


def test_names_of_a_base_model_alone_are_found(tiny: Tiny, tmp_path: Path) -> None:
    """The hub's GPT-2 has `h.0.` where the model has `transformer.h.0.`."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_bytes((tiny("gpt2") / "config.json").read_bytes())
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(tiny("gpt2") / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    an_adapter(tiny("gpt2"), tmp_path / "adapter", AdapterSpec(r=4, alpha=8))
    source = find_source(tmp_path / "adapter", None)
    one = load_file(merge_full(source, tmp_path / "one", base=str(base)) / "model.safetensors")
    two = load_file(merge_full(source, tmp_path / "two", base=str(tiny("gpt2"))) / "model.safetensors")
    assert {f"transformer.{key}" for key in one} == set(two)
    assert all(torch.equal(value, two[f"transformer.{key}"]) for key, value in one.items())


def test_head_that_files_call_otherwise_is_merged_under_that_name(tiny: Tiny, tmp_path: Path) -> None:
    """Files of GPT-NeoX have `embed_out` where the model has `lm_head`."""
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((tiny("gpt_neox") / "config.json").read_text()) | {"tie_word_embeddings": False}
    (base / "config.json").write_text(json.dumps(config))
    tensors = load_file(tiny("gpt_neox") / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    head = torch.randn(tensors["gpt_neox.embed_in.weight"].shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors | {"embed_out.weight": head}, base / "model.safetensors", {"format": "pt"})
    an_adapter(base, tmp_path / "adapter", AdapterSpec(r=4, alpha=8, target_modules=["query_key_value", "lm_head"]))
    out = merge_full(find_source(tmp_path / "adapter", None), tmp_path / "out", base=str(base))
    merged = load_file(out / "model.safetensors")
    assert merged.keys() == load_file(base / "model.safetensors").keys()
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.lm_head.lora_{side}.weight"] for side in "AB")
    assert float((b @ a).abs().max()) > 0
    assert torch.allclose(merged["embed_out.weight"], head + 2 * (b @ a), atol=1e-6)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(model.lm_head.weight, merged["embed_out.weight"])


_PEAK = """
import sys, threading, time
from pathlib import Path
from hetero.merge import main
from hetero.merge_module import merge_module
from hetero.merge import find_source
import peft, transformers.models.llama.modeling_llama
def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024
main(["merge", sys.argv[1], "--full", "--out", sys.argv[2], "--base", sys.argv[3]])  # warms up
before, peak, done = anonymous(), [0], threading.Event()
def look():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=look)
thread.start()
main(["merge", sys.argv[4], "--full", "--out", sys.argv[5], "--base", sys.argv[6]])
done.set()
thread.join()
print(peak[0] - before)
"""


@pytest.mark.by_hand
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_full_merge_never_holds_the_model(tiny: Tiny, tmp_path: Path) -> None:
    """Working copies of its largest tensor, of which the model is 20 times as large, and no more."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=3584,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    base = tmp_path / "large"
    AutoModelForCausalLM.from_config(config).save_pretrained(base, max_shard_size="20MB")
    total = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    largest = 4 * 768 * 3584
    assert total > 20 * largest
    an_adapter(base, tmp_path / "adapter", AdapterSpec(r=4, alpha=8))
    an_adapter(tiny("llama"), tmp_path / "small")
    given = [tmp_path / "small", tmp_path / "warm", tiny("llama"), tmp_path / "adapter", tmp_path / "out", base]
    found = subprocess.run(
        [sys.executable, "-c", _PEAK, *map(str, given)], capture_output=True, text=True, timeout=240, check=True
    )
    peak = int(found.stdout.splitlines()[-1])
    assert peak < 9 * largest, peak / largest


# ---- 4 bits


def quantised(base: Path, folder: Path) -> Path:
    """A checkpoint of 4-bit values made from a base."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head"],
    )
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    model.save_pretrained(folder)
    return folder


def test_a_base_in_4_bits_is_merged_dequantised(tiny: Tiny, tmp_path: Path) -> None:
    """P08: the result is in 32 bits and computes what the adapter computes on the 4-bit base; said in the record."""
    import bitsandbytes
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = quantised(tiny("llama"), tmp_path / "nf4")
    an_adapter(tiny("llama"), tmp_path / "adapter")
    full = merge_full(find_source(tmp_path / "adapter", None), tmp_path / "full", base=str(base))
    assert "quantization_config" not in json.loads((full / "config.json").read_text())
    record = json.loads((full / RECORD).read_text())
    assert record["base_weights"] == "dequantised"
    assert "dequantised" in record["into"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, device_map={"": "cpu"})
    for module in model.modules():  # repacks its weights in place on some CPUs, and cannot use them afterwards
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    model = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = model(input_ids=probe()).logits
    logits, faults = load_elsewhere({"full": (full, None)}, tmp_path)
    assert not faults
    torch.testing.assert_close(logits["full"], expected, rtol=0, atol=2e-3)
    assert float(expected.abs().max()) > 1


def test_a_run_on_4_bits_is_merged_into_the_original_weights(tiny: Tiny, tmp_path: Path) -> None:
    """P08: said in the record and the card; equal to the merge of the same adapter without 4 bits."""
    base = str(tiny("llama"))
    an_adapter(tiny("llama"), tmp_path / "run" / "adapter")
    spec = make_spec(tiny("llama"), (2,), adapter=QV, quantizations=["none", "nf4"])
    (tmp_path / "run" / "run.json").write_text(json.dumps({"spec": msgspec.to_builtins(spec)}))
    source = find_source(tmp_path / "run", None)
    full = merge_full(source, tmp_path / "full", base=base)
    record = json.loads((full / RECORD).read_text())
    assert (record["base_weights"], record["trained_on"]) == ("original", ["nf4", "none"])
    assert "4 bits" in record["into"]
    assert record["into"] in (full / "README.md").read_text()
    plain = merge_full(find_source(tmp_path / "run" / "adapter", None), tmp_path / "plain", base=base)
    for file in full.glob("*.safetensors"):
        assert file.read_bytes() == (plain / file.name).read_bytes()


# ---- where an adapter is


def a_run(base: Path, run: Path, steps: tuple[int, ...] = (1, 2)) -> tuple[RunSpec, dict[int, dict[str, torch.Tensor]]]:
    """A run's folder with checkpoints of an adapter and no adapter/."""
    spec = make_spec(base, (2,), adapter=QV)
    shapes = resolved(base, QV).shapes
    store = CheckpointStore(run / "checkpoints", keep_last=2)
    given = {}
    for step in steps:
        given[step] = {key: value * step for key, value in values(shapes).items()}
        about = about_of(spec, "run1", run, {}, fingerprint(base), {})
        store.save(Snapshot(step, as_state(given[step]), about))
    (run / "run.json").write_text(
        json.dumps({"spec": msgspec.to_builtins(spec), "config": {"model": {"path": str(base)}}})
    )
    return spec, given


def test_an_adapter_is_taken_from_a_run_an_adapter_or_a_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    base = tiny("llama")
    _, given = a_run(base, tmp_path / "run")
    whole = resolved(base, QV)
    for number, (place, step) in enumerate([("run", 2), ("run/checkpoints", 2), ("run/checkpoints/step-00000001", 1)]):
        out = merge_adapter(find_source(tmp_path / place, None), tmp_path / f"out{number}")
        found = read_adapter(out, whole)
        assert all(torch.equal(value, given[step][key]) for key, value in found.items())
        assert json.loads((out / CONFIG_FILE).read_text())["inference_mode"] is True
    final = {key: value * 9 for key, value in given[2].items()}
    save_adapter(tmp_path / "run" / "adapter", whole, final)
    for number, place in enumerate(["run", "run/adapter"]):
        found = read_adapter(merge_adapter(find_source(tmp_path / place, None), tmp_path / f"final{number}"), whole)
        assert all(torch.equal(value, final[key]) for key, value in found.items())


def test_another_base_than_the_trained_one_is_refused_unless_asked_for(tiny: Tiny, tmp_path: Path) -> None:
    base = tmp_path / "llama"
    subprocess.run(["cp", "-r", str(tiny("llama")), str(base)], check=True)
    a_run(base, tmp_path / "run")
    file = next(iter(sorted(base.glob("*.safetensors"))))
    tensors = load_file(file)
    save_file({key: value + 1 for key, value in tensors.items()}, file, {"format": "pt"})
    source = find_source(tmp_path / "run", None)
    assert "trained on" in refusal(lambda: merge_full(source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    merge_full(source, tmp_path / "out", base=str(base))


# ---- the parts that stages kept


def parts(
    base: Path,
    root: Path,
    cuts: tuple[int, ...] = (2, 4),
    *,
    run: str = "run1",
    step: int = 3,
    quantizations: tuple[str, ...] | None = None,
) -> tuple[list[Path], dict[str, torch.Tensor]]:
    spec = make_spec(base, cuts, adapter=QV)
    said = make_spec(base, cuts, adapter=QV, quantizations=quantizations)
    tensors = values(resolved(base, QV).shapes)
    folders = []
    for index, stage in enumerate(build_stages(spec, base)):
        folder = root / f"worker-{index}" / PART_FOLDER
        own = {key: tensors[key] for key in stage.trained}
        assert stage.adapter is not None
        save_adapter(folder, stage.adapter, own, part_of_stage(said, index, run, step, fingerprint(base)))
        folders.append(folder)
    return folders, tensors


def test_parts_of_all_stages_make_the_adapter(tiny: Tiny, tmp_path: Path) -> None:
    """In any order, by the folder or the worker's; byte for byte what the run itself would have written."""
    folders, tensors = parts(tiny("llama"), tmp_path)
    out = merge_adapter(find_stages([folders[2], folders[0].parent, folders[1]]), tmp_path / "out")
    save_adapter(tmp_path / "whole", resolved(tiny("llama"), QV), tensors)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        ours, theirs = (out / name).read_bytes(), (tmp_path / "whole" / name).read_bytes()
        assert json.loads(ours) == json.loads(theirs) if name == CONFIG_FILE else ours == theirs


@pytest.mark.parametrize(
    ("left_out", "layer"), [(0, "layer 0 "), (1, "layer 2 "), (2, "layer 4 ")], ids=["first", "middle", "last"]
)
def test_a_gap_is_refused_by_its_layer(tiny: Tiny, tmp_path: Path, left_out: int, layer: str) -> None:
    folders, _ = parts(tiny("llama"), tmp_path)
    there = [folder for index, folder in enumerate(folders) if index != left_out]
    message = refusal(lambda: find_stages(there))
    assert layer in message
    assert "missing" in message
    assert str(tmp_path) in message


def test_an_overlap_is_refused_by_its_layer_and_files(tiny: Tiny, tmp_path: Path) -> None:
    folders, _ = parts(tiny("llama"), tmp_path / "a")
    others, _ = parts(tiny("llama"), tmp_path / "b", (1, 4))
    message = refusal(lambda: find_stages([folders[0], others[1], folders[2]]))
    assert "layer 1 " in message
    assert str(folders[0]) in message
    assert str(others[1]) in message
    assert "layer 0 " in refusal(lambda: find_stages([*folders, folders[0]]))


@pytest.mark.parametrize("other", [{"run": "run2"}, {"step": 4}])
def test_parts_of_another_run_or_step_are_never_mixed_in(tiny: Tiny, tmp_path: Path, other: dict[str, Any]) -> None:
    folders, _ = parts(tiny("llama"), tmp_path / "a")
    foreign, _ = parts(tiny("llama"), tmp_path / "b", **other)
    message = refusal(lambda: find_stages([folders[0], foreign[1], folders[2]]))
    assert next(iter(other)) in message
    assert str(foreign[1]) in message


def test_files_that_were_not_written_together_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    folders, _ = parts(tiny("llama"), tmp_path)
    config = folders[1] / CONFIG_FILE
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    message = refusal(lambda: find_stages(folders))
    assert str(config) in message
    save_adapter(folders[1], resolved(tiny("llama"), QV), {})
    assert "does not say" in refusal(lambda: find_stages(folders))


def test_a_part_is_not_taken_for_an_adapter(tiny: Tiny, tmp_path: Path) -> None:
    folders, _ = parts(tiny("llama"), tmp_path)
    assert "--stages" in refusal(lambda: find_source(folders[1], None))


def a_copy(base: Path, to: Path) -> Path:
    shutil.copytree(base, to)
    return to


def change_in_place(base: Path) -> None:
    file = next(iter(sorted(base.glob("*.safetensors"))))
    save_file({key: value + 1 for key, value in load_file(file).items()}, file, {"format": "pt"})


def test_a_full_merge_of_parts_says_that_the_run_was_in_4_bits(tiny: Tiny, tmp_path: Path) -> None:
    """Also through the adapter that a merge without --full makes of them."""
    base = str(tiny("llama"))
    folders, _ = parts(tiny("llama"), tmp_path, quantizations=("none", "nf4", "nf4"))
    merge_adapter(find_stages(folders), tmp_path / "adapter")
    for number, source in enumerate([find_stages(folders), find_source(tmp_path / "adapter", None)]):
        record = json.loads((merge_full(source, tmp_path / f"full{number}", base=base) / RECORD).read_text())
        assert record["trained_on"] == ["nf4", "none"]
        assert record["step"] == 3
        assert "4 bits" in record["into"]


def test_a_base_changed_in_place_is_found_by_what_stages_kept(tiny: Tiny, tmp_path: Path) -> None:
    """Of all stages, of a run without checkpoints, and of the adapter that a merge has made of parts."""
    base = a_copy(tiny("llama"), tmp_path / "base")
    folders, tensors = parts(base, tmp_path)
    whole = resolved(base, QV)
    whole.config.base_model_name_or_path = str(base)
    run = tmp_path / "worker-0"
    save_adapter(run / "adapter", whole, tensors)
    save_adapter(run / PART_FOLDER, whole, {}, part_of_stage(make_spec(base, adapter=QV), 0, "r", 3, fingerprint(base)))
    sources = [find_source(run, None)]
    shutil.rmtree(run / PART_FOLDER)
    parts(base, tmp_path)
    sources.append(find_stages(folders))
    merge_adapter(sources[1], tmp_path / "adapter")
    sources.append(find_source(tmp_path / "adapter", None))
    for source in sources:
        source.config["base_model_name_or_path"] = str(base)
    merge_full(sources[0], tmp_path / "before")
    change_in_place(base)
    for source in sources:
        assert "trained on" in refusal(lambda source=source: merge_full(source, tmp_path / "out"))
        assert not (tmp_path / "out").exists()


def test_a_base_that_cannot_be_compared_is_said(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of an adapter alone, and of parts that an older version kept, which can be read as before."""
    caplog.set_level(logging.INFO)
    base = str(tiny("llama"))
    folders, tensors = parts(tiny("llama"), tmp_path)
    merge_full(find_stages(folders), tmp_path / "new", base=base)
    assert "could not be compared" not in caplog.text
    for folder in folders:
        said = json.loads(read_metadata(folder / WEIGHTS_FILE)[PART_KEY])
        old = {key: said[key] for key in ("run", "step", "stage", "start", "end", "num_layers", "config")}
        tensors = load_file(folder / WEIGHTS_FILE)
        save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt", PART_KEY: json.dumps(old)})
    full = merge_full(find_stages(folders), tmp_path / "old", base=base)
    assert "could not be compared" in caplog.text
    assert json.loads((full / RECORD).read_text())["trained_on"] is None


@pytest.mark.parametrize("of", ["stages", "run"])
def test_a_tensor_that_the_run_recorded_and_that_is_gone_is_named(tiny: Tiny, tmp_path: Path, of: str) -> None:
    """Without the base, and where a layer still has other tensors."""
    folders, tensors = parts(tiny("llama"), tmp_path)
    save_adapter(tmp_path / "worker-0" / "adapter", resolved(tiny("llama"), QV), tensors)
    find_source(tmp_path / "worker-0", None)
    gone = "model.layers.3.self_attn.q_proj.lora_"
    folder = folders[1] if of == "stages" else tmp_path / "worker-0" / "adapter"
    metadata = read_metadata(folder / WEIGHTS_FILE)
    kept = {key: value for key, value in load_file(folder / WEIGHTS_FILE).items() if gone not in key}
    save_file(kept, folder / WEIGHTS_FILE, metadata)
    found = refusal(lambda: find_stages(folders) if of == "stages" else find_source(tmp_path / "worker-0", None))
    assert gone in found


# ---- what a user may get wrong


def run_main(capsys: pytest.CaptureFixture[str], *given: object) -> str:
    assert main(["merge", *map(str, given)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


def test_mistakes_are_one_line(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    an_adapter(tiny("llama"), adapter)
    (tmp_path / "empty").mkdir()
    assert "nowhere" in run_main(capsys, tmp_path / "nowhere", "--out", out)
    assert "empty" in run_main(capsys, tmp_path / "empty", "--out", out)
    assert "--base" in run_main(capsys, adapter, "--out", out, "--full")
    assert "--base" in run_main(capsys, adapter, "--out", out, "--full", "--base", tmp_path / "no_model")
    assert "empty" in run_main(capsys, adapter, "--out", tmp_path / "empty")
    assert "cannot be read" in run_main(capsys, *_damaged(tiny, tmp_path), "--out", out, "--full")
    assert not out.exists()
    assert main(["merge", str(adapter), "--out", str(out), "--full", "--base", str(tiny("llama"))]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert "is there" not in run_main(capsys, adapter, "--out", out)


def _damaged(tiny: Tiny, tmp_path: Path) -> tuple[object, ...]:
    an_adapter(tiny("llama"), tmp_path / "damaged")
    (tmp_path / "damaged" / WEIGHTS_FILE).write_bytes(b"x" * 99)
    return (tmp_path / "damaged",)


def test_an_adapter_of_another_model_is_refused_before_anything_is_written(tiny: Tiny, tmp_path: Path) -> None:
    an_adapter(tiny("llama"), tmp_path / "adapter", AdapterSpec(r=4, alpha=8))
    source = find_source(tmp_path / "adapter", None)
    for other in ("gpt2", "mistral"):
        if other == "mistral":  # same names: another width
            source.tensors = {k: v.repeat(1, 2) if "lora_A" in k else v for k, v in source.tensors.items()}
        assert "--base" in refusal(lambda other=other: merge_full(source, tmp_path / "out", base=str(tiny(other))))
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_a_bias_without_a_place_in_the_base_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    an_adapter(tiny("llama"), tmp_path / "adapter", msgspec.structs.replace(QV, lora_bias=True))
    source = find_source(tmp_path / "adapter", None)
    assert "lora_bias" in refusal(lambda: merge_full(source, tmp_path / "out", base=str(tiny("llama"))))


@pytest.mark.parametrize(
    ("model", "parameter", "reason"),
    [
        ("qwen3_moe", "mlp.experts.down_proj", "hold apart"),
        ("gpt_oss", "mlp.experts.down_proj", "in memory at once"),
        ("llama", "self_attn.v_proj.weight", "the weight of one module"),
    ],
)
def test_parameters_are_refused_for_the_reason_that_is_true(
    tiny: Tiny, tmp_path: Path, model: str, parameter: str, reason: str
) -> None:
    """Files hold experts apart, or as one large tensor; a dense weight is neither. The adapter alone is written."""
    base = tiny(model)
    an_adapter(base, tmp_path / "adapter", AdapterSpec(r=4, alpha=8, target_modules=[], target_parameters=[parameter]))
    source = find_source(tmp_path / "adapter", None)
    message = refusal(lambda: merge_full(source, tmp_path / "out", base=str(base)))
    assert "target_parameters" in message
    assert parameter in message
    assert reason in message
    assert [other for other in ("apart", "in memory at once", "one module") if other in message] == [
        other for other in ("apart", "in memory at once", "one module") if other in reason
    ]
    merge_adapter(source, tmp_path / "out", base=str(base))


def test_an_interrupted_merge_leaves_nothing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    an_adapter(tiny("llama"), tmp_path / "adapter")

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetero.full_merge.merge_module", fail)
    source = find_source(tmp_path / "adapter", None)
    with pytest.raises(KeyboardInterrupt):
        merge_full(source, tmp_path / "out", base=str(tiny("llama")))
    assert os.listdir(tmp_path) == ["adapter"]


# ---- weights and configuration that do not belong together


def _without_layer_3(folder: Path) -> str:
    _rewrite(folder, lambda key: ".layers.3." in key)
    return r"layers?[. ]3"


def _without_a_b(folder: Path) -> str:
    _rewrite(folder, lambda key: key.endswith("layers.2.self_attn.v_proj.lora_B.weight"))
    return "layers.2.self_attn.v_proj.lora_B.weight"


def _rewrite(folder: Path, leave_out: Callable[[str], bool]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file({k: v for k, v in tensors.items() if not leave_out(k)}, folder / WEIGHTS_FILE, {"format": "pt"})


def _configured(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | changes))


def _asks_for_dora(folder: Path) -> str:
    _configured(folder, use_dora=True)
    return "lora_magnitude_vector"


def _says_nothing_of_its_dora(folder: Path) -> str:
    shutil.copy(folder.with_name("dora") / WEIGHTS_FILE, folder)
    return "lora_magnitude_vector"


def _has_another_rank(folder: Path) -> str:
    _configured(folder, r=8)
    return "rank"


def _has_another_rank_by_pattern(folder: Path) -> str:
    _configured(folder, rank_pattern={"v_proj": 2})
    return "v_proj"


def _has_foreign_weights(folder: Path) -> str:
    save_file({"transformer.wte.weight": torch.zeros(3, 4)}, folder / WEIGHTS_FILE, {"format": "pt"})
    return "transformer.wte.weight"


def _has_weights_of_other_modules(folder: Path) -> str:
    shutil.copy(folder.with_name("other") / WEIGHTS_FILE, folder)
    return "mlp"


def _has_a_tensor_more(folder: Path) -> str:
    tensors = load_file(folder / WEIGHTS_FILE)
    more = "base_model.model.model.layers.0.mlp.weight"
    save_file(tensors | {more: torch.zeros(2)}, folder / WEIGHTS_FILE, {"format": "pt"})
    return "layers.0.mlp.weight"


def _asks_for_a_saved_module(folder: Path) -> str:
    _configured(folder, modules_to_save=["lm_head"])
    return "lm_head"


def _has_no_tensor(folder: Path) -> str:
    save_file({}, folder / WEIGHTS_FILE, {"format": "pt"})
    return "none"


APART = [
    _without_layer_3,
    _without_a_b,
    _asks_for_dora,
    _says_nothing_of_its_dora,
    _has_another_rank,
    _has_another_rank_by_pattern,
    _has_foreign_weights,
    _has_weights_of_other_modules,
    _has_a_tensor_more,
    _asks_for_a_saved_module,
    _has_no_tensor,
]


@pytest.mark.parametrize("how", ["full", "beside the base", "beside the run's record"])
@pytest.mark.parametrize("spoil", APART, ids=lambda spoil: spoil.__name__)
def test_weights_and_configuration_that_do_not_belong_together_are_refused(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, spoil: Callable[[Path], str]
) -> None:
    base, folder = tiny("llama"), tmp_path / "run" / "adapter"
    an_adapter(base, folder)
    an_adapter(base, folder.with_name("dora"), msgspec.structs.replace(QV, use_dora=True))
    an_adapter(base, folder.with_name("other"), AdapterSpec(r=4, alpha=8, target_modules=["up_proj", "down_proj"]))
    spec = make_spec(base, (2,), adapter=QV)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"spec": msgspec.to_builtins(spec)}))
    more = {"full": ["--full", "--base", base], "beside the base": ["--base", base]}.get(how, [])
    assert main(["merge", *map(str, [tmp_path / "run", "--out", tmp_path / "before", *more])]) == 0
    named = spoil(folder)
    line = run_main(capsys, tmp_path / "run", "--out", tmp_path / "out", *more)
    assert re.search(named, line), line
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_depth_is_refused_where_the_base_that_it_names_is_here(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --base, --full or a record: by the configuration that lies there; nothing is asked for elsewhere."""
    an_adapter(tiny("llama"), tmp_path / "adapter")
    _configured(tmp_path / "adapter", base_model_name_or_path=str(tiny("llama")))
    _rewrite(tmp_path / "adapter", lambda key: ".layers.5." in key)
    assert "layers.5." in run_main(capsys, tmp_path / "adapter", "--out", tmp_path / "out")


def test_what_could_not_be_compared_is_said(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    an_adapter(tiny("llama"), tmp_path / "adapter")
    _rewrite(tmp_path / "adapter", lambda key: ".layers.5." in key)
    assert main(["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "out")]) == 0
    assert "--base PATH compares it" in caplog.text


# ---- the place that it is written to


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
@pytest.mark.parametrize("full", [[], ["--full"]], ids=["adapter", "full"])
def test_a_place_where_no_folder_can_be_made_is_one_line(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], full: list[str]
) -> None:
    an_adapter(tiny("llama"), tmp_path / "adapter")
    line = run_main(capsys, tmp_path / "adapter", "--out", "/proc/x", "--base", tiny("llama"), *full)
    assert "/proc must be writable" in line
    assert "GB" not in line


@contextmanager
def limits(umask: str, most: int = resource.RLIM_INFINITY) -> Iterator[None]:
    """A umask and the largest file that this process may write."""
    before, (soft, hard) = os.umask(int(umask, 8)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.umask(before)


@pytest.mark.parametrize("full", [[], ["--full"]], ids=["adapter", "full"])
def test_files_larger_than_may_be_are_one_line(
    tiny: Tiny, tmp_path: Path, full: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As on FAT, or with ulimit -f; nothing is left."""
    an_adapter(tiny("llama"), tmp_path / "adapter")
    given = [tmp_path / "adapter", "--out", tmp_path / "out", "--base", tiny("llama"), *full]
    with limits("022", 4000):
        assert main(["merge", *map(str, given)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert re.fullmatch("error: .* must be writable .*File too large.*", lines[-1])
    assert os.listdir(tmp_path) == ["adapter"]


@pytest.mark.parametrize("umask", ["022", "007", "077"])
def test_a_merged_folder_is_open_to_whom_the_umask_says(tiny: Tiny, tmp_path: Path, umask: str) -> None:
    an_adapter(tiny("llama"), tmp_path / "adapter")
    for name, full in (("out", []), ("full", ["--full"])):
        given = [tmp_path / "adapter", "--base", tiny("llama"), "--out", tmp_path / name, *full]
        with limits(umask):
            assert main(["merge", *map(str, given)]) == 0
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o777 & ~int(umask, 8)
        modes = {file.stat().st_mode & 0o777 for file in (tmp_path / name).iterdir()}
        assert modes == {0o666 & ~int(umask, 8)}


def test_a_saved_adapter_is_open_to_whom_its_configuration_is(tiny: Tiny, tmp_path: Path) -> None:
    an_adapter(tiny("llama"), tmp_path / "adapter")
    assert len({file.stat().st_mode for file in (tmp_path / "adapter").iterdir()}) == 1

"""Layers of Llama-8B's real sizes with random weights: what loading and training take, and that the plans run.

Needs 4 GB of disk, 6 GB of memory and some minutes, so it is run by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import REPO, environment, losses, metrics, run, write_jsonl
from safetensors.torch import save_file

from hetero.config import SHAPES_DIR

pytestmark = pytest.mark.by_hand

LAYERS = 4
MIB = 1 << 20

# One stage in a process that has done everything once with a small model, so that only the stage itself is counted.
STAGE = """
import json, sys, threading, time
from pathlib import Path
import torch
from hetero import device, models
from hetero.spec import RunSpec
from hetero.stage import build_stage

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.before, self.peak, self.over = anonymous(), 0, False
    def run(self):
        while not self.over:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.002)
    def end(self):
        self.over = True
        self.join()
        return max(self.peak, anonymous()) - self.before

def step(stage, length, hidden, vocab):
    batch = {"labels": torch.arange(length).remainder(vocab).unsqueeze(0)}
    if stage.is_first:
        batch["input_ids"] = batch["labels"]
    else:
        batch["hidden"] = torch.randn(1, length, hidden, dtype=stage.dtype)
    stage.forward(1, 0, batch, length - 1)
    grad = None if stage.is_last else torch.randn(1, length, hidden, dtype=stage.dtype)
    stage.backward(0, grad)
    return float(stage.squared_norms().sum())

small, big, index, length = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def spec_of(folder):
    return RunSpec.from_json((Path(folder) / "spec.json").read_bytes())
spec = spec_of(small)
step(build_stage(spec, index, Path(small), device.resolve("cpu")), 16, spec.hidden_size, spec.vocab_size)
spec = spec_of(big)
loading, began = Peak(), time.monotonic()
loading.start()
stage = build_stage(spec, index, Path(big), device.resolve("cpu"))
seconds, loaded = time.monotonic() - began, loading.end()
held = {t.data_ptr(): t.numel() * t.element_size() for t in stage.model.state_dict().values()}
training, began = Peak(), time.monotonic()
training.start()
norm = step(stage, length, spec.hidden_size, spec.vocab_size)
print(json.dumps({
    "held": sum(held.values()), "loading": loaded, "load_s": seconds, "after": anonymous() - loading.before,
    "training": training.end(), "step_s": time.monotonic() - began, "norm": norm,
}))
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four random layers in bf16 with embedding, norm and head, a file for each; removed afterwards."""
    folder = tmp_path_factory.mktemp("big") / "big-llama"
    make_big(folder)
    yield folder
    for file in folder.iterdir():
        file.unlink()


def make_big(folder: Path) -> None:
    """Writes the model file by file, so that never more than one is in memory."""
    config = json.loads((SHAPES_DIR / "meta-llama--Llama-3.1-8B-Instruct.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = LAYERS
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    narrow = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    linear = {"q": (hidden, hidden), "k": (narrow, hidden), "v": (narrow, hidden), "o": (hidden, hidden)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    parts: list[dict[str, tuple[int, ...]]] = [{"model.embed_tokens.weight": (vocab, hidden)}]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        part: dict[str, tuple[int, ...]] = {f"{at}.self_attn.{n}_proj.weight": shape for n, shape in linear.items()}
        part |= {f"{at}.mlp.{n}_proj.weight": shape for n, shape in mlp.items()}
        part |= {f"{at}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        parts.append(part)
    parts.append({"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)})
    folder.mkdir()
    weight_map, generator = {}, torch.Generator().manual_seed(7)
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors = {
            key: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for key, shape in part.items()
        }
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_spec(folder: Path, cuts: tuple[int, ...], quantization: str) -> None:
    from pipeline import make_spec

    from hetero.spec import AdapterSpec

    count = len(cuts) + 1
    adapter = AdapterSpec(r=16, alpha=32, target_modules="auto")
    spec = make_spec(folder, cuts, adapter=adapter, dtypes=["bfloat16"] * count, quantizations=[quantization] * count)
    (folder / "spec.json").write_bytes(spec.to_json())


@pytest.mark.parametrize("quantization", ["nf4", "none"])
@pytest.mark.parametrize("index", range(3))
def test_loading_takes_the_stage_the_largest_tensor_and_little_more(
    big: Path, tiny: Any, tmp_path: Path, index: int, quantization: str
) -> None:
    """Anonymous memory over a process that has warmed up; weights in the file's own numbers stay in the page cache."""
    import shutil

    small = shutil.copytree(tiny("llama"), tmp_path / "small")
    write_spec(small, (1, 2), quantization)
    write_spec(big, (1, 3), quantization)
    command = [sys.executable, "-c", STAGE, str(small), str(big), str(index), "128"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        f"stage {index} {quantization}:", {k: round(v / MIB, 1) if v > MIB else round(v, 2) for k, v in found.items()}
    )
    largest = (14336 if index == 1 else 128256) * 4096 * 2
    assert found["loading"] <= found["held"] + largest + 96 * MIB
    assert found["training"] <= 400 * MIB  # 16-bit matrices of the backward do not pile up
    assert 0 < found["norm"] < float("inf")


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_plan_of_two_machines_trains_layers_of_the_real_size(big: Path, tmp_path: Path, quantization: str) -> None:
    """`shard_plan=llama8b_2stage` brings model and adapter; four layers in place of 32."""
    rows = [
        {"input_ids": [128000, *range(row, row + 60)], "labels": [128000, *range(row, row + 60)]} for row in (5, 900)
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    plan = "[{id: local, start: 0, end: 2}, {id: pc, start: 2, end: 4}]"
    where = [f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"]
    args = ["shard_plan=llama8b_2stage", f"shard_plan.stages={plan}", f"model.path={big}", "data=jsonl"]
    args += [f"data.path={data}", "loop.steps=2", "loop.batch_size=2", "checkpoint=none"]
    args += [f"model.quantization={quantization}"]
    outcome = run("train", *args, *where, timeout_s=600)
    assert outcome.code == 0, outcome.text
    print(outcome.text)
    found = losses(metrics(tmp_path / "run"))
    assert len(found) == 2 and all(11 < loss < 13 for loss in found)  # random weights: about log(128256) = 11.8
    adapter = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["r"] == 16

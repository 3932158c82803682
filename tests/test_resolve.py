"""From a composed configuration to the run that it asks for, without torch, weights or a worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import REPO, composed

from hetero.config import SHAPES_DIR
from hetero.errors import ConfigError
from hetero.resolve import ResolvedRun, resolve
from hetero.spec import RunSpec


def resolved(*overrides: str, for_drawing: bool = False) -> ResolvedRun:
    return resolve(composed(*overrides), shapes_dir=SHAPES_DIR, for_drawing=for_drawing)


def spec(*overrides: str) -> RunSpec:
    return resolved(*overrides).spec(total_steps=5)


def test_every_machine_can_rebuild_the_spec_from_its_json() -> None:
    made = spec("shard_plan=split", "shard_plan.split_points=[1,4]", "adapter.rank_pattern={q_proj: 2}")
    again = RunSpec.from_json(made.to_json())
    assert again == made and again.digest() == made.digest()
    assert spec("seed=1").digest() != spec().digest()


def test_spec_says_explicitly_what_the_configuration_leaves_open() -> None:
    made = spec()
    assert made.optimizer.args["lr"] == 3e-3 and made.adapter.modules_to_save == ["embed_tokens", "lm_head"]
    assert [(s.id, s.start, s.end, s.dtype) for s in made.stages] == [
        ("local", 0, 3, "float32"),
        ("local-1", 3, 6, "float32"),
    ]
    assert made.total_steps == 5 and made.max_length == 128 and made.boundary_dtypes == ["float32"]
    assert (made.num_hidden_layers, made.hidden_size, made.vocab_size) == (6, 128, 260)


def test_pretrained_model_gets_the_usual_learning_rate_and_trains_no_embedding(tiny: Callable[[str], Path]) -> None:
    made = spec(f"model.path={tiny('gpt2')}")
    assert made.optimizer.args["lr"] == 2e-4 and made.adapter.modules_to_save is None
    assert spec(f"model.path={tiny('gpt2')}", "optimizer.lr=0.5").optimizer.args["lr"] == 0.5


def test_local_folder_travels_as_its_name_alone(tiny: Callable[[str], Path]) -> None:
    made = spec(f"model.path={tiny('llama')}")
    assert made.local_model and made.model.path == "llama"
    assert str(tiny("llama").parent).encode() not in made.to_json()
    assert not spec().local_model and spec().model.path == "tiny"


def test_path_of_the_first_adapter_does_not_travel(tmp_path: Path) -> None:
    made = spec(f"adapter.init_from={tmp_path}")
    assert made.adapter.init_from is None and str(tmp_path).encode() not in made.to_json()


@pytest.mark.parametrize(("wire", "dtypes"), [("auto", ["bfloat16", "float32"]), ("float16", ["float16", "float16"])])
def test_boundary_has_the_senders_dtype_or_the_configured_one(wire: str, dtypes: list[str]) -> None:
    stages = "[{id: local, start: 0, end: 2, dtype: bfloat16}, {id: b, start: 2, end: 4}, {id: c, start: 4, end: 6}]"
    plan = [f"shard_plan.stages={stages}", "shard_plan.num_stages=null"]
    assert spec(*plan, f"transport.wire_dtype={wire}").boundary_dtypes == dtypes


def test_longest_row_is_what_is_asked_for_or_what_the_model_takes(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.touch()
    rows = ["data=jsonl", f"data.path={file}"]
    assert spec(*rows).max_length == 512
    assert spec(*rows, "data.max_length=9").max_length == 9
    assert spec(*rows, f"model.path={tiny('llama')}").max_length == 256
    with pytest.raises(ConfigError, match=r"data\.max_length must be at most 256 .* got 257"):
        spec(*rows, f"model.path={tiny('llama')}", "data.max_length=257")


def test_longest_row_of_a_model_with_a_long_context_is_1024_tokens_unless_asked_for() -> None:
    run = resolved("shard_plan=llama8b_3stage", "data.max_length=null", for_drawing=True)
    assert run.facts.max_position_embeddings > run.max_length == 1024


def test_frame_that_a_micro_batch_does_not_fit_in_is_refused_before_the_run() -> None:
    too_small = ["transport.max_frame_bytes=65536", "loop.microbatch_size=4", "data.max_length=128"]
    with pytest.raises(ConfigError, match=r"transport\.max_frame_bytes must hold a micro-batch \(262144 bytes"):
        spec(*too_small)
    spec(*too_small, "transport.max_frame_bytes=262144")


def test_row_length_that_follows_from_the_model_counts_for_the_frame_as_well(tmp_path: Path) -> None:
    """Without data.max_length a row has up to 512 tokens: 4 x 512 x 128 x 4 bytes."""
    file = tmp_path / "rows.jsonl"
    file.touch()
    rows = ["data=jsonl", f"data.path={file}", "loop.microbatch_size=4"]
    with pytest.raises(ConfigError, match=r"transport\.max_frame_bytes must hold a micro-batch \(1048576 bytes"):
        spec(*rows, "transport.max_frame_bytes=1048575")


def test_drawing_needs_neither_hosts_nor_data() -> None:
    overrides = ["hardware=mac_and_pc", "data=jsonl", "loop.steps=null"]
    assert len(resolved(*overrides, for_drawing=True).stages) == 2
    with pytest.raises(ConfigError):
        resolved(*overrides)


def test_known_model_is_resolved_from_its_shape_without_weights() -> None:
    run = resolved("shard_plan=llama8b_3stage", "hardware=mac_and_two_pcs", for_drawing=True)
    assert run.facts.num_hidden_layers == 32 and run.facts.hidden_size == 4096
    assert [(s.quantization, s.dtype) for s in run.stages] == [("nf4", "bfloat16")] * 3


def test_resolving_a_plan_imports_no_heavy_package() -> None:
    code = """
import sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from hetero.config import CONF_DIR, SHAPES_DIR
from hetero.resolve import resolve
with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
    cfg = compose("config", ["shard_plan=llama8b_3stage", "hardware=mac_and_two_pcs", "outputs=o"])
resolve(OmegaConf.to_container(cfg, resolve=True), shapes_dir=SHAPES_DIR, for_drawing=True)
print(sorted({"torch", "transformers", "peft", "datasets", "bitsandbytes"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_machines_that_take_over_layers_hold_them_in_their_own_numbers() -> None:
    """The small one stays in 4 bits when the plan is made anew."""
    workers = "hardware.workers=[{id: small, host: a.lan}, {id: gone, host: b.lan}, {id: big, host: c.lan}]"
    stages = [
        f"{{id: {name}, start: {i}, end: {i + 1}, {more}}}"
        for i, (name, more) in enumerate(
            [("local", "dtype: bfloat16"), ("small", "quantization: nf4"), ("gone", "quantization: nf4")]
        )
    ]
    plan = f"+shard_plan.stages=[{', '.join(stages)}, {{id: big, start: 3, end: 6}}]"
    before = resolved(workers, "hardware.launch=none", "shard_plan=even", "shard_plan.num_stages=null", plan)
    after = before.evenly_over([before.workers[0], before.workers[2]])
    assert [(s.id, s.start, s.end, s.dtype, s.quantization) for s in after.stages] == [
        ("local", 0, 2, "bfloat16", "none"),
        ("small", 2, 4, "float32", "nf4"),
        ("big", 4, 6, "float32", "none"),
    ]

"""The memory figures against what real stages hold, a published formula, and a worker's process (case P05)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from big_layers import make_big_layers
from choosing import mostly_by_hand
from conftest import EXPERT_NAMES, MODEL_NAMES, Tiny
from processes import composed

from hetero.config import CONF_DIR, SHAPES_DIR
from hetero.device import resolve as resolve_device
from hetero.errors import ConfigError
from hetero.fake_run import Allocations
from hetero.folders import fetched_folder
from hetero.memory import RUNTIME_BYTES, RunMemory, memory_of, nf4_bytes, optimizer_bytes
from hetero.resolve import ResolvedRun, resolve
from hetero.spec import ObjectSpec
from hetero.stage import Stage, build_stage

ALL_LINEAR = ["adapter.target_modules=all-linear", "adapter.r=4", "shard_plan=split", "shard_plan.split_points=[2,4]"]
ONE_ROW = ["loop.microbatch_size=1", "data.max_length=32"]
TWO_ROWS = ["loop.microbatch_size=2", "data.max_length=32"]
BF16, FP32 = ["model.dtype=bfloat16"], ["model.dtype=float32"]
NF4 = [*BF16, "model.quantization=nf4"]


def planned(*overrides: str) -> tuple[ResolvedRun, RunMemory]:
    resolved = resolve(composed(*overrides), shapes_dir=SHAPES_DIR, for_drawing=True)
    return resolved, memory_of(resolved, SHAPES_DIR)


def batch_of(stage: Stage, resolved: ResolvedRun, rows: int, length: int) -> dict[str, torch.Tensor]:
    """A micro-batch in which all tokens are labels; of two rows the first is shorter."""
    draw = torch.Generator().manual_seed(0)
    batch = {"labels": torch.randint(3, resolved.facts.vocab_size, (rows, length), generator=draw)}
    if stage.is_first:
        batch["input_ids"] = batch["labels"]
    else:
        batch["hidden"] = torch.randn(rows, length, resolved.facts.hidden_size, generator=draw).to(stage.dtype)
    if rows > 1:
        batch["attention_mask"] = torch.ones(rows, length, dtype=torch.bool)
        batch["attention_mask"][0, -1] = False
        batch["position_ids"] = torch.arange(length).expand(rows, length)
    return batch


def really_kept(stage: Stage, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the storages that autograd saves in a forward, with the stage's leaf and output; weights excluded."""
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stage.forward(1, 0, batch, batch["labels"].numel())
    in_flight = stage._in_flight[0]
    for tensor in (in_flight.hidden_in, in_flight.out):
        if tensor is not None:
            note(tensor)
    own = [*stage.model.parameters(), *stage.model.buffers()]
    return sum(found.values()) - sum(found.pop(t.untyped_storage().data_ptr(), 0) for t in own)


# ---- activations


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", ONE_ROW), ("bfloat16", TWO_ROWS)], ids=["float32_one_row", "bfloat16_padded"]
)
@pytest.mark.parametrize("name", mostly_by_hand(MODEL_NAMES, ["llama", "gpt2"]))
def test_what_a_micro_batch_holds_is_what_autograd_saves(tiny: Tiny, name: str, dtype: str, shape: list[str]) -> None:
    """Every family, without a mask and with one, on the first, a middle and the last stage."""
    resolved, memory = planned(f"model.path={tiny(name)}", f"model.dtype={dtype}", *ALL_LINEAR, *shape)
    spec = resolved.spec(total_steps=1)
    for index, figures in enumerate(memory.stages):
        stage = build_stage(spec, index, tiny(name), resolve_device("cpu"))
        batch = batch_of(stage, resolved, memory.shape.rows, memory.shape.length)
        assert figures.per_micro_batch == pytest.approx(really_kept(stage, batch), rel=0.02), index


@pytest.mark.parametrize("name", mostly_by_hand(EXPERT_NAMES, ["mixtral", "qwen3_next"]))
def test_router_loss_holds_what_autograd_saves_besides(tiny: Tiny, name: str) -> None:
    run = [f"model.path={tiny(name)}", "shard_plan=split", "shard_plan.split_points=[2,4]", *ONE_ROW]
    resolved, memory = planned(*run, "model.router_aux_loss=on")
    assert resolved.spec(total_steps=1).router_loss is not None
    without = planned(*run)[1]
    for index, figures in enumerate(memory.stages):
        stage = build_stage(resolved.spec(total_steps=1), index, tiny(name), resolve_device("cpu"))
        assert stage.router is not None
        stage.router.begin_step(32)
        batch = batch_of(stage, resolved, memory.shape.rows, memory.shape.length)
        if index:
            count = resolved.spec(total_steps=1).router_loss.num_experts  # type: ignore[union-attr]
            sums = {"router_tokens": torch.zeros(count), "router_probs": torch.zeros(count)}
            batch |= sums | {"router_rows": torch.ones(1)}
        assert figures.per_micro_batch == pytest.approx(really_kept(stage, batch), rel=0.02), index
        assert figures.per_micro_batch > without.stages[index].per_micro_batch
    assert memory.links[0].forward > without.links[0].forward and memory.links[0].backward > without.links[0].backward


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_rows_hold_the_mask_that_keeps_their_documents_apart(tiny: Tiny, implementation: str) -> None:
    run = [f"model.path={tiny('llama')}", *ALL_LINEAR, *TWO_ROWS, f"model.attn_implementation={implementation}"]
    resolved, memory = planned(*run, "data=jsonl", "data.path=/no/such/file", "data.packing=true")
    for index, figures in enumerate(memory.stages):
        stage = build_stage(resolved.spec(total_steps=1), index, tiny("llama"), resolve_device("cpu"))
        batch = batch_of(stage, resolved, memory.shape.rows, memory.shape.length)
        del batch["attention_mask"]
        batch["position_ids"] = torch.arange(32).remainder(11).expand(2, 32)  # three documents
        assert figures.per_micro_batch == pytest.approx(really_kept(stage, batch), rel=0.02), index


def test_recomputation_holds_a_layers_input_alone(tiny: Tiny) -> None:
    run = [f"model.path={tiny('llama')}", *ALL_LINEAR, *ONE_ROW]
    whole, spared = planned(*run)[1].stages[1], planned(*run, "loop.recompute=layer")[1].stages[1]
    hidden = 32 * 32 * 4  # T, H, float32
    assert 3 * hidden <= spared.per_micro_batch <= 4 * hidden  # two layers' inputs, the output, and rotary tables
    assert spared.layer_work > whole.layer_work + (whole.per_micro_batch - 2 * hidden) // 2 * 0.9


def test_layers_before_the_first_that_trains_keep_nothing(tiny: Tiny) -> None:
    run = [f"model.path={tiny('llama')}", *ALL_LINEAR, *ONE_ROW, "adapter.target_modules=[q_proj,down_proj]"]
    _, some = planned(*run, "adapter.layers_to_transform=[2,3]")
    hidden = 32 * 32 * 4
    assert some.stages[0].per_micro_batch == pytest.approx(hidden, abs=64) and some.stages[0].trained == 0
    assert some.stages[1].per_micro_batch == planned(*run)[1].stages[1].per_micro_batch


def test_policy_bounds_what_is_in_flight() -> None:
    run = ["shard_plan=even", "shard_plan.num_stages=3", "loop.batch_size=16"]
    assert [stage.in_flight for stage in planned(*run)[1].stages] == [5, 3, 1]
    assert [stage.in_flight for stage in planned(*run, "schedule=gpipe")[1].stages] == [8, 8, 8]
    assert [stage.in_flight for stage in planned(*run, "schedule.max_in_flight=2")[1].stages] == [2, 2, 1]


# ---- weights, adapter, optimizer


@pytest.mark.parametrize("name", mostly_by_hand(MODEL_NAMES, ["llama", "llama_tied", "gpt2"]))
def test_weights_and_adapter_are_those_of_the_loaded_stages(tiny: Tiny, name: str) -> None:
    resolved, memory = planned(f"model.path={tiny(name)}", *ALL_LINEAR, *ONE_ROW)
    spec = resolved.spec(total_steps=1)
    for index, figures in enumerate(memory.stages):
        stage = build_stage(spec, index, tiny(name), resolve_device("cpu"))
        trained = {id(parameter): parameter for parameter in stage.trained.values()}
        frozen = {id(parameter): parameter for parameter in stage.model.parameters()}.keys() - trained.keys()
        frozen_bytes = sum(p.nbytes for p in stage.model.parameters() if id(p) in frozen)
        assert sum(figures.weights.values()) == frozen_bytes
        assert figures.adapter == figures.gradients == sum(p.nbytes for p in trained.values())
        assert figures.optimizer == pytest.approx(2 * figures.adapter, abs=8 * len(trained))


@pytest.mark.parametrize(
    "name",
    mostly_by_hand([*MODEL_NAMES, *EXPERT_NAMES, "deepseek_v3"], ["llama", "gpt2", "mixtral", "gpt_oss"]),
)
def test_weights_in_4_bits_are_those_of_the_loaded_stage(tiny: Tiny, name: str) -> None:
    """Linear modules alone: routed experts are 3-D tensors, and stay in the stage's own numbers."""
    pytest.importorskip("bitsandbytes")
    run = [f"model.path={tiny(name)}", "shard_plan=split", "shard_plan.split_points=[4]", *ONE_ROW]
    resolved, memory = planned(*run, *NF4)
    stage = build_stage(resolved.spec(total_steps=1), 1, tiny(name), resolve_device("cpu"))
    trained = {id(parameter) for parameter in stage.trained.values()}
    found = {"nf4": 0, "bfloat16": 0}
    for parameter in stage.model.parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            parts = [parameter, state.absmax, state.code, state.state2.absmax, state.state2.code, state.offset]
            found["nf4"] += sum(part.nbytes for part in parts)
        elif id(parameter) not in trained:
            found["bfloat16"] += parameter.numel() * 2
    assert memory.stages[1].weights == found


def test_nf4_takes_what_bitsandbytes_takes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for shape in [(64, 48), (192, 576), (576, 1536)]:
        packed, state = functional.quantize_4bit(torch.randn(shape), compress_statistics=True, quant_type="nf4")
        parts = [packed, state.absmax, state.code, state.state2.absmax, state.state2.code, state.offset]
        assert sum(part.nbytes for part in parts) == nf4_bytes(shape[0] * shape[1])


def test_known_model_has_the_published_sizes() -> None:
    """Llama 8B: 218.1 M parameters a layer, 525.3 M in the head, 41.9 M of LoRA with rank 16, 4.127 bits in nf4."""
    _, memory = planned("shard_plan=llama8b_2stage", "hardware=mac_and_pc", "data.max_length=512")
    layers = (14, 18)
    for stage, count in zip(memory.stages, layers, strict=True):
        assert stage.parameters == pytest.approx(count * 218.1e6 + 525.3e6, rel=1e-3)
        assert stage.weights["nf4"] == pytest.approx(count * 218.1e6 * 4.127 / 8, rel=1e-3)
        assert stage.weights["bfloat16"] == pytest.approx(2 * 525.3e6, rel=1e-3)
        assert stage.adapter + stage.gradients + stage.optimizer == pytest.approx(16 * count * 41.9e6 / 32, rel=0.01)
        parts = sum(stage.weights.values()) + stage.adapter + stage.gradients + stage.optimizer
        parts += (
            stage.copies
            + stage.objects
            + stage.in_flight * stage.per_micro_batch
            + max(stage.layer_work, stage.logits)
            + stage.link_buffers
        )
        assert stage.total == RUNTIME_BYTES + parts
    # The Mac's memory is its GPU's: the start's values, and a checkpoint of all stages on its way to the disk.
    _, other = planned("shard_plan=llama8b_2stage", "hardware=mac_and_pc", "+shard_plan.stages.1.device=cuda")
    mac, card = other.stages
    start, states = mac.adapter, 3 * (mac.adapter + card.adapter)
    assert mac.copies == pytest.approx(start + states, rel=1e-3) and (card.copies, card.objects) == (0, 0)
    _, bare = planned("shard_plan=llama8b_2stage", "hardware=mac_and_pc", "checkpoint=none")
    assert bare.stages[0].copies == start
    _, spared = planned(
        "shard_plan=llama8b_2stage", "hardware=mac_and_pc", "data.max_length=512", "loop.recompute=layer"
    )
    tokens = 2 * 512
    assert spared.stages[0].per_micro_batch == pytest.approx((14 + 1) * 8192 * tokens, rel=0.05)  # 8.2 KB a layer


@pytest.mark.parametrize(
    ("target", "args", "states"),
    [
        ("hetero.optim.adamw", {"lr": 1e-3}, 2),
        ("hetero.optim.sgd", {"lr": 1e-3}, 0),
        ("hetero.optim.sgd", {"lr": 1e-3, "momentum": 0.9}, 1),
    ],
)
def test_optimizer_state_is_that_of_the_optimizer(target: str, args: dict[str, Any], states: int) -> None:
    found = optimizer_bytes(ObjectSpec(target, args), [(torch.Size([16, 100]), torch.float32)] * 3, [])
    assert found == pytest.approx(states * 3 * 1600 * 4, abs=64)


# ---- links


def test_links_carry_hidden_states_and_gradients_of_the_whole_step() -> None:
    _, memory = planned("shard_plan=llama8b_3stage", "hardware=mac_and_two_pcs", *ONE_ROW)
    tokens = 8 * 32
    assert [link.backward for link in memory.links] == [tokens * 4096 * 2] * 2
    assert [link.forward for link in memory.links] == [tokens * (4096 * 2 + 8)] * 2
    assert all(stage.available is None for stage in memory.stages)


def test_buffers_for_rows_of_other_lengths_are_kept_up_to_a_limit(tiny: Tiny) -> None:
    run = [f"model.path={tiny('llama')}", *ALL_LINEAR, *ONE_ROW]
    same, other = planned(*run)[1], planned(*run, "data=jsonl", "data.path=/no/such/file")[1]
    frame, cap = 32 * 32 * 4, [stage.in_flight for stage in same.stages]
    # Stage 1 has received hidden states and gradients of 31 other lengths, half as long in the mean.
    received = (cap[0] + 1 + cap[1]) * frame
    assert other.stages[1].link_buffers - same.stages[1].link_buffers == received * 31 // 2
    big = ["shard_plan=llama8b_3stage", "hardware=mac_and_two_pcs", "data.max_length=512"]
    same, other = planned(*big)[1], planned(*big, "data=jsonl", "data.path=/no/such/file")[1]
    assert [b.total - a.total for a, b in zip(same.stages, other.stages, strict=True)] == [256 << 20] * 3


# ---- what is refused, and plans that others write


def test_wrong_target_is_refused_as_in_training() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.target_modules"):
        planned("adapter.target_modules=[nothing]")


@pytest.mark.parametrize(
    "plan",
    mostly_by_hand(sorted(file.stem for file in (CONF_DIR / "shard_plan").glob("*[0-9]b_*.yaml")), ["llama8b_3stage"]),
)
def test_ready_made_plans_have_figures(plan: str) -> None:
    resolved, memory = planned(f"shard_plan={plan}", "hardware=local")
    assert len(memory.stages) == len(resolved.stages) > 1
    assert sum(stage.parameters for stage in memory.stages) > 7e9
    assert all(stage.total > RUNTIME_BYTES for stage in memory.stages)


# ---- a worker's process

PROCESS = ["adapter.target_modules=all-linear", "adapter.r=16", "loop.microbatch_size=2", "data.max_length=256"]


STEPS = 4  # the first shows what is needed, in the others freed memory is kept


def watched(folder: Path, stored: str, *overrides: str) -> list[tuple[int, int]]:
    """(peak of anonymous memory, predicted) of each worker; weights in the file's own dtype stay mapped from it."""
    resolved, memory = planned(f"model.path={folder}", *PROCESS, *overrides)
    here = Path(__file__).parent
    found = []
    for figures in memory.stages[1:]:
        spec = resolved.spec(total_steps=1).to_json().decode()
        done = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                str(here / "stage_memory.py"),
                folder,
                spec,
                str(figures.index),
                str(STEPS),
            ],
            capture_output=True,
            text=True,
            timeout=1500,
            env={**os.environ, "PYTHONPATH": str(here.parent)},
        )
        assert done.returncode == 0, done.stderr
        mapped = figures.weights.get(stored, 0)
        predicted = figures.training + sum(figures.weights.values()) - mapped
        found.append((json.loads(done.stdout.splitlines()[-1])["peak"], predicted))
        print(f"stage {figures.index}: {found[-1][0] / predicted:.3f} of {predicted / 2**20:.1f} MiB")
    return found


ALLOWANCE = 32 << 20  # of small things, which matter beside a small model alone


@pytest.mark.by_hand
@pytest.mark.smol
@pytest.mark.parametrize("numbers", [BF16, FP32, NF4], ids=["bf16", "fp32", "nf4"])
def test_workers_of_a_real_model_hold_what_was_predicted(numbers: list[str]) -> None:
    """30 layers on three stages."""
    folder = fetched_folder("HuggingFaceTB/SmolLM2-135M-Instruct")
    plan = ["shard_plan=split", "shard_plan.split_points=[10,20]", "loop.batch_size=8"]
    for peak, predicted in watched(folder, "float32", *plan, *numbers):
        assert peak <= 1.10 * predicted + ALLOWANCE


@pytest.mark.by_hand
@pytest.mark.parametrize("numbers", [BF16, FP32, NF4], ids=["bf16", "fp32", "nf4"])
def test_workers_with_layers_of_real_size_hold_what_was_predicted(tmp_path: Path, numbers: list[str]) -> None:
    """4 random layers of Llama 8B on three stages; a middle stage with its cap filled, and one with the head."""
    folder = make_big_layers(tmp_path, 4)
    plan = ["shard_plan=split", "shard_plan.split_points=[1,3]", "loop.batch_size=6", "data.max_length=128"]
    try:
        for peak, predicted in watched(folder, "bfloat16", *plan, *numbers):
            assert peak <= 1.10 * predicted
    finally:
        for file in folder.glob("*.safetensors"):
            file.unlink()


def test_storage_at_the_address_of_one_that_did_not_count_and_is_gone_counts() -> None:
    """Otherwise the figures of a plan depend on where memory happens to be."""
    allocations = Allocations()
    given = [torch.empty(10) for _ in range(50)]
    allocations.ignore(iter(given))
    given.clear()
    with allocations:
        made = [torch.empty(10) for _ in range(50)]
        assert allocations.now == sum(tensor.nbytes for tensor in made) == 50 * 40

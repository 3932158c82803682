"""Experts in mxfp4, compared with the same numbers in 32 bits, which the format's own formula gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mxfp4_model import ABOUT, decoded, make_pair
from processes import losses, train_here
from test_merge import an_adapter, refusal
from transformers import AutoModelForCausalLM

from hetero.adapter_files import WEIGHTS_FILE
from hetero.merge import merge_full
from hetero.merge_sources import find_source
from hetero.models import load_stage
from hetero.mxfp4 import dequantised_in_pieces, values_of
from hetero.quantization import check_stored

CPU = torch.device("cpu")


def test_values_are_those_of_the_formula_whatever_the_pieces() -> None:
    blocks = (
        torch.arange(256, dtype=torch.uint8).repeat(3 * 5 * 2 * 16 // 256 + 1)[: 3 * 5 * 2 * 16].reshape(3, 5, 2, 16)
    )
    scales = torch.arange(100, 130, dtype=torch.uint8).reshape(3, 5, 2)
    wanted = decoded(blocks, scales)
    assert torch.equal(values_of(blocks, scales).double(), wanted)
    from transformers.integrations import mxfp4

    with dequantised_in_pieces(7):
        assert torch.equal(mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).double(), wanted)


@pytest.mark.parametrize("apart", [False, True], ids=["one file", "blocks and scales in two files"])
def test_a_stage_loads_the_numbers_that_the_experts_stand_for(tmp_path: Path, apart: bool) -> None:
    small, plain = make_pair(tmp_path, apart=apart)
    for start, end, dtype in ((0, 1, torch.float32), (1, 4, torch.bfloat16)):
        found = load_stage(small, start, end, dtype=dtype, device=CPU).state_dict()
        wanted = load_stage(plain, start, end, dtype=dtype, device=CPU).state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_run_on_them_is_the_run_on_the_same_numbers(tmp_path: Path, rows_file: Path) -> None:
    small, plain = make_pair(tmp_path)
    ways = ["data=jsonl", f"data.path={rows_file}", "model.dtype=float32", "loop.steps=3", "shard_plan=single"]
    found, wanted = (
        train_here(tmp_path / f"run-{model.name}", f"model.path={model}", *ways) for model in (small, plain)
    )
    assert losses(found) == losses(wanted) and len(found) == 3
    adapters = [tmp_path / f"run-{name}" / "adapter" / WEIGHTS_FILE for name in ("mxfp4", "plain")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


@pytest.mark.parametrize("apart", [False, True], ids=["one file", "blocks and scales in two files"])
def test_the_merged_model_computes_what_the_adapter_does_on_the_same_numbers(tmp_path: Path, apart: bool) -> None:
    from peft import PeftModel

    small, plain = make_pair(tmp_path, apart=apart)
    an_adapter(plain, tmp_path / "adapter")
    full = merge_full(find_source(tmp_path / "adapter", None), tmp_path / "full", base=str(small))
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
        wanted = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()(input_ids=ids).logits
        merged, about = AutoModelForCausalLM.from_pretrained(
            full, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        found = merged.eval()(input_ids=ids).logits
    assert not about["missing_keys"] and not about["unexpected_keys"] and not about["mismatched_keys"]
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_file_without_some_scales_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    small, plain = make_pair(tmp_path)
    stored = load_file(small / "model.safetensors")
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, small / "model.safetensors", {"format": "pt"})
    said = refusal(lambda: load_stage(small, 1, 3, dtype=torch.float32, device=CPU))
    assert "must hold all parts of the experts of layers [1, 3)" in said
    an_adapter(plain, tmp_path / "adapter")
    said = refusal(lambda: merge_full(find_source(tmp_path / "adapter", None), tmp_path / "full", base=str(small)))
    assert "model.safetensors is damaged" in said and "layers.1.mlp.experts.down_proj_scales" in said


def test_4_bits_for_the_rest_of_such_a_model_are_refused() -> None:
    said = refusal(lambda: check_stored(ABOUT, ["none", "nf4"]))
    assert said.startswith("shard_plan.stages[1].quantization must be none") and "model.quantization=none" in said

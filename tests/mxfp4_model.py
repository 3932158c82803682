"""A small model whose experts are in mxfp4, laid out as gpt-oss is published, and an own reading of these numbers."""

from __future__ import annotations

import json
from pathlib import Path

import torch

# OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3: e2m1, the sign first.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SHAPE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ABOUT = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip


def decoded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[experts, out, in / 32, 16] and [experts, out, in / 32] -> values [experts, in, out], each by the formula."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.float64)
    halves = torch.stack([blocks % 16, blocks // 16], dim=-1).long()  # [..., 16, 2], the lower half first
    found = values[halves].flatten(-2) * 2.0 ** (scales.double() - 127).unsqueeze(-1)
    return found.flatten(-2).transpose(1, 2)


def make_pair(folder: Path, *, apart: bool = False) -> tuple[Path, Path]:
    """A random gpt-oss model with experts in mxfp4, and the model with the same numbers in 32 bits.

    Args:
        folder: to be written into.
        apart: blocks and scales in different files.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **_SHAPE))
    packed: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[key] = value * 4  # so that errors show
            continue
        experts, given, made = value.shape
        size = (experts, made, given // 32, 16)
        packed[f"{key}_blocks"] = blocks = torch.randint(0, 256, size, dtype=torch.uint8)
        packed[f"{key}_scales"] = scales = torch.randint(120, 126, size[:-1], dtype=torch.uint8)
        value.copy_(decoded(blocks, scales))
    plain, small = folder / "plain", folder / "mxfp4"
    state = {key: packed.get(key, value).contiguous() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    model.save_pretrained(plain)
    small.mkdir()
    about = json.loads((plain / "config.json").read_text(encoding="utf-8")) | {"quantization_config": ABOUT}
    (small / "config.json").write_text(json.dumps(about), encoding="utf-8")
    if not apart:
        save_file(packed, small / "model.safetensors", {"format": "pt"})
        return small, plain
    files = {key: f"model-0000{1 + key.endswith('_scales')}-of-00002.safetensors" for key in packed}
    for file in sorted({*files.values()}):
        save_file({key: value for key, value in packed.items() if files[key] == file}, small / file, {"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": files})
    (small / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return small, plain

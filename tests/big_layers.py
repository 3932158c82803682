"""A model of few layers in the sizes of Llama 8B, with random weights, written a file at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from hetero.config import SHAPES_DIR
from hetero.models import meta_model
from hetero.shards import INDEX


def make_big_layers(folder: Path, num_layers: int) -> Path:
    """bfloat16; 0.44 GB a layer, and 1.05 GB each for embedding and head."""
    config = json.loads((SHAPES_DIR / "meta-llama--Llama-3.1-8B-Instruct.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}), encoding="utf-8")
    files: dict[str, list[str]] = {}
    for name in meta_model(folder).state_dict():
        part = name.split(".")[2] if ".layers." in name else name.split(".")[-2]
        files.setdefault(f"model-{part}.safetensors", []).append(name)
    shapes = {name: tensor.shape for name, tensor in meta_model(folder).state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    for file, names in files.items():
        tensors = {}
        for name in names:
            row = (
                torch.randn(shapes[name][-1:], generator=draw) * 0.02
            )  # repeated, since speed matters and values do not
            tensors[name] = row.to(torch.bfloat16).expand(shapes[name]).contiguous()
        save_file(tensors, folder / file, {"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return folder

"""An adapter merged into one module of the base, by PEFT's own arithmetic, in fp32."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hetero.errors import NumericError


def merge_module(
    name: str,
    module: nn.Module,
    base: Mapping[str, torch.Tensor],
    lora: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """A module's parameters with the adapter in them.

    Args:
        name: global name of the module, which PEFT's patterns go by.
        module: the module on the meta device; it is copied.
        base: `weight` and, where it has one, `bias`.
        lora: the adapter's tensors, by what follows the module's name in PEFT's keys.
        config: content of adapter_config.json.

    Returns:
        The parameters by their names in the module, fp32.

    Raises:
        NumericError: a value is not finite.
    """
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    leaf = copy.deepcopy(module)
    for key, value in base.items():
        setattr(leaf, key, nn.Parameter(value.float(), requires_grad=False))
    root = _nested(name, leaf)
    known = {field.name for field in dataclasses.fields(LoraConfig) if field.init} - {"peft_type"}
    own = {key: value for key, value in config.items() if key in known} | {
        "target_modules": [name],
        "bias": "none",  # biases that train are whole values, put in by the caller
        "inference_mode": True,
        "layers_to_transform": None,
        "exclude_modules": None,
        "modules_to_save": None,
        "target_parameters": None,
        "base_model_name_or_path": None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about patterns of other modules, and heads that are no Conv1D
        inject_adapter_in_model(LoraConfig(**own), root)
        values = {f"{name}.{key}": value.float() for key, value in lora.items()}
        found = set_peft_model_state_dict(root, values)
    assert not found.unexpected_keys, found.unexpected_keys  # compared by the caller
    assert not [key for key in found.missing_keys if ".lora_" in key], found.missing_keys
    layer: Any = root.get_submodule(name)
    layer.merge()  # in place; the safe way has one more copy of the weight
    merged = {key: getattr(layer.get_base_layer(), key).detach() for key in base}
    if not all(bool(value.isfinite().all()) for value in merged.values()):
        raise NumericError(f"{name} is not finite with the adapter merged into it: the adapter is broken")
    return merged


def _nested(name: str, leaf: nn.Module) -> nn.Module:
    """A module that holds another one under its full name and nothing else."""
    *outer, last = name.split(".")
    root = here = nn.Module()
    for part in outer:
        here.add_module(part, nn.Module())
        here = here.get_submodule(part)
    here.add_module(last, leaf)
    return root

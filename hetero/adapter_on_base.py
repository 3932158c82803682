"""What an adapter consists of on its base model, as PEFT sees it there, and whether that is what is there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.adapter_whole import PREFIX, options_of
from hetero.errors import ConfigError
from hetero.folders import one_line
from hetero.models import meta_model


@dataclass(frozen=True)
class Consists:
    """An adapter on a base model.

    Attributes:
        shapes: global key -> shape of every tensor that it must have.
        may: global keys that it may have: PEFT writes embeddings in some cases.
        parameters: global names of the parameters that are adapted directly.
    """

    shapes: dict[str, list[int]]
    may: frozenset[str]
    parameters: tuple[str, ...]


def consists_of(config: Mapping[str, Any], folder: Path, where: str) -> Consists:
    """What an adapter with this configuration has on a base model.

    Args:
        config: content of adapter_config.json.
        folder: of the base model; its config.json is enough.
        where: what the user named, for the message.

    Raises:
        ConfigError: the model cannot be used, or PEFT finds none of the adapter's modules in it.
    """
    from peft import get_peft_model, get_peft_model_state_dict

    options = options_of(config, where)
    whole = meta_model(folder)
    ends = {id(whole.get_input_embeddings()), id(whole.get_output_embeddings())}
    outer = [name for name, module in whole.named_modules() if id(module) in ends]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names without a match: the tensors are compared
            model: Any = get_peft_model(whole, options, low_cpu_mem_usage=True)
            state = get_peft_model_state_dict(model, save_embedding_layers=False)
    except (ValueError, TypeError, RuntimeError, AttributeError) as exc:
        raise ConfigError(
            f"--base must be the model that the adapter was trained on, but PEFT cannot put it on {folder}: "
            f"{one_line(exc)}"
        ) from None
    may = {f"{PREFIX}{name}{layer}.weight" for name in outer for layer in ("", ".base_layer")}
    tuner = model.base_model
    parameters = tuple(getattr(tuner, "targeted_parameter_names", ()))
    return Consists({key: list(value.shape) for key, value in state.items()}, frozenset(may), parameters)


def check_on_base(tensors: Mapping[str, torch.Tensor], expected: Consists, folder: Path, where: str) -> None:
    """Refuses an adapter that has more or less than it consists of.

    Args:
        tensors: of the adapter, by global key.
        expected: what it must have.
        folder: of the base model.
        where: what the user named, for the message.

    Raises:
        ConfigError: names the first tensor that is missing, left over or of another size.
    """
    missing = [key for key in expected.shapes if key not in tensors]
    extra = sorted(key for key in tensors if key not in expected.shapes and key not in expected.may)
    if missing and len(missing) == len(expected.shapes):
        raise ConfigError(
            f"--base must be the model that the adapter was trained on, but the adapter has no tensor for {folder}: it "
            f"lacks {missing[0]} and holds {next(iter(tensors), 'nothing')}"
        )
    remedy = f"take a whole adapter with its own adapter_config.json, or --base PATH if {folder} is not its model"
    if missing:
        raise ConfigError(
            f"{where} must hold a whole adapter, it lacks {missing[0]} ({len(missing)} tensors in all are missing): "
            f"{remedy}"
        )
    if extra:
        raise ConfigError(
            f"{where} must hold what adapter_config.json asks for and nothing else, got {extra[0]} ({len(extra)} such "
            f"tensors in all): {remedy}"
        )
    for key, shape in expected.shapes.items():
        if list(tensors[key].shape) != shape:
            raise ConfigError(
                f"--base must be the model that the adapter was trained on, but {key} is {shape} on {folder} and "
                f"{list(tensors[key].shape)} in the adapter"
            )

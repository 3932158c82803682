"""Whether an adapter's tensors and its adapter_config.json belong together, and all of it is there, by these alone."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero.errors import ConfigError
from hetero.families import FAMILIES, layer_of
from hetero.folders import one_line

PREFIX = "base_model.model."
_LORA = re.compile(r"^(.+)\.(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\..+)?)$")
# What PEFT writes of them unasked, where an adapter reaches them or the vocabulary has grown.
_ENDS = {"lm_head", "embed_out", *(family.embedding for family in FAMILIES.values())}
# How initial values were found; they are in the tensors, and the model on the meta device has none to take them from.
_HOW_IT_BEGAN = ("eva_config", "corda_config", "loftq_config", "lora_ga_config")
_NUMBERED = re.compile(r"\d")


@dataclass
class Changes:
    """What an adapter does to a base, by names of the model.

    Attributes:
        lora: module -> what follows its name in PEFT's keys -> tensor.
        replaced: parameter -> its trained value.
    """

    lora: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)


def changes_of(tensors: Mapping[str, torch.Tensor]) -> Changes:
    """Sorts an adapter's tensors."""
    found = Changes()
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        if lora := _LORA.match(name):
            found.lora.setdefault(lora[1], {})[lora[2]] = tensor
        else:
            found.replaced[name.replace(".base_layer.", ".")] = tensor
    return found


def options_of(config: Mapping[str, Any], where: str) -> Any:
    """PEFT's LoraConfig out of an adapter_config.json, for a model without values.

    Raises:
        ConfigError: PEFT refuses it.
    """
    from peft import LoraConfig

    known = {one.name for one in dataclasses.fields(LoraConfig) if one.init} - {"peft_type", "task_type"}
    given = {key: value for key, value in config.items() if key in known and key not in _HOW_IT_BEGAN}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes for whoever trains
            return LoraConfig(**given | {"init_lora_weights": True, "task_type": "CAUSAL_LM", "inference_mode": True})
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{where} must hold an adapter_config.json that PEFT can use: {one_line(exc)}") from None


def check_modules(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuses modules whose tensors are not all there, or not as the configuration says.

    Args:
        config: content of adapter_config.json.
        tensors: by global key.
        where: what the user named, for the message.

    Raises:
        ConfigError: names the tensor, the rule and the remedy.
    """
    if not tensors:
        raise ConfigError(f"{where} must hold an adapter's tensors, got none")
    if foreign := [key for key in tensors if not key.startswith(PREFIX)]:
        raise ConfigError(f"{where} must hold tensors of a PEFT adapter ({PREFIX}...), got {foreign[0]}: {_REMEDY}")
    options = options_of(config, where)
    for module, lora in changes_of(tensors).lora.items():
        _check_pair(options, module, lora, where)
        extra = {
            "use_dora": (options.use_dora, any(key.startswith("lora_magnitude_vector") for key in lora)),
            "lora_bias": (options.lora_bias, "lora_B.bias" in lora),
        }
        for key, (asked, there) in extra.items():
            name = f"{module}.{'lora_magnitude_vector' if key == 'use_dora' else 'lora_B.bias'}"
            if asked != there:
                raise ConfigError(
                    f"{where} must hold {name} just where {key} is true, but {key} is {str(asked).lower()} in "
                    f"adapter_config.json and the tensor is {'there' if there else 'missing'}: {_REMEDY}"
                )


_REMEDY = "take both files from one adapter"


def _check_pair(options: Any, module: str, lora: Mapping[str, torch.Tensor], where: str) -> None:
    for kind in ("lora_{}.weight", "lora_embedding_{}"):
        a, b = kind.format("A"), kind.format("B")
        if (a in lora) != (b in lora):
            have, lack = (a, b) if a in lora else (b, a)
            raise ConfigError(f"{where} must hold A and B of each module, {module}.{lack} is missing beside {have}")
        if a in lora:
            _check_rank(options, module, lora[a].shape, lora[b].shape, where)
            return
    raise ConfigError(f"{where} must hold A and B of each module, got {module}.{next(iter(lora))} alone")


def _check_rank(options: Any, module: str, a: Sequence[int], b: Sequence[int], where: str) -> None:
    """LoRA's A is [R, in], its B [out, R]; those of experts' parameters have one R for each expert."""
    from peft.utils.other import get_pattern_key

    rank = int(options.rank_pattern.get(get_pattern_key(options.rank_pattern.keys(), module), options.r))
    if len(a) == len(b) == 2 and a[0] == b[1]:
        if a[0] == rank or (_holds_parameters(options, module) and a[0] and a[0] % int(options.r) == 0):
            return
        raise ConfigError(
            f"{where} must hold tensors of the rank in adapter_config.json, which is {rank} for {module}, got "
            f"{a[0]}: {_REMEDY}"
        )
    raise ConfigError(
        f"{where} must hold A [R, in] and B [out, R] of each module, got {list(a)} and {list(b)} for {module}"
    )


def _holds_parameters(options: Any, module: str) -> bool:
    """Whether a module may be adapted by a parameter of it; PEFT takes some names for experts' parameters."""
    name = module.replace(".base_layer", "")
    holders = [one.rpartition(".")[0] for one in options.target_parameters or []]
    return name.rpartition(".")[2] == "experts" or any(name == one or name.endswith(f".{one}") for one in holders)


def check_names(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str, num_layers: int | None
) -> None:
    """Refuses tensors that the configuration does not ask for, and names in it that have none.

    What the model itself would tell for certain is only likely here: --base leads to it.

    Args:
        config: content of adapter_config.json.
        tensors: by global key.
        where: what the user named, for the message.
        num_layers: of the model, where that is known.

    Raises:
        ConfigError: names the tensor or the name.
    """
    options, changes = options_of(config, where), changes_of(tensors)
    for module in changes.lora:
        if not _holds_parameters(options, module) and not _targeted(options, module):
            raise _foreign(f"{module}.lora_A", where)
    saved = options.modules_to_save or []
    for name in changes.replaced:
        if not (_part_of_any(name, saved) or _asked_otherwise(options, name)):
            raise _foreign(name, where)
    targets = options.target_modules if isinstance(options.target_modules, list | set) else ()
    modules = [*changes.lora]
    lacking = [one for one in sorted(targets) if not any(_ends(name, one) for name in modules)]
    if lacking and not options.exclude_modules and not any(_holds_parameters(options, module) for module in modules):
        raise _lacks(f"any tensor of {lacking[0]}, which is in target_modules", where)
    for one in saved:
        if not any(_part_of_any(name, [one]) for name in changes.replaced):
            raise _lacks(f"any tensor of {one}, which is in modules_to_save", where)
    if num_layers is not None and (layer := _first_empty_layer(options, modules, num_layers)) is not None:
        raise _lacks(f"any tensor of layer {layer} of {num_layers}", where)


def _targeted(options: Any, module: str) -> bool:
    from peft.tuners.tuners_utils import check_target_module_exists

    return options.target_modules == "all-linear" or bool(check_target_module_exists(options, module))


def _asked_otherwise(options: Any, name: str) -> bool:
    """Whether a whole parameter is there as a bias, as the embedding or head, or as single tokens."""
    module, _, parameter = name.rpartition(".")
    if parameter == "bias" and options.bias != "none":
        return True
    ends = module.rpartition(".")[2] in _ENDS and parameter == "weight"
    return ends or (bool(options.trainable_token_indices) and "trainable_tokens" in name)


def _ends(name: str, asked: str) -> bool:
    return name == asked or name.endswith(f".{asked}")


def _part_of_any(name: str, modules: Sequence[str]) -> bool:
    holders = name.split(".")[:-1]
    outer = [".".join(holders[: depth + 1]) for depth in range(len(holders))]
    return any(holder.endswith(module) for holder in outer for module in modules)  # as PEFT matches: norm, input_norm


def _first_empty_layer(options: Any, modules: Sequence[str], num_layers: int) -> int | None:
    """The first layer without a tensor, where the names that are asked for are those of every layer."""
    targets = options.target_modules
    if not isinstance(targets, list | set) or options.exclude_modules or any(_NUMBERED.search(one) for one in targets):
        return None
    there = {layer_of(name) for name in modules} - {None}
    asked = options.layers_to_transform
    layers = range(num_layers) if asked is None else [asked] if isinstance(asked, int) else asked
    return next((layer for layer in layers if layer not in there), None) if there else None


def uneven(shapes: Mapping[str, Sequence[int]]) -> str | None:
    """A tensor that another layer has and the layer that it is named after has not; None: all have the same."""
    layers = sorted({layer for key in shapes if (layer := layer_of(key)) is not None})
    for layer in range(layers[-1] + 1 if layers else 0):
        for key in shapes:
            own = layer_of(key)
            if own is not None and (here := key.replace(f".{own}.", f".{layer}.", 1)) not in shapes:
                return here
    return None


def _foreign(name: str, where: str) -> ConfigError:
    return ConfigError(
        f"{where} must hold what adapter_config.json asks for and nothing else, got {name}: {_REMEDY}, or --base PATH "
        "to compare with the model itself"
    )


def _lacks(what: str, where: str) -> ConfigError:
    return ConfigError(
        f"{where} must hold a whole adapter, it lacks {what}: take a whole one, or --base PATH to compare with the "
        "model itself"
    )

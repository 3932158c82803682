"""PEFT on a stage: the same initial adapter on every split.

What an adapter consists of is decided once, on the whole model built without memory (`resolve`); every stage takes its
share of that. Initial values are keyed by the module's global name, so they do not depend on the split.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from hetero.errors import ConfigError
from hetero.families import FAMILIES, Family, check_layers, check_target_names, family_of, layer_of
from hetero.keys import key64
from hetero.models import PassThrough
from hetero.spec import AdapterSpec, StageSpec

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class ResolvedAdapter:
    """An adapter of a whole model.

    Attributes:
        config: PEFT's LoraConfig, as it stands in adapter_config.json.
        shapes: global key -> shape of every tensor that trains.
    """

    config: Any
    shapes: dict[str, list[int]]

    def num_trained(self) -> int:
        """Trained parameters of the whole model."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


def lora_config(spec: AdapterSpec, family: Family, whole: Any) -> Any:
    """PEFT's configuration for an adapter spec on a whole model of a family, of plain Python values.

    Raises:
        ConfigError: a named target is no module of this family.
    """
    from peft import LoraConfig

    targets: Any = spec.target_modules
    if targets == "auto":
        found = {name.rpartition(".")[2] for name, _ in whole.named_modules()}
        targets = [name for name in family.default_targets if name in found or name not in family.optional_modules]
    if isinstance(targets, list):
        check_target_names(targets, family)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=spec.r,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=targets,
        modules_to_save=None if spec.modules_to_save == "auto" else spec.modules_to_save,
        layers_to_transform=spec.layers_to_transform,
        rank_pattern=dict(spec.rank_pattern or {}),
        alpha_pattern=dict(spec.alpha_pattern or {}),
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        fan_in_fan_out=family.model_type == "gpt2",
    )


def resolve(whole: Any, spec: AdapterSpec, base_name: str) -> ResolvedAdapter:
    """What an adapter spec means on a whole model.

    Args:
        whole: the model on the meta device; it is changed.
        spec: the adapter.
        base_name: recorded in the adapter's configuration as the base model.

    Raises:
        ConfigError: a target matches nothing, or tied embeddings would train.
    """
    _hide_broken_bitsandbytes()
    from peft import get_peft_model, get_peft_model_state_dict

    family = family_of(whole.config.model_type)
    config = lora_config(spec, family, whole)
    asked = config.target_modules
    check_layers(spec.layers_to_transform, whole.config.num_hidden_layers)
    try:
        peft_model = get_peft_model(whole, copy.deepcopy(config), low_cpu_mem_usage=True)
    except ValueError as exc:
        raise ConfigError(
            f"adapter.target_modules must match modules of the model ({', '.join(family.linear_modules)}), "
            f"got {spec.target_modules!r}: {str(exc).splitlines()[0]}"
        ) from None
    shapes = {
        key: list(tensor.shape)
        for key, tensor in get_peft_model_state_dict(peft_model, save_embedding_layers=False).items()
    }
    if whole.config.tie_word_embeddings:
        _refuse_trained_embedding(shapes, family)
    if isinstance(asked, list | set):
        _refuse_unmatched(list(asked), shapes)
    if missing := [m for m in config.modules_to_save or [] if not any(f".{m}." in f".{key}" for key in shapes)]:
        raise ConfigError(f"adapter.modules_to_save must name modules of the model, got {', '.join(missing)}")
    resolved = peft_model.peft_config["default"]
    resolved.inference_mode = False
    resolved.base_model_name_or_path = base_name
    if isinstance(resolved.target_modules, set):
        resolved.target_modules = sorted(resolved.target_modules)
    return ResolvedAdapter(resolved, shapes)


def _hide_broken_bitsandbytes() -> None:
    """PEFT imports bitsandbytes wherever it is installed, so one that cannot be imported would break plain LoRA too."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]


def _refuse_unmatched(asked: list[str], shapes: dict[str, list[int]]) -> None:
    unmatched = [name for name in asked if not any(f".{name}." in key for key in shapes)]
    if unmatched:
        raise ConfigError(
            f"adapter.target_modules must each match a module of the model, got {', '.join(unmatched)} without a match"
        )


def _refuse_trained_embedding(shapes: dict[str, list[int]], family: Family) -> None:
    """Judged by what would train, since a target may also be a regular expression."""
    if any(f".{family.embedding}." in key for key in shapes):
        raise ConfigError(
            f"adapter.modules_to_save and adapter.target_modules must leave {family.embedding} out for a model with "
            "tie_word_embeddings: first and last stage would train separate copies of one matrix"
        )


def attach(model: Any, adapter: ResolvedAdapter, seed: int) -> Any | None:
    """Puts a stage's share of an adapter on its model; None where the stage has none (a frozen relay).

    Args:
        model: a stage's model; modules are replaced in place.
        adapter: of the whole model.
        seed: of the run; each module's initial values depend on it and on the module's global name.
    """
    from peft import NoMatchingPeftModuleError, get_peft_model

    foreign = {name for name, module in model.named_modules() if isinstance(module, PassThrough)}
    config = copy.deepcopy(adapter.config)
    config.exclude_modules = sorted(foreign) or None
    config.base_model_name_or_path = None
    own = [name for name in config.modules_to_save or [] if _has_own(model, name, foreign)]
    config.modules_to_save = own or None
    try:
        with _keyed_init(seed):
            return get_peft_model(model, config)
    except NoMatchingPeftModuleError:
        if not own:
            model.requires_grad_(False)
            return None
    raise ConfigError(
        f"adapter.modules_to_save {own} cannot stand alone on a stage without a target of adapter.target_modules; "
        "choose another split"
    )


def _has_own(model: Any, name: str, foreign: set[str]) -> bool:
    return any((full == name or full.endswith(f".{name}")) and full not in foreign for full, _ in model.named_modules())


@contextmanager
def _keyed_init(seed: int) -> Iterator[None]:
    """Keys the draws of PEFT's initial values by module name.

    Wraps peft's private `LoraModel._create_and_replace`, the one place that knows the module's name while it draws.
    """
    from peft import LoraModel

    original = LoraModel._create_and_replace

    def keyed(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("current_key") or args[5]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key64(seed, "init", name))
            return original(self, *args, **kwargs)

    LoraModel._create_and_replace = keyed
    try:
        yield
    finally:
        LoraModel._create_and_replace = original


def trained_tensors(peft_model: Any | None) -> dict[str, nn.Parameter]:
    """Global key (as in a PEFT file) -> parameter, for all that trains on a stage."""
    from peft import get_peft_model_state_dict

    if peft_model is None:
        return {}
    parameters = {p.data_ptr(): p for p in peft_model.parameters() if p.requires_grad}
    found: dict[str, nn.Parameter] = {}
    for key, tensor in get_peft_model_state_dict(peft_model, save_embedding_layers=False).items():
        found[key] = parameters.pop(tensor.data_ptr())
    assert not parameters, "a trained parameter has no key in PEFT's state"
    return found


def part_of(whole: Mapping[str, T], stages: Sequence[StageSpec], index: int) -> dict[str, T]:
    """A stage's entries of a whole adapter: of its layers; the embedding's are the first's, all else the last's."""
    stage, last = stages[index], index == len(stages) - 1
    part = {}
    for key, value in whole.items():
        layer = layer_of(key)
        if layer is not None:
            mine = stage.start <= layer < stage.end
        else:
            mine = index == 0 if any(f".{family.embedding}." in key for family in FAMILIES.values()) else last
        if mine:
            part[key] = value
    return part

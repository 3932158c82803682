"""PEFT on a stage: the same initial adapter on every split.

What an adapter consists of is decided once, on the whole model built without memory (`resolve`); every stage takes its
share of that. Initial values are keyed by the module's global name, so they do not depend on the split.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from hetero.adapter_names import check_saved, matched_by_pattern, refuse_unmatched
from hetero.adapter_rules import check_options, check_parameters, refusal_of_4_bits
from hetero.errors import ConfigError
from hetero.expert_targets import judge, reaches_parameters
from hetero.families import FAMILIES, Family, check_layers, check_target_names, family_of, layer_of
from hetero.keys import key64
from hetero.models import AddsNothing, PassThrough
from hetero.peft_import import load_peft
from hetero.spec import AdapterSpec, StageSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

_OF_THE_FIRST = {
    name
    for family in FAMILIES.values()
    for name in (family.embedding, *family.zero_after_first, *family.identity_after_first)
}


@dataclass(frozen=True)
class ResolvedAdapter:
    """An adapter of a whole model.

    Attributes:
        config: PEFT's LoraConfig, as it stands in adapter_config.json.
        shapes: global key -> shape of every tensor that trains.
        targets: global names of the modules that are adapted.
        parameters: global names of the parameters that are adapted.
        saved: global names of the modules that train in full.
        notes: what a user should know about it.
    """

    config: Any
    shapes: dict[str, list[int]]
    targets: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

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
        exclude_modules=spec.exclude_modules,
        target_parameters=spec.target_parameters,
        modules_to_save=None if spec.modules_to_save == "auto" else spec.modules_to_save,
        layers_to_transform=spec.layers_to_transform,
        rank_pattern=dict(spec.rank_pattern or {}),
        alpha_pattern=dict(spec.alpha_pattern or {}),
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        bias=spec.bias,
        lora_bias=spec.lora_bias,
        init_lora_weights=spec.init_lora_weights,
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
    load_peft(four_bit=False)
    family = family_of(whole.config.model_type)
    tied = bool(whole.config.tie_word_embeddings)
    check_options(spec, family, tied=tied, quantizations=())
    check_layers(spec.layers_to_transform, whole.config.num_hidden_layers)
    names = [name for name, _ in whole.named_modules()]
    linear = [name for name, module in whole.named_modules() if isinstance(module, nn.Linear)]
    check_saved(spec, whole)
    config = lora_config(spec, family, whole)
    reaches = False
    try:
        reaches = reaches_parameters(config, whole)
        if reaches:
            asked = f"adapter.target_modules={spec.target_modules}, which adapts parameters of this model's experts"
            check_parameters(spec, family, asked)
        peft_model, state = _tried(config, spec, whole)
    except ValueError as exc:
        raise ConfigError(
            f"adapter.target_modules must match modules of the model ({', '.join(family.linear_modules)}), "
            f"got {spec.target_modules!r}: {str(exc).splitlines()[0]}"
        ) from None
    resolved = peft_model.peft_config["default"]
    tuner = peft_model.base_model
    targets, parameters = tuple(tuner.targeted_module_names), tuple(tuner.targeted_parameter_names)
    notes = judge(str(spec.target_modules), targets, parameters, linear) if reaches else []
    adapter = ResolvedAdapter(
        resolved,
        {key: list(tensor.shape) for key, tensor in state.items()},
        targets,
        parameters,
        tuple(_saved_modules(peft_model)),
        (*_notes(spec, peft_model), *notes),
    )
    if tied:
        _refuse_trained_embedding(adapter.shapes, family)
    if any(".original_module." in key for key in adapter.shapes):
        raise ConfigError(
            "adapter.bias must not be all where adapter.modules_to_save holds biases: PEFT would save the ones that do "
            "not train beside those that do; adapter.bias=lora_only, or leave these modules out"
        )
    refuse_unmatched(spec, config, adapter, names, family)
    for name in adapter.saved:
        if inside := [parameter for parameter in parameters if parameter.startswith(f"{name}.")]:
            raise ConfigError(
                f"adapter.modules_to_save must leave out what holds a target parameter, got {name} with {inside[0]}: "
                "PEFT cannot load such an adapter again"
            )
    resolved.inference_mode = False
    resolved.base_model_name_or_path = base_name
    resolved.init_lora_weights = spec.init_lora_weights
    resolved.fan_in_fan_out = config.fan_in_fan_out  # PEFT changes it where it meets a head that is no Conv1D
    if config.target_modules == set() and not spec.target_parameters:
        resolved.target_modules = _no_targets()
    for key in ("target_modules", "exclude_modules"):
        if isinstance(value := getattr(resolved, key), set):
            setattr(resolved, key, sorted(value))
    return adapter


def _tried(config: Any, spec: AdapterSpec, whole: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A whole model on the meta device with an adapter on it, and what would be saved of it.

    Raises:
        ValueError: PEFT refuses it.
    """
    from peft import get_peft_model, get_peft_model_state_dict

    trial = copy.deepcopy(config)
    trial.init_lora_weights = True  # there are no values on the meta device that others could be taken from
    if config.target_modules == set() and not spec.target_parameters:
        trial.target_modules = _no_targets()
    with warnings.catch_warnings():  # what PEFT warns about is refused elsewhere, or noted
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(whole, trial, low_cpu_mem_usage=True)
        return peft_model, get_peft_model_state_dict(peft_model, save_embedding_layers=False)


def _no_targets() -> str:
    """PEFT's own word for an adapter that adapts no module, as one of saved modules alone."""
    from peft.utils.constants import DUMMY_TARGET_MODULES

    return str(DUMMY_TARGET_MODULES)


def _saved_modules(peft_model: Any) -> list[str]:
    from peft.utils.other import ModulesToSaveWrapper

    prefix = "base_model.model."
    return [name.removeprefix(prefix) for name, m in peft_model.named_modules() if isinstance(m, ModulesToSaveWrapper)]


def _notes(spec: AdapterSpec, peft_model: Any) -> list[str]:
    if not spec.lora_bias:
        return []
    bare = [
        m
        for m in peft_model.base_model.targeted_module_names
        if peft_model.base_model.model.get_submodule(m).bias is None
    ]
    if not bare:
        return []
    return [
        f"adapter.lora_bias: {bare[0]} and {len(bare) - 1} more have no bias in the base, so the adapter can be loaded "
        "by PEFT and not merged into a model of the same architecture"
    ]


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

    Raises:
        ConfigError: a module that is to train in full is in 4 bits here.
    """
    load_peft(four_bit=bool(getattr(model, "is_loaded_in_4bit", False)))
    from peft import get_peft_model

    config = _share_of(adapter, model)
    for name in config.modules_to_save or []:
        if not all(p.is_floating_point() for p in model.get_submodule(name).parameters()):
            raise ConfigError(refusal_of_4_bits(name))
    biases = config.bias == "all" and any(name.endswith(".bias") for name, _ in model.named_parameters())
    if not (config.target_modules or config.target_parameters or config.modules_to_save or biases):
        model.requires_grad_(False)
        return None
    if not config.target_modules and not config.target_parameters:
        config.target_modules = _no_targets()
    with _keyed_init(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # judged on the whole model already
        return get_peft_model(model, config)


def _share_of(adapter: ResolvedAdapter, model: Any) -> Any:
    """The configuration of a stage: the modules that are here, by their full names."""
    stand_ins = PassThrough | AddsNothing | nn.Identity
    here = {name for name, module in model.named_modules() if not isinstance(module, stand_ins)}
    own = [name for name in adapter.targets if name in here]
    parameters = [name for name in adapter.parameters if name.rpartition(".")[0] in here]
    config = copy.deepcopy(adapter.config)
    config.target_modules = set(own)
    config.target_parameters = parameters or None
    config.modules_to_save = [name for name in adapter.saved if name in here] or None
    config.exclude_modules = config.layers_to_transform = config.base_model_name_or_path = None
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, key)
        setattr(config, key, {k: v for k, v in pattern.items() if matched_by_pattern(k, [*own, *parameters])})
    return config


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
            mine = index == 0 if any(f".{name}." in key for name in _OF_THE_FIRST) else last
        if mine:
            part[key] = value
    return part


def main(argv: list[str] | None = None) -> int:
    """`python -m hetero.adapters merge RUN --out DIR`."""
    from hetero.merge import main as merge_main

    return merge_main(argv)


if __name__ == "__main__":
    raise SystemExit(main())

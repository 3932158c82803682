"""What an adapter's own adapter_config.json says of it, so that a run that only uses it need not be told again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from hetero.adapter_rules import FROM_BASE
from hetero.checked import convert
from hetero.errors import ConfigError
from hetero.folders import one_line
from hetero.spec import AdapterSpec, Config
from hetero.tiny import TINY

CONFIG_FILE = "adapter_config.json"

# Key of `AdapterSpec` -> PEFT's.
_KEYS = {
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "target_modules",
    "modules_to_save": "modules_to_save",
    "layers_to_transform": "layers_to_transform",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "bias": "bias",
    "lora_bias": "lora_bias",
    "init_lora_weights": "init_lora_weights",
    "exclude_modules": "exclude_modules",
    "target_parameters": "target_parameters",
}
# Of PEFT's other keys those that change nothing in what a trained adapter computes, or follow from the model.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode",
    "loftq_config", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision",
    "task_type",
}  # fmt: skip
# Initial values that training has replaced, and that were taken from no base weights.
_REPLACED = (True, False, None, "gaussian", "orthogonal", "eva")
_NO_TARGETS = "dummy-target-modules"  # PEFT's word for an adapter that adapts no module


def with_its_adapter(config: Config) -> Config:
    """The configuration with `adapter` as the first adapter has it, for tasks that train nothing.

    Where the folder or its file is not there, the configuration is the same; it is refused later.

    Raises:
        ConfigError: the file is none of a LoRA adapter, asks for what is not done here, or is of another model; or a
            key under `adapter` was given another value than it has there.
    """
    folder = config.adapter.init_from
    if config.task == "train" or folder is None:
        return config
    file = Path(folder).expanduser() / CONFIG_FILE
    if not file.is_file():
        return config
    theirs = _read(file)
    _check_base(config, theirs.get("base_model_name_or_path"))
    found = _spec_of(theirs)
    _check_given(config.adapter, found, config.task)
    return msgspec.structs.replace(config, adapter=msgspec.structs.replace(found, init_from=folder))


def _read(file: Path) -> dict[str, Any]:
    try:
        theirs = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"adapter.init_from cannot be read: {file}: {one_line(exc)}") from None
    if not isinstance(theirs, dict) or theirs.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"adapter.init_from must be the folder of a LoRA adapter, got another kind in {file}")
    for key, value in sorted(theirs.items()):
        if value and key not in _WITHOUT_EFFECT and key not in _KEYS.values():
            raise ConfigError(
                f"adapter.init_from must be an adapter without {key}, which is not done here, got {value!r}"
            )
    return theirs


def _check_base(config: Config, base: Any) -> None:
    """The random tiny model is what a run without `model` has; sizes are compared later, with any other model."""
    path = config.model.path
    if isinstance(base, str) and base and path != base and TINY in (path, base):
        remedy = "model=tiny" if base == TINY else f"model.path={base}, or model=NAME as in training"
        raise ConfigError(f"model.path must be the base of adapter.init_from, got {path}, there {base}: {remedy}")


def _spec_of(theirs: dict[str, Any]) -> AdapterSpec:
    """The adapter's options under our names; {} and [] are none, as PEFT takes them."""
    found = {ours: theirs[key] for ours, key in _KEYS.items() if theirs.get(key) not in (None, {}, [])}
    layers = found.get("layers_to_transform")
    if isinstance(layers, int):
        found["layers_to_transform"] = [layers]
    if found.get("target_modules") in (None, _NO_TARGETS):
        found["target_modules"] = []
    init = found.get("init_lora_weights")
    if isinstance(init, str | bool | None) and init in _REPLACED:
        found["init_lora_weights"] = True
    try:
        return convert(found, AdapterSpec, root="adapter")
    except ConfigError as exc:
        raise ConfigError(
            f"adapter.init_from must have options that are done here, in its {CONFIG_FILE}: {exc}"
        ) from None


def _check_given(given: AdapterSpec, found: AdapterSpec, task: str) -> None:
    """Refuses a key that was given another value: whoever gave it expects it to be used."""
    default = AdapterSpec()
    for key in _KEYS:
        ours, theirs = getattr(given, key), getattr(found, key)
        if ours in (getattr(default, key), "auto") or key == "dropout":
            continue
        if key in ("target_modules", "exclude_modules") and isinstance(ours, str):
            continue  # PEFT writes down the modules that it found
        if key == "init_lora_weights" and ours not in FROM_BASE and theirs not in FROM_BASE:
            continue
        same = set(ours) == set(theirs or ()) if isinstance(ours, list) else ours == theirs
        if not same and (ours or theirs):
            raise ConfigError(
                f"adapter.{key} must be as in adapter.init_from, got {ours!r}, there {theirs!r}: task={task} takes it "
                f"from there where it is not given (a file of conf/model may give it too: then adapter.{key}=VALUE)"
            )

"""What an adapter's options must be, alone and together, judged without the model: PEFT says less, later or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hetero.errors import ConfigError
from hetero.families import Family
from hetero.spec import AdapterSpec

FROM_BASE = ("pissa", "olora")  # these initial values are taken out of the base weights, which change with it
_RANDOM = ("gaussian", "orthogonal")


def check_options(spec: AdapterSpec, family: Family, *, tied: bool, quantizations: Sequence[str]) -> None:
    """Refuses options that cannot work, or that would give an adapter that others load wrongly.

    Args:
        spec: the adapter.
        family: of the model.
        tied: whether the model's embedding and head are one matrix.
        quantizations: of each stage, or of the one that is built here.

    Raises:
        ConfigError: names the options and the reason.
    """
    _check_patterns(spec)
    _check_init(spec, family, tied=tied, quantized="nf4" in quantizations)
    _check_targets(spec)
    if "nf4" in quantizations:
        _check_saved_in_4_bits(spec, family)
    if spec.target_parameters:
        quantized = "nf4" in quantizations
        check_parameters(spec, family, "adapter.target_parameters", quantized=quantized)
    if spec.lora_bias and spec.use_dora:
        raise ConfigError("adapter.lora_bias must be false with adapter.use_dora: PEFT's DoRA has no bias of its own")
    if spec.lora_bias and _names(spec, family.embedding):
        raise ConfigError(
            f"adapter.lora_bias must be false with {family.embedding} as a target: it has no bias in PEFT"
        )


def _check_patterns(spec: AdapterSpec) -> None:
    """Regular expressions that are none fail in PEFT with a traceback."""
    expressions: list[tuple[str, str]] = []
    for key in ("target_modules", "exclude_modules"):
        value = getattr(spec, key)
        if isinstance(value, str):
            expressions.append((f"adapter.{key}", value))
    for key in ("rank_pattern", "alpha_pattern"):
        expressions += [(f"adapter.{key}", name) for name in getattr(spec, key) or {}]
    for key, expression in expressions:
        try:
            re.compile(expression)
        except re.error as exc:
            raise ConfigError(f"{key} must be a regular expression, got {expression!r}: {exc}") from None


def _check_init(spec: AdapterSpec, family: Family, *, tied: bool, quantized: bool) -> None:
    init = spec.init_lora_weights
    if isinstance(init, bool):
        return
    if init.startswith("pissa_niter"):
        raise ConfigError(
            f"adapter.init_lora_weights must not be {init!r}: it is drawn at random again whenever the adapter is "
            "loaded, over a base that it changed, so that the loaded adapter is a wrong one; pissa is exact"
        )
    if init not in FROM_BASE + _RANDOM:
        raise ConfigError(
            f"adapter.init_lora_weights must be true, false, {', '.join(_RANDOM + FROM_BASE)}, got {init!r}"
        )
    if spec.lora_bias:
        raise ConfigError(f"adapter.lora_bias must be false with adapter.init_lora_weights={init}, as PEFT has it")
    if init == "orthogonal" and quantized:
        raise ConfigError(
            "adapter.init_lora_weights must not be orthogonal with quantization=nf4: PEFT makes the adapter of the "
            "base's numbers, and these are 4-bit integers"
        )
    odd = [rank for rank in (spec.r, *(spec.rank_pattern or {}).values()) if rank % 2]
    if init == "orthogonal" and odd:
        raise ConfigError(
            f"adapter.r and adapter.rank_pattern must be even for orthogonal initial values, got {odd[0]}"
        )
    if init != "gaussian" and _names(spec, family.embedding):
        raise ConfigError(
            f"adapter.init_lora_weights must be true, false or gaussian with {family.embedding} as a target: PEFT "
            f"leaves {init} out for embeddings"
        )
    if init not in FROM_BASE:
        return
    if quantized:
        raise ConfigError(
            f"adapter.init_lora_weights must not be {init} with quantization=nf4: it changes the base weights, which "
            "would have to be quantised a second time, and the adapter would fit no other copy of the base"
        )
    if tied and _names(spec, "lm_head"):
        raise ConfigError(
            f"adapter.init_lora_weights must not be {init} with lm_head as a target of a model with "
            "tie_word_embeddings: it changes the head's base weights, which are the embedding's too"
        )


def _check_targets(spec: AdapterSpec) -> None:
    if isinstance(spec.target_modules, str) and spec.target_modules != "auto" and spec.layers_to_transform is not None:
        raise ConfigError(
            "adapter.layers_to_transform needs adapter.target_modules as a list (or auto), got "
            f"{spec.target_modules!r}: write the layers into the expression, or list the names"
        )
    if spec.target_modules == [] and not spec.target_parameters and not spec.modules_to_save:
        raise ConfigError("adapter.target_modules must name a module, got an empty list: nothing would train")
    if spec.layers_to_transform == []:
        raise ConfigError("adapter.layers_to_transform must name a layer, or be null for all of them, got none")


def _check_saved_in_4_bits(spec: AdapterSpec, family: Family) -> None:
    """Only what is named here; a stage that finds 4-bit weights in a saved module refuses too."""
    saved = spec.modules_to_save if isinstance(spec.modules_to_save, list) else []
    if wrong := [
        name for name in saved if name.rpartition(".")[2] in (*family.linear_modules, "mlp", "self_attn", "attn")
    ]:
        raise ConfigError(refusal_of_4_bits(wrong[0]))


def refusal_of_4_bits(module: str) -> str:
    """Why a module in 4 bits cannot train in full."""
    return (
        f"adapter.modules_to_save must leave {module} out with quantization=nf4: 4-bit weights cannot train in full; "
        "quantization=none for its stage, or make it a target"
    )


def check_parameters(spec: AdapterSpec, family: Family, asked: str, *, quantized: bool = False) -> None:
    """Refuses what does not go together with adapted parameters.

    Args:
        spec: the adapter.
        family: of the model.
        asked: what asks for them, for the message.
        quantized: whether a stage is in 4 bits.

    Raises:
        ConfigError: names the option and the reason.
    """
    must: list[tuple[str, bool, str]] = [
        ("adapter.dropout must be 0", spec.dropout > 0, "the input of a parameter cannot be dropped"),
        ("adapter.use_dora must be false", spec.use_dora, "PEFT has no DoRA of a parameter"),
        ("adapter.lora_bias must be false", spec.lora_bias, "a parameter has no bias"),
        ("adapter.bias must be none", spec.bias != "none", "which of them belong to a parameter is not defined"),
        (
            "adapter.layers_to_transform must be null",
            spec.layers_to_transform is not None,
            "PEFT looks at modules only",
        ),
        (
            "adapter.init_lora_weights must be true, false or gaussian",
            spec.init_lora_weights not in (True, False, "gaussian"),
            "the others need a module's weight",
        ),
        ("model.path must be another family", family.model_type == "gpt2", "its weights are transposed"),
        ("model.quantization must be none", quantized, "a parameter in 4 bits takes no adapter"),
    ]
    for rule, broken, reason in must:
        if broken:
            raise ConfigError(f"{rule} with {asked}: {reason}")


def _names(spec: AdapterSpec, module: str) -> bool:
    """Whether the targets name a module; `all-linear` and `auto` leave out embedding and head."""
    targets = spec.target_modules
    if isinstance(targets, list):
        return any(name.rpartition(".")[2] == module for name in targets)
    if targets in ("auto", "all-linear"):
        return False
    return any(_fully_matches(targets)(name) for name in (module, f"model.{module}", f"transformer.{module}"))


def _fully_matches(expression: str) -> Callable[[str], bool]:
    compiled = re.compile(expression)
    return lambda name: compiled.fullmatch(name) is not None

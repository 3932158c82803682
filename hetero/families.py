"""The table of verified model families: where their parts are, and their few differences.

A family is verified when the tests that run over this table pass for it; every other `model_type` is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetero.errors import ConfigError

_LLAMA_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LLAMA_MLP = ("gate_proj", "up_proj", "down_proj")
_LAYER = re.compile(r"[.:](?:layers|h)\.([0-9]+)\.")


def layer_of(key: str) -> int | None:
    """The global layer of a tensor, by its global key or state name; None for the embedding, the head and norms."""
    found = _LAYER.search(key)
    return None if found is None else int(found[1])


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    Attributes:
        layers: the decoder layers' list in the base model.
        embedding: the token embedding there.
        final_norm: the norm after the last layer there.
        zero_after_first: modules of the base model whose output is added after the embedding, so that stages
            after the first must add nothing (learned positions).
        identity_after_first: modules that act on the embedding's sum, so that stages after the first skip them.
        eager_only: transformers has no other attention for it.
        linear_modules: names of the linear modules of a layer, which an adapter may target.
        default_targets: what `adapter.target_modules=auto` means.
    """

    model_type: str
    layers: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    zero_after_first: tuple[str, ...] = ()
    identity_after_first: tuple[str, ...] = ()
    eager_only: bool = False
    linear_modules: tuple[str, ...] = _LLAMA_ATTENTION + _LLAMA_MLP
    default_targets: tuple[str, ...] = _LLAMA_ATTENTION + _LLAMA_MLP


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2"),
        Family("qwen3"),
        Family(
            "gpt2",
            layers="h",
            embedding="wte",
            final_norm="ln_f",
            zero_after_first=("wpe",),
            identity_after_first=("drop",),
            linear_modules=("c_attn", "c_proj", "c_fc"),
            default_targets=("c_attn",),
        ),
        # Routed experts are 3-D tensors, no linear modules; PEFT takes gate_proj, up_proj, down_proj of Qwen for them.
        Family("mixtral", linear_modules=_LLAMA_ATTENTION, default_targets=_LLAMA_ATTENTION),
        Family(
            "qwen2_moe",
            linear_modules=(*_LLAMA_ATTENTION, "shared_expert_gate"),
            default_targets=_LLAMA_ATTENTION,
        ),
        Family("qwen3_moe", linear_modules=_LLAMA_ATTENTION, default_targets=_LLAMA_ATTENTION),
        Family("gpt_oss", eager_only=True, linear_modules=_LLAMA_ATTENTION, default_targets=_LLAMA_ATTENTION),
    )
}


def family_of(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ConfigError: it is not in the table.
    """
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model.path must lead to a model of a verified family ({', '.join(FAMILIES)}), "
            f"got model_type {model_type!r}: its layers would have to be checked stage by stage first"
        )
    return FAMILIES[model_type]


def check_attention(implementation: str | None, family: Family) -> None:
    """Checks that a family has the attention that was asked for; None is its own choice.

    Raises:
        ConfigError: it has not.
    """
    if family.eager_only and implementation not in (None, "eager"):
        raise ConfigError(
            f"model.attn_implementation must be eager for model_type {family.model_type!r}, which has no other in "
            f"transformers, got {implementation}; leave it out or set eager"
        )


def check_target_names(targets: list[str], family: Family) -> None:
    """Checks that an adapter's targets are modules of a family.

    Raises:
        ConfigError: one is not.
    """
    known = {*family.linear_modules, "lm_head", family.embedding}
    wrong = [name for name in targets if name.rpartition(".")[2] not in known]
    if wrong:
        raise ConfigError(
            f"adapter.target_modules must name modules of a {family.model_type} model "
            f"({', '.join(family.linear_modules)}), got {', '.join(map(repr, wrong))}"
        )


def check_layers(layers: list[int] | None, num_layers: int) -> None:
    """Checks that an adapter's layers are layers of the model.

    Raises:
        ConfigError: one is not.
    """
    if out := [index for index in layers or [] if index >= num_layers]:
        raise ConfigError(f"adapter.layers_to_transform must be below {num_layers} layers, got {out[0]}")

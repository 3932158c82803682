"""The table of verified model families: where their parts are, and their few differences.

A family is verified when the tests that run over this table pass for it; every other `model_type` is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hetero.errors import ConfigError
from hetero.unsuitable import check_suitable

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_FUSED = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
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
        head_in_files: what checkpoints call the head, which the model itself calls `lm_head`.
        left_out: first parts of the names of tensors in checkpoints that the model does not have.
        zero_after_first: modules of the base model whose output is added after the embedding, so that stages
            after the first must add nothing (learned positions).
        identity_after_first: modules that act on the embedding's sum, so that stages after the first skip them.
        numbers_after_first: attributes of the base model that act on the embedding, and the value without an effect.
        layers_give_tuples: a layer returns its hidden states as the first of a tuple.
        eager_only: transformers has no other attention for it.
        logits_multiplied_by, logits_divided_by, logits_capped_at: keys of its configuration for what follows the head.
        isolates_documents: packed documents in one row cannot see one another.
        linear_modules: names of linear modules of a layer, which an adapter may target.
        default_targets: what `adapter.target_modules=auto` means; empty: all of them.
        inner_modules: linear modules that neither read nor write hidden states, as all others do.
        optional_modules: linear modules that not every model of the family has; `auto` means those that are there.
    """

    model_type: str
    layers: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    head_in_files: str = "lm_head"
    left_out: tuple[str, ...] = ()
    zero_after_first: tuple[str, ...] = ()
    identity_after_first: tuple[str, ...] = ()
    numbers_after_first: tuple[tuple[str, float], ...] = ()
    layers_give_tuples: bool = False
    eager_only: bool = False
    logits_multiplied_by: str | None = None
    logits_divided_by: str | None = None
    logits_capped_at: str | None = None
    linear_modules: tuple[str, ...] = _ATTENTION + _MLP
    default_targets: tuple[str, ...] = ()
    optional_modules: tuple[str, ...] = ()
    inner_modules: tuple[str, ...] = ()
    isolates_documents: bool = True

    def __post_init__(self) -> None:
        if not self.default_targets:
            object.__setattr__(self, "default_targets", self.linear_modules)

    @property
    def first_only(self) -> tuple[str, ...]:
        """Modules of the base model beside the embedding that no stage but the first has."""
        return self.zero_after_first + self.identity_after_first


_TABLE = (
    Family("llama"),
    Family("mistral"),
    Family("qwen2"),
    Family("qwen3"),
    Family("gemma"),
    Family("gemma2", eager_only=True, logits_capped_at="final_logit_softcapping"),
    Family("gemma3_text", logits_capped_at="final_logit_softcapping"),
    Family(
        "gemma4_text",
        logits_capped_at="final_logit_softcapping",
        linear_modules=(*_ATTENTION, *_MLP, "proj"),
        default_targets=_ATTENTION + _MLP,  # not the router's
        optional_modules=(
            "v_proj",
            "proj",
        ),  # with attention_k_eq_v full attention has none; a model may be full throughout
    ),
    Family("smollm3"),
    Family("olmo"),
    Family("olmo2"),
    Family("olmo3"),
    Family("exaone4"),
    Family("stablelm"),
    Family("cohere", logits_multiplied_by="logit_scale"),
    Family("cohere2", logits_multiplied_by="logit_scale"),
    Family("granite", numbers_after_first=(("embedding_multiplier", 1.0),), logits_divided_by="logits_scaling"),
    Family("nemotron", linear_modules=(*_ATTENTION, "up_proj", "down_proj")),
    Family("glm4", linear_modules=(*_ATTENTION, "gate_up_proj", "down_proj")),
    Family("phi3", linear_modules=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    Family(
        "phi",
        final_norm="final_layernorm",
        identity_after_first=("embed_dropout",),
        linear_modules=("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    ),
    Family(
        "starcoder2",
        numbers_after_first=(("embedding_dropout", 0.0),),
        linear_modules=(*_ATTENTION, "c_fc", "c_proj"),
    ),
    # PEFT takes gate_proj, up_proj and down_proj of the next two for the experts' fused tensors: no targets by name.
    Family(
        "deepseek_v3",
        linear_modules=("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        optional_modules=("q_proj", "q_a_proj", "q_b_proj"),
        inner_modules=("q_b_proj", "kv_b_proj"),
    ),
    Family(
        "qwen3_5_text",
        left_out=("mtp.", "model.visual."),
        isolates_documents=False,
        linear_modules=(*_ATTENTION, *_MLP, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    ),
    Family(
        "qwen3_next",
        left_out=("mtp.",),
        isolates_documents=False,
        linear_modules=(*_ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"),
        default_targets=(*_ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    ),
    # Routed experts are 3-D tensors, no linear modules; PEFT takes gate_proj, up_proj, down_proj of Qwen for them.
    Family("mixtral", linear_modules=_ATTENTION),
    Family("qwen2_moe", linear_modules=(*_ATTENTION, "shared_expert_gate"), default_targets=_ATTENTION),
    Family("qwen3_moe", linear_modules=_ATTENTION),
    Family("gpt_oss", eager_only=True, isolates_documents=False, linear_modules=_ATTENTION),
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
    Family(
        "gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        head_in_files="embed_out",
        identity_after_first=("emb_dropout",),
        linear_modules=_FUSED,
    ),
    Family(
        "falcon",
        layers="h",
        embedding="word_embeddings",
        final_norm="ln_f",
        layers_give_tuples=True,
        linear_modules=_FUSED,
    ),
    Family(
        "bloom",
        isolates_documents=False,
        layers="h",
        embedding="word_embeddings",
        final_norm="ln_f",
        identity_after_first=("word_embeddings_layernorm",),
        layers_give_tuples=True,
        eager_only=True,
        linear_modules=_FUSED,
    ),
)
FAMILIES = {family.model_type: family for family in _TABLE}


def family_of(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ConfigError: it is not in the table.
    """
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model.path must lead to a model of a verified family, got model_type {model_type!r}, whose layers would "
            f"have to be checked stage by stage first; verified are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def family_of_config(config: dict[str, Any]) -> Family:
    """The family of a parsed `config.json` whose model can be cut into stages.

    Code that comes with a model (`auto_map`) is never run: transformers' own class of the family is used.

    Raises:
        ConfigError: the family is not in the table, or this model of it cannot be cut; the reason is given.
    """
    model_type = check_suitable(config)
    if model_type not in FAMILIES and "auto_map" in config:
        raise ConfigError(
            f"model.path must lead to a model of a verified family, got model_type {model_type!r}, which needs Python "
            f"code of its own (auto_map in config.json), and such code is never run; verified are {', '.join(FAMILIES)}"
        )
    return family_of(model_type)


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

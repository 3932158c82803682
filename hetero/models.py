"""A stage of a transformers model: the ordinary class with foreign modules replaced, loaded by `from_pretrained`.

The list of layers keeps its full length, so that global names, per-layer attention types and PEFT keys stay right;
layers of other stages are pass-throughs and their weights are never read. Relies on transformers' private
`_keys_to_ignore_on_load_unexpected` and `all_tied_weights_keys`; the version is pinned and a test covers each.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero.errors import ConfigError
from hetero.families import Family, check_attention, family_of, family_of_config
from hetero.folders import one_line
from hetero.mxfp4 import dequantised_in_pieces, loaded_as_numbers
from hetero.quantization import (
    check_nf4,
    check_stored,
    keep_trainable_layout,
    nf4_as_stored,
    nf4_on_load,
    quantised_in_pieces,
    stored_quantization,
)
from hetero.shards import own_files
from hetero.token_loss import Scaling

log = logging.getLogger(__name__)

_PIECEWISE = {"nf4": quantised_in_pieces, "mxfp4": dequantised_in_pieces}


class PassThrough(nn.Module):
    """Stands where another stage's module is; gives its first argument back.

    Args:
        as_tuple: in a tuple, as some families' layers give their hidden states.
    """

    def __init__(self, *, as_tuple: bool = False) -> None:
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, first: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The first argument."""
        value = first if first is not None else next(iter(kwargs.values()))
        return (value,) if self.as_tuple else value


class AddsNothing(nn.Module):
    """Stands where a module is whose output another stage has added already; gives zero."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A scalar zero."""
        return torch.zeros(())


def load_stage(
    path: str | Path,
    start: int,
    end: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "none",
    attn_implementation: str | None = None,
    revision: str | None = None,
) -> nn.Module:
    """The model's layers [start, end), with the embedding on the first stage and norm and head on the last.

    Only the weights of these modules are read. The model is in training mode and frozen.

    Args:
        path: a folder with config.json and safetensors, or a hub id.
        start: first layer.
        end: one past the last layer.
        dtype: of the weights.
        device: where they go.
        quantization: `nf4` holds linear layers in 4 bits: made while loading (with double quantisation), or as they
            are in a checkpoint that bitsandbytes made.
        attn_implementation: `sdpa`, `eager`, or None for the model's own choice.
        revision: of a hub id.

    Raises:
        ConfigError: the family is not verified, weights are missing, or they cannot be in 4 bits as asked.
    """
    from safetensors import SafetensorError
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    config, family = _read_config(path, revision)
    check_attention(attn_implementation, family)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    options: dict[str, Any] = (
        {"device_map": {"": str(device)}} if device.type != "cpu" or quantization != "none" else {}
    )
    if quantization == "nf4":
        check_nf4(device, where=f"layers [{start}, {end})")
        options["quantization_config"] = nf4_on_load(dtype)
    stored = getattr(config, "quantization_config", None)
    check_stored(stored, [quantization])
    kind = stored_quantization(stored)
    if kind == "nf4":
        del options["quantization_config"]
        config.quantization_config = nf4_as_stored(stored, dtype)
    elif kind == "mxfp4":
        config.quantization_config = loaded_as_numbers()
    extent = {"num_layers": config.num_hidden_layers, "tied": config.tie_word_embeddings}
    try:
        with (
            own_files(path, family, start, end, **extent) as own_path,
            _PIECEWISE.get(quantization if kind == "none" else kind, nullcontext)(),
        ):
            model, info = _stage_class(cls, family, start, end).from_pretrained(
                own_path,
                revision=revision,
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                **options,
            )
    except (OSError, ValueError, SafetensorError) as exc:
        first_line = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {first_line}") from exc
    except RuntimeError as exc:
        if "automatic conversion of the weights" not in str(exc):
            raise
        raise ConfigError(
            f"model.path {str(path)!r} must hold all parts of the experts of layers [{start}, {end}): some do not fit "
            "together"
        ) from exc
    lacking = sorted({*info["missing_keys"], *(key for key, *_shapes in info["mismatched_keys"])})
    if lacking:
        raise ConfigError(
            f"model.path {str(path)!r} must hold all weights of layers [{start}, {end}), "
            f"lacks {', '.join(lacking[:4])}{' ...' if len(lacking) > 4 else ''}"
        )
    unfilled = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    assert not unfilled, unfilled
    if quantization == "nf4":
        keep_trainable_layout(model)
    model.name_or_path = model.config.name_or_path = str(path)  # not the folder of links
    model.requires_grad_(False)
    model.train()
    return model  # type: ignore[no-any-return]


def meta_model(path: str | Path, *, revision: str | None = None) -> Any:
    """The whole model without memory for its weights: shapes and names only.

    Raises:
        ConfigError: the family is not verified, or the configuration is not one that a model can be built of.
    """
    from transformers import AutoModelForCausalLM

    config, _ = _read_config(path, revision)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as exc:  # whatever a value of the file leads to in the model's code
        raise _unbuildable(path, exc) from exc


def logit_scaling(config: Any) -> Scaling:
    """What follows the head in a model of this configuration, before the softmax."""
    family = family_of(config.model_type)
    factor, cap = 1.0, None
    if family.logits_multiplied_by is not None:
        factor = float(getattr(config, family.logits_multiplied_by))
    if family.logits_divided_by is not None:
        factor = 1.0 / float(getattr(config, family.logits_divided_by))
    if family.logits_capped_at is not None:
        cap = getattr(config, family.logits_capped_at)
    return Scaling(factor, None if cap is None else float(cap))


def embedding_of(model: Any) -> nn.Module:
    """The token embedding, as it is now (PEFT may have wrapped it)."""
    return model.get_input_embeddings()  # type: ignore[no-any-return]


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder layers, foreign ones included."""
    return getattr(model.base_model, family_of(model.config.model_type).layers)  # type: ignore[no-any-return]


def _read_config(path: str | Path, revision: str | None) -> tuple[Any, Family]:
    """A model's configuration and family; the file is judged before any class is chosen by it."""
    from transformers import AutoConfig, PreTrainedConfig

    try:
        raw, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
        family = family_of_config(raw)
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False), family
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {one_line(exc)}") from exc
    except ConfigError:
        raise
    except Exception as exc:  # whatever a value of the file leads to in the configuration's code
        raise _unbuildable(path, exc) from exc


def _unbuildable(path: str | Path, exc: Exception) -> ConfigError:
    return ConfigError(
        f"model.path must have a config.json of values that transformers knows, from {str(path)!r} it cannot build the "
        f"model: {type(exc).__name__}: {one_line(exc)}"
    )


def _stage_class(cls: Any, family: Family, start: int, end: int) -> Any:
    """A subclass of a transformers model class that prunes itself when it is made."""

    class Stage(cls):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = (
            *(cls._keys_to_ignore_on_load_unexpected or ()),
            rf"(^|\.){family.layers}\.\d+\.",
            r"^lm_head\.",
            *(rf"(^|\.){name}\." for name in (family.final_norm, family.embedding, *family.first_only)),
        )

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            prune(self, family, start, end)

    Stage.__name__ = Stage.__qualname__ = cls.__name__
    Stage.__module__ = cls.__module__  # from elsewhere it would count as custom code: no renaming of old files' tensors
    return Stage


def prune(model: Any, family: Family, start: int, end: int) -> None:
    """Replaces what other stages hold; the list of layers keeps its length."""
    base = model.base_model
    layers = getattr(base, family.layers)
    first, last = start == 0, end == len(layers)
    if end > len(layers):
        raise ConfigError(f"shard_plan must end at the model's {len(layers)} layers, got [{start}, {end})")
    for index, layer in enumerate(layers):
        if not start <= index < end:
            foreign = PassThrough(as_tuple=family.layers_give_tuples)
            if hasattr(layer, "attention_type"):  # the model looks up the mask by it
                foreign.attention_type = layer.attention_type
            layers[index] = foreign
    if not (first or (last and model.config.tie_word_embeddings)):
        setattr(base, family.embedding, PassThrough())
    if not first:
        for name in family.zero_after_first:
            setattr(base, name, AddsNothing())
        for name in family.identity_after_first:
            setattr(base, name, nn.Identity())
        for name, value in family.numbers_after_first:
            assert hasattr(base, name), f"{type(base).__name__} has no {name}"
            setattr(base, name, value)
    if not last:
        setattr(base, family.final_norm, PassThrough())
        model.lm_head = PassThrough()
        model.all_tied_weights_keys = {}


def main(argv: list[str] | None = None) -> int:
    """`python -m hetero.models fetch NAME`."""
    from hetero.fetch import main as fetch_main

    return fetch_main(argv)


if __name__ == "__main__":
    raise SystemExit(main())

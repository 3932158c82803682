"""The key/value cache of a stage: entries for its own layers, and none that reads as empty for the others'."""

from __future__ import annotations

from typing import Any

from hetero import models


def stage_cache(model: Any) -> Any | None:
    """An empty cache for a pruned model; None where it could not be exact, so that each token needs the whole prefix.

    The base model asks the cache how long it is, and how long its windows are, through whichever entry comes first of
    a kind. An entry of another stage's layer would stay empty and give a mask for the wrong length, so it is an alias
    of one that this stage fills: of the same kind (sliding, full) where it has one. Linear and ordinary attention
    cannot stand in for one another, since one kind keeps a state and the other a length.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    cache = DynamicCache(config=model.config)
    own = own_layers(model)
    is_linear = [isinstance(entry, LinearAttentionCacheLayerMixin) for entry in cache.layers]
    if set(is_linear) != {is_linear[index] for index in own}:
        return None
    for index, entry in enumerate(cache.layers):
        if index not in own:
            alike = [other for other in own if type(cache.layers[other]) is type(entry)]
            cache.layers[index] = cache.layers[alike[0] if alike else own[0]]
    return cache


def own_layers(model: Any) -> list[int]:
    """Global numbers of the layers that a pruned model holds."""
    layers = enumerate(models.layers_of(model))
    return [index for index, layer in layers if not isinstance(layer, models.PassThrough)]

"""A stage's part of generation: pieces of hidden states through its layers, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hetero import models
from hetero.kv_cache import stage_cache
from hetero.peft_import import load_peft
from hetero.stage import Stage
from hetero.token_loss import logits_of


class Decoder:
    """One batch of prompts on one stage.

    A stage whose cache would not be exact runs the whole prefix again with each new token.

    Args:
        stage: what computes; in evaluation mode, see `evaluating`.
        lengths: tokens of each prompt; shorter ones are padded on the left.
    """

    def __init__(self, stage: Stage, lengths: Sequence[int]) -> None:
        self._stage = stage
        longest = max(lengths)
        real = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]  # [B, T]
        self._mask = stage.device.from_host(real)
        self._cache = stage_cache(stage.model)
        limit = getattr(stage.model.config, "max_position_embeddings", None)
        self._last_position = None if limit is None else limit - 1
        self._prefix: torch.Tensor | None = None  # what came in so far, [B, T] or [B, T, H], where there is no cache

    @torch.no_grad()
    def forward(self, piece: torch.Tensor) -> torch.Tensor:
        """What comes out for what came in.

        Args:
            piece: on the host: token ids [B, T] on the first stage, hidden [B, T, H] on later ones; T is that of the
                prompts at first, and 1 from then on.

        Returns:
            On this device hidden [B, T, H], on the last stage the float32 logits [B, V] of the last position.
        """
        stage, num_new = self._stage, piece.shape[1]
        given = stage.device.from_host(piece, None if stage.is_first else stage.dtype)
        if self._cache is None:
            self._prefix = given = given if self._prefix is None else torch.cat([self._prefix, given], 1)
        # [B, all so far]; only a row that has ended can be at the limit, and what becomes of it is not read
        positions = (self._mask.long().cumsum(-1) - 1).clamp(min=0, max=self._last_position)
        inputs: dict[str, Any] = {
            "input_ids" if stage.is_first else "inputs_embeds": given,
            "attention_mask": self._mask,
            "position_ids": positions[:, -given.shape[1] :],
            "use_cache": self._cache is not None,
        }
        if self._cache is not None:
            inputs["cache"] = self._cache
        hidden = stage.model.base_model(**inputs).last_hidden_state[:, -num_new:]  # [B, T, H]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], 1)
        if not stage.is_last:
            return hidden  # type: ignore[no-any-return]
        head, scaling = stage.model.get_output_embeddings(), models.logit_scaling(stage.model.config)
        return logits_of(head, hidden[:, -1], scaling)


@contextmanager
def evaluating(stage: Stage, *, base_only: bool = False) -> Iterator[None]:
    """Dropout is off while it lasts; with `base_only` the adapter as well."""
    stage.model.eval()
    if base_only:
        _switch_adapter(stage, False)
    try:
        yield
    finally:
        if base_only:
            _switch_adapter(stage, True)
        stage.model.train()


def _switch_adapter(stage: Stage, on: bool) -> None:
    load_peft(four_bit=False)  # once 4 bits are in play it knows them already
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    trains = {key: parameter.requires_grad for key, parameter in stage.trained.items()}
    for module in stage.model.modules():
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper):
            module.enable_adapters(on)
    for key, parameter in stage.trained.items():
        parameter.requires_grad_(trains[key])  # PEFT ties the two together

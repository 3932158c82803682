"""The balancing loss of a mixture of experts over stages.

It is E * sum over experts of (share of the tokens) * (mean probability), over the routers of all layers at once
(Switch Transformer, Fedus et al. 2021, equations 4 to 6, as transformers computes it). Each stage adds its layers to
three sums that travel with the hidden states; the last stage makes the loss of them, and the gradient of the
probabilities' sum comes back with the gradient of the hidden states. Padding is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.device import Device
from hetero.spec import RouterLossSpec


@dataclass
class _Sums:
    """Of one micro-batch, over the layers up to here; float32.

    Attributes:
        leaf: [E], the probabilities' sum as it came from the stage before; None on the first stage.
        tokens: [E], how often each expert was chosen.
        probs: [E], of the router's probabilities, differentiable.
        rows: [1], tokens that were counted, once for each router.
        real_tokens: of the micro-batch.
    """

    leaf: torch.Tensor | None
    tokens: torch.Tensor
    probs: torch.Tensor
    rows: torch.Tensor
    real_tokens: int


class RouterLoss:
    """What one stage has to do with the router loss.

    Args:
        spec: number of experts and coefficient.
        top_k: experts that a token goes to.
        device: of the stage.
    """

    def __init__(self, spec: RouterLossSpec, top_k: int, device: Device) -> None:
        self._spec, self._top_k, self._device = spec, top_k, device
        self._step_tokens = 0
        self._sums: dict[int, _Sums] = {}
        self._losses: list[torch.Tensor] = []

    def begin_step(self, real_tokens: int) -> None:
        """A step begins; `real_tokens` are all tokens of its micro-batches but padding."""
        self._step_tokens = real_tokens

    def add_layers(
        self, micro_batch: int, batch: dict[str, torch.Tensor], router_logits: Sequence[torch.Tensor]
    ) -> None:
        """Adds the routers of this stage to what came from the stage before.

        Args:
            micro_batch: its number in the step.
            batch: on the device: `labels` and, where rows are padded, `attention_mask` [B, T]; on later stages the sums
                of the stage before under their names on the wire.
            router_logits: [B * T, E] of each router, in order.
        """
        zeros = torch.zeros(self._spec.num_experts, device=self._device.torch_device)
        leaf = batch["router_probs"].detach().requires_grad_() if "router_probs" in batch else None
        probs = zeros if leaf is None else leaf
        tokens, rows = batch.get("router_tokens", zeros), batch.get("router_rows", zeros.new_zeros(1))
        shape, mask = batch["labels"].shape, batch.get("attention_mask")
        counted = torch.ones(shape, device=zeros.device) if mask is None else mask.to(zeros.dtype)
        counted = counted.reshape(-1)  # [B * T]
        for logits in router_logits:
            shares = torch.softmax(
                logits, dim=-1
            )  # in the router's dtype, and what follows in float32, as transformers
            chosen = torch.topk(shares, self._top_k, dim=-1).indices
            tokens = tokens + torch.zeros_like(zeros).scatter_add_(
                0, chosen.reshape(-1), counted.repeat_interleave(self._top_k)
            )
            probs = probs + (shares.float() * counted[:, None]).sum(dim=0)
            rows = rows + counted.sum()
        real_tokens = shape.numel() if mask is None else int(mask.sum())
        self._sums[micro_batch] = _Sums(leaf, tokens, probs, rows, real_tokens)

    def outgoing(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """The sums that go to the next stage, by their names on the wire."""
        sums = self._sums[micro_batch]
        return {"router_tokens": sums.tokens, "router_probs": sums.probs.detach(), "router_rows": sums.rows}

    def probs(self, micro_batch: int) -> torch.Tensor:
        """[E]: the sum that a gradient comes back for."""
        return self._sums[micro_batch].probs

    def loss(self, micro_batch: int) -> torch.Tensor:
        """The part of a micro-batch in the step's loss, weighed by its tokens: a scalar, on the last stage."""
        sums, spec = self._sums[micro_batch], self._spec
        balance = torch.sum((sums.tokens / sums.rows) * (sums.probs / sums.rows)) * spec.num_experts
        part = balance * (spec.coefficient * sums.real_tokens / self._step_tokens)
        self._losses.append(part.detach())
        return part

    def end_backward(self, micro_batch: int) -> torch.Tensor | None:
        """The gradient [E] of the sum that came in, float32; None on the first stage. Forgets the micro-batch."""
        leaf = self._sums.pop(micro_batch).leaf
        if leaf is None:
            return None
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    def total(self) -> float:
        """The router's part of the step's loss so far, on the last stage."""
        return math.fsum(float(part) for part in self._losses)

    def end_step(self) -> None:
        """Forgets losses and whatever is in flight."""
        self._losses.clear()
        self._sums.clear()

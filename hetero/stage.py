"""Stage: a contiguous range of layers that runs forward and backward one micro-batch at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetero import adapters, models
from hetero.device import Device
from hetero.errors import ConfigError
from hetero.families import family_of
from hetero.keys import key64
from hetero.router_loss import RouterLoss
from hetero.spec import RunSpec
from hetero.token_loss import token_loss, token_losses
from hetero.wire.tensors import DTYPES

IGNORED_LABEL = -100


@dataclass
class _InFlight:
    """What a micro-batch leaves on a stage between its forward and its backward."""

    step: int
    hidden_in: torch.Tensor | None  # a leaf [B, T, H]; None on the first stage
    out: torch.Tensor  # hidden [B, T, H], or on the last stage the loss, a scalar


class Stage:
    """Layers [start, end) of a model with their share of the adapter.

    Args:
        model: the pruned model.
        peft_model: PEFT's wrapper around it, None where nothing trains here.
        start: first layer.
        end: one past the last.
        num_layers: of the whole model.
        dtype: that the layers compute in; `model.dtype` would be the adapter's where all weights are 4-bit.
        device: where it runs.
        seed: of the run; dropout masks are keyed by (seed, step, micro-batch, global layer).
        recompute: `layer`: activations inside a layer are computed again in the backward; `stage`: those of all layers,
            from the stage's input. The last stage, whose backward follows its forward, does it by layers.
        adapter: of the whole model, for whoever saves.
        router: of a mixture of experts whose router loss is on.
    """

    def __init__(
        self,
        model: Any,
        peft_model: Any | None,
        *,
        start: int,
        end: int,
        num_layers: int,
        dtype: torch.dtype,
        device: Device,
        seed: int,
        recompute: str = "none",
        adapter: adapters.ResolvedAdapter | None = None,
        router: RouterLoss | None = None,
    ) -> None:
        self.is_first, self.is_last = start == 0, end == num_layers
        self.device, self.model, self.adapter = device, model, adapter
        self.trained: dict[str, nn.Parameter] = adapters.trained_tensors(peft_model)
        self.dtype, self.router = dtype, router
        if router is not None or getattr(model.config, "output_router_logits", False):
            model.config.output_router_logits = router is not None  # what no loss needs would only be kept
        self._seed = seed
        self._scaling = models.logit_scaling(model.config)
        self._in_flight: dict[int, _InFlight] = {}
        self._losses: list[torch.Tensor] = []
        self._now = (0, 0)  # step and micro-batch that dropout is keyed by
        self._generator: torch.Generator | None = None
        self._recompute_all = recompute == "stage" and not self.is_last
        if recompute == "layer" or (recompute == "stage" and self.is_last):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._key_dropout(start, end)
        self._bound_memory(start, end)

    def forward(
        self, step: int, micro_batch: int, batch: dict[str, torch.Tensor], label_tokens: int
    ) -> torch.Tensor | None:
        """Runs one micro-batch forward.

        Args:
            step: optimizer step, from 1.
            micro_batch: its number in the step.
            batch: on the host: `labels` [B, T] int64; `input_ids` [B, T] on the first stage, `hidden` [B, T, H] on
                later ones; `attention_mask` [B, T] bool and `position_ids` [B, T] where rows are padded.
            label_tokens: of the whole step.

        Returns:
            hidden [B, T, H] for the next stage, None on the last (see `losses`).
        """
        on_device = {key: self.device.from_host(value) for key, value in batch.items() if key != "hidden"}
        inputs: dict[str, Any] = {key: on_device.get(key) for key in ("attention_mask", "position_ids")}
        leaf: torch.Tensor | None = None
        if self.is_first:
            inputs["input_ids"] = on_device["input_ids"]
        else:
            leaf = self.device.from_host(batch["hidden"], self.dtype).detach().requires_grad_()
            inputs["inputs_embeds"] = leaf
        with self._keyed(step, micro_batch):
            output = self._run(inputs)
            hidden = output.last_hidden_state  # [B, T, H]
            if self.router is not None:
                self.router.add_layers(micro_batch, on_device, output.router_logits)
            out = self._loss(hidden, on_device["labels"], label_tokens) if self.is_last else hidden
            if self.router is not None and self.is_last:
                out = out + self.router.loss(micro_batch)
        self._in_flight[micro_batch] = _InFlight(step, leaf, out)
        if self.is_last:
            self._losses.append(out.detach())
            return None
        return out.detach()

    def backward(
        self, micro_batch: int, grad: torch.Tensor | None, router_grad: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Runs one micro-batch backward; gradients of trained tensors add up.

        Args:
            micro_batch: one that went forward.
            grad: on the host, of the hidden that `forward` gave; None on the last stage.
            router_grad: on the host, of the sum that `router` gave with it; None on the last stage.

        Returns:
            The gradient [B, T, H] of the hidden that came in, None on the first stage.
        """
        saved = self._in_flight.pop(micro_batch)
        with self._keyed(saved.step, micro_batch):
            incoming = None if grad is None else self.device.from_host(grad, saved.out.dtype)
            outs = [(saved.out, incoming)]
            if self.router is not None and router_grad is not None:
                outs.append((self.router.probs(micro_batch), self.device.from_host(router_grad)))
            if outs := [pair for pair in outs if pair[0].requires_grad]:  # in one call, as in one process
                torch.autograd.backward([out for out, _ in outs], [into for _, into in outs])
        return None if saved.hidden_in is None else saved.hidden_in.grad

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Between two steps: dropout is off, and each module is in the mode that it was in afterwards."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @torch.no_grad()
    def evaluate(self, batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Runs one micro-batch forward and keeps nothing of it, inside `evaluating`.

        The last stage adds the sum of its label tokens' losses, in float64 and without a router loss, to `loss`.

        Args:
            batch: as for `forward`.

        Returns:
            hidden [B, T, H] for the next stage, None on the last.
        """
        inputs: dict[str, Any] = {
            key: self.device.from_host(batch[key]) if key in batch else None
            for key in ("attention_mask", "position_ids")
        }
        if self.is_first:
            inputs["input_ids"] = self.device.from_host(batch["input_ids"])
        else:
            inputs["inputs_embeds"] = self.device.from_host(batch["hidden"], self.dtype)
        hidden: torch.Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state  # [B, T, H]
        if not self.is_last:
            return hidden
        targets = self.device.from_host(batch["labels"])[:, 1:]
        keep = targets != IGNORED_LABEL
        head = self.model.get_output_embeddings()
        losses = token_losses(head, hidden[:, :-1][keep], targets[keep], scaling=self._scaling)
        self._losses.append(self.device.to_host(losses).double().sum())  # not every device has float64
        return None

    def loss(self) -> float:
        """The loss of the step so far: exact sum of its micro-batches' parts."""
        return math.fsum(float(part) for part in self._losses)

    def squared_norms(self) -> torch.Tensor:
        """float64 [n] on the host: squared gradient norm of each trained tensor."""
        norms = [
            self.device.squared_norm(p.grad) if p.grad is not None else torch.zeros((), dtype=torch.float64)
            for p in self.trained.values()
        ]
        return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)

    def scale_gradients(self, factor: float) -> None:
        """Multiplies all gradients, as clipping does."""
        if factor != 1.0:
            for parameter in self.trained.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def end_step(self) -> None:
        """Forgets gradients, losses and whatever is in flight."""
        for parameter in self.trained.values():
            parameter.grad = None
        self._losses.clear()
        self._in_flight.clear()
        if self.router is not None:
            self.router.end_step()
        self.device.end_step()

    def state(self) -> dict[str, torch.Tensor]:
        """Global key -> the trained tensor's value on the host, a copy."""
        return {key: parameter.detach().to("cpu", copy=True) for key, parameter in self.trained.items()}

    def _run(self, inputs: dict[str, Any]) -> Any:
        """transformers' output of the stage's layers, on the last stage with the norm."""
        if not self._recompute_all:
            return self.model.base_model(**inputs, use_cache=False)
        # Whoever draws is seeded by hooks inside, so the generators' states need not be kept.
        return checkpoint(
            self.model.base_model, **inputs, use_cache=False, use_reentrant=False, preserve_rng_state=False
        )

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor, label_tokens: int) -> torch.Tensor:
        """Sum over this micro-batch's label tokens / label tokens of the whole step; logits only where a label is."""
        targets = labels[:, 1:]
        keep = targets != IGNORED_LABEL
        self.device.between_layers()
        return token_loss(
            self.model.get_output_embeddings(),
            hidden[:, :-1][keep],
            targets[keep],
            label_tokens,
            scaling=self._scaling,
            seed=partial(self._seed_for, "head"),
        )

    @contextmanager
    def _keyed(self, step: int, micro_batch: int) -> Iterator[None]:
        self._now = (step, micro_batch)
        with self.device.keyed_draws() as generator:
            self._generator = generator
            try:
                yield
            finally:
                self._generator = None

    def _key_dropout(self, start: int, end: int) -> None:
        """Seeds in a pre-hook of each module that draws, so that a recomputation draws the same.

        Outside of `_keyed` (evaluation by somebody else) nothing is seeded.
        """
        layers = models.layers_of(self.model)
        for index in range(start, end):
            layers[index].register_forward_pre_hook(partial(self._seed_for, index))
        base = self.model.base_model
        if self.is_first:
            models.embedding_of(self.model).register_forward_pre_hook(partial(self._seed_for, "embedding"))
            for name in family_of(self.model.config.model_type).identity_after_first:
                getattr(base, name).register_forward_pre_hook(partial(self._seed_for, name))

    def _bound_memory(self, start: int, end: int) -> None:
        """Lets the device see to its memory before each layer, forward and backward; `_loss` does before the head."""
        layers = models.layers_of(self.model)
        for index in range(start, end):
            layers[index].register_forward_pre_hook(self._before_layer)
            layers[index].register_forward_hook(self._after_layer)

    def _before_layer(self, *_: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation keeps nothing that could add up
            self.device.between_layers()

    def _after_layer(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.device.between_layers())  # the layer's backward begins

    def _seed_for(self, what: int | str, *_: Any) -> None:
        if self._generator is not None:
            self._generator.manual_seed(key64(self._seed, "dropout", *self._now, what))


def build_stage(spec: RunSpec, index: int, model_path: Path, device: Device) -> Stage:
    """The stage of a run with transformers and PEFT.

    Args:
        spec: the run.
        index: which stage.
        model_path: the folder where this machine has what the stage needs of the model.
        device: where to put it.

    Raises:
        ConfigError: the model or the adapter cannot be what the spec says.
    """
    plan = spec.stages[index]
    quantization = plan.quantization or spec.model.quantization
    dtype_name = plan.dtype or spec.model.dtype
    device.check_dtype(dtype_name, key=f"shard_plan.stages[{index}].dtype")
    with device.loading():
        resolved = adapters.resolve(models.meta_model(model_path), spec.adapter, spec.model.path)
        model = models.load_stage(
            model_path,
            plan.start,
            plan.end,
            dtype=DTYPES[dtype_name],
            device=device.torch_device,
            quantization=quantization,
            attn_implementation=spec.model.attn_implementation,
        )
        peft_model = adapters.attach(model, resolved, spec.seed)
        model.to(device.torch_device)
    return Stage(
        model,
        peft_model,
        start=plan.start,
        end=plan.end,
        num_layers=spec.num_hidden_layers,
        dtype=DTYPES[dtype_name],
        device=device,
        seed=spec.seed,
        recompute=spec.loop.recompute,
        adapter=resolved,
        router=_router(spec, model, device),
    )


def _router(spec: RunSpec, model: Any, device: Device) -> RouterLoss | None:
    if spec.router_loss is None:
        return None
    if model.config.num_experts != spec.router_loss.num_experts:
        raise ConfigError(
            f"model.path must lead to the model of the run, which has {spec.router_loss.num_experts} experts, "
            f"found one with {model.config.num_experts}"
        )
    return RouterLoss(spec.router_loss, model.config.num_experts_per_tok, device)

"""What a forward and a backward hold, found by running them on tensors that have shapes and no memory.

One decoder layer of the whole model runs as if it were a stage of its own, with PEFT's modules and transformers' own
code, on torch's fake tensors: kernels are chosen as on a real CPU, and nothing is computed. A dispatch mode sees every
storage come and go. So the figures hold for each family as it is, and there is no formula that could be out of date.
Relies on torch's `FakeTensorMode` and transformers' `find_packed_sequence_indices`; the versions are pinned, and tests
compare with real runs.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetero.device import Device
from hetero.families import Family
from hetero.models import layers_of, prune
from hetero.router_loss import RouterLoss
from hetero.spec import RouterLossSpec
from hetero.token_loss import token_loss


@dataclass(frozen=True)
class Shape:
    """A micro-batch: B rows of T tokens each.

    Attributes:
        rows: B.
        length: T.
        padded: shorter rows are filled up, which needs a mask.
        packed: rows hold several documents, which positions alone tell apart.
    """

    rows: int
    length: int
    padded: bool
    packed: bool = False


@dataclass(frozen=True)
class Usage:
    """Bytes of one micro-batch in one layer, or in the head.

    Attributes:
        kept: what the layer made, or was given, that is held until its backward.
        shared: the same of what was made around the layer, as masks, once for all layers of a stage.
        input_kept: whether the hidden states that came in are among `kept`.
        work: most bytes at once in forward or backward, beyond what is kept.
    """

    kept: int
    shared: int
    input_kept: bool
    work: int


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are made while it is on and still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.place = "around"
        self._live: dict[int, tuple[int, str]] = {}
        self._known: dict[int, torch.UntypedStorage] = {}  # held, so that no new storage gets the address of one

    def ignore(self, tensors: Iterator[torch.Tensor]) -> None:
        """Views of these tensors do not count."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._known |= {storage._cdata: storage for storage in storages}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        grouped = func is torch.ops.aten._grouped_mm.default
        out = (_grouped_product if grouped else func)(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or key in self._known:
            return
        self._live[key] = (storage.nbytes(), self.place)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key)[0]

    def held(self, place: str) -> int:
        """Bytes that were made at a place and are still there."""
        return sum(num_bytes for num_bytes, where in self._live.values() if where == place)


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None = None, dtype: Any = None
) -> torch.Tensor:
    """What multiplies tokens by their experts, without torch's rule for fake tensors, which allows bfloat16 alone."""
    if b.dim() == 2:  # the weights' gradient: [K, S] by [S, N] for each expert
        return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(a.shape[0], b.shape[-1])


class _Cut(torch.autograd.Function):
    """Ends a graph as a stage does: the hidden states go, and their gradient comes later."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.like = (hidden.shape, hidden.dtype, hidden.device)
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)


class _FourBitProduct(torch.autograd.Function):
    """As bitsandbytes multiplies: the weight exists in the input's dtype for as long as that takes; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, num_out: int) -> torch.Tensor:
        ctx.shape = (num_out, x.shape[-1])
        return nn.functional.linear(x, x.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ grad.new_empty(ctx.shape), None


def quantized_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> linear module that 4-bit loading replaces: all but the head, and not what PEFT has added."""
    from transformers.pytorch_utils import Conv1D

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and "lora_" not in name and "lm_head" not in name
    }


def dtype_in_stage(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter on a stage that computes in `dtype`: PEFT holds its own in float32."""
    return torch.float32 if "lora_" in name else dtype


class FakeRun:
    """Runs parts of a whole model without memory.

    Args:
        model: the whole model on the meta device, with its adapter in place.
        family: of the model.
        attn_implementation: as configured.
        router_loss: of a mixture of experts; None where it is off.
    """

    def __init__(
        self, model: Any, family: Family, attn_implementation: str | None, router_loss: RouterLossSpec | None = None
    ) -> None:
        self._model, self._family, self._mode = model, family, FakeTensorMode()
        self._router_loss = router_loss
        if router_loss is not None or getattr(model.config, "output_router_logits", False):
            model.config.output_router_logits = router_loss is not None  # as on a stage
        if router_loss is not None:  # else on the first run, when all layers but one are replaced
            from transformers.utils.output_capturing import maybe_install_capturing_hooks

            maybe_install_capturing_hooks(model.base_model)
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
        model.train()

    def recompute_layers(self, wanted: bool) -> None:
        """Whether layers compute their activations again in the backward, from now on."""
        if wanted:
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self._model.activation_checkpointing_disable()

    def layer(
        self, index: int, shape: Shape, *, dtype: torch.dtype, four_bit: bool, input_grad: bool, device_type: str
    ) -> Usage:
        """What one layer holds; the first with the embedding, the last with the final norm.

        Args:
            index: of the layer.
            shape: of the micro-batch.
            dtype: that the stage computes in.
            four_bit: linear layers are held in 4 bits.
            input_grad: the gradient of what comes in is wanted.
            device_type: of the stage; it decides how attention is computed.
        """
        allocations = Allocations()
        with (
            self._alone(index),
            self._mode,
            _attention_of(device_type),
            _linears(self._model, four_bit),
            _documents(shape.packed),
        ):
            self._give_fakes(dtype, allocations)
            inputs, leaf = self._inputs(index, shape, dtype, input_grad)
            allocations.ignore(iter(inputs.values()))
            layer = layers_of(self._model)[index]
            with allocations, _noting(layer, allocations):
                if leaf is not None:
                    allocations.place = "input"
                    inputs["inputs_embeds"] = leaf.clone()
                    allocations.place = "around"
                ends = self._forward(inputs, shape, allocations)
                inputs.clear()
                held = {place: allocations.held(place) for place in ("input", "around", "inside")}
                kept = sum(held.values())
                if ends := [end for end in ends if end.requires_grad]:
                    torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
        return Usage(held["input"] + held["inside"], held["around"], held["input"] > 0, allocations.peak - kept)

    def head(self, shape: Shape, dtype: torch.dtype) -> Usage:
        """What the head and the loss hold where all tokens are labels."""
        allocations, config = Allocations(), self._model.config
        num_layers = len(layers_of(self._model))
        with self._alone(num_layers - 1), self._mode:
            self._give_fakes(dtype, allocations)
            leaf = torch.empty(shape.rows, shape.length, config.hidden_size, dtype=dtype).requires_grad_()
            positions = torch.empty(shape.rows * (shape.length - 1), dtype=torch.int64)
            targets = torch.empty_like(positions)
            with allocations:
                hidden = leaf.clone()
                chosen = hidden[:, :-1][positions.clone(), positions.clone()]  # [N, H], by a mask in the real one
                del hidden
                loss = token_loss(self._model.get_output_embeddings(), chosen, targets, 1)
                del chosen
                kept = allocations.now
                torch.autograd.backward(loss)
        return Usage(kept, 0, False, allocations.peak - kept)

    def _forward(self, inputs: dict[str, Any], shape: Shape, allocations: Allocations) -> list[torch.Tensor]:
        """The ends of the graph, which alone are held: of the hidden states, and of the router's sums."""
        output = self._model.base_model(**inputs, use_cache=False)
        ends: list[torch.Tensor] = [_Cut.apply(output.last_hidden_state)]  # type: ignore[no-untyped-call]
        if self._router_loss is not None and output.router_logits:
            allocations.place = "inside"  # for each layer anew
            # A mask's values would be asked for; it is small beside the probabilities.
            batch = {"labels": torch.empty(shape.rows, shape.length, dtype=torch.int64)}
            router = RouterLoss(self._router_loss, self._model.config.num_experts_per_tok, Device(torch.device("cpu")))
            router.add_layers(0, batch, output.router_logits)
            ends.append(router.probs(0))
        return ends

    def _inputs(
        self, index: int, shape: Shape, dtype: torch.dtype, input_grad: bool
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Arguments of the base model, and the hidden states to give to it where it has no embedding."""
        size, inputs, leaf = (shape.rows, shape.length), {}, None
        if shape.padded and not shape.packed:
            inputs["attention_mask"] = torch.empty(size, dtype=torch.bool)
        if shape.padded or shape.packed:
            inputs["position_ids"] = torch.empty(size, dtype=torch.int64)
        if index == 0:
            inputs["input_ids"] = torch.empty(size, dtype=torch.int64)
        else:
            leaf = torch.empty(*size, self._model.config.hidden_size, dtype=dtype).requires_grad_(input_grad)
        return inputs, leaf

    @contextlib.contextmanager
    def _alone(self, index: int) -> Iterator[None]:
        """All but one layer replaced, by the rule that loading uses."""
        model, base = self._model, self._model.base_model
        places = [layers_of(model), base, model]
        before = [dict(place._modules) for place in places]
        tied = model.all_tied_weights_keys
        prune(model, self._family, index, index + 1)
        try:
            yield
        finally:
            for place, modules in zip(places, before, strict=True):
                place._modules.update(modules)
            model.all_tied_weights_keys = tied

    def _give_fakes(self, dtype: torch.dtype, allocations: Allocations) -> None:
        """Fresh fake tensors for all that is left; trained ones have a gradient already, as after a micro-batch."""
        for prefix, module in self._model.named_modules():
            for name, old in module._parameters.items():
                if old is not None:
                    wanted = dtype_in_stage(f"{prefix}.{name}", dtype)
                    fake = nn.Parameter(torch.empty(old.shape, dtype=wanted), requires_grad=old.requires_grad)
                    fake.grad = torch.empty_like(fake) if old.requires_grad else None
                    module._parameters[name] = fake
            for name, old in module._buffers.items():
                if old is not None:
                    module._buffers[name] = torch.empty(old.shape, dtype=old.dtype)
        allocations.ignore(self._model.parameters())
        allocations.ignore(self._model.buffers())


@contextlib.contextmanager
def _linears(model: nn.Module, four_bit: bool) -> Iterator[None]:
    """Lets linear modules compute as if their weights were held in 4 bits."""
    found = list(quantized_linears(model).values()) if four_bit else []
    for module in found:
        num_out: Any = module.nf if hasattr(module, "nf") else module.out_features  # Conv1D, Linear
        module.forward = functools.partial(_four_bit, num_out)
    try:
        yield
    finally:
        for module in found:
            del module.forward


def _four_bit(num_out: int, x: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _FourBitProduct.apply(x, num_out)  # type: ignore[no-untyped-call]
    return product


@contextlib.contextmanager
def _noting(layer: nn.Module, allocations: Allocations) -> Iterator[None]:
    """Tells what is made inside a layer from what is made around it."""

    def enter(*_: Any) -> None:
        allocations.place = "inside"

    def leave(*_: Any) -> None:
        allocations.place = "around"

    hooks = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _documents(several: bool) -> Iterator[None]:
    """Answers for transformers what it cannot see in positions without values: how many documents are in a row."""
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = torch.zeros_like if several else lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def _attention_of(device_type: str) -> contextlib.AbstractContextManager[None]:
    """On MPS attention that trains goes by single operations, elsewhere by one kernel that keeps no [T, T]."""
    if device_type == "mps":
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()

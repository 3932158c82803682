"""The memory that each stage of a run will hold, and the bytes that each link will carry: from configuration alone."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hetero import adapters, models, registry, store
from hetero.fake_run import FakeRun, Shape, Usage, dtype_in_stage, quantized_linears
from hetero.machine_memory import device_here, machine_of
from hetero.resolve import ResolvedRun
from hetero.schedule import policy_for
from hetero.shards import holds
from hetero.spec import ObjectSpec, RunSpec
from hetero.wire.headers import DTYPE_BYTES
from hetero.wire.tensors import DTYPES, MAX_KEPT_BYTES

# Interpreter, torch, transformers and PEFT; a card's own context is about as large.
RUNTIME_BYTES = 1 << 29

# nf4 with double quantisation, as bitsandbytes holds it: blocks of 64 numbers with an 8-bit scale, blocks of 256
# scales with a float32 one, and two tables for each matrix. Without the tables 4 + 8/64 + 32/(64 * 256) bits a number.
_BLOCK, _SCALES_BLOCK, _TABLES_BYTES = 64, 256, 4 * (16 + 256 + 1)

_HOST_MEMORY = ("cpu", "mps")  # devices whose memory is the host's too
_OBJECT_BYTES = 160 << 10  # of a micro-batch in flight in a layer: Python's and autograd's, as measured

_LABEL_BYTES, _POSITION_BYTES, _MASK_BYTES = 8, 8, 1  # of a token, as they ride with the hidden states


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a stage holds at its peak, with rows of full length.

    Attributes:
        parameters: of the base model, here.
        trained: parameters of the adapter, here.
        weights: frozen parameters by the kind of number that they are held in.
        adapter: values that train.
        gradients: theirs.
        optimizer: its state for them.
        copies: of what trains, where the device's memory is the host's: as it was at the start, and with checkpoints
            what is on its way to the disk, at stage 0 that of all stages.
        in_flight: most micro-batches between their forward and their backward.
        per_micro_batch: what the stage holds of each of them.
        objects: Python's and autograd's in the host's memory, for all that is in flight.
        layer_work: what a layer's forward or backward takes besides, while it runs.
        logits: what the head and the loss take besides, while they run; 0 but on the last stage.
        link_buffers: hidden states and gradients that wait to be sent or computed, at most, and receive buffers that
            are kept for frames of their sizes.
        machine: whose memory it is; stages of one process group on one machine share it.
        available: memory of its device, None where it is not known.
    """

    index: int
    id: str
    parameters: int
    trained: int
    weights: dict[str, int]
    adapter: int
    gradients: int
    optimizer: int
    copies: int
    in_flight: int
    per_micro_batch: int
    objects: int
    layer_work: int
    logits: int
    link_buffers: int
    machine: str
    available: int | None

    @property
    def learned(self) -> int:
        """Of what trains, and for it."""
        return self.adapter + self.gradients + self.optimizer + self.copies

    @property
    def activations(self) -> int:
        """Of all micro-batches in flight."""
        return self.in_flight * self.per_micro_batch + self.objects

    @property
    def work(self) -> int:
        """Of what runs just now: a layer, or the head."""
        return max(self.layer_work, self.logits)

    @property
    def training(self) -> int:
        """All that is not weights and not the programs themselves."""
        return self.learned + self.activations + self.work + self.link_buffers

    @property
    def total(self) -> int:
        """All together."""
        return RUNTIME_BYTES + sum(self.weights.values()) + self.training


@dataclass(frozen=True)
class LinkLoad:
    """Bytes of one step on the link between stages `index` and `index + 1`, each way."""

    index: int
    forward: int
    backward: int


@dataclass(frozen=True)
class RunMemory:
    """The figures of a run.

    Attributes:
        stages: in order.
        links: between them.
        micro_batches: of a step.
        shape: of a micro-batch.
        complete: the figures include activations, the work on them, and what waits at links.
    """

    stages: list[StageMemory]
    links: list[LinkLoad]
    micro_batches: int
    shape: Shape
    complete: bool = True

    def lacking(self) -> dict[str, int]:
        """Machine -> bytes that it lacks; machines whose memory is not known lack nothing."""
        wanted: Counter[str] = Counter()
        for stage in self.stages:
            wanted[stage.machine] += stage.total
        has: dict[str, int] = {}
        for stage in self.stages:
            if stage.available is not None:  # of one machine's entries the strictest counts
                has[stage.machine] = min(stage.available, has.get(stage.machine, stage.available))
        return {m: n - has[m] for m, n in wanted.items() if m in has and n > has[m]}


def memory_of(resolved: ResolvedRun, shapes_dir: Path) -> RunMemory:
    """The figures of a run; reads configurations only, no weights and no data.

    Args:
        resolved: the run.
        shapes_dir: configurations of models whose weights are not here.

    Raises:
        ConfigError: the adapter cannot be what the configuration says.
    """
    spec, whole = resolved.spec(total_steps=0), _whole_model(resolved, shapes_dir)
    adapters.resolve(whole, spec.adapter, spec.model.path)
    return _Planner(resolved, spec, whole).run()


def memory_at_rest(resolved: ResolvedRun, whole: Any) -> RunMemory:
    """The same but for activations and the work on them, which take the most of the time to find.

    Args:
        resolved: the run.
        whole: its model on the meta device, with the adapter.
    """
    return _Planner(resolved, resolved.spec(total_steps=0), whole, complete=False).run()


def show_bytes(num_bytes: int) -> str:
    """A size as people read it, to three digits or so."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:,.1f} MiB"


def nf4_bytes(num_parameters: int) -> int:
    """Bytes of one matrix in 4 bits with double quantisation."""
    blocks = math.ceil(num_parameters / _BLOCK)
    return math.ceil(num_parameters / 2) + blocks + 4 * math.ceil(blocks / _SCALES_BLOCK) + _TABLES_BYTES


def optimizer_bytes(optimizer: ObjectSpec, shapes: Iterable[tuple[torch.Size, torch.dtype]], allowed: list[str]) -> int:
    """Bytes of an optimizer's state after its first step on tensors of these shapes; any optimizer of torch's kind."""
    total = 0
    for (shape, dtype), count in Counter(shapes).items():
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        parameter.grad = torch.empty_like(parameter)
        stepper = registry.make("optimizer", optimizer.target, allowed, [parameter], **optimizer.args)
        stepper.step()
        state = stepper.state[parameter].values()
        total += count * sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    return total


def _whole_model(resolved: ResolvedRun, shapes_dir: Path) -> Any:
    """The model on the meta device, from the configuration wherever that is found."""
    wanted = resolved.config.model
    config, _ = store.find_config(wanted.path, revision=wanted.revision, shapes_dir=shapes_dir)
    with tempfile.TemporaryDirectory(prefix="hetero-config-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        return models.meta_model(folder)


def _plain(name: str) -> str:
    """A base parameter's name without PEFT's wrapper."""
    return name.replace(".base_layer.", ".")


class _Planner:
    """Puts a run's figures together."""

    def __init__(self, resolved: ResolvedRun, spec: RunSpec, whole: Any, *, complete: bool = True) -> None:
        self._resolved, self._spec, self._whole, self._complete = resolved, spec, whole, complete
        loop = spec.loop
        rows = min(loop.batch_size, loop.microbatch_size)
        self._shape = Shape(rows, spec.max_length, padded=rows > 1, packed=resolved.config.data.packing)
        self._micro_batches = math.ceil(loop.batch_size / loop.microbatch_size)
        self._fake = FakeRun(whole, resolved.family, spec.model.attn_implementation, spec.router_loss)
        self._parameters = [(_plain(name), parameter) for name, parameter in whole.named_parameters()]
        self._usages: dict[Any, Usage] = {}
        self._by_layers = False  # what the stage at hand recomputes
        self._quantized = {_plain(f"{name}.weight") for name in quantized_linears(whole)}

    def run(self) -> RunMemory:
        first, *others = [self._stage(index) for index in range(len(self._spec.stages))]
        if first.copies and self._resolved.config.checkpoint.is_on():
            gathered = sum(stage.adapter + stage.optimizer for stage in others)
            first = replace(first, copies=first.copies + gathered)
        stages = [first, *others]
        links = [self._link(index) for index in range(len(stages) - 1)]
        return RunMemory(stages, links, self._micro_batches, self._shape, self._complete)

    def _stage(self, index: int) -> StageMemory:
        spec, plan = self._spec, self._spec.stages[index]
        machine, available, device_type = machine_of(self._resolved, index)
        if (device := device_here(self._resolved, index)) is not None:
            device.check_dtype(str(plan.dtype), key=f"shard_plan.stages[{index}].dtype")
        weights: Counter[str] = Counter()
        trained: list[tuple[torch.Size, torch.dtype]] = []
        parameters = 0
        for name, parameter in self._held_by(index):
            dtype = dtype_in_stage(name, DTYPES[str(plan.dtype)])
            if parameter.requires_grad:
                trained.append((parameter.shape, dtype))
                continue
            parameters += parameter.numel()
            if plan.quantization == "nf4" and name in self._quantized:
                weights["nf4"] += nf4_bytes(parameter.numel())
            else:
                weights[str(dtype).removeprefix("torch.")] += parameter.numel() * dtype.itemsize
        adapter = sum(shape.numel() * dtype.itemsize for shape, dtype in trained)
        kept, work, logits = self._activations(index, device_type) if self._complete else (0, 0, 0)
        optimizer = optimizer_bytes(spec.optimizer, trained, self._resolved.config.allow_targets)
        copies = objects = 0
        if device_type in _HOST_MEMORY:
            copies = adapter + (adapter + optimizer) * self._resolved.config.checkpoint.is_on()
            objects = self._cap(index) * (plan.end - plan.start) * _OBJECT_BYTES
        return StageMemory(
            index=index,
            id=plan.id,
            parameters=parameters,
            trained=sum(shape.numel() for shape, _ in trained),
            weights=dict(weights),
            adapter=adapter,
            gradients=adapter,
            optimizer=optimizer,
            copies=copies,
            in_flight=self._cap(index),
            per_micro_batch=kept,
            objects=objects if self._complete else 0,
            layer_work=work,
            logits=logits,
            link_buffers=self._link_buffers(index, device_type) if self._complete else 0,
            machine=machine,
            available=available,
        )

    def _held_by(self, index: int) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Name -> parameter of all that a stage holds, by the rule that loading uses."""
        plan, config = self._spec.stages[index], self._whole.config
        extent = {"num_layers": self._spec.num_hidden_layers, "tied": config.tie_word_embeddings}
        for name, parameter in self._parameters:
            if holds(name, self._resolved.family, plan.start, plan.end, **extent):
                yield name, parameter

    def _activations(self, index: int, device_type: str) -> tuple[int, int, int]:
        """What a stage keeps of a micro-batch, and what a layer's and the head's work take besides."""
        plan, recompute = self._spec.stages[index], self._spec.loop.recompute
        is_last = index == len(self._spec.stages) - 1
        self._by_layers = recompute == "layer" or (recompute == "stage" and is_last)
        self._fake.recompute_layers(self._by_layers)
        layers = [self._layer(layer, index, device_type) for layer in range(plan.start, plan.end)]
        kept = sum(usage.kept for usage in layers) + max(usage.shared for usage in layers)
        boundary = self._shape.rows * self._shape.length * self._spec.hidden_size * DTYPES[str(plan.dtype)].itemsize
        if index and not layers[0].input_kept:
            kept += boundary  # the leaf that will have the gradient
        work = max(usage.work for usage in layers)
        if not is_last and recompute == "stage":  # input and output wait; the backward has all layers' of one at a time
            return boundary * (1 + bool(index)), kept + work, 0
        if not is_last:
            return kept + boundary, work, 0  # the output, which has the graph
        head = self._fake.head(self._shape, DTYPES[str(plan.dtype)])
        return kept + head.kept, work, head.work

    def _layer(self, layer: int, index: int, device_type: str) -> Usage:
        """A layer's figures; layers that are alike are run once."""
        plan, config = self._spec.stages[index], self._whole.config
        of_layer = list(models.layers_of(self._whole)[layer].named_parameters())
        kinds = getattr(config, "layer_types", None)
        settings = {
            "dtype": DTYPES[str(plan.dtype)],
            "four_bit": plan.quantization == "nf4",
            "input_grad": index > 0 or self._trains_before(layer),
            "device_type": device_type,
        }
        key = (
            layer == 0,
            layer == config.num_hidden_layers - 1,
            kinds[layer] if kinds else None,
            tuple((name, parameter.shape, parameter.requires_grad) for name, parameter in of_layer),
            tuple(settings.values()),
            self._by_layers,
        )
        if key not in self._usages:
            self._usages[key] = self._fake.layer(layer, self._shape, **settings)  # type: ignore[arg-type]
        return self._usages[key]

    def _trains_before(self, layer: int) -> bool:
        """Whether anything trains in the embedding or in a layer before."""
        before = itertools.chain(
            models.embedding_of(self._whole).parameters(),
            *(models.layers_of(self._whole)[index].parameters() for index in range(layer)),
        )
        return any(parameter.requires_grad for parameter in before)

    def _cap(self, index: int) -> int:
        schedule = self._spec.schedule
        policy = policy_for(schedule.name, index, len(self._spec.stages), self._micro_batches, schedule.max_in_flight)
        return policy.in_flight_cap

    def _link_buffers(self, index: int, device_type: str) -> int:
        """Tensors that wait at a stage, at most, beyond those that its micro-batches in flight hold anyway.

        Whatever the stage before has in flight may lie here, as hidden states or as a gradient to be sent, with one
        more that is just being made; and a gradient for each micro-batch in flight here may have come from the stage
        after. Hidden states are sent from where they lie on a CPU, in their own dtype; else from a copy. Hidden states
        that came are what is in flight on a CPU, in its own dtype; else their buffers are kept beside it.
        """
        spec, dtype, total = self._spec, self._spec.stages[index].dtype, 0
        received = 0
        if index:
            copied = device_type != "cpu" or spec.boundary_dtypes[index - 1] != dtype
            arriving = self._cap(index - 1) + 1
            total += (arriving if copied else max(0, arriving - self._cap(index))) * self._frame(index - 1)
            received += arriving * self._frame(index - 1)
            # Labels, and what else rides along, lie in the same buffers, for as long as the hidden states do.
            total += arriving * self._riders(self._shape.rows * self._shape.length)
        if index < len(spec.stages) - 1:
            copied = device_type != "cpu" or spec.boundary_dtypes[index] != dtype
            total += self._cap(index) * self._frame(index) * (1 + copied)
            received += self._cap(index) * self._frame(index)
        return total + self._kept_for_other_sizes(received)

    def _kept_for_other_sizes(self, received: int) -> int:
        """Receive buffers that lie unused, at most: rows of other lengths need others, and all are kept up to a limit.

        Args:
            received: bytes of those of the largest size.
        """
        if self._resolved.config.data.source == "pydocs":  # running text: all rows are of one length
            return 0
        return min(MAX_KEPT_BYTES, received * (self._shape.length - 1) // 2)

    def _frame(self, boundary: int) -> int:
        """Bytes of the hidden states of a micro-batch on a link, and of their gradient."""
        size = self._shape.rows * self._shape.length * self._spec.hidden_size
        return size * DTYPE_BYTES[self._spec.boundary_dtypes[boundary]]

    def _link(self, index: int) -> LinkLoad:
        tokens = self._spec.loop.batch_size * self._shape.length
        hidden = tokens * self._spec.hidden_size * DTYPE_BYTES[self._spec.boundary_dtypes[index]]
        router = 0
        if self._spec.router_loss is not None:
            router = self._micro_batches * 4 * self._spec.router_loss.num_experts  # a float32 for each expert
        count = 4 * self._micro_batches if router else 0
        return LinkLoad(index, hidden + self._riders(tokens) + 2 * router + count, hidden + router)

    def _riders(self, tokens: int) -> int:
        """Bytes that ride with the hidden states of so many tokens."""
        shape = self._shape
        position, mask = shape.padded or shape.packed, shape.padded and not shape.packed
        return tokens * (_LABEL_BYTES + _POSITION_BYTES * position + _MASK_BYTES * mask)

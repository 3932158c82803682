"""Device abstraction: CUDA (and ROCm through it), MPS, CPU; nothing outside this file asks for a device type."""

from __future__ import annotations

import platform
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from hetero import host_memory
from hetero.errors import ConfigError
from hetero.heap import Heap

# The default generator of a device belongs to the process; whoever keys it holds this lock while its draws last.
_GENERATOR_LOCK = threading.RLock()

_NORM_VALUES = 1 << 20  # of a tensor whose norm is taken, at once
_MPS_SLACK_BYTES = 256 << 20  # that torch's cache on MPS may hold besides twice of what is in use


def available_types() -> list[str]:
    """Device types of this machine, best first; `cpu` is always the last."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [accelerator.type, "cpu"] if accelerator is not None else ["cpu"]


def resolve(name: str, *, key: str = "device") -> Device:
    """The device that a configuration names: `auto` is the best of this machine, `cuda:1` picks an index.

    Raises:
        ConfigError: this machine does not have it.
    """
    types = available_types()
    type_, _, index = (types[0] if name == "auto" else name).partition(":")
    if type_ not in types:
        raise ConfigError(f"{key} must be auto or one of {', '.join(types)} on this machine, got {name!r}")
    if index and type_ != "cpu" and int(index) >= torch.accelerator.device_count():
        raise ConfigError(f"{key} must have an index below {torch.accelerator.device_count()}, got {name!r}")
    kinds: dict[str, type[Device]] = {"cuda": CudaDevice, "mps": MpsDevice, "cpu": Device}
    kind = kinds.get(type_)
    if kind is None:
        raise ConfigError(f"{key} must be one of {', '.join(kinds)}, got {name!r}")
    return kind(torch.device(f"{type_}:{index}" if index and type_ != "cpu" else type_))


class Device:
    """One device of this machine; this class is the CPU, subclasses differ in a method or two.

    Args:
        torch_device: the device as torch names it.
    """

    float64 = True  # has float64 arithmetic

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._heap = Heap()

    def __str__(self) -> str:
        return str(self.torch_device)

    def check_dtype(self, dtype: str, *, key: str) -> None:
        """Raises ConfigError where this device cannot compute in `dtype`."""
        if dtype == "float16" and self.torch_device.type == "cpu":
            raise ConfigError(f"{key} must be float32 or bfloat16 on a CPU, got 'float16'")

    def memory_bytes(self) -> int:
        """Peak memory that this process has held here so far: on a CPU its resident set."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak) * (1 if sys.platform == "darwin" else 1024)

    def total_memory_bytes(self) -> int:
        """Memory that this device has, or this process may use of it."""
        return host_memory.total_bytes()

    def available_memory_bytes(self) -> int:
        """Memory of this device that is left."""
        return host_memory.available_bytes()

    def description(self) -> str:
        """What it is, for people."""
        return f"{platform.processor() or platform.machine()}, {psutil.cpu_count(logical=False) or 1} cores"

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While a stage is built: what that frees goes back at once."""
        self._heap.begin_loading()
        try:
            yield
        finally:
            self._heap.end_loading()

    def give_back(self) -> None:
        """Memory that its allocator holds and nobody uses goes back to the system."""
        self._heap.give_back()

    def between_layers(self) -> None:
        """Gives back memory that its allocator holds without need, before a layer of a training step adds to it."""
        self._heap.bound()

    def end_step(self) -> None:
        """Between two steps: nothing is in flight."""
        self._heap.end_step()

    def synchronize(self) -> None:
        """Waits until all queued work is done."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory, complete when this returns; itself where it already is there."""
        return tensor.detach()

    def from_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor on this device, cast to `dtype` if given."""
        return tensor.to(self.torch_device, dtype or tensor.dtype)

    def generator(self) -> torch.Generator:
        """The generator that dropout on this device draws from."""
        return torch.default_generator

    @contextmanager
    def keyed_draws(self) -> Iterator[torch.Generator]:
        """Lends the device's generator; its state is as before afterwards.

        Two stages that are threads of one process share the generator, so they take turns here.
        """
        with _GENERATOR_LOCK:
            generator = self.generator()
            before = generator.get_state()
            try:
                yield generator
            finally:
                generator.set_state(before)

    def squared_norm(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of squares in float64, a scalar on the host."""
        wide = tensor.detach() if self.float64 else tensor.detach().to("cpu")
        parts = [part.double().square().sum() for part in torch.split(wide.flatten(), _NORM_VALUES)]  # float64 is wide
        return (parts[0] if len(parts) == 1 else torch.stack(parts).sum()).to("cpu")


class CudaDevice(Device):
    """An NVIDIA card, or an AMD card through ROCm. Written with care, not run on such hardware by its authors yet."""

    def check_dtype(self, dtype: str, *, key: str) -> None:
        """Raises ConfigError where this card cannot compute in `dtype`."""
        if dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
            raise ConfigError(f"{key} must be float16 or float32 on {self}, which has no bfloat16")

    def memory_bytes(self) -> int:
        """Peak memory that torch has held on the card."""
        return int(torch.cuda.max_memory_reserved(self.torch_device))

    def total_memory_bytes(self) -> int:
        """Memory of the card."""
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def available_memory_bytes(self) -> int:
        """Memory of the card that nobody holds."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def description(self) -> str:
        """The card's name."""
        return str(torch.cuda.get_device_name(self.torch_device))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While a stage is built."""
        yield

    def give_back(self) -> None:
        """Blocks of torch's cache go back to the card."""
        torch.cuda.empty_cache()

    def between_layers(self) -> None:
        """torch's allocator has blocks of few sizes on a card."""

    def end_step(self) -> None:
        """As between two layers."""

    def synchronize(self) -> None:
        """Waits until all queued work is done."""
        torch.cuda.synchronize(self.torch_device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned copy in host memory; the wait is for this copy alone."""
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        staged.copy_(tensor.detach(), non_blocking=True)
        torch.cuda.current_stream(self.torch_device).synchronize()
        return staged

    def generator(self) -> torch.Generator:
        """The card's default generator."""
        index = self.torch_device.index
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


class MpsDevice(Device):
    """A Mac's GPU. Written with care, not run on such hardware by its authors yet."""

    float64 = False

    def check_dtype(self, dtype: str, *, key: str) -> None:
        """MPS computes in all three dtypes from macOS 14 on."""

    def memory_bytes(self) -> int:
        """Memory that the driver holds for this process."""
        return int(torch.mps.driver_allocated_memory())

    def total_memory_bytes(self) -> int:
        """Memory that the driver recommends not to exceed."""
        return int(torch.mps.recommended_max_memory())

    def available_memory_bytes(self) -> int:
        """What is left of the memory that the driver recommends not to exceed."""
        return max(0, self.total_memory_bytes() - int(torch.mps.driver_allocated_memory()))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While a stage is built."""
        yield

    def give_back(self) -> None:
        """Blocks of torch's cache go back to the system."""
        torch.mps.empty_cache()

    def between_layers(self) -> None:
        """Once a step is enough, see `end_step`."""

    def end_step(self) -> None:
        """Unequal rows fill torch's cache with blocks of many sizes, which memory shared with the CPU cannot afford."""
        held, used = torch.mps.driver_allocated_memory(), torch.mps.current_allocated_memory()
        if held > 2 * used + _MPS_SLACK_BYTES:
            torch.mps.empty_cache()

    def synchronize(self) -> None:
        """Waits until all queued work is done."""
        torch.mps.synchronize()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory."""
        return tensor.detach().to("cpu")

    def generator(self) -> torch.Generator:
        """The GPU's default generator."""
        return torch.mps._get_default_mps_generator()

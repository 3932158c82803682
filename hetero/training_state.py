"""What a stage has learned: its trained tensors and its optimizer's, by names that do not depend on the split.

adapter:<global key>                 a trained tensor
optimizer.<moment>:<global key>      what the optimizer keeps for it, as in optimizer.exp_avg:...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hetero.errors import ConfigError
from hetero.wire.headers import TensorEntry

ADAPTER = "adapter:"
OPTIMIZER = "optimizer."

_DTYPES = {"float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool"}
_TRAINED_DTYPES = {"float32", "bfloat16", "float16"}
_SMALL_BYTES = 64 * 1024  # of what an optimizer keeps beside moments: counters, tables of a quantised moment


def key_of(name: str) -> str:
    """The global key in a state name."""
    return name.partition(":")[2]


def may_be_state(entry: TensorEntry, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a peer's tensor can be state of a stage: a trained tensor as it must be, or an optimizer's for one."""
    kind, _, key = entry.name.partition(":")
    shape = shapes.get(key)
    if shape is None or entry.dtype not in _DTYPES:
        return False
    if f"{kind}:" == ADAPTER:
        return list(entry.shape) == list(shape) and entry.dtype in _TRAINED_DTYPES
    most = 8 * torch.Size(shape).numel() + _SMALL_BYTES
    return kind.startswith(OPTIMIZER) and kind[len(OPTIMIZER) :].isidentifier() and entry.nbytes() <= most


def adapter_of(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trained tensors in some state, by global key."""
    return {key_of(name): tensor for name, tensor in state.items() if name.startswith(ADAPTER)}


def as_state(adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Trained tensors by global key as state without an optimizer's."""
    return {ADAPTER + key: tensor for key, tensor in adapter.items()}


def part_of(state: Mapping[str, torch.Tensor], keys: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The state that belongs to some global keys."""
    return {name: tensor for name, tensor in state.items() if key_of(name) in keys}


def take_state(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """A copy on the host of everything that a stage would need to go on."""
    state = {ADAPTER + key: parameter.detach().to("cpu", copy=True) for key, parameter in trained.items()}
    for key, parameter in trained.items():
        for moment, value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).items():
            if isinstance(value, torch.Tensor):
                state[f"{OPTIMIZER}{moment}:{key}"] = value.detach().to("cpu", copy=True)
            elif isinstance(value, int | float):  # a counter that is no tensor; float64 holds it exactly
                state[f"{OPTIMIZER}{moment}:{key}"] = torch.tensor(float(value), dtype=torch.float64)
            elif value is not None:
                raise ConfigError(
                    f"optimizer._target_ must keep tensors and numbers to be saved, got {type(value).__name__} "
                    f"in {moment!r}: checkpoint=none"
                )
    return state


def put_state(
    trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None, state: Mapping[str, torch.Tensor]
) -> None:
    """Makes a stage what it was when `take_state` gave this state; moments that are not in it are forgotten.

    The state must hold every trained tensor.
    """
    with torch.no_grad():
        for key, parameter in trained.items():
            parameter.copy_(state[ADAPTER + key])
            parameter.grad = None
    if optimizer is None:
        return
    optimizer.state.clear()
    for name, value in state.items():
        kind, _, key = name.partition(":")
        if not kind.startswith(OPTIMIZER):
            continue
        parameter = trained[key]
        moment = kind[len(OPTIMIZER) :]
        if value.dtype == torch.float64 and value.ndim == 0:
            optimizer.state[parameter][moment] = float(value)
        else:
            where = "cpu" if moment == "step" else parameter.device  # torch keeps its counters on the host
            optimizer.state[parameter][moment] = value.to(where, copy=True)

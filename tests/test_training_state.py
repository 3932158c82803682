"""What a stage has learned, taken and put back: the next steps are the same to the last bit, for any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetero.errors import ConfigError, PeerError
from hetero.optim import adamw, sgd
from hetero.state import MAX_FOR_EACH, StateAssembler
from hetero.training_state import (
    adapter_of,
    as_state,
    key_of,
    may_be_state,
    part_of,
    put_state,
    take_state,
)
from hetero.wire.headers import State, TensorEntry
from hetero.wire.tensors import state_frames

A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.4.self_attn.q_proj.lora_B.weight"
SHAPES = {A: [2, 3], B: [4, 2]}


class Counting(torch.optim.Optimizer):
    """Keeps numbers that are no tensors, and nothing at all for some."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["decay"] = state.get("decay", 1.0) * 0.9
                state["nothing"] = None
                parameter.data -= group["lr"] * state["decay"] / state["count"] * parameter.grad


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: adamw(parameters, lr=0.1, weight_decay=0.01),
    "sgd": lambda parameters: sgd(parameters, lr=0.1),
    "momentum": lambda parameters: sgd(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "counting": lambda parameters: Counting(parameters, lr=0.1),
    "adamax": lambda parameters: torch.optim.Adamax(list(parameters), lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(list(parameters), lr=0.1, momentum=0.9, centered=True),
}


def stage(seed: int) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {key: nn.Parameter(torch.randn(shape, generator=generator)) for key, shape in SHAPES.items()}


def take_steps(trained: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        for parameter in trained.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("used", [False, True])
def test_steps_after_the_state_was_put_are_those_without(name: str, used: bool) -> None:
    """Also where the stage has taken other steps meanwhile, as a survivor of a fault has."""
    whole = stage(1)
    optimizer = OPTIMIZERS[name](whole.values())
    take_steps(whole, optimizer, 1, 3)
    state = take_state(whole, optimizer)
    take_steps(whole, optimizer, 4, 6)
    other = stage(2)
    other_optimizer = OPTIMIZERS[name](other.values())
    if used:
        take_steps(other, other_optimizer, 9, 12)
    put_state(other, other_optimizer, state)
    assert all(parameter.grad is None for parameter in other.values())
    assert_equal(take_state(other, other_optimizer), state)
    take_steps(other, other_optimizer, 4, 6)
    assert_equal(take_state(other, other_optimizer), take_state(whole, optimizer))


def test_names_tell_moments_and_keys_apart() -> None:
    trained = stage(1)
    optimizer = OPTIMIZERS["adamw"](trained.values())
    assert set(take_state(trained, optimizer)) == {f"adapter:{key}" for key in SHAPES}
    take_steps(trained, optimizer, 1, 1)
    state = take_state(trained, optimizer)
    kinds = ["adapter", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step"]
    assert set(state) == {f"{kind}:{key}" for kind in kinds for key in SHAPES}
    assert {key_of(name) for name in state} == set(SHAPES)
    assert_equal(as_state(adapter_of(state)), {name: state[name] for name in state if name.startswith("adapter:")})
    assert set(part_of(state, {A: None})) == {f"{kind}:{A}" for kind in kinds}


def test_copy_is_of_its_own_and_survivors_forget_their_moments() -> None:
    trained = stage(1)
    optimizer = OPTIMIZERS["adamw"](trained.values())
    initial = take_state(trained, optimizer)
    kept = {name: value.clone() for name, value in initial.items()}
    take_steps(trained, optimizer, 1, 2)
    assert_equal(initial, kept)
    put_state(trained, optimizer, initial)
    assert_equal(take_state(trained, optimizer), initial)
    before = {name: value.clone() for name, value in take_state(trained, optimizer).items()}
    put_state(trained, None, before)
    take_steps(trained, optimizer, 1, 2)
    assert_equal(before, kept)


def test_numbers_come_back_as_numbers() -> None:
    trained = stage(1)
    optimizer = OPTIMIZERS["counting"](trained.values())
    take_steps(trained, optimizer, 1, 3)
    state = take_state(trained, optimizer)
    assert state[f"optimizer.count:{A}"].dtype == torch.float64 and f"optimizer.nothing:{A}" not in state
    put_state(trained, optimizer, state)
    assert optimizer.state[trained[A]] == {"count": 3, "decay": 0.9 * 0.9 * 0.9}


@pytest.mark.parametrize("value", ["text", [torch.ones(1)], {"a": 1}, object()])
def test_state_that_cannot_be_saved_is_refused_by_its_name(value: Any) -> None:
    trained = stage(1)
    optimizer = OPTIMIZERS["sgd"](trained.values())
    optimizer.state[trained[A]]["history"] = value
    with pytest.raises(ConfigError) as caught:
        take_state(trained, optimizer)
    assert str(caught.value) == (
        f"optimizer._target_ must keep tensors and numbers to be saved, got {type(value).__name__} in 'history': "
        "checkpoint=none"
    )


# ---- state from a peer


@pytest.mark.parametrize(
    ("entry", "right"),
    [
        (TensorEntry(f"adapter:{A}", "float32", [2, 3]), True),
        (TensorEntry(f"adapter:{A}", "bfloat16", [2, 3]), True),
        (TensorEntry(f"adapter:{A}", "int64", [2, 3]), False),
        (TensorEntry(f"adapter:{A}", "bool", [2, 3]), False),
        (TensorEntry(f"adapter:{A}", "float32", [3, 2]), False),
        (TensorEntry(f"adapter:{A}", "float32", [1]), False),
        (TensorEntry(A, "float32", [2, 3]), False),
        (TensorEntry("adapter:", "float32", [2, 3]), False),
        (TensorEntry("adapter:other", "float32", [2, 3]), False),
        (TensorEntry(f"optimizer.exp_avg:{A}", "float32", [2, 3]), True),
        (TensorEntry(f"optimizer.step:{A}", "float32", []), True),
        (TensorEntry(f"optimizer.count:{A}", "float64", []), True),
        (TensorEntry(f"optimizer.state1:{A}", "uint8", [6]), True),  # a quantised moment
        (TensorEntry(f"optimizer.qmap1:{A}", "float32", [256]), True),
        (TensorEntry(f"optimizer.exp_avg:{A}", "float64", [8192 + 6]), True),
        (TensorEntry(f"optimizer.exp_avg:{A}", "float64", [8192 + 7]), False),
        (TensorEntry(f"optimizer.exp_avg:{A}", "float32", [1 << 40, 1 << 40]), False),
        (TensorEntry(f"optimizer.:{A}", "float32", [2, 3]), False),
        (TensorEntry(f"optimizer:{A}", "float32", [2, 3]), False),
        (TensorEntry(f"optimizer.a.b:{A}", "float32", [2, 3]), False),
        (TensorEntry(f"optimizer.a/../b:{A}", "float32", [2, 3]), False),
        (TensorEntry(f"optimizer.a\n:{A}", "float32", [2, 3]), False),
        (TensorEntry("optimizer.exp_avg:other", "float32", [2, 3]), False),
        (TensorEntry(f"model:{A}", "float32", [2, 3]), False),
        (TensorEntry("", "float32", []), False),
        (TensorEntry(":", "float32", []), False),
    ],
    ids=str,
)
def test_peers_tensor_is_state_of_this_run_or_is_refused(entry: TensorEntry, right: bool) -> None:
    assert may_be_state(entry, SHAPES) is right
    assembler = StateAssembler(SHAPES)
    if not right:
        with pytest.raises(PeerError, match="which this run does not have") as caught:
            assembler.add(State(0, 1, entry, 0), memoryview(b""))
        assert str(caught.value).isprintable() and assembler.tensors == {}


@given(
    name=st.text(max_size=30) | st.sampled_from(["adapter:", "optimizer.m:", "optimizer.", ":"]).map(lambda s: s + A),
    dtype=st.sampled_from(["float32", "int64", "bool", "float64"]),
    shape=st.lists(st.integers(0, 1 << 52), max_size=8),
)
def test_what_is_taken_needs_little_memory(name: str, dtype: Any, shape: list[int]) -> None:
    entry = TensorEntry(name, dtype, shape)
    if may_be_state(entry, SHAPES):
        assert entry.nbytes() <= 8 * 8 + 65536 and key_of(name) in SHAPES


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_an_optimizer_crosses_the_wire_to_the_last_bit(name: str) -> None:
    trained = stage(1)
    optimizer = OPTIMIZERS[name](trained.values())
    take_steps(trained, optimizer, 1, 3)
    state = take_state(trained, optimizer)
    assembler = StateAssembler(SHAPES)
    ends = [assembler.add(header, memoryview(b"".join(payload))) for header, payload in state_frames(state)]
    assert ends == [False] * (len(state) - 1) + [True]
    assert_equal(assembler.tensors, state)


def test_peer_cannot_have_moments_without_end() -> None:
    most = MAX_FOR_EACH * len(SHAPES)
    entry = TensorEntry(f"optimizer.m0:{A}", "float32", [2, 3])
    assert not StateAssembler(SHAPES).add(State(0, most, entry, 0), memoryview(bytes(24)))
    with pytest.raises(PeerError, match=f"announced {most + 1} tensors of state"):
        StateAssembler(SHAPES).add(State(0, most + 1, entry, 0), memoryview(bytes(24)))
    twice = StateAssembler(SHAPES)
    assert not twice.add(State(0, 3, entry, 0), memoryview(bytes(24)))
    with pytest.raises(PeerError, match="twice"):
        twice.add(State(1, 3, entry, 0), memoryview(bytes(24)))

"""What a simulated stage computes: a hash chain, so that one wrong weight anywhere shows everywhere."""

from __future__ import annotations

import functools
import struct
from typing import Any

from hetero.errors import PeerError
from hetero.wire.frames import Frame
from hetero.wire.headers import (
    FrameType,
    State,
    TensorEntry,
)

T = FrameType
KEPT = 2  # checkpoint.keep_last
MASK = (1 << 62) - 1
WEIGHT, MOMENT = TensorEntry("w", "uint8", [16]), TensorEntry("m", "uint8", [8])


class Violation(Exception):
    """A promise was broken."""


def require(held: bool, promise: str, *about: Any) -> None:
    if not held:
        raise Violation(promise % about if about else promise)


def mix(*values: Any) -> int:
    """A number that depends on all of these; the same in every process."""
    return hash(values) & MASK


class Member:
    """A stage's weights and moments."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.initial = (mix(1, stage), mix(2, stage))
        self.weight, self.moment = self.initial
        self.at = 0  # finished steps that the weights come from
        self.gradient: int | None = None

    def restore(self, step: int, state: tuple[int, int] | None) -> None:
        """As `hetero.member.Member.restore`."""
        self.weight, self.moment = state or self.initial
        self.at, self.gradient = step, None

    def forward(self, step: int, came: int) -> int:
        return mix(3, step, came, self.weight)

    def backward(self, step: int, forward: int, came: int) -> int:
        self.gradient = mix(4, step, forward, came, self.weight)
        return self.gradient

    def evaluate(self, step: int, came: int) -> int:
        require(step == self.at, "stage %d evaluates after step %d and holds step %d", self.stage, step, self.at)
        return mix(7, step, came, self.weight)

    def norm(self) -> float:
        assert self.gradient is not None
        return (self.gradient & 0xFFFFFF) / 0x1000000

    def apply(self, step: int, clip_factor: float) -> None:
        require(step == self.at + 1, "stage %d took step %d after step %d", self.stage, step, self.at)
        require(self.gradient is not None, "stage %d took step %d without a gradient", self.stage, step)
        self.moment = mix(5, self.moment, self.gradient, clip_factor)
        self.weight = mix(6, self.weight, self.moment, step)
        self.at, self.gradient = step, None

    def state(self) -> tuple[int, int]:
        return self.weight, self.moment


def clip_factor(norms: list[float]) -> float:
    return 1.0 / (1.0 + sum(norms))


@functools.cache
def uninterrupted(num_stages: int, num_steps: int) -> list[list[tuple[int, int]]]:
    """What every stage holds after each step of a run without faults: step -> stage -> state."""
    members = [Member(stage) for stage in range(num_stages)]
    found = [[member.state() for member in members]]
    for step in range(1, num_steps + 1):
        came = [0]
        for member in members:
            came.append(member.forward(step, came[-1]))
        gradient = came[-1]
        for member in reversed(members):
            gradient = member.backward(step, came[member.stage], gradient)
        factor = clip_factor([member.norm() for member in members])
        for member in members:
            member.apply(step, factor)
        found.append([member.state() for member in members])
    return found


def evaluated(state: list[tuple[int, int]], step: int) -> float:
    """What an evaluation after a step gives of the weights of all stages, which it leaves alone."""
    came = 0
    for weight, _ in state:
        came = mix(7, step, came, weight)
    return float(came & 0xFFFFFFFF)


def state_frames(state: tuple[int, int]) -> list[Frame]:
    """The weight in two pieces and the moment in one."""
    raw = struct.pack("<qq", state[0], ~state[0])
    return [
        Frame(T.STATE, State(0, 2, WEIGHT, 0), memoryview(raw[:8])),
        Frame(T.STATE, State(0, 2, WEIGHT, 8), memoryview(raw[8:])),
        Frame(T.STATE, State(1, 2, MOMENT, 0), memoryview(struct.pack("<q", state[1]))),
    ]


class Assembler:
    """As `hetero.state.StateAssembler`."""

    ORDER = ((0, 0), (0, 8), (1, 0))

    def __init__(self) -> None:
        self._raw = b""

    def add(self, frame: Frame) -> tuple[int, int] | None:
        header: Any = frame.header
        if len(self._raw) >= 24 or (header.index, header.offset) != self.ORDER[len(self._raw) // 8]:
            raise PeerError("sent pieces of state out of order")
        self._raw += bytes(frame.payload)
        if len(self._raw) < 24:
            return None
        weight, inverse, moment = struct.unpack("<qqq", self._raw)
        require(weight == ~inverse, "a state was put together from two")
        return weight, moment


class Store:
    """What is on the coordinator's disk and survives it."""

    def __init__(self) -> None:
        self.steps: dict[int, list[tuple[int, int]]] = {}
        self.records: list[int] = []
        self.evaluations: list[int] = []  # after which steps
        self.adapter: list[tuple[int, int]] | None = None

    def commit(self, step: int, states: list[tuple[int, int]]) -> None:
        self.steps[step] = states
        for old in sorted(self.steps)[:-KEPT]:
            del self.steps[old]

    def newest(self) -> int | None:
        return max(self.steps, default=None)


def pack(value: int) -> memoryview:
    return memoryview(struct.pack("<q", value))


def unpack(payload: memoryview) -> int:
    return int(struct.unpack("<q", payload)[0])

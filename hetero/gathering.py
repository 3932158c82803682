"""The state of all stages, put together while it comes in from several machines at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from hetero.state import StateAssembler
from hetero.wire.headers import State


class Gathering:
    """Collects the state of one step; the parts come on I/O threads and on the compute thread.

    Args:
        step: the finished step that the state belongs to.
        shapes: stage -> global key -> shape of the tensors that train there.
        done: called once, on the thread that brings the last part, with the tensors of all stages by state name.
    """

    def __init__(
        self,
        step: int,
        shapes: Mapping[int, Mapping[str, Sequence[int]]],
        done: Callable[[int, dict[str, torch.Tensor]], None],
    ) -> None:
        self.step = step
        self._assemblers = {stage: StateAssembler(own) for stage, own in shapes.items()}
        self._done = done
        self._parts: dict[int, dict[str, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def piece(self, stage: int, header: State, payload: memoryview) -> bool:
        """Takes a piece of a worker's state; True when it was that worker's last.

        Raises:
            PeerError: it is not what must follow.
        """
        if not self._assemblers[stage].add(header, payload):
            return False
        self.part(stage, self._assemblers[stage].tensors)
        return True

    def part(self, stage: int, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the whole state of a stage."""
        with self._lock:
            self._parts[stage] = tensors
            complete = len(self._parts) == len(self._assemblers)
        if complete:
            self._done(self.step, {name: t for own in sorted(self._parts) for name, t in self._parts[own].items()})

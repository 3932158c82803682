"""How many layers each machine gets: equal numbers, by memory, or from explicit cut points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hetero.errors import ConfigError
from hetero.facts import ModelFacts, num_parameters


def cut_points(split: str, facts: ModelFacts, memory_gb: Sequence[float]) -> list[int]:
    """Where the stages after the first begin.

    Args:
        split: `even`, `memory`, or numbers such as `10,20`.
        facts: of the model.
        memory_gb: of each machine in the order of the stages; looked at for `memory` alone.

    Raises:
        ConfigError: the split cannot be read, or leaves a machine without a layer.
    """
    stages, layers = len(memory_gb), facts.num_hidden_layers
    if stages > layers:
        raise ConfigError(f"--worker must leave a layer for each machine: {stages} machines, {layers} layers")
    if split == "even":
        share, extra = divmod(layers, stages)
        return list(itertools.accumulate(share + (index < extra) for index in range(stages)))[:-1]
    if split == "memory":
        return list(itertools.accumulate(by_memory(facts, memory_gb)))[:-1]
    try:
        points = [int(part) for part in split.split(",")]
    except ValueError:
        raise ConfigError(f"--split must be even, memory, or layers to cut before as in 10,20, got {split!r}") from None
    rising = all(a < b for a, b in itertools.pairwise([0, *points, layers]))
    if len(points) != stages - 1 or not rising:
        raise ConfigError(
            f"--split must have {'1 number' if stages == 2 else f'{stages - 1} rising numbers'} from 1 to {layers - 1} "
            f"for {stages} machines and "
            f"{layers} layers, got {split!r}"
        )
    return points


def by_memory(facts: ModelFacts, memory_gb: Sequence[float]) -> list[int]:
    """Numbers of layers that fill the machines alike: the fullest one is as empty as can be.

    Each layer goes to the machine that is the least full with it, which is optimal since all layers are alike. The
    embedding counts on the first machine and the head on the last.
    """
    layer, embedding, head = _sizes(facts)
    held = [0.0] * len(memory_gb)
    held[0] += embedding
    held[-1] += head
    counts = [1] * len(memory_gb)  # a stage without a layer is none
    for _ in range(facts.num_hidden_layers - len(memory_gb)):
        best = min(
            range(len(memory_gb)), key=lambda index: (held[index] + (counts[index] + 1) * layer) / memory_gb[index]
        )
        counts[best] += 1
    return counts


def _sizes(facts: ModelFacts) -> tuple[float, float, float]:
    """Parameters of a layer, the embedding and the head; for families whose counts are not known, of a layer alone."""
    try:
        counts = num_parameters(facts)
    except ConfigError:
        return 1.0, 0.0, 0.0
    return float(counts.layer), float(counts.embedding), float(counts.head)

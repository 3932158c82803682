"""A step in seconds: what stages and links cost, what a simulation returns, and the bound that no schedule can beat.

`simulate()` itself lives in `hetero.schedule`, next to the rule that it runs, and everything here can be imported from
there as well. A value may be one number for all micro-batches or a tuple with one number each.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.errors import ConfigError

Seconds = float | tuple[float, ...]


class Op(enum.Enum):
    """What a stage computes for a micro-batch; on a link, what travels: hidden with FORWARD, grad with BACKWARD."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class StageTime:
    """What a micro-batch costs on one stage; a recomputation is part of `backward_s`."""

    forward_s: Seconds
    backward_s: Seconds

    def __post_init__(self) -> None:
        _check_seconds("forward_s", self.forward_s)
        _check_seconds("backward_s", self.backward_s)

    def seconds(self, op: Op, micro_batch: int) -> float:
        """How long the stage computes `op` of this micro-batch."""
        return _pick(self.forward_s if op is Op.FORWARD else self.backward_s, micro_batch)


@dataclass(frozen=True, slots=True)
class LinkTime:
    """What a micro-batch costs on the link below a stage; full duplex, so the directions do not share it.

    Args:
        forward_occupancy_s: bytes / bandwidth of a hidden: how long it keeps the next one waiting.
        backward_occupancy_s: the same for a grad.
        latency_s: from the last byte sent to usable by the receiver; keeps nobody waiting behind it.
    """

    forward_occupancy_s: Seconds = 0.0
    backward_occupancy_s: Seconds = 0.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds("forward_occupancy_s", self.forward_occupancy_s)
        _check_seconds("backward_occupancy_s", self.backward_occupancy_s)
        _check_seconds("latency_s", self.latency_s)

    def occupancy(self, direction: Op, micro_batch: int) -> float:
        """How long this micro-batch occupies one direction of the link."""
        return _pick(self.forward_occupancy_s if direction is Op.FORWARD else self.backward_occupancy_s, micro_batch)

    def delay(self, direction: Op, micro_batch: int) -> float:
        """From handed over to an idle link to usable by the receiver."""
        return self.occupancy(direction, micro_batch) + self.latency_s


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of one stage; times in seconds from the step's start."""

    stage: int
    op: Op
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One frame on the link between stages `link` and `link + 1`: sent from `start` to `end`, usable at `arrive`."""

    link: int
    direction: Op
    micro_batch: int
    start: float
    end: float
    arrive: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated step; times in seconds, the tuples below `transfers` have one value for each stage.

    Args:
        makespan: end of the last backward.
        spans: all work, in the order in which it started.
        transfers: all frames, in the order in which they were handed to a link.
        busy: seconds of compute.
        idle_share: the part of the makespan without compute, 0 to 1.
        peak_in_flight: most micro-batches forwarded and not yet backwarded.
    """

    makespan: float
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]
    busy: tuple[float, ...]
    idle_share: tuple[float, ...]
    peak_in_flight: tuple[int, ...]


def lower_bound(
    stages: Sequence[StageTime],
    links: Sequence[LinkTime],
    num_microbatches: int,
    in_flight_caps: Sequence[int] | None = None,
) -> float:
    """Seconds that no order of forwards and backwards can beat, for FIFO micro-batches.

    With M micro-batches; F_s, B_s a stage's forward and backward; xf_s, xb_s the occupancy and l_s the latency of the
    link below stage s; cf = xf + l and cb = xb + l:

        head_s = sum_{j<s}(F_j + cf_j)                    earliest first forward on s
        tail_s = sum_{j<s}(B_j + cb_j)                    after the last backward on s
        rt_s   = cf_s + F_{s+1} + rt_{s+1} + B_{s+1} + cb_s   round trip below s; 0 at the last stage

    and the bound is the largest, over all stages s, of head_s + tail_s + one of

        M (F_s + B_s)                                     stage work
        M F_s + rt_s + B_s                                the last forward must return
        F_s + rt_s + M B_s                                the first backward cannot be earlier
        F_s + M xf_s + l_s + (rt_s - cf_s) + B_s          forward link
        F_s + (rt_s - cb_s) + M xb_s + l_s + B_s          backward link
        ceil(M / K_s) (F_s + rt_s + B_s)                  in-flight cap K_s

    Where micro-batches differ, a sum replaces each product, head and the first backward take the first micro-batch,
    tail and the last forward the last one, and the cap's term is the longest chain r, r + K_s, r + 2 K_s, ...

    Args:
        stages: what each stage costs, in order.
        links: what each link costs; one less than stages.
        num_microbatches: M, at least 1.
        in_flight_caps: K_s of each stage; None for the bound of all schedules, whatever memory they take.

    Raises:
        ConfigError: lengths that do not belong together.
    """
    check_lengths(stages, links, num_microbatches)
    caps = [num_microbatches] * len(stages) if in_flight_caps is None else in_flight_caps
    if len(caps) != len(stages) or min(caps) < 1:
        raise ConfigError(f"in_flight_caps must be {len(stages)} numbers of at least 1, got {list(caps)}")
    every, last = range(num_microbatches), num_microbatches - 1
    trips = _round_trips(stages, links, num_microbatches)
    bound = head = tail = 0.0
    for s, stage in enumerate(stages):
        forward = [stage.seconds(Op.FORWARD, i) for i in every]
        backward = [stage.seconds(Op.BACKWARD, i) for i in every]
        visits = [forward[i] + trips[s][i] + backward[i] for i in every]
        terms = [
            sum(forward) + sum(backward),
            sum(forward) + trips[s][last] + backward[last],
            forward[0] + trips[s][0] + sum(backward),
            *(sum(visits[r :: caps[s]]) for r in range(min(caps[s], num_microbatches))),
        ]
        if s < len(links):
            down = [links[s].occupancy(Op.FORWARD, i) for i in every]
            up = [links[s].occupancy(Op.BACKWARD, i) for i in every]
            terms.append(forward[0] + sum(down) + (trips[s][last] - down[last]) + backward[last])
            terms.append(forward[0] + (trips[s][0] - up[0]) + sum(up) + backward[last])
        bound = max(bound, head + max(terms) + tail)
        if s < len(links):
            head += forward[0] + links[s].delay(Op.FORWARD, 0)
            tail += backward[last] + links[s].delay(Op.BACKWARD, last)
    return bound


def check_lengths(stages: Sequence[StageTime], links: Sequence[LinkTime], num_microbatches: int) -> None:
    """Refuses times that do not describe one chain of stages with `num_microbatches` micro-batches."""
    if num_microbatches < 1 or not stages:
        raise ConfigError(f"a step needs a stage and a micro-batch, got {len(stages)} and {num_microbatches}")
    if len(links) != len(stages) - 1:
        raise ConfigError(f"{len(stages)} stages have {len(stages) - 1} links between them, got {len(links)}")
    values: list[Seconds] = [v for stage in stages for v in (stage.forward_s, stage.backward_s)]
    values += [v for link in links for v in (link.forward_occupancy_s, link.backward_occupancy_s)]
    for value in values:
        if isinstance(value, tuple) and len(value) != num_microbatches:
            raise ConfigError(f"times per micro-batch must be {num_microbatches} numbers, got {len(value)}")


def _round_trips(stages: Sequence[StageTime], links: Sequence[LinkTime], num_microbatches: int) -> list[list[float]]:
    """rt_s of each stage and micro-batch."""
    trips = [[0.0] * num_microbatches for _ in stages]
    for s in reversed(range(len(links))):
        for i in range(num_microbatches):
            below = sum(stages[s + 1].seconds(op, i) + links[s].delay(op, i) for op in Op)
            trips[s][i] = below + trips[s + 1][i]
    return trips


def _pick(value: Seconds, micro_batch: int) -> float:
    return value[micro_batch] if isinstance(value, tuple) else value


def _check_seconds(name: str, value: Seconds) -> None:
    for seconds in value if isinstance(value, tuple) else (value,):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ConfigError(f"{name} must be finite seconds of at least 0, got {value}")

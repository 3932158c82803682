"""Policies as data, the one rule that runs them, and a simulation of that rule.

A stage is event-driven: whenever it is idle it asks `next_op` what to do with what has arrived. Nothing is locked to a
static list, so a slow stage or link reorders work instead of stopping it. Micro-batches stay FIFO in both directions on
every stage, so sums of gradients do not depend on the interleaving.

Why this cannot deadlock, whatever the policies of the stages, the caps (>= 1), the times and the delays. Let f_s and
b_s count the forwards and backwards that stage s has done, of M. Suppose all is delivered, every stage is idle, and
`next_op` is None everywhere:

1. No backward is ready, and a backward needs no room: b_s = b_{s+1} at each stage, and b = f at the last. So every b_s
   is the same number n = f_{P-1}. If n = M, the step is complete.
2. Else f_0 >= f_1 >= ... >= f_{P-1} = n < M. Take the first stage t with f_t = n. Its next forward has arrived (t = 0,
   or f_{t-1} > n), and it has f_t - b_t = 0 < cap micro-batches in flight, so `next_op` is FORWARD. Contradiction.

Bounded receive queues (any size >= 1) for hiddens change nothing, even where a sender computes nothing until its frame
is taken. Let s be the last stage that is held up so. Stage s+1 is not held up and its queue is full, so it is at its
cap: f_{s+1} > b_{s+1}. The stages after s are idle and not held up, so by 1. they all have b = n = f_{P-1} < f_{s+1},
and by 2. the first of them with f_t = n (t > s+1) has a forward to do. Contradiction. The argument needs that whoever
sends a grad is never held up. At most cap_s grads wait at stage s, so room for all of them can be kept. Where both
directions may hold up compute, two neighbours can wait for each other forever.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.simulation import (
    LinkTime,
    Op,
    Simulation,
    Span,
    StageTime,
    Transfer,
    check_lengths,
    lower_bound,
)

__all__ = [
    "POLICIES",
    "LinkTime",
    "Op",
    "Policy",
    "PolicyKind",
    "Simulation",
    "Span",
    "StageTime",
    "Transfer",
    "evaluation_policy",
    "lower_bound",
    "next_op",
    "policy_for",
    "simulate",
]

# Sums of the same times along two paths differ in their last bits; events closer than this part of the clock are one
# instant, or the order of the work would hang on rounding.
SAME_INSTANT = 1e-12

# Micro-batches of an evaluation that a stage has sent and the next one has not taken: one is computed there, one is on
# its way, and one makes up for unequal times. Nothing comes back through the pipeline, so more would only fill memory.
EVAL_IN_FLIGHT = 3


@dataclass(frozen=True, slots=True)
class Policy:
    """What one stage prefers in one step.

    Args:
        name: the policy that it was made from.
        prefer: what to do when both a forward and a backward are ready.
        in_flight_cap: most micro-batches forwarded and not yet backwarded, at least 1; K_s in the papers.
    """

    name: str
    prefer: Op
    in_flight_cap: int

    def __post_init__(self) -> None:
        if self.in_flight_cap < 1:
            raise ConfigError(f"in_flight_cap must be at least 1, got {self.in_flight_cap}")


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A policy before stage and step are known: `in_flight_cap(stage, num_stages, num_microbatches)`, at least 1."""

    prefer: Op
    in_flight_cap: Callable[[int, int, int], int]


def policy_for(
    name: str, stage: int, num_stages: int, num_microbatches: int, max_in_flight: int | None = None
) -> Policy:
    """Returns the policy of one stage for a step of `num_microbatches`.

    Args:
        name: a key of POLICIES.
        stage: the stage's index, from 0.
        num_stages: how many stages the plan has.
        num_microbatches: how many micro-batches the step has.
        max_in_flight: bounds every stage's cap, to save memory; None for the policy's own.

    Raises:
        ConfigError: an unknown name, or a max_in_flight below 1.
    """
    if name not in POLICIES:
        raise ConfigError(f"schedule.name must be one of {', '.join(POLICIES)}, got {name!r}")
    if max_in_flight is not None and max_in_flight < 1:
        raise ConfigError(f"schedule.max_in_flight must be at least 1 or null, got {max_in_flight}")
    if not 0 <= stage < num_stages:
        raise ConfigError(f"a stage of {num_stages} has an index from 0 to {num_stages - 1}, got {stage}")
    kind = POLICIES[name]
    cap = min(num_microbatches, kind.in_flight_cap(stage, num_stages, num_microbatches))
    return Policy(name, kind.prefer, cap if max_in_flight is None else min(cap, max_in_flight))


def evaluation_policy(max_in_flight: int | None = None) -> Policy:
    """The policy of every stage in an evaluation: its backward is the next stage's word that it took a micro-batch.

    Args:
        max_in_flight: as for `policy_for`.
    """
    return Policy("evaluation", Op.BACKWARD, min(EVAL_IN_FLIGHT, max_in_flight or EVAL_IN_FLIGHT))


def next_op(policy: Policy, in_flight: int, forward_ready: bool, backward_ready: bool) -> Op | None:
    """Says what an idle stage does now; None: wait until something arrives.

    Greedy: it never waits while work that the cap allows is ready, which is what excludes a deadlock (see the module).

    Args:
        policy: the stage's policy in this step.
        in_flight: micro-batches that the stage has forwarded and not yet backwarded.
        forward_ready: the hidden of the next micro-batch to forward is here (stage 0: its tokens are).
        backward_ready: the grad of the oldest micro-batch in flight is here (last stage: one is in flight).
    """
    may_forward = forward_ready and in_flight < policy.in_flight_cap
    if may_forward and not (backward_ready and policy.prefer is Op.BACKWARD):
        return Op.FORWARD
    return Op.BACKWARD if backward_ready else None


def simulate(
    stages: Sequence[StageTime], links: Sequence[LinkTime], num_microbatches: int, policies: Sequence[Policy]
) -> Simulation:
    """Runs `next_op` for every stage on a clock of its own: the step that the runtime would do with these times.

    Sending costs a stage nothing. A direction of a link carries one frame after the other, in order. All that happens
    in one instant has happened before a stage decides.

    Args:
        stages: what each stage costs, in order.
        links: what each link costs; one less than stages.
        num_microbatches: M, at least 1; stage 0 holds the tokens of all of them from the start.
        policies: the policy of each stage.

    Raises:
        ConfigError: lengths that do not belong together.
        RuntimeError: the stages stalled; a defect of the rule.
    """
    check_lengths(stages, links, num_microbatches)
    if len(policies) != len(stages):
        raise ConfigError(f"{len(stages)} stages need as many policies, got {len(policies)}")
    clock = _Clock(stages, links, num_microbatches)
    running = True
    while running:
        for index, stage in enumerate(clock.stages):
            ready = (stage.hiddens > stage.forwarded, stage.grads > stage.backwarded)
            op = next_op(policies[index], stage.forwarded - stage.backwarded, *ready) if stage.idle else None
            if op is not None:
                clock.start(index, op)
        running = clock.advance()
    if any(stage.backwarded < num_microbatches for stage in clock.stages):
        done = [(stage.forwarded, stage.backwarded) for stage in clock.stages]
        raise RuntimeError(f"the schedule stalled after {clock.now} s with (forwards, backwards) done {done}")
    return clock.result()


@dataclass(slots=True)
class _Stage:
    """Counts are enough: everything is FIFO."""

    hiddens: int = 0
    grads: int = 0
    forwarded: int = 0
    backwarded: int = 0
    peak: int = 0
    idle: bool = True


class _Clock:
    """The state of a simulated step and its events, each a time, a stage, and what then holds for that stage."""

    def __init__(self, times: Sequence[StageTime], links: Sequence[LinkTime], num_microbatches: int) -> None:
        self.now = 0.0
        self.stages = [_Stage() for _ in times]
        self.stages[0].hiddens = num_microbatches
        self._times, self._links = times, links
        self._events: list[tuple[float, int, str]] = []
        self._link_free = {(link, op): 0.0 for link in range(len(links)) for op in Op}
        self._spans: list[Span] = []
        self._transfers: list[Transfer] = []

    def start(self, index: int, op: Op) -> None:
        """Starts an op on an idle stage; nothing can change its end or its transfer's, so both are events at once."""
        stage = self.stages[index]
        if op is Op.FORWARD:
            micro_batch, neighbour, arrival = stage.forwarded, index + 1, "hidden"
            stage.forwarded += 1
            stage.peak = max(stage.peak, stage.forwarded - stage.backwarded)
        else:
            micro_batch, neighbour, arrival = stage.backwarded, index - 1, "grad"
            stage.backwarded += 1
        stage.idle = False
        end = self.now + self._times[index].seconds(op, micro_batch)
        self._spans.append(Span(index, op, micro_batch, self.now, end))
        heapq.heappush(self._events, (end, index, "idle"))
        if neighbour == len(self.stages):
            heapq.heappush(self._events, (end, index, "grad"))
        elif neighbour >= 0:
            arrive = self._send(min(index, neighbour), op, micro_batch, end)
            heapq.heappush(self._events, (arrive, neighbour, arrival))

    def _send(self, link: int, direction: Op, micro_batch: int, handed_over: float) -> float:
        start = max(handed_over, self._link_free[link, direction])
        end = start + self._links[link].occupancy(direction, micro_batch)
        self._link_free[link, direction] = end
        arrive = end + self._links[link].latency_s
        self._transfers.append(Transfer(link, direction, micro_batch, start, end, arrive))
        return arrive

    def advance(self) -> bool:
        """Moves to the next instant and applies all its events; False if there is none."""
        if not self._events:
            return False
        until = self._events[0][0] * (1 + SAME_INSTANT)
        while self._events and self._events[0][0] <= until:
            self.now, index, event = heapq.heappop(self._events)
            stage = self.stages[index]
            stage.hiddens += event == "hidden"
            stage.grads += event == "grad"
            stage.idle |= event == "idle"
        return True

    def result(self) -> Simulation:
        makespan = max(span.end for span in self._spans)
        busy = [0.0] * len(self.stages)
        for span in self._spans:
            busy[span.stage] += span.end - span.start
        return Simulation(
            makespan=makespan,
            spans=tuple(self._spans),
            transfers=tuple(self._transfers),
            busy=tuple(busy),
            idle_share=tuple(1 - b / makespan if makespan else 0.0 for b in busy),
            peak_in_flight=tuple(stage.peak for stage in self.stages),
        )


def _1f1b_cap(stage: int, num_stages: int, num_microbatches: int) -> int:
    """PipeDream-Flush (Narayanan et al. 2021, section 3.2) with room for transfers; the last stage backwards at once.

    1F1B's own value, P - s, is just enough where links cost nothing. 2 (P - s) - 1 keeps one micro-batch on its way at
    each boundary below as well, as in Alpa's overlap-friendly schedule (Zhuang et al. 2023, section 4): simulated over
    balanced pipelines of 2 to 8 stages, the mean step is then at the lower bound, instead of 1.23 of it, where a link
    takes 25 % of a stage's time. `schedule.max_in_flight` bounds it where memory is short.
    """
    return 2 * (num_stages - stage) - 1


def _gpipe_cap(stage: int, num_stages: int, num_microbatches: int) -> int:
    """GPipe (Huang et al. 2019, section 2.3): all forwards may come first."""
    return num_microbatches


POLICIES: Mapping[str, PolicyKind] = {
    "1f1b": PolicyKind(prefer=Op.BACKWARD, in_flight_cap=_1f1b_cap),
    "gpipe": PolicyKind(prefer=Op.FORWARD, in_flight_cap=_gpipe_cap),
}

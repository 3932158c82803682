"""Policies, their simulation and the bound: closed forms, brute force, and a search for deadlocks."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.schedule import (
    POLICIES,
    LinkTime,
    Op,
    Policy,
    Simulation,
    StageTime,
    lower_bound,
    next_op,
    policy_for,
    simulate,
)

F, B = Op.FORWARD, Op.BACKWARD
ROUNDING = 1 + 1e-9
each_policy = pytest.mark.parametrize("name", list(POLICIES))
quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Instance:
    """All that simulate() takes."""

    stages: list[StageTime]
    links: list[LinkTime]
    num_microbatches: int
    policies: list[Policy]

    @property
    def caps(self) -> list[int]:
        return [policy.in_flight_cap for policy in self.policies]

    def simulate(self) -> Simulation:
        return simulate(self.stages, self.links, self.num_microbatches, self.policies)

    def bound(self) -> float:
        return lower_bound(self.stages, self.links, self.num_microbatches, self.caps)


def policies_of(name: str, num_stages: int, num_microbatches: int) -> list[Policy]:
    return [policy_for(name, s, num_stages, num_microbatches) for s in range(num_stages)]


def unlike_instance(rng: random.Random, num_stages: int, num_microbatches: int, per_micro_batch: bool) -> Instance:
    """Random times of three kinds (zero, small integers so that ties happen, any) under random, mixed policies."""
    kind = rng.choice(["zero", "ties", "any", "any"])

    def seconds() -> float:
        if kind == "any":
            return rng.choice([0.0, rng.uniform(0.01, 1), rng.uniform(0.5, 2), rng.uniform(5, 20)])
        return float(rng.randint(0, 3)) if kind == "ties" else 0.0

    def cost() -> float | tuple[float, ...]:
        return tuple(seconds() for _ in range(num_microbatches)) if per_micro_batch else seconds()

    def policy(stage: int) -> Policy:
        base = policy_for(rng.choice(list(POLICIES)), stage, num_stages, num_microbatches)
        return replace(base, in_flight_cap=rng.randint(1, num_microbatches + 2))

    return Instance(
        stages=[StageTime(cost(), cost()) for _ in range(num_stages)],
        links=[LinkTime(cost(), cost(), seconds()) for _ in range(num_stages - 1)],
        num_microbatches=num_microbatches,
        policies=[policy(s) for s in range(num_stages)],
    )


@st.composite
def instances(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 12) -> Instance:
    rng = random.Random(draw(st.integers(0, 2**32)))
    num_stages = draw(st.integers(1, max_stages))
    num_microbatches = draw(st.integers(1, max_microbatches))
    return unlike_instance(rng, num_stages, num_microbatches, per_micro_batch=draw(st.booleans()))


# Policies


def test_unknown_policy_is_refused_with_key_value_and_allowed_names() -> None:
    with pytest.raises(ConfigError) as refused:
        policy_for("zigzag", 0, 2, 8)
    assert str(refused.value) == f"schedule.name must be one of {', '.join(POLICIES)}, got 'zigzag'"
    assert {"1f1b", "gpipe"} <= set(POLICIES)


@each_policy
def test_max_in_flight_bounds_every_stage_and_must_be_at_least_one(name: str) -> None:
    for stage, bound in itertools.product(range(4), range(1, 10)):
        free = policy_for(name, stage, 4, 8).in_flight_cap
        assert policy_for(name, stage, 4, 8, max_in_flight=bound).in_flight_cap == min(free, bound)
    with pytest.raises(ConfigError, match=r"schedule\.max_in_flight must be at least 1 or null, got 0"):
        policy_for(name, 0, 4, 8, max_in_flight=0)


@each_policy
def test_every_cap_lies_between_one_and_the_number_of_micro_batches(name: str) -> None:
    for num_stages, num_microbatches in itertools.product(range(1, 6), range(1, 8)):
        for policy in policies_of(name, num_stages, num_microbatches):
            assert 1 <= policy.in_flight_cap <= num_microbatches
            assert policy.name == name


def test_1f1b_caps_fall_along_the_pipeline_to_one_at_the_last_stage() -> None:
    assert [p.in_flight_cap for p in policies_of("1f1b", 4, 32)] == [7, 5, 3, 1]
    assert [p.in_flight_cap for p in policies_of("1f1b", 4, 2)] == [2, 2, 2, 1]
    assert [p.in_flight_cap for p in policies_of("1f1b", 1, 8)] == [1]
    assert {p.prefer for p in policies_of("1f1b", 4, 8)} == {B}


def test_gpipe_prefers_forwards_and_may_hold_the_whole_step() -> None:
    assert policies_of("gpipe", 3, 8) == [Policy("gpipe", F, 8)] * 3


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="in_flight_cap must be at least 1, got 0"):
        Policy("none", F, 0)


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_outside_of_the_pipeline_is_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match=f"got {stage}"):
        policy_for("1f1b", stage, 2, 8)


@pytest.mark.parametrize("prefer", [F, B])
def test_next_op_is_the_preferred_ready_op_under_the_cap(prefer: Op) -> None:
    policy = Policy("any", prefer, 2)
    for in_flight in (0, 1):
        assert next_op(policy, in_flight, True, True) is prefer
        assert next_op(policy, in_flight, True, False) is F
        assert next_op(policy, in_flight, False, True) is B
        assert next_op(policy, in_flight, False, False) is None
    for in_flight in (2, 3):
        assert next_op(policy, in_flight, True, True) is B
        assert next_op(policy, in_flight, True, False) is None


# Simulation and bound against closed forms


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("backward_s", [1.0, 2.0])
def test_balanced_1f1b_without_links_meets_the_bound(extra: int, backward_s: float) -> None:
    for num_stages, m in itertools.product(range(1, 7), range(1, 13)):
        stages, links = [StageTime(1.0, backward_s)] * num_stages, [LinkTime()] * (num_stages - 1)
        policies = [Policy("1f1b", B, min(m, num_stages - s + extra)) for s in range(num_stages)]
        expected = (m + num_stages - 1) * (1 + backward_s)
        assert lower_bound(stages, links, m) == expected
        assert simulate(stages, links, m, policies).makespan == expected


@each_policy
def test_balanced_stages_without_links_meet_the_bound_under_every_policy(name: str) -> None:
    for num_stages, m in itertools.product(range(1, 7), range(1, 13)):
        stages, links = [StageTime(1.0, 2.0)] * num_stages, [LinkTime()] * (num_stages - 1)
        run = simulate(stages, links, m, policies_of(name, num_stages, m))
        assert run.makespan == lower_bound(stages, links, m) == (m + num_stages - 1) * 3
        assert run.busy == (3.0 * m,) * num_stages
        assert run.idle_share == pytest.approx([(num_stages - 1) / (m + num_stages - 1)] * num_stages)  # the bubble


def test_gpipe_with_equal_ops_does_all_forwards_of_a_stage_first() -> None:
    stages, links = [StageTime(1.0, 2.0)] * 3, [LinkTime()] * 2
    run = simulate(stages, links, 4, policies_of("gpipe", 3, 4))
    for s in range(3):
        assert [span.op for span in run.spans if span.stage == s] == [F] * 4 + [B] * 4
    assert run.peak_in_flight == (4, 4, 4)


def test_1f1b_order_is_the_published_one_without_the_extra_micro_batch() -> None:
    policies = [Policy("1f1b", B, 4 - s) for s in range(4)]
    run = simulate([StageTime(1.0, 2.0)] * 4, [LinkTime()] * 3, 8, policies)
    for s in range(4):
        warm_up = 3 - s  # PipeDream-Flush: P - s - 1 forwards, then one forward and one backward in turn, then the rest
        expected = [F] * warm_up + [F, B] * (8 - warm_up) + [B] * warm_up
        assert [span.op for span in run.spans if span.stage == s] == expected
    assert run.peak_in_flight == (4, 3, 2, 1)


def test_one_micro_batch_takes_the_sum_of_its_trip() -> None:
    stages = [StageTime(1.0, 2.0), StageTime(4.0, 8.0), StageTime(16.0, 32.0)]
    links = [LinkTime(64.0, 128.0, 256.0), LinkTime(512.0, 1024.0, 2048.0)]
    run = simulate(stages, links, 1, policies_of("1f1b", 3, 1))
    ops, hiddens, grads, latencies = 1 + 2 + 4 + 8 + 16 + 32, 64 + 512, 128 + 1024, 2 * (256 + 2048)
    assert run.makespan == lower_bound(stages, links, 1) == ops + hiddens + grads + latencies


@pytest.mark.parametrize(
    ("stages", "link", "caps", "expected"),
    [
        pytest.param((2, 3, 1, 1), (0, 0, 0), None, 2 * 8 + 3 * 8, id="stage work"),
        pytest.param((1, 2, 9, 8), (3, 4, 5), None, 1 + 3 + 5 + 9 * 8 + 8 * 8 + 4 + 5 + 2, id="stage work, last stage"),
        pytest.param((9, 1, 2, 3), (1, 1, 1), None, 9 * 8 + (2 + 2 + 3 + 2) + 1, id="the last forward must return"),
        pytest.param((1, 9, 2, 3), (1, 1, 1), None, 1 + (2 + 2 + 3 + 2) + 9 * 8, id="first backward"),
        pytest.param((1, 1, 1, 1), (9, 2, 4), None, 1 + 9 * 8 + 4 + 1 + 1 + 2 + 4 + 1, id="forward link"),
        pytest.param((1, 1, 1, 1), (2, 9, 4), None, 1 + 2 + 4 + 1 + 1 + 9 * 8 + 4 + 1, id="backward link"),
        pytest.param((1, 1, 1, 1), (0, 0, 20), (7, 1), 2 * (1 + 20 + 2 + 20 + 1), id="in-flight cap"),
    ],
)
def test_each_term_of_the_bound_is_met_where_it_rules(
    stages: tuple[int, ...], link: tuple[int, ...], caps: tuple[int, int] | None, expected: int
) -> None:
    times = [StageTime(*stages[:2]), StageTime(*stages[2:])]
    assert lower_bound(times, [LinkTime(*link)], 8, caps) == expected
    reached = {
        simulate(times, [LinkTime(*link)], 8, [Policy("", p, c) for p, c in zip(prefer, caps or (8, 8), strict=True)])
        for prefer in itertools.product(Op, Op)
    }
    assert min(run.makespan for run in reached) == expected


def test_the_caps_term_takes_the_longest_chain_of_unlike_micro_batches() -> None:
    stages = [StageTime(1.0, 1.0), StageTime((1.0, 20.0, 1.0, 1.0), 1.0), StageTime((1.0, 1.0, 1.0, 20.0), 1.0)]
    links = [LinkTime(latency_s=10.0)] * 2
    trip = (1 + 10 + 20 + 10 + 1) + (1 + 10 + 1 + 10 + 1)  # of micro-batch 1, and of 3, which waits for 1 to return
    assert lower_bound(stages, links, 4, [2, 4, 4]) == 2 * trip
    assert simulate(stages, links, 4, [Policy("", F, 2), Policy("", F, 4), Policy("", F, 4)]).makespan >= 2 * trip


def test_the_order_of_work_does_not_hang_on_the_last_bits_of_floats() -> None:
    for name, p in itertools.product(POLICIES, range(2, 6)):
        runs = [
            simulate(
                [StageTime(8 * u, 16 * u)] * p, [LinkTime(2 * u, 3 * u, u)] * (p - 1), 12, policies_of(name, p, 12)
            )
            for u in (1.0, 0.1, 0.7, 1 / 3)  # the first is exact; the others round, differently along each path
        ]
        orders = [[[(x.op, x.micro_batch) for x in run.spans if x.stage == s] for s in range(p)] for run in runs]
        assert orders.count(orders[0]) == len(orders)


# Simulation: what must hold for every instance


@quick
@given(instances())
def test_simulation_keeps_every_rule_of_the_pipeline(instance: Instance) -> None:
    run = instance.simulate()
    every, last = range(instance.num_microbatches), len(instance.stages) - 1
    span = {(x.stage, x.op, x.micro_batch): x for x in run.spans}
    sent = {(x.link, x.direction, x.micro_batch): x for x in run.transfers}
    assert len(span) == len(run.spans) == 2 * len(instance.stages) * len(every)  # all work, once
    assert len(sent) == len(run.transfers) == 2 * last * len(every)
    assert run.makespan == max(x.end for x in run.spans)
    for s, stage in enumerate(instance.stages):
        mine = [x for x in run.spans if x.stage == s]
        assert all(a.end <= b.start for a, b in itertools.pairwise(mine))  # one op at a time
        for op in Op:
            assert [x.micro_batch for x in mine if x.op is op] == list(every)  # FIFO
        depth = list(itertools.accumulate(1 if x.op is F else -1 for x in mine))
        assert 1 <= max(depth) == run.peak_in_flight[s] <= instance.caps[s]
        assert run.busy[s] == pytest.approx(sum(x.end - x.start for x in mine))
        for i in every:
            forward, backward = span[s, F, i], span[s, B, i]
            assert forward.end - forward.start == pytest.approx(stage.seconds(F, i))
            assert backward.end - backward.start == pytest.approx(stage.seconds(B, i))
            assert s == 0 or forward.start >= sent[s - 1, F, i].arrive
            assert backward.start >= (forward.end if s == last else sent[s, B, i].arrive)
    for (link, direction, i), frame in sent.items():
        sender = span[link if direction is F else link + 1, direction, i]
        times = instance.links[link]
        assert frame.start == max(sender.end, sent[link, direction, i - 1].end if i else 0.0)  # FIFO, never idle
        assert frame.end - frame.start == pytest.approx(times.occupancy(direction, i))
        assert frame.arrive - frame.end == pytest.approx(times.latency_s)


@quick
@given(instances())
def test_simulation_is_never_below_the_bound(instance: Instance) -> None:
    makespan = instance.simulate().makespan
    assert makespan * ROUNDING >= instance.bound()
    assert instance.bound() * ROUNDING >= lower_bound(instance.stages, instance.links, instance.num_microbatches)


@quick
@given(instances())
def test_simulation_is_deterministic(instance: Instance) -> None:
    assert instance.simulate() == instance.simulate()


def test_bound_of_equal_micro_batches_is_the_same_in_both_notations() -> None:
    rng = random.Random(3)
    for _ in range(50):
        one = unlike_instance(rng, 4, 5, per_micro_batch=False)
        stages = [StageTime(*(tuple(x.seconds(op, i) for i in range(5)) for op in Op)) for x in one.stages]
        links = [
            LinkTime(
                tuple(x.occupancy(F, i) for i in range(5)), tuple(x.occupancy(B, i) for i in range(5)), x.latency_s
            )
            for x in one.links
        ]
        each = replace(one, stages=stages, links=links)
        assert each.bound() == one.bound()
        assert each.simulate() == one.simulate()


# Brute force over all interleavings


def interleavings(num_microbatches: int, cap: int) -> Iterator[tuple[Op, ...]]:
    """All orders of one stage's FIFO forwards and backwards with at most `cap` in flight."""

    def grow(order: tuple[Op, ...], forwards: int, backwards: int) -> Iterator[tuple[Op, ...]]:
        if backwards == num_microbatches:
            yield order
        if forwards < num_microbatches and forwards - backwards < cap:
            yield from grow((*order, F), forwards + 1, backwards)
        if backwards < forwards:
            yield from grow((*order, B), forwards, backwards + 1)

    yield from grow((), 0, 0)


def makespan_of(instance: Instance, orders: Sequence[tuple[Op, ...]]) -> float | None:
    """Earliest end of these fixed orders, by passes over the precedence graph; None if they wait in a circle."""
    last = len(orders) - 1
    arrive: dict[tuple[int, Op, int], float] = {(0, F, i): 0.0 for i in range(instance.num_microbatches)}
    position, free = [0] * len(orders), [0.0] * len(orders)
    link_free: dict[tuple[int, Op], float] = {}
    progress = True
    while progress:
        progress = False
        for s, order in enumerate(orders):
            while position[s] < len(order):
                op = order[position[s]]
                i = order[: position[s]].count(op)
                if (s, op, i) not in arrive:
                    break
                free[s] = max(free[s], arrive[s, op, i]) + instance.stages[s].seconds(op, i)
                position[s] += 1
                progress = True
                to = s + 1 if op is F else s - 1
                if to > last:
                    arrive[s, B, i] = free[s]
                elif to >= 0:
                    link = min(s, to)
                    link_free[link, op] = max(link_free.get((link, op), 0.0), free[s]) + instance.links[link].occupancy(
                        op, i
                    )
                    arrive[to, op, i] = link_free[link, op] + instance.links[link].latency_s
    return max(free) if all(p == len(o) for p, o in zip(position, orders, strict=True)) else None


def optimum_of(instance: Instance) -> float:
    choices = [list(interleavings(instance.num_microbatches, cap)) for cap in instance.caps]
    return min(end for orders in itertools.product(*choices) if (end := makespan_of(instance, orders)) is not None)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3)])
def test_bound_optimum_and_simulation_stand_in_this_order(num_stages: int, num_microbatches: int) -> None:
    rng = random.Random(num_stages * 10 + num_microbatches)
    for trial in range(16):
        instance = unlike_instance(rng, num_stages, num_microbatches, per_micro_batch=trial % 2 == 1)
        optimum = optimum_of(instance)
        assert instance.bound() <= optimum * ROUNDING
        assert optimum <= instance.simulate().makespan * ROUNDING


def test_simulation_equals_the_brute_force_time_of_the_order_that_it_chose() -> None:
    rng = random.Random(5)
    for trial in range(60):
        instance = unlike_instance(rng, 1 + trial % 5, 1 + trial % 8, per_micro_batch=trial % 2 == 1)
        run = instance.simulate()
        orders = [tuple(x.op for x in run.spans if x.stage == s) for s in range(len(instance.stages))]
        assert run.makespan == pytest.approx(makespan_of(instance, orders))


# No deadlock, on the clock


def test_every_small_mix_of_policies_and_caps_completes() -> None:
    slow_down, slow_up = (StageTime(1.0, 5.0), LinkTime(3.0, 0.0, 2.0)), (StageTime(0.0, 0.0), LinkTime(0.0, 7.0, 0.0))
    for p, m in itertools.product(range(1, 4), range(1, 4)):
        kinds = [Policy(name, kind.prefer, cap) for name, kind in POLICIES.items() for cap in range(1, m + 3)]
        for number, policies in enumerate(itertools.product(kinds, repeat=p)):
            times = [(slow_down, slow_up)[(number + s) % 2] for s in range(p)]
            run = simulate([x[0] for x in times], [x[1] for x in times[1:]], m, policies)
            assert len(run.spans) == 2 * p * m


@quick
@given(instances(max_stages=5, max_microbatches=8))
def test_every_random_mix_completes_all_micro_batches_on_every_stage(instance: Instance) -> None:
    done = sorted((x.stage, x.op.value, x.micro_batch) for x in instance.simulate().spans)
    every = itertools.product(range(len(instance.stages)), ("backward", "forward"), range(instance.num_microbatches))
    assert done == list(every)


def test_a_stalled_schedule_raises_and_does_not_loop() -> None:
    stuck = Policy("stuck", F, 1)
    object.__setattr__(stuck, "in_flight_cap", 0)
    with pytest.raises(RuntimeError, match=r"stalled .* \[\(1, 0\), \(0, 0\)\]"):
        simulate([StageTime(1.0, 1.0)] * 2, [LinkTime()], 2, [Policy("free", F, 1), stuck])


# No deadlock, without a clock: any order of events that the network and the machines may choose


State = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Chain:
    """Stages that run next_op; a stage whose frame finds the neighbour's queue full computes nothing until it fits.

    A state counts for each stage (forwards, backwards, hiddens received, grads received). What is computed and not
    received is on the wire, or in its sender's hands where that direction is bounded.
    """

    policies: tuple[Policy, ...]
    num_microbatches: int
    hidden_queue: int | None = None
    grad_queue: int | None = None

    def first(self) -> State:
        return tuple((0, 0, self.num_microbatches if s == 0 else 0, 0) for s in range(len(self.policies)))

    def complete(self, state: State) -> bool:
        return all(forwards == backwards == self.num_microbatches for forwards, backwards, _, _ in state)

    def moves(self, state: State) -> Iterator[State]:
        """Every state that one event leads to: a delivery, or an op of a stage that is not held up."""
        last = len(state) - 1
        for s, (forwards, backwards, hiddens, grads) in enumerate(state):
            if s > 0 and state[s - 1][0] > hiddens and self._fits(hiddens - forwards, self.hidden_queue):
                yield self._with(state, s, 2)
            if s < last and state[s + 1][1] > grads and self._fits(grads - backwards, self.grad_queue):
                yield self._with(state, s, 3)
            if not self._held_up(state, s):
                backward_ready = (forwards if s == last else grads) > backwards
                op = next_op(self.policies[s], forwards - backwards, hiddens > forwards, backward_ready)
                if op is not None:
                    yield self._with(state, s, 0 if op is F else 1)

    def _held_up(self, state: State, s: int) -> bool:
        down = s < len(state) - 1 and self.hidden_queue is not None and state[s][0] > state[s + 1][2]
        up = s > 0 and self.grad_queue is not None and state[s][1] > state[s - 1][3]
        return down or up

    @staticmethod
    def _fits(waiting: int, queue: int | None) -> bool:
        return queue is None or waiting < queue

    @staticmethod
    def _with(state: State, s: int, field: int) -> State:
        stage = list(state[s])
        stage[field] += 1
        return (*state[:s], (stage[0], stage[1], stage[2], stage[3]), *state[s + 1 :])

    def dead_ends(self) -> list[State]:
        """All reachable states without a next one, other than the complete one."""
        seen, todo, found = {self.first()}, [self.first()], []
        while todo:
            state = todo.pop()
            following = list(self.moves(state))
            if not following and not self.complete(state):
                found.append(state)
            fresh = {after for after in following if after not in seen}
            seen |= fresh
            todo += fresh
        return found

    def random_walk(self, rng: random.Random) -> State:
        state = self.first()
        while following := list(self.moves(state)):
            state = rng.choice(following)
        return state


@pytest.mark.parametrize("queue", [None, 1, 2])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 3), (3, 2)])
def test_no_reachable_state_of_a_small_chain_is_a_deadlock(
    num_stages: int, num_microbatches: int, queue: int | None
) -> None:
    caps = range(1, num_microbatches + 1)
    kinds = [Policy(name, kind.prefer, cap) for name, kind in POLICIES.items() for cap in caps]
    for policies in itertools.product(kinds, repeat=num_stages):
        assert not Chain(policies, num_microbatches, hidden_queue=queue).dead_ends()


@pytest.mark.parametrize("queue", [None, 1, 2, 3])
def test_no_order_of_deliveries_deadlocks_a_random_chain(queue: int | None) -> None:
    rng = random.Random(queue or 0)
    for _ in range(250):
        instance = unlike_instance(rng, rng.randint(1, 5), rng.randint(1, 8), per_micro_batch=False)
        chain = Chain(tuple(instance.policies), instance.num_microbatches, hidden_queue=queue)
        assert chain.complete(chain.random_walk(rng))


@each_policy
def test_a_grad_queue_with_room_for_the_cap_never_deadlocks(name: str) -> None:
    policies = tuple(policies_of(name, 3, 4))
    room = max(policy.in_flight_cap for policy in policies)
    assert not Chain(policies, 4, hidden_queue=1, grad_queue=room).dead_ends()


def test_the_search_finds_the_deadlock_of_two_stages_that_hold_each_other_up() -> None:
    policies = (Policy("", F, 4), Policy("", F, 4))
    assert Chain(policies, 4, hidden_queue=1, grad_queue=1).dead_ends()
    assert not Chain(policies, 4, hidden_queue=1).dead_ends()


# Inputs


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), (1.0, -1.0)])
def test_impossible_times_are_refused(seconds: float | tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="forward_s must be finite seconds of at least 0"):
        StageTime(seconds, 1.0)
    with pytest.raises(ConfigError, match="backward_occupancy_s must be finite seconds of at least 0"):
        LinkTime(0.0, seconds)


def test_times_that_are_no_chain_are_refused() -> None:
    one, link, policy = StageTime(1.0, 1.0), LinkTime(), Policy("", F, 1)
    with pytest.raises(ConfigError, match="2 stages have 1 links between them, got 0"):
        simulate([one, one], [], 2, [policy, policy])
    with pytest.raises(ConfigError, match="2 stages need as many policies, got 1"):
        simulate([one, one], [link], 2, [policy])
    with pytest.raises(ConfigError, match="times per micro-batch must be 2 numbers, got 3"):
        lower_bound([StageTime((1.0, 2.0, 3.0), 1.0)], [], 2)
    with pytest.raises(ConfigError, match="in_flight_caps must be 1 numbers of at least 1"):
        lower_bound([one], [], 2, [0])
    with pytest.raises(ConfigError, match="a step needs a stage and a micro-batch, got 1 and 0"):
        lower_bound([one], [], 0)

"""Every plan covers each layer exactly once, on the machines that the hardware lists (case M12)."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import composed

from hetero.checked import convert
from hetero.errors import ConfigError
from hetero.plan import resolve_plan
from hetero.spec import (
    Config,
    HardwareSpec,
    ShardPlanSpec,
    StageSpec,
    WorkerEntry,
)

PC1 = WorkerEntry(id="pc1", host="pc1.lan", port=9001, device="cuda")
PC2 = WorkerEntry(id="pc2", host="pc2.lan")


@functools.cache
def base() -> Config:
    return convert(composed(), Config)


def plan_of(
    layers: int, workers: list[WorkerEntry] | None = None, launch: Any = "none", **plan: Any
) -> tuple[list[StageSpec], list[WorkerEntry]]:
    hardware = HardwareSpec(workers=workers or [], launch=launch)
    return resolve_plan(msgspec.structs.replace(base(), shard_plan=ShardPlanSpec(**plan), hardware=hardware), layers)


def ranges(stages: list[StageSpec]) -> list[tuple[int, int]]:
    return [(stage.start, stage.end) for stage in stages]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (7, 2, [(0, 4), (4, 7)]),
        (30, 4, [(0, 8), (8, 16), (16, 23), (23, 30)]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (1, 1, [(0, 1)]),
    ],
)
def test_even_plan_gives_what_is_left_over_to_earlier_stages(
    layers: int, stages: int, expected: list[tuple[int, int]]
) -> None:
    assert ranges(plan_of(layers, launch="local", num_stages=stages)[0]) == expected


@given(layers=st.integers(1, 200), num_stages=st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_even_plan_covers_every_layer_once_in_sizes_that_differ_by_one_at_most(layers: int, num_stages: int) -> None:
    if num_stages > layers:
        with pytest.raises(ConfigError, match=rf"num_stages must be at most {layers} .*got {num_stages}"):
            plan_of(layers, launch="local", num_stages=num_stages)
        return
    stages, workers = plan_of(layers, launch="local", num_stages=num_stages)
    assert [layer for a, b in ranges(stages) for layer in range(a, b)] == list(range(layers))
    sizes = [b - a for a, b in ranges(stages)]
    assert max(sizes) - min(sizes) <= 1 and len(sizes) == num_stages == len(workers) + 1


@given(layers=st.integers(1, 40), points=st.lists(st.integers(-3, 45), max_size=6))
@settings(max_examples=300, deadline=None)
def test_split_points_make_a_full_cover_or_are_refused_by_value(layers: int, points: list[int]) -> None:
    good = points == sorted(set(points)) and all(0 < p < layers for p in points)
    if not good:
        with pytest.raises(ConfigError) as refused:
            plan_of(layers, launch="local", split_points=points)
        assert "shard_plan.split_points" in str(refused.value) and str(points) in str(refused.value)
        return
    stages, _ = plan_of(layers, launch="local", split_points=points)
    assert [a for a, _ in ranges(stages)] == [0, *points]
    assert [layer for a, b in ranges(stages) for layer in range(a, b)] == list(range(layers))


def test_auto_is_the_coordinator_and_every_worker_and_two_stages_locally() -> None:
    assert len(plan_of(6, [PC1, PC2], num_stages="auto")[0]) == 3
    assert len(plan_of(6, launch="local", num_stages="auto")[0]) == 2
    assert len(plan_of(6, launch="none", num_stages="auto")[0]) == 1


def test_stage_takes_device_and_numbers_of_its_machine_and_model() -> None:
    stages, workers = plan_of(6, [PC1, PC2], split_points=[2, 4])
    assert [s.id for s in stages] == ["local", "pc1", "pc2"] and workers == [PC1, PC2]
    assert [s.device for s in stages] == [None, "cuda", None]
    assert {(s.dtype, s.quantization) for s in stages} == {("float32", "none")}


def test_explicit_stage_names_its_machine_in_any_order_of_the_hardware() -> None:
    plan = [
        StageSpec(id="local", start=0, end=2, quantization="nf4"),
        StageSpec(id="pc2", start=2, end=3, device="cpu", dtype="bfloat16"),
        StageSpec(id="pc1", start=3, end=6, is_last=True),
    ]
    stages, workers = plan_of(6, [PC1, PC2], stages=plan)
    assert workers == [PC2, PC1]
    assert [(s.device, s.dtype, s.quantization) for s in stages] == [
        (None, "float32", "nf4"),
        ("cpu", "bfloat16", "none"),
        ("cuda", "float32", "none"),
    ]


def stages_of(*parts: tuple[str, int, int]) -> list[StageSpec]:
    return [StageSpec(id=name, start=start, end=end) for name, start, end in parts]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"stages": []}, "shard_plan.stages must hold at least one stage"),
        ({"stages": stages_of(("local", 1, 6))}, r"stages\[0\] \(local\) must start at layer 0 .* got \[1, 6\)"),
        (
            {"stages": stages_of(("local", 0, 2), ("pc1", 3, 6))},
            r"stages\[1\] \(pc1\) must start at layer 2 .* got \[3, 6\)",
        ),
        ({"stages": stages_of(("local", 0, 4), ("pc1", 3, 6))}, r"stages\[1\] \(pc1\) must start at layer 4"),
        ({"stages": stages_of(("local", 0, 0), ("pc1", 0, 6))}, r"stages\[0\] \(local\) .* hold a layer"),
        ({"stages": stages_of(("local", 0, 5))}, r"must cover all 6 layers of the model, got \[0, 5\)"),
        ({"stages": stages_of(("local", 0, 7))}, r"must cover all 6 layers of the model, got \[0, 7\)"),
        ({"stages": stages_of(("pc1", 0, 6))}, r"stages\[0\]\.id must be 'local' on exactly the first"),
        ({"stages": stages_of(("local", 0, 3), ("local", 3, 6))}, r"stages\[1\]\.id must be 'local' on exactly"),
        (
            {"stages": stages_of(("local", 0, 3), ("pc9", 3, 6))},
            r"stages\[1\]\.id must name an entry of hardware\.workers \(pc1, pc2\), got 'pc9'",
        ),
        (
            {"stages": [StageSpec(id="local", start=0, end=3, is_last=True), StageSpec(id="pc1", start=3, end=6)]},
            r"stages\[0\] \(local\)\.is_last must be true on exactly the last stage",
        ),
        ({"split_points": [3]}, "one for each of the 2 hardware.workers, got 2 stages"),
        ({"num_stages": 4}, "one for each of the 2 hardware.workers, got 4 stages"),
        ({"num_stages": 2, "split_points": [3]}, "exactly one of .* got split_points and num_stages"),
        ({}, "exactly one of stages, split_points and num_stages, got none"),
        (
            {"stages": [StageSpec(id="local", start=0, end=6)], "split_points": [3]},
            "exactly one of .* got stages and split_points",
        ),
    ],
)
def test_plan_that_cannot_work_is_refused_by_place_and_value(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(6, [PC1, PC2], **plan)


def test_machine_that_runs_two_stages_is_refused() -> None:
    plan = stages_of(("local", 0, 2), ("pc1", 2, 4), ("pc1", 4, 6))
    with pytest.raises(ConfigError, match="pc1"):
        plan_of(6, [PC1, PC2], stages=plan)


@pytest.mark.parametrize("workers", [[PC1, PC1], [WorkerEntry(id="local", host="x")]])
def test_worker_ids_are_names_of_their_own(workers: list[WorkerEntry]) -> None:
    with pytest.raises(ConfigError, match=r"hardware\.workers\[\d\]\.id must be a name of its own"):
        plan_of(6, workers, num_stages="auto")

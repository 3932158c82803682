"""A curve in few buckets says the same as all of its points."""

from __future__ import annotations

import math
import random

import pytest

from hetero.series import Series


@pytest.mark.parametrize("count", [1, 7, 160, 161, 1000, 10_000])
def test_buckets_hold_every_point_once_and_the_extremes_of_all(count: int) -> None:
    draw = random.Random(count)
    points = [(step, draw.gauss(0, 1)) for step in range(1, count + 1)]
    buckets = Series(points).buckets
    assert len(buckets) <= 160
    assert sum(b.count for b in buckets) == count
    assert math.isclose(sum(b.total for b in buckets), sum(y for _, y in points), abs_tol=1e-9)
    for b in buckets:
        inside = [(x, y) for x, y in points if b.first <= x <= b.last]
        assert len(inside) == b.count
        assert b.low == min(inside, key=lambda p: p[1])
        assert b.high == max(inside, key=lambda p: p[1])
    assert [b.last + 1 for b in buckets[:-1]] == [b.first for b in buckets[1:]]


def test_single_spike_among_many_steps_is_kept() -> None:
    buckets = Series((step, 9.0 if step == 7777 else 1.0) for step in range(10_000)).buckets
    assert max(b.high for b in buckets)[0] in {b.high[0] for b in buckets} and (7777, 9.0) in {b.high for b in buckets}

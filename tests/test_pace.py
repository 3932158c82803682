"""A stage that is much slower than it usually is: reported once, and left alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hetero.pace import Pace, Slow

TOKENS = 1000


def reports(seconds: Sequence[float], tokens: Sequence[int] | None = None) -> dict[int, Slow]:
    """Step (from 1) -> what was reported of a stage that took these seconds."""
    pace = Pace()
    found = {}
    for step, (took_s, num_tokens) in enumerate(zip(seconds, tokens or [TOKENS] * len(seconds), strict=True), 1):
        for slow in pace.step({2: took_s}, num_tokens):
            found[step] = slow
    return found


def test_step_of_more_than_three_times_the_own_median_is_reported_with_both() -> None:
    assert reports([9.0, 1.0, 2.0, 3.0, 2.0, 6.1]) == {6: Slow(stage=2, took_s=6.1, median_s=2.0, num_steps=5)}
    assert reports([9.0, 1.0, 2.0, 3.0, 2.0, 6.0]) == {}


def test_nothing_is_usual_before_five_steps() -> None:
    """The first ones compile."""
    assert reports([1.0, 1.0, 1.0, 1.0, 9.0]) == {}
    assert reports([60.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == {}


def test_each_stage_is_compared_with_itself() -> None:
    pace = Pace()
    for _ in range(9):
        assert pace.step({0: 0.5, 1: 20.0}, TOKENS) == []
    assert [slow.stage for slow in pace.step({0: 4.0, 1: 20.0}, TOKENS)] == [0]
    assert [slow.stage for slow in pace.step({0: 0.5, 1: 61.0}, TOKENS)] == [1]


def test_stage_that_stays_slow_is_reported_once() -> None:
    """Also when it has been slow for so long that this is usual."""
    assert list(reports([2.0] * 20 + [9.0] * 300)) == [21]


def test_stage_that_is_slow_now_and_then_is_reported_once() -> None:
    assert list(reports([2.0] * 20 + [9.0, 2.0, 2.0, 2.0] * 50)) == [21]


def test_stage_that_was_as_usual_for_ten_steps_is_reported_again() -> None:
    assert list(reports([2.0] * 20 + [9.0] + [2.0] * 10 + [9.0])) == [21, 32]
    assert list(reports([2.0] * 20 + [9.0] + [2.0] * 9 + [9.0])) == [21]


def test_milliseconds_are_nobody_s_trouble() -> None:
    assert reports([0.01] * 20 + [1.0]) == {}
    assert list(reports([0.01] * 20 + [1.1])) == [21]


def test_steps_of_long_rows_and_of_short_ones_are_not_slow() -> None:
    """Time is a constant and a share for each token; rows are of any length."""
    drawn = random.Random(0)
    tokens = [drawn.choice([50, 100, 1000, 10_000]) for _ in range(500)]
    assert reports([2.0 + 0.01 * count for count in tokens], tokens) == {}
    assert list(reports([2.0] * 20 + [20.0, 20.0], [TOKENS] * 20 + [10 * TOKENS, TOKENS])) == [22]


@pytest.mark.parametrize("count", [0, 1])
def test_step_without_tokens_is_a_step(count: int) -> None:
    assert list(reports([2.0] * 6 + [9.0], [count] * 7)) == [7]

"""Which cases of a long list run each time; the rest run by hand (`pytest -m by_hand`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_by_hand(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases, those that are not in `quick` marked `by_hand`; each of `quick` must be one of them."""
    cases = list(cases)
    assert all(case in cases for case in quick), (quick, cases)
    return [case if case in quick else _by_hand(case) for case in cases]


def _by_hand(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.by_hand)

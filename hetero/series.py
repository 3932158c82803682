"""A curve of any length in few buckets, each with its smallest and largest value, built as the steps come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_BUCKETS = 160  # more than a chart of half a screen shows apart


@dataclass
class Bucket:
    """Consecutive points of a curve.

    Attributes:
        first, last: x of the first and last point.
        low, high: the points (x, y) with the smallest and the largest y.
        total, count: sum of y, and how many points.
    """

    first: float
    last: float
    low: tuple[float, float]
    high: tuple[float, float]
    total: float
    count: int = 1

    @property
    def mean(self) -> float:
        """Mean of y."""
        return self.total / self.count

    def with_next(self, other: Bucket) -> Bucket:
        """This one and the one that follows as one."""
        return Bucket(
            self.first,
            other.last,
            min(self.low, other.low, key=lambda point: point[1]),
            max(self.high, other.high, key=lambda point: point[1]),
            self.total + other.total,
            self.count + other.count,
        )


class Series:
    """A curve that grows at its end; the work and the memory of a point do not grow with their number.

    Args:
        points: (x, y) to begin with, x ascending.
        max_buckets: when there are more, neighbours become one, and later buckets are as wide.
    """

    def __init__(self, points: Iterable[tuple[float, float]] = (), max_buckets: int = MAX_BUCKETS) -> None:
        self._max, self._width = max_buckets, 1
        self.buckets: list[Bucket] = []
        for x, y in points:
            self.add(x, y)

    def add(self, x: float, y: float) -> None:
        """The next point."""
        new = Bucket(x, x, (x, y), (x, y), y)
        if self.buckets and self.buckets[-1].count < self._width:
            self.buckets[-1] = self.buckets[-1].with_next(new)
            return
        self.buckets.append(new)
        if len(self.buckets) > self._max:
            old = self.buckets
            self._width *= 2
            self.buckets = [old[i].with_next(old[i + 1]) if i + 1 < len(old) else old[i] for i in range(0, len(old), 2)]

"""Medians with their spread, ratios of interleaved runs, tables, and a core for each process."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Median, lowest and highest of several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, format_: str) -> str:
        return f"{self.median:{format_}} ({self.low:{format_}} to {self.high:{format_}})"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Figure:
    """The ratio of the medians; its spread is that of the ratios within a round.

    Both sequences hold one value a round, in the same order.
    """
    each = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return Figure(statistics.median(numerators) / statistics.median(denominators), min(each), max(each))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in columns; a line is left free where the first column changes."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines, before = [], None
    for row in [heads, *rows]:
        if before is not None and row[0] != before:
            lines.append("")
        before = row[0]
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines)


def on_core(index: int) -> None:
    """Keeps this process on one core, where the system can do that; `index` counts the cores that it may use."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})

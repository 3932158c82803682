"""Line charts as SVG text: axes with round ticks, a legend, values on hover; no script, and light and dark by CSS."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.page import text
from hetero.series import Bucket, Series

# Colours of Okabe and Ito (2008, "Color Universal Design"), told apart with every kind of colour vision; a little
# darker on white, a little lighter on black.
_LIGHT = ("#0067a5", "#c44e00", "#00805c", "#a8478a", "#8a6d00", "#2a8fc4", "#6a4fb3", "#555f6b")
_DARK = ("#6db9f2", "#ff9a4d", "#3fd0a4", "#e58fc6", "#e6c84a", "#9ad4f5", "#b7a2f2", "#b4bdc8")
NUM_COLOURS = len(_LIGHT)


def _colours(colours: Sequence[str]) -> str:
    return " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))


STYLE = (
    f":root {{ {_colours(_LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_colours(_DARK)} }} }}\n"
    """
.chart { display: block; width: 100%; height: auto; font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
.chart text { fill: var(--faint); }
.chart .title { fill: var(--text); font-size: 14px; font-weight: 600; }
.chart .grid { stroke: var(--line); stroke-width: 1; }
.chart .mark { stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 4 3; }
.chart .limit { stroke: var(--faint); stroke-width: 1.5; stroke-dasharray: 2 3; }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart .range { fill: none; stroke-width: 1; opacity: .4; stroke-linejoin: round; }
.chart .hit { fill: transparent; }
.chart .hit:hover { fill: var(--text); fill-opacity: .12; }
"""
)

_WIDTH, _PLOT_HEIGHT = 480, 170
_LEFT, _RIGHT, _BOTTOM = 66, 24, 40  # room for 0.002995 at the left
_TITLE = 10
_MAX_HITS = 80  # places where a value is shown on hover
_MAX_RANGES = 3  # curves whose ranges do not yet hide one another; of more, they are said on hover alone


@dataclass(frozen=True)
class Line:
    """A curve of a chart; `dots` marks its points, for curves of few of them; `colour` is a number from 0."""

    label: str
    series: Series
    colour: int = 0
    dots: bool = False


@dataclass(frozen=True)
class _Axes:
    """Where values are in the picture."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool
    top: int

    @property
    def bottom(self) -> int:
        return self.top + _PLOT_HEIGHT

    def x(self, value: float) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        return _LEFT + width * (value - self.x_low) / ((self.x_high - self.x_low) or 1)

    def y(self, value: float) -> float:
        low, high = self.y_low, self.y_high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.bottom - _PLOT_HEIGHT * (value - low) / ((high - low) or 1)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "",
    percent: bool = False,
    log: bool | None = False,
    marks: Sequence[tuple[float, str]] = (),
    limit: tuple[float, str] | None = None,
) -> str:
    """A chart of curves over steps.

    Args:
        title: plain text.
        lines: at least one with a point, or the chart says that there is none yet.
        unit: of the values, for the hover text.
        percent: values are shares, drawn from 0 to 100 %.
        log: a logarithmic axis; None: where the values spread over more than 30 times and none is 0 or less.
        marks: upright lines at a step, with what they mean.
        limit: a level line, with what it means; drawn where it is within the values.

    Returns:
        An `<svg>` that needs `STYLE` in its page.
    """
    lines = [line for line in lines if line.series.buckets]
    legend, legend_rows = _legend(lines)
    top = 30 + 18 * legend_rows
    head = [f'<text class="title" x="{_TITLE}" y="18">{text(title)}</text>', *legend]
    if not lines:
        empty = f'<text x="{_WIDTH / 2}" y="{top + _PLOT_HEIGHT / 2}" text-anchor="middle">no step yet</text>'
        return _svg(title, top, [*head, empty])
    axes = _axes(lines, percent=percent, log=log, top=top)
    body = [*head, *_grid(axes, percent=percent)]
    for x, meaning in marks:
        if axes.x_low <= x <= axes.x_high:
            at = _n(axes.x(x))
            path = f'<path class="mark" d="M{at} {axes.top}V{axes.bottom}"/>'
            body.append(f"<g><title>{text(meaning)}</title>{path}</g>")
    if limit is not None and axes.y_low <= limit[0] <= axes.y_high and not (axes.log and limit[0] <= 0):
        path = f'<path class="limit" d="M{_LEFT} {_n(axes.y(limit[0]))}H{_WIDTH - _RIGHT}"/>'
        body.append(f"<g><title>{text(limit[1])}</title>{path}</g>")
    for line in lines:
        body += _drawn(line, axes, ranges=len(lines) <= _MAX_RANGES)
    body += _hits(lines, axes, unit, percent)
    return _svg(title, top, body)


def bar(share: float, *, colour: int = 0, title: str = "") -> str:
    """A small bar, `share` of its width full, for a table's cell."""
    full = _n(100 * min(1.0, max(0.0, share)))
    return (
        f'<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" width="100%" height="8" role="img">'
        f"<title>{text(title)}</title>"
        f'<rect width="100" height="8" rx="2" style="fill:var(--line)"/>'
        f'<rect width="{full}" height="8" rx="2" style="fill:var(--c{colour % NUM_COLOURS})"/></svg>'
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high], about `count` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)
    return [round(k * gap, 12) + 0.0 for k in range(math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high]; 2 and 5 times them as well where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    found = [step * 10.0**power for power in powers for step in steps]
    every = 1 + len(powers) // 8 if steps == (1,) else 1
    return [tick for tick in found if low * 0.999 <= tick <= high * 1.001][::every]


def show(value: float) -> str:
    """A number as people read it: 0.0002 is 2e-4, 12345.6 is 12,346."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e7 or size < 1e-3:
        digits, _, power = f"{value:.3g}".partition("e")
        return f"{digits}e{int(power)}" if power else digits
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def _axes(lines: Sequence[Line], *, percent: bool, log: bool | None, top: int) -> _Axes:
    buckets = [bucket for line in lines for bucket in line.series.buckets]
    x_low, x_high = min(b.first for b in buckets), max(b.last for b in buckets)
    low, high = min(b.low[1] for b in buckets), max(b.high[1] for b in buckets)
    if log is None:
        log = low > 0 and high / low > 30
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    if percent:
        return _Axes(x_low, x_high, 0.0, max(1.0, high), False, top)
    if log and low > 0:
        return _Axes(x_low, x_high, low / 1.1, high * 1.1, True, top)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return _Axes(x_low, x_high, max(0.0, low - room) if low >= 0 else low - room, high + room, False, top)


def _legend(lines: Sequence[Line]) -> tuple[list[str], int]:
    """The legend below the title, and its rows; none for a single curve."""
    if len(lines) < 2:
        return [], 0
    parts, x, row = [], _TITLE, 1
    for line in lines:
        label = line.label if len(line.label) <= 40 else line.label[:39] + "…"
        width = 30 + 7 * len(label)
        if x + width > _WIDTH and x > _TITLE:
            x, row = _TITLE, row + 1
        y = 18 + 18 * row
        colour = f"var(--c{line.colour % NUM_COLOURS})"
        parts.append(f'<path d="M{x} {y - 4}h14" style="stroke:{colour};stroke-width:3{_dashes(line)}"/>')
        parts.append(f'<text x="{x + 19}" y="{y}">{text(label)}</text>')
        x += width
    return parts, row


def _grid(axes: _Axes, *, percent: bool) -> list[str]:
    parts = []
    for tick in log_ticks(axes.y_low, axes.y_high) if axes.log else ticks(axes.y_low, axes.y_high, 6 if percent else 5):
        y = _n(axes.y(tick))
        label = f"{tick:.0%}" if percent else show(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" dy=".35em" text-anchor="end">{label}</text>')
    for tick in ticks(axes.x_low, axes.x_high, 6):
        if tick == int(tick):  # there is no half of a step
            x = _n(axes.x(tick))
            parts.append(f'<text x="{x}" y="{axes.bottom + 16}" text-anchor="middle">{int(tick):,}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{axes.bottom + 33}" text-anchor="middle">step</text>')
    return parts


def _drawn(line: Line, axes: _Axes, *, ranges: bool) -> list[str]:
    """The curve; where a bucket holds several points, their range faintly and their mean over it."""
    buckets, stroke = line.series.buckets, f"stroke:var(--c{line.colour % NUM_COLOURS})"
    parts = []
    if ranges and any(bucket.count > 1 for bucket in buckets):
        ends = [point for b in buckets for point in sorted({b.low, b.high})]
        parts.append(f'<path class="range" style="{stroke}" d="{_path(ends, axes)}"/>')
    means = [((b.first + b.last) / 2, b.mean) for b in buckets]
    parts.append(f'<path class="line" style="{stroke}{_dashes(line)}" d="{_path(means, axes)}"/>')
    if line.dots or len(buckets) == 1:
        fill = f"fill:var(--c{line.colour % NUM_COLOURS})"
        parts += [f'<circle cx="{_n(axes.x(x))}" cy="{_n(axes.y(y))}" r="3.5" style="{fill}"/>' for x, y in means]
    return parts


def _hits(lines: Sequence[Line], axes: _Axes, unit: str, percent: bool) -> list[str]:
    """Upright strips that say on hover what is there."""
    longest = max(lines, key=lambda line: len(line.series.buckets)).series.buckets
    group = -(-len(longest) // _MAX_HITS)
    groups = [longest[i : i + group] for i in range(0, len(longest), group)]
    centres = [(axes.x(g[0].first) + axes.x(g[-1].last)) / 2 for g in groups]
    edges = [_LEFT, *((a + b) / 2 for a, b in itertools.pairwise(centres)), _WIDTH - _RIGHT]
    starts = [[bucket.first for bucket in line.series.buckets] for line in lines]
    parts = []
    for index, found in enumerate(groups):
        first, last = found[0].first, found[-1].last
        said = [f"step {first:,.0f}" if first == last else f"steps {first:,.0f} to {last:,.0f}"]
        for line, begins in zip(lines, starts, strict=True):
            mine = line.series.buckets[max(0, bisect.bisect_left(begins, first)) : bisect.bisect_right(begins, last)]
            if mine:
                said.append(f"{line.label} {_said(mine, unit, percent)}")
        left, right = edges[index], edges[index + 1]
        shape = f'x="{_n(left)}" y="{axes.top}" width="{_n(right - left)}" height="{_PLOT_HEIGHT}"'
        parts.append(f'<rect class="hit" {shape}><title>{chr(10).join(map(text, said))}</title></rect>')
    return parts


def _said(buckets: Sequence[Bucket], unit: str, percent: bool) -> str:
    mean = sum(b.total for b in buckets) / sum(b.count for b in buckets)
    low, high = min(b.low[1] for b in buckets), max(b.high[1] for b in buckets)
    shown = [f"{value:.1%}" if percent else show(value) for value in (mean, low, high)]
    tail = f" {unit}" if unit else ""
    return f"{shown[0]}{tail}" if low == high else f"{shown[0]}{tail} ({shown[1]} to {shown[2]})"


def _dashes(line: Line) -> str:
    """Curves beyond the colours are told apart by dashes."""
    return "" if line.colour < NUM_COLOURS else f";stroke-dasharray:{2 + 4 * (line.colour // NUM_COLOURS)} 4"


def _path(points: Sequence[tuple[float, float]], axes: _Axes) -> str:
    return "M" + "L".join(f"{_n(axes.x(x))} {_n(axes.y(y))}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _svg(title: str, top: int, body: Sequence[str]) -> str:
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + _PLOT_HEIGHT + _BOTTOM}" '
        f'role="img" aria-label="{text(title)}">\n' + "\n".join(body) + "\n</svg>"
    )

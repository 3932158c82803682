"""A timeline as a self-contained SVG: a lane a stage, compute above, what is sent and received below."""

from __future__ import annotations

import math
from html import escape

from hetero.timeline import Timeline, TimelineSpan

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#e39b3f",
    "wait": "#d0d0d0",
    "send": "#59a14f",
    "receive": "#b07aa1",
}
# Light colours stand in the elements, for renderers without @media; dark ones where the viewer wants them.
_STYLE = (
    "@media (prefers-color-scheme:dark){.gt-back{fill:#12171f}.gt-text{fill:#e6ebf2}.gt-faint{fill:#9aa8ba}"
    ".gt-line{stroke:#2a3441}.gt-wait{fill:#4a5666}}"
)
LANE, COMPUTE, BAR, LEFT, TOP, FOOT = 58, 26, 8, 150, 46, 34
_MAX_SHOWN = 6000  # rectangles that a browser draws without effort


def gantt_svg(timeline: Timeline, *, width: int = 960) -> str:
    """The picture of a step; no script, no external reference, the same bytes for the same timeline.

    Args:
        timeline: what to draw.
        width: in pixels.
    """
    scale = (width - LEFT - 20) / (timeline.duration_s or 1.0)
    notes = _notes(timeline)
    height = TOP + LANE * len(timeline.stages) + FOOT + 16 * len(notes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{_text(_heading(timeline))}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="gt-back" width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="gt-text" x="8" y="18" font-size="14" fill="#222222">{_text(_heading(timeline))}</text>',
        *_legend(),
        *_axis(timeline, scale, TOP + LANE * len(timeline.stages)),
    ]
    for stage, name in enumerate(timeline.stages):
        lines += _lane(timeline, stage, name, scale)
    for number, note in enumerate(notes):
        y = height - 16 * (len(notes) - number) + 8
        lines.append(f'<text class="gt-faint" x="8" y="{y}" fill="#666666" font-size="11">{_text(note)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _heading(timeline: Timeline) -> str:
    what = "simulated step" if timeline.simulated else f"measured step {timeline.step}"
    return f"{what}, {timeline.duration_s:.4g} {timeline.unit}"


def _notes(timeline: Timeline) -> list[str]:
    notes = list(timeline.notes)
    if timeline.clock_error_s:
        notes.append(f"clocks of different machines agree within {timeline.clock_error_s * 1e3:.3g} ms")
    if len(timeline.spans) > _MAX_SHOWN:
        notes.append(f"the first {_MAX_SHOWN} of {len(timeline.spans)} spans by stage are drawn")
    return notes


def _legend() -> list[str]:
    lines = []
    for number, (kind, colour) in enumerate(COLOURS.items()):
        x = LEFT + 90 * number
        lines.append(f'<rect class="gt-{kind}" x="{x}" y="27" width="12" height="10" fill="{colour}"/>')
        lines.append(f'<text class="gt-faint" x="{x + 17}" y="36" fill="#444444">{kind}</text>')
    return lines


def _axis(timeline: Timeline, scale: float, bottom: int) -> list[str]:
    """Ticks at round numbers, about eight."""
    length = timeline.duration_s
    if length <= 0:
        return []
    tick = 10 ** math.floor(math.log10(length / 8))
    tick *= next(factor for factor in (1, 2, 5, 10) if tick * factor >= length / 8 * 0.999)
    lines = []
    for number in range(int(length / tick) + 1):
        x = LEFT + number * tick * scale
        lines.append(f'<line class="gt-line" x1="{x:.2f}" y1="{TOP}" x2="{x:.2f}" y2="{bottom}" stroke="#eeeeee"/>')
        label = f"{number * tick:.4g} {timeline.unit}" if number == 0 else f"{number * tick:.4g}"
        lines.append(
            f'<text class="gt-faint" x="{x:.2f}" y="{bottom + 14}" fill="#666666" font-size="11">{_text(label)}</text>'
        )
    return lines


def _lane(timeline: Timeline, stage: int, name: str, scale: float) -> list[str]:
    y = TOP + LANE * stage
    shown = name if len(name) <= 18 else name[:17] + "…"
    idle = f"idle {timeline.idle_share(stage):.0%}"
    lines = [
        f'<text class="gt-text" x="8" y="{y + 14}" fill="#222222">{_text(shown)}</text>',
        f'<text class="gt-faint" x="8" y="{y + 30}" fill="#666666" font-size="11">{_text(idle)}</text>',
    ]
    rows = {"wait": (4, COMPUTE), "forward": (4, COMPUTE), "backward": (4, COMPUTE)}
    rows |= {"send": (COMPUTE + 6, BAR), "receive": (COMPUTE + 16, BAR)}
    for kind in ("wait", "send", "receive", "forward", "backward"):
        top, tall = rows[kind]
        spans = timeline.of_stage(stage, kind)
        for span in spans[: _MAX_SHOWN // (5 * len(timeline.stages)) + 1]:
            lines += _bar(span, y + top, tall, scale, timeline.unit)
    return lines


def _bar(span: TimelineSpan, y: int, tall: int, scale: float, unit: str) -> list[str]:
    x, wide = LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
    what = span.kind if span.of is None else f"{span.kind} {'hidden' if span.of == 'forward' else 'grad'}"
    seconds = f"{span.end_s - span.start_s:.4g} {unit}"
    wait = ' class="gt-wait"' if span.kind == "wait" else ""
    lines = [
        f'<rect{wait} x="{x:.2f}" y="{y}" width="{max(wide, 0.5):.2f}" height="{tall}" fill="{COLOURS[span.kind]}">'
        f"<title>{_text(f'{what} of micro-batch {span.micro_batch}: {seconds}')}</title></rect>"
    ]
    if wide > 16 and span.kind in ("forward", "backward"):
        lines.append(
            f'<text x="{x + wide / 2:.2f}" y="{y + 17}" fill="#ffffff" text-anchor="middle">{span.micro_batch}</text>'
        )
    return lines


def _text(text: str) -> str:
    """Literal text; characters that XML cannot hold are shown as they are written in Python."""
    return escape("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))

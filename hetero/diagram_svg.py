"""A plan as an SVG picture of its own: a pipeline is a chain, so it needs nobody else's layout.

stage 0 --> stage 1 --> stage 2     rows of at most three; each other row runs backwards, so that links stay short
                           |
stage 5 <-- stage 4 <-- stage 3
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero.diagram_text import wrapped
from hetero.memory import RUNTIME_BYTES, show_bytes
from hetero.page import text
from hetero.plan_view import TIED, LinkView, PlanView, StageView

_CARD, _PAD, _MARGIN, _GAP_X, _GAP_Y = 292, 16, 40, 144, 92
_LINE, _TITLE_LINE = 18, 20
_MEMORY = ("weights", "adapter, gradients, optimizer", "activations and work", "programs")

# Light colours as they are, dark ones where the viewer wants them; renderers without @media take the light ones.
_STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;font-size:12.5px}"
    ".pv-back{fill:#ffffff}.pv-card{fill:#f6f8fb;stroke:#c6d0de}.pv-track{fill:#dde4ee}.pv-on{fill:#3566a8}"
    ".pv-text{fill:#1b2430}.pv-faint{fill:#5b6878}.pv-bad{fill:#b3261e}.pv-over{stroke:#b3261e;stroke-width:2}"
    ".pv-bold{font-weight:700;font-size:14.5px}.pv-big{font-weight:700;font-size:18px}.pv-small{font-size:11.5px}"
    ".pv-mid{text-anchor:middle}.pv-end{text-anchor:end}"
    ".pv-line{stroke:#5b6878;stroke-width:1.5;fill:none}.pv-tip{fill:#5b6878}.pv-dash{stroke-dasharray:5 4}"
    ".pv-m0{fill:#4c78a8}.pv-m1{fill:#e39b3b}.pv-m2{fill:#5aa89f}.pv-m3{fill:#98a2b1}"
    "@media (prefers-color-scheme:dark){.pv-back{fill:#12171f}.pv-card{fill:#1b222d;stroke:#3a475a}"
    ".pv-track{fill:#33404f}.pv-on{fill:#7fb0f0}.pv-text{fill:#e6ebf2}.pv-faint{fill:#9aa8ba}.pv-bad{fill:#ff8a80}"
    ".pv-over{stroke:#ff8a80}.pv-line{stroke:#9aa8ba}.pv-tip{fill:#9aa8ba}}"
)


@dataclass(frozen=True)
class _Place:
    """Where a stage's card is."""

    x: int
    y: int
    height: int
    row: int

    @property
    def middle(self) -> int:
        return self.x + _CARD // 2

    @property
    def bottom(self) -> int:
        return self.y + self.height


def svg(view: PlanView) -> str:
    """The plan as an SVG document, which an HTML page can hold as well; light and dark, no script, nothing fetched."""
    columns = _columns(len(view.stages))
    width = 2 * _MARGIN + columns * _CARD + (columns - 1) * _GAP_X
    head, top = _heading(view, width - 2 * _MARGIN)
    cards = [_card(view, stage) for stage in view.stages]
    places = _places([height for _, height in cards], columns, top)
    drawn = [*head]
    for link in view.links:
        drawn += _link(link, places[link.index], places[link.index + 1])
    for stage, (parts, _), place in zip(view.stages, cards, places, strict=True):
        drawn += [
            f'<g class="pv-stage" id="stage-{stage.index}" transform="translate({place.x} {place.y})">'
            f"<title>{text(stage.title())}</title>",
            f'<rect class="pv-card" width="{_CARD}" height="{place.height}" rx="10"/>',
            f'<rect class="pv-on" x="{_PAD}" width="{_CARD - 2 * _PAD}" height="4" rx="2"/>',
            *parts,
            "</g>",
        ]
    bottom = max(place.bottom for place in places) + 12
    if tied := view.tied_link():
        drawn += _tied(places[tied[0]], places[tied[1]], bottom + 14)
        bottom += 36
    if view.stages[0].memory is not None:
        drawn += _legend(view, bottom + 22)
        bottom += 32
    height = bottom + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" xml:space="preserve"><title>{text(view.model)}: the plan of a run</title><style>{_STYLE}</style>\n'
        f'<rect class="pv-back" width="{width}" height="{height}" rx="12"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _columns(count: int) -> int:
    return count if count <= 3 else 2 if count == 4 else 3


def _places(heights: list[int], columns: int, top: int) -> list[_Place]:
    """Rows, each as high as its highest card, each other one from right to left."""
    places: list[_Place] = []
    for row, first in enumerate(range(0, len(heights), columns)):
        in_row = heights[first : first + columns]
        for position in range(len(in_row)):
            column = position if row % 2 == 0 else columns - 1 - position
            places.append(_Place(_MARGIN + column * (_CARD + _GAP_X), top, max(in_row), row))
        top += max(in_row) + _GAP_Y
    return places


def _texts(x: int, y: int, lines: list[str], kind: str, step: int = _LINE) -> list[str]:
    """Lines of text below one another; `y` is the first one's baseline."""
    return [f'<text class="{kind}" x="{x}" y="{y + n * step}">{text(line)}</text>' for n, line in enumerate(lines)]


def _heading(view: PlanView, width: int) -> tuple[list[str], int]:
    """Model and step, and where the cards begin."""
    drawn, y = [], 44
    for said, kind, size in (
        (view.model, "pv-big pv-text", 21),
        (view.facts, "pv-faint", 12.5),
        (view.step, "pv-faint", 12.5),
    ):
        lines = wrapped(said, width / size)
        step = 24 if kind.startswith("pv-big") else _LINE
        drawn += _texts(_MARGIN, y, lines, kind, step)
        y += step * len(lines)
    return drawn, y + 12


def _card(view: PlanView, stage: StageView) -> tuple[list[str], int]:
    """What is in a stage's card, and how high that is."""
    width, drawn, y = _CARD - 2 * _PAD, [], 32

    def say(said: str, kind: str, size: float = 12.5, step: int = _LINE) -> None:
        nonlocal y
        lines = wrapped(said, width / size)
        drawn.extend(_texts(_PAD, y, lines, kind, step))
        y += step * len(lines)

    say(stage.title(), "pv-bold pv-text", 17, _TITLE_LINE)
    say(stage.host, "pv-faint")
    say(stage.kind(), "pv-text")
    drawn += _model_strip(view, stage, y - 2, width)
    y += 30
    say(stage.contents(), "pv-text")
    if stage.memory is not None:
        say(stage.parameters(), "pv-faint")
        drawn += _memory_bar(stage, y - 2, width)
        y += 30
        lack = view.lacking.get(stage.memory.machine)
        say(view.memory_text(stage), "pv-bad" if lack else "pv-text")
        if lack:
            say(f"too much: lacks {show_bytes(lack)}", "pv-bad")
    return drawn, y


def _model_strip(view: PlanView, stage: StageView, y: int, width: int) -> list[str]:
    """The whole model from embedding to head, with this stage's part of it in colour."""
    end, inner = 12, width - 30
    scale = inner / view.num_layers
    on = ("pv-track", "pv-on")
    x, part = _PAD + 15 + stage.start * scale, max(2.0, (stage.end - stage.start) * scale)
    return [
        f'<rect class="{on[stage.has_embedding]}" x="{_PAD}" y="{y}" width="{end}" height="10" rx="2"/>',
        f'<rect class="pv-track" x="{_PAD + 15}" y="{y}" width="{inner}" height="10" rx="2"/>',
        f'<rect class="pv-on" x="{x:.1f}" y="{y}" width="{part:.1f}" height="10" rx="2"/>',
        f'<rect class="{on[stage.has_head]}" x="{_PAD + width - end}" y="{y}" width="{end}" height="10" rx="2"/>',
    ]


def memory_parts(stage: StageView) -> list[int]:
    """Bytes of each kind in the bar, in the legend's order; together the stage's total."""
    memory = stage.memory
    assert memory is not None
    kept = memory.learned
    return [sum(memory.weights.values()), kept, memory.training - kept, RUNTIME_BYTES]


def _memory_bar(stage: StageView, y: int, width: int) -> list[str]:
    """What the stage holds, beside what its device has."""
    parts, memory = memory_parts(stage), stage.memory
    assert memory is not None
    whole = max(memory.total, memory.available or 0)
    over = memory.available is not None and memory.total > memory.available
    drawn = [f'<rect class="pv-track{" pv-over" if over else ""}" x="{_PAD}" y="{y}" width="{width}" height="10"/>']
    x = float(_PAD)
    for kind, size in enumerate(parts):
        part = size / whole * width
        drawn.append(f'<rect class="pv-m{kind}" x="{x:.1f}" y="{y}" width="{part:.1f}" height="10"/>')
        x += part
    if over:
        limit = _PAD + (memory.available or 0) / whole * width
        drawn.append(f'<path class="pv-over" d="M{limit:.1f} {y - 4}v18"/>')
    return drawn


def _link(link: LinkView, here: _Place, there: _Place) -> list[str]:
    """Both ways between two stages, with what goes over them."""
    each = f"{link.bytes_per_token / 1024:g} KiB a token"
    forward, backward = each, each
    if link.load is not None:
        forward, backward = (f"{show_bytes(size)} a step" for size in (link.load.forward, link.load.backward))
    drawn = [
        f'<g class="pv-link" id="link-{link.index}-{link.index + 1}">'
        f"<title>stage {link.index} to {link.index + 1}: {text(link.text())}</title>"
    ]
    small, bottom = "pv-small pv-faint", [link.dtype, each] if link.load else [link.dtype]
    if here.row == there.row:
        sign = 1 if there.x > here.x else -1
        start = here.x + (_CARD if sign > 0 else 0) + 8 * sign
        length, y = _GAP_X - 16, here.y + here.height // 2
        middle = start + sign * length // 2
        drawn += _arrow(start, y - 8, sign * length, 0) + _arrow(start + sign * length, y + 8, -sign * length, 0)
        drawn += _texts(middle, y - 32, ["hidden states", forward], f"{small} pv-mid", 15)
        drawn += _texts(middle, y + 26, ["gradients", backward, *bottom], f"{small} pv-mid", 15)
    else:
        start, length = here.bottom + 8, _GAP_Y - 16
        drawn += _arrow(here.middle - 8, start, 0, length) + _arrow(here.middle + 8, start + length, 0, -length)
        lines = [f"hidden states {forward}", f"gradients {backward}", ", ".join(bottom)]
        at_left = here.x == _MARGIN
        x, kind = (here.middle + 22, small) if at_left else (here.middle - 22, f"{small} pv-end")
        drawn += _texts(x, start + 24, lines, kind, 16)
    return [*drawn, "</g>"]


def _arrow(x: int, y: int, dx: int, dy: int) -> list[str]:
    """A straight arrow along one axis."""
    ux, uy = (dx > 0) - (dx < 0), (dy > 0) - (dy < 0)
    tip_x, tip_y = x + dx, y + dy
    back = f"{tip_x - 8 * ux - 4 * uy} {tip_y - 8 * uy - 4 * ux} {tip_x - 8 * ux + 4 * uy} {tip_y - 8 * uy + 4 * ux}"
    return [
        f'<path class="pv-line" d="M{x} {y}L{tip_x - 6 * ux} {tip_y - 6 * uy}"/>',
        f'<path class="pv-tip" d="M{tip_x} {tip_y}L{back}Z"/>',
    ]


def _tied(first: _Place, last: _Place, y: int) -> list[str]:
    """From the embedding around all cards to the head."""
    x = _MARGIN // 2
    path = f"M{first.x} {first.y + 24}H{x}V{y}H{last.middle}V{last.bottom}"
    return [
        f'<g class="pv-tied" id="tied"><title>{text(TIED)}</title><path class="pv-line pv-dash" d="{path}"/>',
        *_texts(x, y + 16, [f"embedding and head {TIED}"], "pv-small pv-faint"),
        "</g>",
    ]


def _legend(view: PlanView, y: int) -> list[str]:
    """What the colours of the memory bars mean."""
    drawn, x = [], _MARGIN
    for kind, name in enumerate(_MEMORY):
        if kind == 2 and not view.complete:
            continue
        drawn.append(f'<rect class="pv-m{kind}" x="{x}" y="{y - 9}" width="10" height="10" rx="2"/>')
        drawn += _texts(x + 16, y, [name], "pv-small pv-faint")
        x += 34 + round(5.8 * len(name))
    return drawn

"""A plan as text that other programs draw: Mermaid and DOT."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from hetero.plan_view import TIED, PlanView

JOINER = "\u2060"

_LONGEST_ROW = 4  # stages side by side; more are drawn one below the other
_LINE = 44  # letters of a line in DOT, which has no lines of its own

_MERMAID_STYLE = "classDef stage fill:#f6f8fb,stroke:#3566a8,stroke-width:1.5px,color:#1b2430,text-align:left"
_DOT_STYLE = (
    '    graph [bgcolor="#ffffff", pad=0.3, nodesep=0.5, ranksep=0.7, fontname="Helvetica,Arial,sans-serif"];',
    '    node [shape=box, style="rounded,filled", fillcolor="#f6f8fb", color="#3566a8", fontcolor="#1b2430", '
    'margin="0.2,0.14", fontname="Helvetica,Arial,sans-serif", fontsize=12];',
    '    edge [color="#5b6878", fontcolor="#5b6878", fontname="Helvetica,Arial,sans-serif", fontsize=11];',
)


def mermaid(view: PlanView) -> str:
    """The plan as a Mermaid flowchart."""
    lines = [f"flowchart {_direction(view)}"]
    for stage in view.stages:
        text = "<br/>".join(_mermaid_text(line) for line in view.stage_lines(stage))
        lines.append(f'    s{stage.index}["{text}"]:::stage')
    for link in view.links:
        lines.append(f'    s{link.index} -->|"{_mermaid_text(link.text())}"| s{link.index + 1}')
    if tied := view.tied_link():
        lines.append(f'    s{tied[0]} -.-|"{_mermaid_text(TIED)}"| s{tied[1]}')
    return "\n".join([*lines, f"    {_MERMAID_STYLE}"]) + "\n"


def dot(view: PlanView) -> str:
    """The plan as a Graphviz digraph."""
    lines = ["digraph pipeline {", '    charset="UTF-8";', f"    rankdir={_direction(view)};", *_DOT_STYLE]
    for stage in view.stages:
        lines.append(f"    s{stage.index} [label={_dot_text(view.stage_lines(stage))}];")
    for link in view.links:
        words = [f"\u00a0 {words} \u00a0" for words in link.text().split(", ")]
        lines.append(f"    s{link.index} -> s{link.index + 1} [dir=both, label={_dot_text(words, 'n')}];")
    if tied := view.tied_link():
        style = "style=dashed, dir=none, constraint=false"
        lines.append(f"    s{tied[0]} -> s{tied[1]} [{style}, label={_dot_text([TIED], 'n')}];")
    return "\n".join([*lines, "}"]) + "\n"


def width_of(letter: str) -> float:
    """How wide a letter is in a sans serif font, in its size; rather too much than too little."""
    if unicodedata.combining(letter) or letter in "\u200b\u200c\u200d\ufe0e\ufe0f":
        return 0.0
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.3 if ord(letter) > 0xFFFF else 1.05
    if letter in " .,:;|!'ijl[]()/\\-":
        return 0.36
    return 0.9 if letter in "mwMW@%—" else 0.68 if letter.isupper() else 0.58


def wrapped(text: str, width: float) -> list[str]:
    """Text in lines that are at most so wide (in its font's size); cut at spaces where it can be; nothing is lost."""
    lines, line, used = [], "", 0.0
    for letter in text:
        used += width_of(letter)
        if used > width and line and not unicodedata.combining(letter) and width_of(letter) > 0:
            before, space, rest = line.rpartition(" ")
            if space and letter != " " and len(rest) < len(line) / 2:
                lines.append(before + space)
                line = rest
            else:
                lines.append(line)
                line = ""
            used = sum(map(width_of, line)) + width_of(letter)
        line += letter
    return [*lines, line]


def _direction(view: PlanView) -> str:
    return "LR" if len(view.stages) <= _LONGEST_ROW else "TB"


def _mermaid_text(text: str) -> str:
    """Text that Mermaid shows literally: characters that are syntax become entity codes.

    Even as codes a backslash and an n would be a new line, so a joiner, which has no width, stands between them.
    """
    apart = text.replace("\\n", f"\\{JOINER}n")
    return "".join(c if c.isalnum() or c in " .,:/-_+()" else f"#{ord(c)};" for c in apart)


def _dot_text(lines: Iterable[str], justify: str = "l") -> str:
    """A quoted DOT string that shows literally, each line ended by its way of justifying.

    Not Graphviz's HTML: some builds cannot read that, and others put a node's name for a backslash and N in it.
    """
    cut = [part for line in lines for part in wrapped(line, _LINE * 0.58)]
    escaped = (part.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&#38;") for part in cut)
    return '"' + "".join(f"{part}\\{justify}" for part in escaped) + '"'

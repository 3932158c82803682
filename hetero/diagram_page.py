"""A plan as a web page in one file: the picture, and its figures as tables."""

from __future__ import annotations

from collections.abc import Iterable

from hetero.diagram_svg import svg
from hetero.memory import RUNTIME_BYTES, show_bytes
from hetero.page import page, text
from hetero.plan_view import PlanView, StageView


def html_page(view: PlanView) -> str:
    """The page; it needs no renderer and no network."""
    body = [f"<figure>{svg(view)}</figure>", "<h2>Stages</h2>", _stages(view)]
    if view.links:
        body += ["<h2>Links</h2>", _links(view)]
    return page(f"{view.model}: the plan of a run", "\n".join([*body, *_notes(view)]))


def _stages(view: PlanView) -> str:
    has_memory = view.stages[0].memory is not None
    head = ["stage", "host", "device and numbers", "holds"]
    if has_memory:
        head += ["parameters", "weights", "adapter, gradients, optimizer"]
        head += ["activations and work"] * view.complete + ["in all"]
    rows = [_stage(view, stage) for stage in view.stages]
    return _table(head, rows, text_columns=4)


def _stage(view: PlanView, stage: StageView) -> list[str]:
    row = [f"{stage.index}: {stage.name}", stage.host, stage.kind().replace(", ", "\n"), stage.contents()]
    memory = stage.memory
    if memory is None:
        return row
    kept = memory.learned
    weights = "\n".join(f"{kind} {show_bytes(size)}" for kind, size in sorted(memory.weights.items()))
    row += [f"{memory.parameters:,}\n{memory.trained:,} train", weights, show_bytes(kept)]
    if view.complete:
        row.append(show_bytes(memory.training - kept))
    has = "?" if memory.available is None else show_bytes(memory.available)
    return [*row, f"{show_bytes(memory.total)}\nof {has}"]


def _links(view: PlanView) -> str:
    head, rows = ["link", "numbers", "a token, each way"], []
    has_load = view.links[0].load is not None
    if has_load:
        head += ["a step forward", "a step back", "at 1 Gbit/s"]
    for link in view.links:
        row = [f"{link.index} to {link.index + 1}", link.dtype, f"{link.bytes_per_token / 1024:g} KiB"]
        if link.load is not None:
            forward, backward = link.load.forward, link.load.backward
            row += [show_bytes(forward), show_bytes(backward), f"{(forward + backward) * 8 / 1e9:.2g} s"]
        rows.append(row)
    return _table(head, rows, text_columns=2)


def _notes(view: PlanView) -> Iterable[str]:
    for machine, lack in view.lacking.items():
        yield f'<p class="bad">{text(machine)} lacks {text(show_bytes(lack))}; dry_run=true says what would help.</p>'
    if view.tied:
        where = ": both machines hold it, and it does not train" if view.tied_link() else ""
        yield f'<p class="faint">The head is the embedding\'s own tensor (tied){where}.</p>'
    memories = [stage.memory for stage in view.stages if stage.memory is not None]
    if not memories:
        return
    if len({memory.machine for memory in memories}) < len(memories):
        yield '<p class="faint">Stages on one machine share its memory: their totals are added.</p>'
    if any(memory.available is None for memory in memories):
        yield '<p class="faint">?: give memory_gb in the machine\'s entry under hardware to have it compared.</p>'
    rest = "" if view.complete else "; activations are not in it, python train.py dry_run=true says them as well"
    yield f'<p class="faint">In all: with {text(show_bytes(RUNTIME_BYTES))} for the programs{rest}.</p>'


def _table(head: list[str], rows: list[list[str]], text_columns: int) -> str:
    """A table whose columns are numbers after the first few."""

    def cells(tag: str, row: list[str]) -> str:
        kinds = ("" if column < text_columns else ' class="num"' for column in range(len(row)))
        lines = ("<br>".join(map(text, cell.split("\n"))) for cell in row)
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, lines, strict=True))

    lines = [f"<tr>{cells('th', head)}</tr>", *(f"<tr>{cells('td', row)}</tr>" for row in rows)]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"

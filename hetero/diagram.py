"""Pictures of a plan in every format, as files: asked for, or beside a run that starts."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetero.diagram_page import html_page
from hetero.diagram_svg import svg
from hetero.diagram_text import dot, mermaid
from hetero.errors import ConfigError
from hetero.memory import RunMemory
from hetero.plan_view import PlanView, view_of
from hetero.rendering import RenderError, Rendering
from hetero.resolve import ResolvedRun

# Name of a format -> how its file ends. The last two need a renderer.
FORMATS = {"svg": ".svg", "html": ".html", "mermaid": ".mmd", "dot": ".dot", "png": ".png", "pdf": ".pdf"}
OF_A_RUN = ("svg", "html", "mermaid", "png")
ALL = "all"

_WRITERS = {"svg": svg, "html": html_page, "mermaid": mermaid, "dot": dot}
_STEM = "architecture"
_PATIENCE_S = 5.0  # for a picture that is still being made when its run is over

log = logging.getLogger(__name__)


def write_diagrams(
    resolved: ResolvedRun, output: Path, memory: RunMemory | None = None, formats: Sequence[str] | None = None
) -> list[Path]:
    """Writes the plan's pictures.

    Args:
        resolved: the run.
        output: a file, whose ending says its format, or a folder that gets one of each format.
        memory: the run's figures, to be shown as well.
        formats: keys of `FORMATS`; None: all that can be made here, with a warning for each other one.

    Returns:
        The absolute paths of the files.

    Raises:
        ConfigError: a place that cannot be written, an ending that is no format; or a format that was asked for could
            not be made, which leaves the others written.
    """
    asked, targets = _targets(output, formats)
    view, rendering, written, failures = view_of(resolved, memory), Rendering(), [], []
    for name, target in targets.items():
        try:
            written.append(_write(target, _made(view, name, rendering)))
        except RenderError as exc:
            failures.append(str(exc))
    if failures and asked:
        also = f"; written: {', '.join(map(str, written))}" if written else ""
        raise ConfigError(f"format {', '.join(failures)}{also}")
    for failure in failures:
        log.warning("left out: %s", failure)
    return written


@contextlib.contextmanager
def drawn_beside(resolved: ResolvedRun, run_dir: Path, memory: RunMemory | None) -> Iterator[None]:
    """Draws a run that starts into its folder; a picture that cannot be made is a warning, and what is slow waits for
    nobody and nobody for it.

    Args:
        resolved: the run.
        run_dir: its folder.
        memory: its figures, where they are known.
    """
    rendering = Rendering()
    thread = threading.Thread(
        target=_draw_run, args=(resolved, run_dir, memory, rendering), name="diagram", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        thread.join(_PATIENCE_S)
        rendering.stop()


def formats_of(wanted: object) -> list[str] | None:
    """The formats that a configuration's `format` asks for; None where it leaves the choice.

    Raises:
        ConfigError: it names no format.
    """
    names = wanted if isinstance(wanted, list) else [wanted]
    if wanted is None:
        return None
    found: list[str] = []
    for name in names:
        if not isinstance(name, str) or name not in (*FORMATS, ALL):
            known = ", ".join([*FORMATS, ALL])
            raise ConfigError(f"format must be one or more of {known}, or null, got {name!r}")
        found += [new for new in (FORMATS if name == ALL else [name]) if new not in found]
    if not found:
        raise ConfigError("format must name a format, or be null for all that can be made here, got []")
    return found


def _targets(output: Path, formats: Sequence[str] | None) -> tuple[bool, dict[str, Path]]:
    """Whether formats were asked for by name, and where each goes."""
    if not output.suffix or output.is_dir():
        names = list(FORMATS) if formats is None else formats
        return formats is not None, {name: output / f"{_STEM}{FORMATS[name]}" for name in names}
    found = [name for name, suffix in FORMATS.items() if suffix == output.suffix.lower()]
    if not found:
        endings = ", ".join(FORMATS.values())
        raise ConfigError(f"output must end in one of {endings}, or be a folder, got {str(output)!r}")
    if formats is not None and list(formats) != found:
        raise ConfigError(
            f"output must be a folder for format={','.join(formats)}, or end in its ending, got {str(output)!r}"
        )
    return True, {found[0]: output}


def _made(view: PlanView, name: str, rendering: Rendering) -> bytes:
    if name in _WRITERS:
        return _WRITERS[name](view).encode()
    return rendering.make(FORMATS[name], dot=dot(view), svg=svg(view))


def _write(target: Path, content: bytes) -> Path:
    """Writes a file as a whole or not at all, since a report may read it meanwhile."""
    target = target.absolute()
    draft = target.with_name(f".{target.name[:40]}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(content)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)  # not there any more where it was renamed
    except OSError as exc:
        raise ConfigError(f"output must be a place that can be written, got {target} ({exc.strerror})") from None
    return target


def _draw_run(resolved: ResolvedRun, run_dir: Path, memory: RunMemory | None, rendering: Rendering) -> None:
    """All pictures of a run, in a thread of its own; nothing that fails here may fail the run."""
    try:
        view = view_of(resolved, memory)
        for name in OF_A_RUN:
            _write(run_dir / f"{_STEM}{FORMATS[name]}", _made(view, name, rendering))
    except RenderError as exc:
        log.log(logging.INFO if exc.nothing_there else logging.WARNING, "%s.png is left out: %s", _STEM, exc)
    except Exception as exc:
        log.warning("the run's architecture could not be drawn: %s: %s", type(exc).__name__, exc)

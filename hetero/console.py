"""What a person sees while a run goes on: a live view in a terminal, one clean line a step elsewhere.

Where there is no terminal (a pipe, a file, TERM=dumb) each step is a line, however many there are: a line has about 100
bytes, so 100,000 steps make 10 MB, and whoever wants fewer has `grep`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import rich
from rich.live import Live

from hetero.live import Picture, show_time

log = logging.getLogger(__name__)
steps_log = logging.getLogger("hetero.steps")

ANSWERING = "answering prompts"
REFRESHES_PER_S = 2  # one takes 3 to 7 ms of the interpreter that the compute thread shares
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}


class ConsoleHandler(logging.Handler):
    """Prints log records above the live view, each on one line however long it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record; steps only where no live view shows them."""
        console = rich.get_console()
        if record.name == steps_log.name and console.is_interactive:
            return
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {record.getMessage() if record.exc_info is None else text}"
        console.print(text, markup=False, highlight=False, soft_wrap=True, style=_STYLES.get(record.levelno))


class RunDisplay:
    """Shows a run from its start to its end; a context manager, and a logger that is told of steps like any other."""

    def __init__(self) -> None:
        self._console = rich.get_console()
        self._picture = Picture()
        self._total = 0
        self._live: Live | None = None

    def __enter__(self) -> RunDisplay:
        if self._console.is_interactive:
            self._live = Live(self._picture, console=self._console, refresh_per_second=REFRESHES_PER_S)
            self._live.start(refresh=True)
            # A process that is killed leaves the terminal as it is, and that should not be without a cursor.
            self._console.show_cursor(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_view()

    def _end_view(self) -> None:
        if self._live is not None:
            self._picture.is_over = True
            self._live.transient = not self._picture.has_steps()
            self._live.stop()
            self._live = None

    def expect(self, total_steps: int, memory: Mapping[str, int | None]) -> None:
        """The run is known now.

        Args:
            total_steps: of the whole run.
            memory: stage id -> bytes that its device has, None where that is not known.
        """
        self._total = total_steps
        self._picture.expect(total_steps, memory)

    def doing(self, words: str) -> None:
        """The run is busy with something else than steps from now on; `training` means with steps.

        Answers to prompts are shown as they come, so the view ends before them.
        """
        self._picture.doing(words)
        if words == ANSWERING:
            self._end_view()

    def start(self, run: dict[str, Any]) -> None:
        """Nothing: it is shown since its beginning."""

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""
        self._picture.step(record)
        steps_log.info(
            "step %d/%d loss %.4f lr %.3g grad_norm %.4g tokens/s %.0f left %s",
            record["step"],
            self._total,
            record["loss"],
            record["lr"],
            record["grad_norm"],
            record["tokens_per_s"],
            show_time(self._picture.left_s() or 0.0),
        )

    def evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation is done."""
        self._picture.evaluation(record)

    def rewind(self, step: int) -> None:
        """Steps after this one will be taken again."""
        self._picture.rewind(step)

    def finish(self, error: str | None) -> None:
        """Nothing: whoever ends the run says why."""

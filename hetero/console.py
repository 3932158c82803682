"""What a person sees while a run goes on: a progress line in a terminal, one clean line a step elsewhere."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

import rich
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)
steps_log = logging.getLogger("hetero.steps")


class ConsoleHandler(logging.Handler):
    """Prints log records above a live progress line, each on one line however long it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record; steps only where no progress line shows them."""
        console = rich.get_console()
        if record.name == steps_log.name and console.is_terminal:
            return
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {record.getMessage() if record.exc_info is None else text}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


class StepProgress:
    """Shows the steps of a run.

    Args:
        total_steps: of the run.
    """

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(),
            console=rich.get_console(),
            disable=not rich.get_console().is_terminal,
        )
        self._task = self._progress.add_task("training", total=total_steps, metrics="")

    def __enter__(self) -> StepProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""
        steps_log.info(
            "step %d/%d loss %.4f lr %.3g grad_norm %.4g tokens/s %.0f",
            record["step"],
            self._total,
            record["loss"],
            record["lr"],
            record["grad_norm"],
            record["tokens_per_s"],
        )
        metrics = f"loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s"
        self._progress.update(self._task, completed=record["step"], metrics=metrics)

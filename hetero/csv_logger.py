"""Metrics as tables for a spreadsheet: a row for each step in `metrics.csv`, for each evaluation in `eval.csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hetero.log_file import LogFile
from hetero.loggers import flat_evaluation, flat_step


class CsvLogger:
    """Tables with a column for each number; a column that comes later, as of a changed plan, is empty before.

    Args:
        run_dir: the run's folder.
        file_name: of the table of steps in it.
    """

    def __init__(self, run_dir: Path, file_name: str = "metrics.csv") -> None:
        self._steps = _Table(run_dir / file_name)
        self._evaluations = _Table(run_dir / "eval.csv")

    def start(self, run: dict[str, Any]) -> None:
        """Nothing: the columns come with the first row."""

    def step(self, record: dict[str, Any]) -> None:
        """Writes a row."""
        self._steps.add(flat_step(record))

    def evaluation(self, record: dict[str, Any]) -> None:
        """Writes a row of the other table."""
        self._evaluations.add(flat_evaluation(record))

    def rewind(self, step: int) -> None:
        """Takes the rows of later steps out."""
        self._steps.cut(step)
        self._evaluations.cut(step)

    def finish(self, error: str | None) -> None:
        """Closes the files."""
        self._steps.close()
        self._evaluations.close()


class _Table:
    """A CSV file whose first column is the step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._file: LogFile | None = None

    def add(self, row: dict[str, float]) -> None:
        if self._file is None or not row.keys() <= {*self._columns}:
            self._file = self._widened([column for column in row if column not in self._columns])
        self._file.write(_line(row.get(column, "") for column in self._columns))

    def _widened(self, more: list[str]) -> LogFile:
        """The file anew, with more columns."""
        rows = csv.reader(self._file.lines()[1:]) if self._file is not None else ()
        self._columns += more
        file = LogFile(self._path)
        file.write(_line(self._columns))
        for row in rows:
            file.write(_line([*row, *[""] * len(more)]))
        return file

    def cut(self, step: int) -> None:
        if self._file is not None:
            self._file.cut(lambda line: line.startswith("step,") or int(line.partition(",")[0]) <= step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()

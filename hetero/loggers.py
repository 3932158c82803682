"""Where metrics go; a logger is a class with the methods below, written to by the coordinator alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from hetero.log_file import LogFile

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "eval.jsonl"


class RunLogger(Protocol):
    """What the coordinator calls; the constructor takes `run_dir` and the group's flat arguments.

    A class of one's own may leave out `rewind` and `evaluation`.
    """

    def start(self, run: dict[str, Any]) -> None:
        """The run begins; `run` is what run.json holds."""

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""

    def evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation is done: `step`, `eval_loss`, `perplexity` (null: not finite) and `tokens`."""

    def rewind(self, step: int) -> None:
        """Steps after this one will be taken again, after a fault, and their evaluations."""

    def finish(self, error: str | None) -> None:
        """The run is over; `error` says why where it did not come to its end."""


class JsonlLogger:
    """One JSON object for each step in `metrics.jsonl`, and for each evaluation in `eval.jsonl`, written at once.

    Args:
        run_dir: the run's folder.
        file_name: of the file of steps in it.
    """

    def __init__(self, run_dir: Path, file_name: str = METRICS_FILE) -> None:
        self.path = run_dir / file_name
        self._steps: LogFile | None = None
        self._evaluations: LogFile | None = None

    def start(self, run: dict[str, Any]) -> None:
        """Makes the file."""
        del run
        self._steps = LogFile(self.path)

    def step(self, record: dict[str, Any]) -> None:
        """Writes a line."""
        assert self._steps is not None
        self._steps.write(json.dumps(record, allow_nan=False))

    def evaluation(self, record: dict[str, Any]) -> None:
        """Writes a line of the other file, which is made with the first."""
        name = EVALUATIONS_FILE if self.path.name == METRICS_FILE else f"eval-{self.path.name}"
        self._evaluations = self._evaluations or LogFile(self.path.with_name(name))
        self._evaluations.write(json.dumps(record, allow_nan=False))

    def rewind(self, step: int) -> None:
        """Takes the lines of later steps out."""
        for file in (self._steps, self._evaluations):
            if file is not None:
                file.cut(lambda line: int(json.loads(line)["step"]) <= step)

    def finish(self, error: str | None) -> None:
        """Closes the files."""
        del error
        for file in (self._steps, self._evaluations):
            if file is not None:
                file.close()


def flat_step(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a step under one level of names, those of a stage as `stage/ID/NAME`; its rows are left out."""
    flat = {key: value for key, value in record.items() if isinstance(value, int | float)}
    for stage in record["stages"]:
        flat |= {f"stage/{stage['id']}/{key}": value for key, value in stage.items() if key != "id"}
    return flat


def flat_evaluation(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation, as `eval/NAME`, but its step; what is null is left out."""
    named = {key: f"eval/{key.removeprefix('eval_')}" for key in record if key != "step" and record[key] is not None}
    return {"step": record["step"]} | {name: record[key] for key, name in named.items()}

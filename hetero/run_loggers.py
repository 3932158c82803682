"""The loggers of a run: what the configuration asks for, beside `metrics.jsonl`, which every run has."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero import registry
from hetero.errors import ConfigError, HeteroError
from hetero.folders import one_line
from hetero.loggers import METRICS_FILE, JsonlLogger, RunLogger
from hetero.spec import Config

log = logging.getLogger(__name__)


class Guarded:
    """A logger whose failure costs a warning and what it would have got, not the run.

    Args:
        logger: it; one without `rewind` or `evaluation` is not told of those.
        name: in the configuration.
    """

    def __init__(self, logger: Any, name: str) -> None:
        self._logger, self._name = logger, name
        self._failed = False

    def start(self, run: dict[str, Any]) -> None:
        """The run begins.

        Raises:
            ConfigError: the logger cannot start, and there is nothing to lose yet.
        """
        try:
            self._logger.start(run)
        except HeteroError:
            raise
        except Exception as exc:
            raise ConfigError(f"logger.{self._name} cannot start: {one_line(exc)}") from exc

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""
        self._tell("step", record)

    def evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation is done."""
        self._tell("evaluation", record)

    def rewind(self, step: int) -> None:
        """Steps after this one will be taken again."""
        self._tell("rewind", step)

    def finish(self, error: str | None) -> None:
        """The run is over; one that has failed before may close what it can."""
        failed_before = self._failed
        self._failed = False
        try:
            self._logger.finish(error)
        except Exception as exc:
            if not failed_before:
                log.warning("logger.%s could not be closed: %s", self._name, one_line(exc))

    def _tell(self, what: str, value: Any) -> None:
        method = getattr(self._logger, what, None)
        if self._failed or method is None:
            return
        try:
            method(value)
        except Exception as exc:
            self._failed = True
            log.warning(
                "logger.%s failed and gets nothing more of this run, which goes on (%s has all): %s",
                self._name,
                METRICS_FILE,
                one_line(exc),
            )


@dataclass
class Ending:
    """How a run ended, for its loggers.

    Attributes:
        stopped: who asked for its end before its last step.
    """

    stopped: str | None = None


def loggers_of(config: Config, run_dir: Path) -> list[RunLogger]:
    """The loggers of a run, not started; the one of `metrics.jsonl` is always among them, and the first.

    Raises:
        ConfigError: one cannot be made of its arguments, or not here.
    """
    own: RunLogger = JsonlLogger(run_dir)
    others: list[RunLogger] = []
    for name, raw in (config.logger or {}).items():
        args = {key: value for key, value in raw.items() if key != "_target_"}
        made = registry.make("logger", raw["_target_"], config.allow_targets, run_dir=run_dir, **args)
        if isinstance(made, JsonlLogger) and made.path == run_dir / METRICS_FILE:
            continue
        others.append(Guarded(made, name))
    return [own, *others]


@contextlib.contextmanager
def logging_to(loggers: Sequence[RunLogger], run: dict[str, Any], before: Sequence[dict[str, Any]]) -> Iterator[Ending]:
    """Starts the loggers with the steps before, and finishes them with what ended the run, if it was not its last step.

    Args:
        loggers: of the run.
        run: what run.json holds.
        before: records of the steps that a resumed run begins after, and of their evaluations.
    """
    started: list[RunLogger] = []
    ending = Ending()
    error: str | None = "interrupted"
    try:
        for logger in loggers:
            logger.start(run)
            started.append(logger)
            for record in sorted(before, key=_place):
                (logger.evaluation if _is_evaluation(record) else logger.step)(record)
        yield ending
        error = None if ending.stopped is None else f"stopped before its last step ({ending.stopped})"
    except Exception as exc:
        error = one_line(exc)
        raise
    finally:
        for logger in started:
            logger.finish(error)


def _is_evaluation(record: dict[str, Any]) -> bool:
    return "eval_loss" in record


def _place(record: dict[str, Any]) -> tuple[int, bool]:
    """A step's evaluation comes after the step."""
    return record["step"], _is_evaluation(record)

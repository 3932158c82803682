"""Where metrics go; a logger is a class that does what `RunLogger` says, written to by the coordinator alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from hetero import folders
from hetero.errors import ConfigError

EVALUATIONS = "eval.jsonl"  # in a run's folder


class RunLogger(Protocol):
    """What the coordinator calls; the constructor takes `run_dir` and the group's flat arguments."""

    def start(self, run: dict[str, Any]) -> None:
        """The run begins; `run` is what run.json holds."""

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""

    def evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation is done: `step`, `eval_loss`, `perplexity` (null: not finite) and `tokens`."""

    def rewind(self, step: int) -> None:
        """Steps after this one will be taken again, after a fault, and their evaluations."""

    def finish(self, error: str | None) -> None:
        """The run is over; `error` says why where it failed."""


class JsonlLogger:
    """One JSON object for each step in `metrics.jsonl` and for each evaluation in `eval.jsonl`, written at once.

    Args:
        run_dir: the run's folder.
        file_name: of the steps' file in it.
    """

    def __init__(self, run_dir: Path, file_name: str = "metrics.jsonl") -> None:
        self._path, self._eval_path = run_dir / file_name, run_dir / EVALUATIONS
        self._file: IO[str] | None = None

    def start(self, run: dict[str, Any]) -> None:
        """Makes the file."""
        del run
        self._file = self._path.open("w", encoding="utf-8")

    def step(self, record: dict[str, Any]) -> None:
        """Writes a line."""
        assert self._file is not None
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def evaluation(self, record: dict[str, Any]) -> None:
        """Writes a line; the first one makes the file."""
        with self._eval_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def rewind(self, step: int) -> None:
        """Takes the lines of later steps out."""
        assert self._file is not None
        self._file.close()
        for path in (self._path, self._eval_path):
            if path.exists():
                _keep_lines_up_to(path, step)
        self._file = self._path.open("a", encoding="utf-8")

    def finish(self, error: str | None) -> None:
        """Closes the file."""
        del error
        if self._file is not None:
            self._file.close()


def _keep_lines_up_to(path: Path, step: int) -> None:
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= step]
    folders.write_text(path, "".join(line + "\n" for line in kept))


class WandbLogger:
    """One Weights & Biases run for each run; offline unless told otherwise, so it needs no key and asks nothing.

    Args:
        run_dir: the run's folder, which gets `wandb/`.
        project: name of the project.
        mode: `offline` (upload later with `wandb sync`) or `online`.
        group: runs of one sweep; None leaves it out.

    Raises:
        ConfigError: the package is not there, or mode is online and there is no key that the server takes.
    """

    def __init__(self, run_dir: Path, project: str = "hetero", mode: str = "offline", group: str | None = None) -> None:
        if mode not in ("offline", "online"):
            raise ConfigError(f"logger.wandb.mode must be offline or online, got {mode!r}")
        try:
            import wandb
        except ImportError as exc:
            raise ConfigError(
                f"logger=wandb needs the package wandb, which cannot be imported here: pip install wandb ({exc})"
            ) from None
        self._wandb: Any = wandb
        self._settings = {"project": project, "mode": mode, "group": group, "dir": str(run_dir)}
        self._run: Any = None
        if mode == "online":
            with self._refusals_in_one_line():
                if not wandb.login(prompt=False):
                    raise wandb.errors.UsageError("no API key is configured")

    def start(self, run: dict[str, Any]) -> None:
        """Opens the run.

        Raises:
            ConfigError: mode is online and the server takes no run.
        """
        wandb = self._wandb
        with self._refusals_in_one_line():
            self._run = wandb.init(
                **self._settings,
                name=run.get("run_name"),
                config=run["config"],
                reinit="finish_previous",
                settings=wandb.Settings(console="off", x_disable_stats=True, silent=True),
            )

    def step(self, record: dict[str, Any]) -> None:
        """Logs the numbers of a step, stages by id."""
        flat = {key: value for key, value in record.items() if isinstance(value, int | float)}
        for stage in record["stages"]:
            flat |= {f"stage/{stage['id']}/{key}": value for key, value in stage.items() if key != "id"}
        self._run.log(flat, step=record["step"])

    def evaluation(self, record: dict[str, Any]) -> None:
        """Logs the numbers of an evaluation."""
        self._run.log({key: value for key, value in record.items() if value is not None}, step=record["step"])

    def rewind(self, step: int) -> None:
        """Nothing: the steps that are taken again have the same numbers, and those that are there already stay."""

    def finish(self, error: str | None) -> None:
        """Closes the run, as failed where there was an error."""
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)

    @contextmanager
    def _refusals_in_one_line(self) -> Iterator[None]:
        errors = self._wandb.errors
        try:
            yield
        except (errors.UsageError, errors.CommError) as exc:
            raise ConfigError(
                f"logger.wandb.mode=online needs a key (wandb login), or use offline: {str(exc).splitlines()[0]}"
            ) from exc

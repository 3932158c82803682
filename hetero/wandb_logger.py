"""Metrics for Weights & Biases: offline unless told otherwise, so that it needs no key and asks nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hetero import packages
from hetero.errors import ConfigError
from hetero.hiding import without_secrets
from hetero.loggers import flat_evaluation, flat_step

MODES = ("offline", "online")
ANSWER_S = 8  # that the server has at the start; a run that cannot be logged as wanted should not be kept waiting
UPLOAD_S = 60.0  # for what is left at the end; `wandb sync` uploads what did not make it


class WandbLogger:
    """One Weights & Biases run for each run, with the id of run.json.

    Numbers have the step as their own axis, so none is lost where steps are taken again: those rows say `rewinds`.
    A run that goes on with another one's checkpoint is a run of its own here as well: it holds the steps before too,
    and its configuration names that run (`run.resumed`).

    Args:
        run_dir: the run's folder, which gets `wandb/`.
        project: name of the project.
        mode: `offline` (upload later with `wandb sync`) or `online`.
        group: runs of one sweep; None leaves it out.

    Raises:
        ConfigError: the package is not there, or mode is online and there is no key that the server takes.
    """

    def __init__(self, run_dir: Path, project: str = "hetero", mode: str = "offline", group: str | None = None) -> None:
        if mode not in MODES:
            raise ConfigError(f"logger.wandb.mode must be offline or online, got {mode!r}")
        wandb: Any = packages.need("wandb", "logger=wandb")
        self._wandb = wandb
        self._run_dir = run_dir
        self._settings = {"project": project, "mode": mode, "group": group, "dir": str(run_dir)}
        self._run: Any = None
        self._rewinds = 0
        if mode == "online":
            with self._refusals_in_one_line():
                if not wandb.login(prompt=False, timeout=ANSWER_S):
                    raise wandb.errors.UsageError("no API key is configured")

    def start(self, run: dict[str, Any]) -> None:
        """Opens the run.

        Raises:
            ConfigError: mode is online and the server takes no run.
        """
        wandb = self._wandb
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, init_timeout=ANSWER_S, finish_timeout=UPLOAD_S
        )
        with self._refusals_in_one_line():
            self._run = wandb.init(
                **self._settings,
                id=run["run_id"],
                name=run["run_name"] or f"{self._run_dir.parent.name}/{self._run_dir.name}",
                config=config_of(run, self._run_dir),
                reinit="finish_previous",  # of a job before in the same process
                settings=settings,
            )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def step(self, record: dict[str, Any]) -> None:
        """Logs the numbers of a step, those of a stage as `stage/ID/NAME`."""
        again = {"rewinds": self._rewinds} if self._rewinds else {}
        self._run.log(flat_step(record) | again)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Logs the numbers of an evaluation, as `eval/NAME`."""
        self._run.log(flat_evaluation(record))

    def rewind(self, step: int) -> None:
        """Counts: what is there stays, and the steps that are taken again are told apart."""
        self._rewinds += 1

    def finish(self, error: str | None) -> None:
        """Closes the run, as failed where it did not come to its end."""
        if self._run is None:
            return
        try:
            if error is not None:
                self._run.summary["error"] = error
            self._run.finish(exit_code=0 if error is None else 1)
        except Exception:
            # Its process is gone: a run that this process may still start gets a new one.
            with suppress(Exception):
                self._wandb.teardown(exit_code=1)
            raise

    @contextmanager
    def _refusals_in_one_line(self) -> Iterator[None]:
        errors = self._wandb.errors
        try:
            yield
        except (errors.UsageError, errors.CommError) as exc:  # AuthenticationError is one of the latter
            raise ConfigError(
                f"logger.wandb.mode=online needs a key (wandb login), or use offline: {str(exc).splitlines()[0]}"
            ) from exc


def config_of(run: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """What Weights & Biases shows as the configuration: plain values, what was overridden, and what came of it."""
    about = {key: run[key] for key in ("run_id", "digest", "versions")}
    about |= {"run_dir": str(run_dir), "stages": run["spec"]["stages"], "total_steps": run["spec"]["total_steps"]}
    if run["resumed"] is not None:
        about["resumed"] = run["resumed"] | {"run_id": _run_id_beside(Path(run["resumed"]["checkpoints"]))}
    config: dict[str, Any] = without_secrets(run["config"] | {"overrides": _overrides(run_dir), "run": about})
    return config


def _run_id_beside(checkpoints: Path) -> str | None:
    """Of the run in whose folder they are; None where they are in a folder of their own."""
    try:
        return str(json.loads((checkpoints.parent / "run.json").read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError):
        return None


def _overrides(run_dir: Path) -> list[str]:
    """What was said on the command line, as hydra wrote it down; nothing where it was told to write none."""
    import yaml

    file = run_dir / ".hydra" / "overrides.yaml"
    return [str(line) for line in yaml.safe_load(file.read_text(encoding="utf-8"))] if file.is_file() else []

"""Metrics for TensorBoard: `tensorboard --logdir outputs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetero import packages
from hetero.hiding import without_secrets
from hetero.loggers import flat_evaluation, flat_step

FLUSH_S = 10  # a person who looks on sees no older numbers, and a killed run has lost no more


class TensorBoardLogger:
    """Event files in the run's folder `tensorboard/`: scalars by step, and the configuration as text.

    Steps that are taken again after a fault replace those before, since TensorBoard is told to forget them.

    Args:
        run_dir: the run's folder.

    Raises:
        ConfigError: the package is not there.
    """

    def __init__(self, run_dir: Path) -> None:
        packages.need("tensorboard", "logger=tensorboard")
        self._folder = run_dir / "tensorboard"
        self._writer: Any = None

    def start(self, run: dict[str, Any]) -> None:
        """Opens the files, and writes down what the run is."""
        self._open(None)
        text = json.dumps(without_secrets(run), indent=1, ensure_ascii=False)
        self._writer.add_text("run", "\n".join("    " + line for line in text.splitlines()))  # Markdown: as it is

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=FLUSH_S)

    def step(self, record: dict[str, Any]) -> None:
        """Adds the numbers of a step, those that say how it learns under `train/`."""
        for name, value in flat_step(record).items():
            if name != "step":
                self._writer.add_scalar(name if "/" in name else f"train/{name}", value, record["step"])

    def evaluation(self, record: dict[str, Any]) -> None:
        """Adds the numbers of an evaluation."""
        for name, value in flat_evaluation(record).items():
            if name != "step":
                self._writer.add_scalar(name, value, record["step"])

    def rewind(self, step: int) -> None:
        """Goes on in another file, which says that later steps are void."""
        self._writer.close()
        self._open(step + 1)

    def finish(self, error: str | None) -> None:
        """Writes why the run failed, where it did, and closes the files."""
        if self._writer is not None:
            if error is not None:
                self._writer.add_text("error", error)
            self._writer.close()

"""What a run has given so far, and in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero import best
from hetero.best import Best
from hetero.generate import Sample
from hetero.spec import RunSpec
from hetero.timeline import Timeline


@dataclass
class RunResult:
    """What a run gave.

    Attributes:
        spec: of the run.
        records: one for each step, as in metrics.jsonl.
        adapter_dir: the adapter of the whole model.
        stages: device and dtype of each stage.
        stopped: who asked for its end before its last step; None where nobody did.
        task: what it was to do.
        evaluations: one for each evaluation, as in eval.jsonl.
        best: the step that checkpoint.keep_best has kept, whose adapter is in `best_dir`.
        last_timeline: makes that of the last step; None before there is one.
        samples: answers to the run's prompts.
        samples_path: where they are kept; None before there are any.
    """

    spec: RunSpec
    adapter_dir: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    stages: list[tuple[str, str]] = field(default_factory=list)
    stopped: str | None = None
    task: str = "train"
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    best: Best | None = None
    last_timeline: Callable[[], Timeline] | None = None
    samples: list[Sample] = field(default_factory=list)
    samples_path: Path | None = None

    @property
    def timeline(self) -> Timeline | None:
        """Of the last step; None where there is none yet."""
        return None if self.last_timeline is None else self.last_timeline()

    @property
    def best_dir(self) -> Path:
        """Where the adapter of the best step is."""
        return self.adapter_dir.with_name(best.FOLDER)

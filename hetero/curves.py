"""The curves of a run, which grow step by step and stay small, and the figures that stand beside them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

from hetero.series import Series

_STEP = ("loss", "router_loss", "lr", "grad_norm", "tokens_per_s", "step_time_s")
RECENT = 20  # steps whose median and mean are shown


class StageCurves:
    """A stage's: its shares of each step's time, and what it held and sent."""

    def __init__(self) -> None:
        self.busy, self.wait = Series(), Series()
        self.busy_s = self.wait_s = self.elapsed_s = 0.0
        self.bytes_sent = self.memory_bytes = self.steps = 0

    def add(self, step: int, elapsed_s: float, stage: dict[str, Any]) -> None:
        """The next step."""
        if elapsed_s > 0:
            self.busy.add(step, stage["busy_s"] / elapsed_s)
            self.wait.add(step, stage["wait_s"] / elapsed_s)
        self.busy_s += stage["busy_s"]
        self.wait_s += stage["wait_s"]
        self.elapsed_s += elapsed_s
        self.bytes_sent += stage["bytes_sent"]
        self.memory_bytes = max(self.memory_bytes, stage["memory_bytes"])
        self.steps += 1

    @property
    def busy_share(self) -> float:
        """Of the time of all steps."""
        return self.busy_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def wait_share(self) -> float:
        """Of the time of all steps."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0


class Curves:
    """All curves of a run.

    Attributes:
        of_step: key of a record -> curve.
        stages: (index, id) -> its curves, in the order of their first step.
    """

    def __init__(self, records: Iterable[dict[str, Any]] = (), evaluations: Iterable[dict[str, Any]] = ()) -> None:
        self.of_step: dict[str, Series] = {key: Series() for key in _STEP}
        self.evaluations: list[dict[str, Any]] = []
        self.stages: dict[tuple[int, str], StageCurves] = {}
        self.steps, self.tokens, self.elapsed_s = 0, 0, 0.0
        self.last: dict[str, Any] | None = None
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._times: deque[float] = deque(maxlen=10 * RECENT)  # of steps after the first, which warms up
        for record in records:
            self.add(record)
        for record in evaluations:
            self.evaluation(record)

    def add(self, record: dict[str, Any]) -> None:
        """The next step's record, as metrics.jsonl holds it."""
        step, elapsed = int(record["step"]), float(record["step_time_s"])
        for key, series in self.of_step.items():
            value = record.get(key)
            if value is not None:
                series.add(step, float(value))
        for index, stage in enumerate(record["stages"]):
            self.stages.setdefault((index, str(stage["id"])), StageCurves()).add(step, elapsed, stage)
        self._losses.append(float(record["loss"]))
        if self.steps or step > 1:
            self._times.append(elapsed)
        self.steps += 1
        self.tokens += int(record["tokens"])
        self.elapsed_s += elapsed
        self.last = record

    def evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation's record, as eval.jsonl holds it."""
        if record.get("eval_loss") is not None:
            self.evaluations.append(record)

    @property
    def recent_loss(self) -> float | None:
        """Mean of the last steps."""
        return statistics.fmean(self._losses) if self._losses else None

    @property
    def step_time_s(self) -> float | None:
        """Median of the last steps without the run's first."""
        times = self._times or ([self.last["step_time_s"]] if self.last else [])
        return statistics.median(times) if times else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of all steps together."""
        return self.tokens / self.elapsed_s if self.elapsed_s else None

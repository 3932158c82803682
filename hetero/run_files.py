"""What a run left in its folder, read back for its report and its sweep's."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.folders import read_object

RUN, METRICS, EVALUATIONS, STATUS, JOB, REPORT = (
    "run.json",
    "metrics.jsonl",
    "eval.jsonl",
    "status.json",
    "job.json",
    "report.html",
)


@dataclass
class Status:
    """How far a run is, or how it ended, as `status.json` holds it.

    Attributes:
        state: running, finished, stopped, interrupted or failed; unknown where the file is not there.
        reason: why it failed, or who stopped it.
        total_steps: of the whole run.
        devices: device and dtype of each stage, once all are built.
        stages: of the plan that it ended with; empty: that of run.json.
        memory_bytes: of each stage's device, None where it is not known.
        rewinds: steps from which and to which it went back after faults.
        seconds: from its start to its end, or to when this was written.
    """

    state: str = "unknown"
    reason: str | None = None
    total_steps: int = 0
    devices: list[list[str]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    memory_bytes: list[int | None] = field(default_factory=list)
    rewinds: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class RunFiles:
    """A run's folder: run.json, records by step (each step once), evaluations, and how it ended."""

    folder: Path
    about: dict[str, Any]
    records: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    status: Status


def read_run(folder: Path) -> RunFiles:
    """Reads a run's folder.

    Raises:
        ConfigError: it holds no readable run.json, or a file in it is not what it should be.
    """
    about = read_object(folder / RUN)
    status = Status()
    if (folder / STATUS).is_file():
        known = read_object(folder / STATUS)
        status = Status(**{key: value for key, value in known.items() if key in Status.__dataclass_fields__})
    return RunFiles(folder, about, read_lines(folder / METRICS), read_lines(folder / EVALUATIONS), status)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines by step, each step's last one; none where there is no such file.

    A last line that a killed process left half written is no record.
    """
    if not file.is_file():
        return []
    found: dict[int, dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            found[int(record["step"])] = record
    return [found[step] for step in sorted(found)]


def write_atomically(file: Path, content: str) -> None:
    """Replaces a file as a whole; what a full disk cuts off is never seen, and at most one draft stays.

    Raises:
        OSError: it cannot be written.
    """
    draft = file.with_name(f".{file.name}.new")
    try:
        draft.write_text(content, encoding="utf-8", errors="backslashreplace")
        os.replace(draft, file)
    except OSError:
        draft.unlink(missing_ok=True)
        raise

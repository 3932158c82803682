"""The names of checkpoints' folders, what they say of a step, and whose a step is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import CheckpointError
from hetero.folders import one_line
from hetero.snapshot import MANIFEST_FILE, read_manifest

FOLDER = "checkpoints"  # in a run's folder
RUN_ID, BEFORE = (
    "run_id",
    "runs_before",
)  # in what the caller records of a snapshot: its run, and those in the folder before
_STEP_NAME = re.compile(r"(step-([0-9]{8,}))(\.tmp|\.old)?")


@dataclass(frozen=True)
class Owner:
    """The run that a folder of checkpoints belongs to.

    A step whose manifest cannot be read is nobody's, and its own.

    Args:
        run_id: of the run.
        before: ids of the runs in the same folder that it goes on from: what they left grows old.
    """

    run_id: str
    before: tuple[Any, ...] = ()

    @classmethod
    def after(cls, run_id: str, about: dict[str, Any]) -> Owner:
        """A run that goes on, in the same folder, from a snapshot of which this was recorded."""
        return cls(run_id, (about.get(RUN_ID), *about.get(BEFORE, ())))

    def is_foreign(self, step: int, path: Path) -> bool:
        """Whether a step was saved by a run that this one has nothing to do with."""
        return self._writer(step, path) not in (self.run_id, *self.before)

    def is_before(self, step: int, path: Path) -> bool:
        """Whether a step was saved by a run that this one goes on from."""
        return self._writer(step, path) in self.before

    def _writer(self, step: int, path: Path) -> Any:
        try:
            return read_manifest(path / MANIFEST_FILE, step).about.get(RUN_ID)
        except (CheckpointError, OSError):
            return self.run_id


def run_shown(folder: Path) -> Path:
    """How people know a folder of checkpoints: the run's folder that it lies in, or itself where it is one's own."""
    return folder.parent if folder.name == FOLDER else folder


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> tuple[int, str] | None:
    """Step and suffix (`""`, `.tmp` or `.old`) that a name says; None where it is no step's."""
    match = _STEP_NAME.fullmatch(name)
    return (int(match[2]), match[3] or "") if match and match[1] == step_name(int(match[2])) else None


def names_in(folder: Path) -> list[tuple[int, str]]:
    """Step and suffix of everything in a folder that has a step's name; none where the folder is not there.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise CheckpointError(file_and_reason(exc, folder)) from exc
    return [found for name in names if (found := step_of(name))]


def committed_in(folder: Path) -> list[tuple[int, Path]]:
    """Step and folder of everything that was committed once, newest first, complete or not; raises as `names_in`."""
    names = set(names_in(folder))
    found = {step: suffix for step, suffix in names if suffix == "" or (suffix == ".old" and (step, "") not in names)}
    return [(step, folder / f"{step_name(step)}{found[step]}") for step in sorted(found, reverse=True)]


def file_and_reason(exc: Exception, default: Path) -> str:
    """`file: reason` of an error of the disk."""
    if not isinstance(exc, OSError):
        return one_line(exc)
    return f"{exc.filename or default}: {exc.strerror or one_line(exc)}"

"""Which checkpoint a run goes on from: the one that was asked for, or the newest that is whole."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.errors import CheckpointError, ConfigError
from hetero.folder_lock import holder_of
from hetero.folders import one_line
from hetero.step_folders import FOLDER, run_shown, step_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What `checkpoint.resume` means.

    Attributes:
        folder: of checkpoints.
        step: in it; None: the newest that is whole.
        given: as it was asked for.
        other_dir: a start at step 0 needs another `checkpoint.dir`.
    """

    folder: Path
    step: int | None
    given: int | str
    other_dir: bool = False


def find_checkpoints(resume: int | str, folder: str | None, outputs: Path) -> Choice:
    """Finds the checkpoints that `checkpoint.resume` means.

    Args:
        resume: `latest`, a step, a run's folder or that of a step.
        folder: `checkpoint.dir`, where `latest` and a step are looked for; else the newest run under `outputs`.
        outputs: where runs have their folders.

    Raises:
        ConfigError: there is none.
    """
    step = resume if isinstance(resume, int) else None
    if isinstance(resume, str) and resume != "latest":
        return _named(Path(resume).expanduser(), resume)
    if folder is None:
        return Choice(_newest_run(outputs, resume), step, resume)
    own = Path(folder).expanduser()
    if not _steps(own, f"checkpoint.dir={folder}"):
        raise ConfigError(
            f"checkpoint.resume={resume} found no checkpoint in checkpoint.dir, {own.absolute()}; leave "
            "checkpoint.resume out to start at step 0"
        )
    return Choice(own, step, resume, other_dir=True)


def read_checkpoint(choice: Choice) -> Snapshot:
    """Reads it: the step that was asked for, else the newest that is whole, saying what was skipped.

    Raises:
        ConfigError: the step is not there or not whole, or none is.
    """
    store = CheckpointStore(choice.folder)
    try:
        if choice.step is not None:
            return _one_step(store, choice, choice.step)
        snapshot, skipped = store.newest()
    except CheckpointError as exc:
        raise ConfigError(f"checkpoint.resume={choice.given} cannot be read: {exc}") from None
    for line in skipped:
        log.warning("checkpoint skipped: %s", line)
    if snapshot is None:
        raise ConfigError(
            f"checkpoint.resume={choice.given} found no whole checkpoint in {choice.folder.absolute()}; leave it out "
            f"{'and name another checkpoint.dir ' * choice.other_dir}to start at step 0"
        )
    return snapshot


def _one_step(store: CheckpointStore, choice: Choice, step: int) -> Snapshot:
    try:
        return store.load(step)
    except CheckpointError as exc:
        there = ", ".join(map(str, store.steps())) or "none"
        raise ConfigError(
            f"checkpoint.resume={choice.given} cannot be taken: {exc} (steps there: {there}); "
            "checkpoint.resume=latest takes the newest that is whole"
        ) from None


def _named(given: Path, resume: str) -> Choice:
    """A run's folder, its checkpoints', or that of one step."""
    key = f"checkpoint.resume={resume}"
    try:
        is_folder, is_there = given.is_dir(), given.exists()
    except OSError as exc:  # a name that is too long
        raise ConfigError(f"{key} cannot be read: {exc.strerror or one_line(exc)}") from None
    if is_folder:
        for found in (given / FOLDER, given):
            if _steps(found, key):
                return _told(Choice(found, None, resume))
        if (step := step_of(given.absolute().name)) is not None and step[1] != ".tmp":
            return _told(Choice(given.absolute().parent, step[0], resume))
    what = "it is a file" if is_there and not is_folder else f"found no checkpoint in {given.absolute()}"
    if is_folder and given.name.endswith(".tmp"):
        what = "it is a save that was interrupted before it was complete"
    raise ConfigError(
        f"checkpoint.resume must be latest, a step number, a run's folder with {FOLDER}/ in it, or a step's folder in "
        f"that, got {resume}: {what}"
    )


def _told(choice: Choice) -> Choice:
    """Says of a run that was asked for by name that it has not ended."""
    if holder := holder_of(choice.folder):
        log.warning("%s is still being written (%s): what it has saved by now is taken", choice.folder, holder)
    return choice


def _newest_run(outputs: Path, resume: int | str) -> Path:
    """The run that saved last, of those that do not go on any more."""
    saved: dict[Path, int] = {}
    for file in outputs.glob(f"**/{FOLDER}/step-*/manifest.json"):
        folder = file.parent.parent
        saved[folder] = max(saved.get(folder, 0), file.stat().st_mtime_ns)
    running: list[str] = []
    for folder in sorted(saved, key=lambda folder: (saved[folder], folder), reverse=True):
        if not CheckpointStore(folder).steps():  # only one that was never committed
            continue
        holder = holder_of(folder)
        if holder is None:
            for line in running:
                log.warning("not the latest, since it still goes on: %s", line)
            return folder
        running.append(f"{run_shown(folder)} ({holder})")
    if running:
        raise ConfigError(
            f"checkpoint.resume={resume} found no run that has ended under {outputs.absolute()}, but one that still "
            f"goes on: {running[0]}; end it first, or name its folder to go on beside it"
        )
    raise ConfigError(
        f"checkpoint.resume={resume} found no run with a checkpoint under {outputs.absolute()}; leave it out to "
        "start at step 0"
    )


def _steps(folder: Path, key: str) -> list[int]:
    try:
        return CheckpointStore(folder).steps()
    except CheckpointError as exc:
        raise ConfigError(f"{key} must be a folder that can be read: {exc}") from None

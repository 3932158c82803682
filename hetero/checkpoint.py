"""Checkpoints: a folder for each step, which comes into being by one rename and is checked before it is used.

    checkpoints/
        step-00000012/              complete: the rename from step-00000012.tmp was the commit
            layer-00003.safetensors     adapter and optimizer state of a layer, the same on every split
            other.safetensors           what belongs to no layer
            manifest.json               size and SHA-256 of each file, every tensor's name, what the caller records
        step-00000013.tmp/          a save that is going on, or was interrupted
        step-00000012.old/          only while step 12 is replaced; stands in for it where it is not there

Power cuts: every file is on the disk before the rename, the rename before anything old is removed (what goes wrong
otherwise: "All File Systems Are Not Created Equal", OSDI 2014). One process writes; others may read. A run that owns
its store neither goes back to, nor replaces, nor deletes what another run has saved.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from hetero.disk import Disk
from hetero.errors import CheckpointError, ConfigError
from hetero.failpoints import hit
from hetero.snapshot import MANIFEST_FILE, Part, Snapshot, manifest_of, part_files, read_snapshot
from hetero.step_folders import RUN_ID, Owner, committed_in, file_and_reason, names_in, step_name

__all__ = ["CheckpointStore", "Owner", "Snapshot"]

MIN_KEEP_LAST = 2

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints in a folder.

    Args:
        folder: made at the first save.
        keep_last: how many steps stay, at least 2.
        disk: where the files go; None: the real one.
        owner: the run whose checkpoints these are, `run_id` in what it records of them; None: whoever's there are.

    Raises:
        ConfigError: `keep_last` is below 2.
    """

    def __init__(
        self, folder: Path, *, keep_last: int = 2, disk: Disk | None = None, owner: Owner | None = None
    ) -> None:
        if keep_last < MIN_KEEP_LAST:
            raise ConfigError(f"checkpoint.keep_last must be at least {MIN_KEEP_LAST}, got {keep_last}")
        self._folder, self._keep_last, self._disk = Path(os.path.abspath(folder)), keep_last, disk or Disk()
        self._owner = owner
        self.kept_step: int | None = None  # stays however old it grows
        self._parent_synced = False
        self._seen_good: set[int] = set()  # written or read by this store, so not read again before others are deleted

    def save(self, snapshot: Snapshot) -> Path:
        """Writes a checkpoint and deletes those beyond `keep_last`; when it returns, a power cut takes nothing away.

        A step that this run has saved already stays where it holds the same tensors, and is replaced where it does not.
        Old steps that cannot be deleted are logged and tried again after the next save.

        Returns:
            The folder of the step.

        Raises:
            CheckpointError: the disk is full or fails, or the step is there and another run's; the checkpoints before
                are as they were.
        """
        assert snapshot.step >= 0
        final = self._folder / step_name(snapshot.step)
        if self._is_foreign(snapshot.step, final):
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} could not be written: {final} is another run's, which stays "
                "as it is; end one of the two and give it a checkpoint.dir of its own"
            )
        try:
            self._make_folder()
            self._settle(snapshot.step)
            if self._holds(snapshot, final):
                self._disk.sync_dir(self._folder)  # a process that was killed may have renamed and not synced
            else:
                self._seen_good.discard(snapshot.step)
                self._commit(self._write_draft(snapshot), final)
        except OSError as exc:
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} could not be written: {file_and_reason(exc, final)}; "
                "the previous checkpoint is untouched"
            ) from exc
        self._seen_good.add(snapshot.step)
        try:
            self._settle()
            self._delete_old(snapshot.step)
        except (OSError, CheckpointError) as exc:
            _log.warning("old checkpoints could not be deleted: %s", file_and_reason(exc, self._folder))
        return final

    def steps(self) -> list[int]:
        """The steps that have a manifest, newest first; nothing in them has been checked."""
        return [
            step
            for step, path in committed_in(self._folder)
            if (path / MANIFEST_FILE).is_file() and not path.is_symlink()
        ]

    def load(self, step: int) -> Snapshot:
        """Reads a checkpoint of which every byte has been checked.

        Raises:
            CheckpointError: there is none, or a file in it is damaged, missing or does not belong there.
        """
        for found, path in committed_in(self._folder):
            if found == step:
                snapshot = read_snapshot(path, step)[0]
                self._seen_good.add(step)
                return snapshot
        raise CheckpointError(f"{self._folder} must hold a checkpoint of step {step}, there is no {step_name(step)}")

    def newest(self) -> tuple[Snapshot | None, list[str]]:
        """The newest checkpoint that loads, and for each newer one a line that says why it was skipped.

        A store with an owner gives those of this run alone, without a word of those before: it knows where it began.

        Raises:
            CheckpointError: the folder itself cannot be read.
        """
        skipped: list[str] = []
        committed = dict(committed_in(self._folder))
        drafts = {step for step, suffix in names_in(self._folder) if suffix == ".tmp"}
        for step in sorted(committed.keys() | drafts, reverse=True):
            if step in committed and self._is_foreign(step, committed[step]):
                skipped.append(f"{committed[step]}: is another run's")
            elif step in committed and not self._is_before(step, committed[step]):
                try:
                    return self.load(step), skipped
                except CheckpointError as exc:
                    skipped.append(str(exc))
            if step in drafts:
                skipped.append(f"{self._folder / step_name(step)}.tmp: a save was interrupted before it was complete")
        return None, skipped

    def clean(self) -> None:
        """Removes what an interrupted save has left: for the start of a run.

        Raises:
            CheckpointError: the disk fails.
        """
        try:
            self._settle()
        except OSError as exc:
            raise CheckpointError(
                f"what an interrupted save left could not be removed: {file_and_reason(exc, self._folder)}"
            ) from exc

    def _is_foreign(self, step: int, path: Path) -> bool:
        return self._owner is not None and self._owner.is_foreign(step, path)

    def _is_before(self, step: int, path: Path) -> bool:
        return self._owner is not None and self._owner.is_before(step, path)

    def _make_folder(self) -> None:
        self._disk.make_dirs(self._folder)
        if not self._parent_synced:
            self._disk.sync_dir(self._folder.parent)
            self._parent_synced = True

    def _settle(self, only: int | None = None) -> None:
        """Takes an interrupted save back, of one step or of all."""
        left = sorted((step, suffix) for step, suffix in names_in(self._folder) if suffix and only in (None, step))
        if not left:
            return
        self._disk.sync_dir(self._folder)  # what follows must not reach the disk before the renames that it goes by
        for step, suffix in left:
            final = self._folder / step_name(step)
            path = final.with_name(final.name + suffix)
            if suffix == ".old" and not os.path.lexists(final):
                self._disk.rename(path, final)
            else:
                self._remove(path)
        self._disk.sync_dir(self._folder)

    def _holds(self, snapshot: Snapshot, final: Path) -> bool:
        """Whether the step is there with the very same tensors, of the same run."""
        if not os.path.lexists(final):
            return False
        try:
            _, manifest = read_snapshot(final, snapshot.step)
        except CheckpointError:
            return False
        if manifest.about.get(RUN_ID) != snapshot.about.get(RUN_ID):
            return False
        return manifest.files == {name: Part.of(data) for name, data in part_files(snapshot.tensors)}

    def _write_draft(self, snapshot: Snapshot) -> Path:
        draft = self._folder / f"{step_name(snapshot.step)}.tmp"
        files: dict[str, Part] = {}
        try:
            self._disk.make_dir(draft)
            hit("checkpoint.begun")
            for name, data in part_files(snapshot.tensors):
                self._disk.write(draft / name, data)
                files[name] = Part.of(data)
            hit("checkpoint.before_manifest")
            self._disk.write(draft / MANIFEST_FILE, manifest_of(snapshot, files).to_bytes())
            self._disk.sync_dir(draft)
        except BaseException:
            self._discard(draft)
            raise
        return draft

    def _commit(self, draft: Path, final: Path) -> None:
        old = final.with_name(final.name + ".old")
        replaced = os.path.lexists(final)
        try:
            if replaced:  # a folder that holds something cannot be renamed over
                self._disk.rename(final, old)
            hit("checkpoint.before_rename")
            self._disk.rename(draft, final)
            hit("checkpoint.renamed")
        except BaseException:
            if replaced and not os.path.lexists(final):
                with suppress(OSError):  # `old` stands in for it
                    self._disk.rename(old, final)
            self._discard(draft)
            raise
        self._disk.sync_dir(self._folder)

    def _delete_old(self, written: int) -> None:
        kept, not_good = {written}, set()
        found = [step for step, path in committed_in(self._folder) if not self._is_foreign(step, path)]
        for step in found:
            if len(kept) == self._keep_last:
                break
            if step not in self._seen_good:
                try:
                    self.load(step)
                except CheckpointError:
                    not_good.add(step)
                    continue
            kept.add(step)
        # A damaged step that is newer than a good one stays: it is replaced when the run gets there, or grows old.
        doomed = [step for step in found if step not in kept and (step < min(kept) or step not in not_good)]
        for step in sorted(set(doomed) - {self.kept_step}):
            self._remove(self._folder / step_name(step))
            hit("checkpoint.pruned")
        if doomed:
            self._disk.sync_dir(self._folder)

    def _discard(self, draft: Path) -> None:
        """Removes a draft as far as the disk lets it."""
        try:
            if os.path.lexists(draft):
                self._remove(draft)
        except OSError as exc:
            _log.warning("an unfinished checkpoint is left: %s", file_and_reason(exc, draft))

    def _remove(self, path: Path) -> None:
        """Removes a file or a folder with all that is in it, the manifest first, so that no part looks like a whole."""
        if path.is_symlink() or not path.is_dir():
            self._disk.remove(path)
            return
        for name in sorted(os.listdir(path), key=lambda name: (name != MANIFEST_FILE, name)):
            self._remove(path / name)
            if name == MANIFEST_FILE:
                self._disk.sync_dir(path)
        self._disk.remove_dir(path)

"""Downloads of a stage's own weight files into the hub's cache of this user, each resumed where it broke off.

    index --layers--> files of the stage --missing ones--> blobs/ETAG.hetero.incomplete --whole and right--> blobs/ETAG

huggingface_hub resumes within one call only and deletes what a broken download left; these files have gigabytes.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import rich
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hetero import hub
from hetero.errors import ConfigError
from hetero.shards import own_weight_files

log = logging.getLogger(__name__)

_SAY_EVERY_S = 30.0
_LOCK_LOOK_S = 1.0
_CHUNK_BYTES = 1 << 22
_ASK_TIMEOUT_S = 10.0


def complete(folder: Path, path: str, start: int, end: int, *, moved: Callable[[], object]) -> None:
    """Downloads the weight files that layers [start, end) need and the hub's cache lacks.

    Args:
        folder: of the model's commit in the hub's cache, with its config.json and index; others are left alone.
        path: the model's hub id.
        start: first layer.
        end: one past the last.
        moved: called as often as something arrives; what it raises ends the download, which a later call resumes.

    Raises:
        ConfigError: the hub lacks a file or does not give it, or the disk is full.
    """
    commit = hub.commit_of(folder)
    missing = [name for name in own_weight_files(folder, start, end) if not (folder / name).exists()]
    if commit is None or not missing:
        return
    with hub.refusals_in_one_line(path, commit):
        files = [_ask(path, name, commit) for name in missing]
        total = sum(file.size for file in files)
        have = sum(file.have() for file in files)
        _check_room(folder, total - have)
        log.info(
            "downloading %d weight files of %s for layers [%d, %d): %s",
            len(files),
            path,
            start,
            end,
            f"{total / 1e9:.2f} GB" + (f", of which {have / 1e9:.2f} GB are here" if have else ""),
        )
        with _Shown(total, have, moved) as shown:
            for file in files:
                file.get(shown)


class _File:
    """One weight file of a commit, on its way into the hub's cache."""

    def __init__(self, path: str, name: str, commit: str, url: str, etag: str, size: int) -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        self.path, self.name, self.commit, self.url, self.etag, self.size = path, name, commit, url, etag, size
        cache, repository = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=path, repo_type="model")
        self.blob = cache / repository / "blobs" / etag
        self.partial = self.blob.with_name(f"{etag}.hetero.incomplete")
        self._lock = cache / ".locks" / repository / f"{etag}.lock"

    def have(self) -> int:
        """Bytes that are here already."""
        if self.blob.exists():
            return self.size
        return min(self.size, self.partial.stat().st_size) if self.partial.exists() else 0

    def get(self, shown: _Shown) -> None:
        """Downloads what is missing and gives the file its place under the commit."""
        from huggingface_hub import hf_hub_download

        with _locked(self._lock, shown):
            if not self.blob.exists():
                self._get_blob(shown)
        hf_hub_download(self.path, self.name, revision=self.commit)  # links it, since the blob is there

    def _get_blob(self, shown: _Shown) -> None:
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if urlparse(self.url).netloc != urlparse(_endpoint()).netloc:
            headers.pop("authorization", None)  # the token is for the hub alone, not for where it keeps its files
        self.blob.parent.mkdir(parents=True, exist_ok=True)
        if self.partial.exists() and self.partial.stat().st_size > self.size:
            self.partial.unlink()
        with self.partial.open("ab") as file:
            http_get(
                self.url,
                file,
                resume_size=file.tell(),
                headers=headers,
                expected_size=self.size,
                displayed_filename=self.name,
                tqdm_class=shown.bar_class(),
            )
        self._check(shown)
        self.partial.replace(self.blob)

    def _check(self, shown: _Shown) -> None:
        """The hub names large files by their SHA-256; a file that is put together from pieces has to be that one."""
        if len(self.etag) != 64:
            return
        digest = hashlib.sha256()
        with self.partial.open("rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
                shown.arrived(0)
        if digest.hexdigest() != self.etag:
            self.partial.unlink()
            raise ConfigError(
                f"model.path {self.path!r}: the download of {self.name} is damaged (its SHA-256 is not what the hub "
                "says) and was deleted; start the run again"
            )


class _Shown:
    """What a person sees of the download: a bar in a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, have: int, moved: Callable[[], object]) -> None:
        self._total, self._have, self._moved = total, have, moved
        self._said_at = time.monotonic()
        self._progress = Progress(
            TextColumn("downloading"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=rich.get_console(),
            disable=not rich.get_console().is_interactive,
        )
        self._task = self._progress.add_task("downloading", total=total, completed=have)

    def __enter__(self) -> _Shown:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def arrived(self, num_bytes: int) -> None:
        """Counts bytes; negative ones have to come again."""
        self._moved()
        self._have += num_bytes
        self._progress.update(self._task, completed=self._have)
        now = time.monotonic()
        if self._progress.disable and now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            log.info("downloaded %.2f of %.2f GB", self._have / 1e9, self._total / 1e9)

    def bar_class(self) -> Any:
        """A class like tqdm's, as far as huggingface_hub uses it, that reports here."""
        arrived = self.arrived

        class Bar:
            def __init__(self, *_: Any, **__: Any) -> None: ...

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: object) -> None: ...

            def update(self, num_bytes: int) -> None:
                arrived(int(num_bytes))

        return Bar


def _ask(path: str, name: str, commit: str) -> _File:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    try:
        about = get_hf_file_metadata(hf_hub_url(path, name, revision=commit), timeout=_ASK_TIMEOUT_S)
    except EntryNotFoundError:
        raise ConfigError(
            f"model.path {path!r} must have {name}, which its index names, but the hub has none at commit {commit}"
        ) from None
    if about.etag is None or about.size is None:
        raise OSError(f"the hub gives no size or no name for {name}")
    return _File(path, name, commit, about.location, about.etag, about.size)


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(
            f"the hub's cache {folder} must have {num_bytes / 1e9:.2f} GB free for this stage's weights, got "
            f"{free / 1e9:.2f} GB; make room, or let HF_HOME name a place on another disk"
        )


@contextmanager
def _locked(lock: Path, shown: _Shown) -> Iterator[None]:
    """Holds huggingface_hub's own lock of a blob: another process of this machine may download the same."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        held = WeakFileLock(lock, timeout=_LOCK_LOOK_S)
        try:
            held.__enter__()
        except Timeout:
            shown.arrived(0)
            continue
        break
    try:
        yield
    finally:
        held.__exit__(None, None, None)

"""Folders of this user's cache, folders that come into being as a whole or not at all, and what is read from them."""

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


def cache_dir() -> Path:
    """The user's cache folder of hetero; it need not exist."""
    home = Path.home()
    return (home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache") / "hetero"


def models_cache(cache: Path | None = None) -> Path:
    """The folder in the cache that holds one folder for each model."""
    return (cache or cache_dir()) / "models"


def fetched_folder(hub_id: str, cache: Path | None = None) -> Path:
    """Where the fetched copy of a hub model belongs; it need not exist."""
    return models_cache(cache) / flat_name(hub_id)


def local_name(path: str | Path) -> str:
    """The name under which other machines look up a local model: its folder's name.

    Raises:
        ConfigError: the folder's name holds something else than letters, digits, `.`, `_` and `-`.
    """
    return checked_name(Path(os.path.abspath(os.path.expanduser(path))).name)


def write_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Create a folder as a whole or not at all; where another process was faster, its folder stays.

    Args:
        target: the folder to create; its parents are created too.
        fill: writes the content into an empty folder beside `target`, which gets its name when all is on the disk.

    Raises:
        ConfigError: the place cannot be written.
    """
    draft = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        fill(draft)
        for file in draft.iterdir():
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # a rename never replaces a folder that holds something
                raise
    except OSError as exc:
        if exc.errno not in _NOT_WRITABLE:
            raise
        raise ConfigError(f"the folder {target.parent} must be writable and have space: {one_line(exc)}") from exc
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)  # not there any more where it was renamed
    return target


def write_text(file: Path, text: str, *, private: bool = False) -> None:
    """Writes a file as a whole or not at all; whom it is open to follows from the umask, or is this user alone.

    Raises:
        ConfigError: the place cannot be written.
    """
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if private:
            draft.touch(mode=0o600, exist_ok=False)
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    except OSError as exc:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise ConfigError(f"the folder {file.parent} must be writable and have space: {one_line(exc)}") from exc


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConfigError: it cannot be read, is no JSON, or is no object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{file} must be a readable JSON file: {one_line(exc)}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, got a {type(content).__name__}")
    return content


def checked_name(name: str) -> str:
    """A plain name, which cannot lead out of the folder that it is looked up in; raises ConfigError for others."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"a local model's folder must be named with letters, digits, '.', '_' and '-' only and not start with '.', "
            f"got {name!r}; rename the folder"
        )
    return name


def is_plain_name(name: str) -> bool:
    """Whether `checked_name` lets it pass."""
    return _NAME.fullmatch(name) is not None


def flat_name(hub_id: str) -> str:
    """A hub id as the name of a folder."""
    return hub_id.replace("/", "--")


def one_line(exc: BaseException) -> str:
    """The first line of an exception's text, or its type."""
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__

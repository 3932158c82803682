"""Folders of this user's cache, folders that come into being as a whole or not at all, and what is read from them."""

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
# What a place answers where a file cannot be written, as opposed to what the network or a mistake here does.
_NOT_WRITABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EFBIG,  # a limit of the file system (4 GiB on FAT) or of the user (ulimit -f)
    errno.EINVAL,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.EMLINK,
    errno.ENAMETOOLONG,
    errno.ENODEV,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.ENOTDIR,
    errno.ENOTSUP,
    errno.ENXIO,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EROFS,
    errno.ESTALE,
    errno.ETXTBSY,
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as safetensors words it in an error of its own


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
        draft = _make_draft(target)
        fill(draft)
        for file in draft.iterdir():
            file.chmod(draft.stat().st_mode & 0o666)  # safetensors writes files for this user alone
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # a rename never replaces a folder that holds something
                raise
    except Exception as exc:  # safetensors raises its own SafetensorError without a common base
        if _errno_of(exc) not in _NOT_WRITABLE:
            raise
        raise _not_writable(target, exc) from exc
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)  # not there any more where it was renamed
    return target


def check_writable(target: Path) -> None:
    """Refuses a place where no folder can be made, before any work is done for one; leaves nothing there.

    Raises:
        ConfigError: it cannot.
    """
    place = next(parent for parent in target.absolute().parents if parent.is_dir())
    _make_draft(place / target.name).rmdir()


def _make_draft(target: Path) -> Path:
    """An empty folder beside the one that it becomes; whom it is open to follows from the umask."""
    draft = target.with_name(f".{target.name[:64]}.{uuid.uuid4().hex[:8]}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
    except OSError as exc:
        raise _not_writable(target, exc) from exc
    return draft


def _not_writable(target: Path, exc: Exception) -> ConfigError:
    return ConfigError(f"the folder {target.parent} must be writable and have space: {one_line(exc)}")


def _errno_of(exc: Exception) -> int | None:
    if isinstance(exc, OSError):
        return exc.errno
    found = _OS_ERROR.search(str(exc))
    return int(found[1]) if found else None


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

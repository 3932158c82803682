"""Which versions of what run here, for handshakes and run.json."""

from __future__ import annotations

import platform
from importlib import metadata

from hetero import __version__
from hetero.errors import printable

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "bitsandbytes")


def versions() -> dict[str, str]:
    """Name -> version of Python, hetero and the libraries that results depend on; absent ones are left out."""
    found = {"hetero": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def differences(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """`name mine / theirs` for each version that differs or stands on one side only; fit for a log."""
    names = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    return [printable(f"{name} {mine.get(name, 'none')} / {theirs.get(name, 'none')}") for name in names]

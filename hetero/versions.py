"""Which versions of what run here, for handshakes and run.json."""

from __future__ import annotations

import platform
from importlib import metadata

from hetero import __version__

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
    """`name mine / theirs` for each version that differs or stands on one side only."""
    names = sorted({*mine, *theirs})
    return [f"{n} {mine.get(n, 'none')} / {theirs.get(n, 'none')}" for n in names if mine.get(n) != theirs.get(n)]

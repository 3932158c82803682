"""What the tests of pictures share: names that are syntax somewhere, plans with them, machines without renderers."""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from processes import composed

from hetero.config import SHAPES_DIR
from hetero.resolve import ResolvedRun, resolve

ODD = [
    "192.168.1.5:5000",
    "[::1]:5000",
    "C:\\models\\x",
    "C:\\new\\",
    "<mps> a <b>",
    'he said "hi"',
    "it's & that &lt; &#65;",
    "a|b{c}",
    "x" * 300,
    "中文 🙂",
    "👩‍🚀 עברית é",
    "end",
    "s0-->s1",
    "a\\n\\N\\G\\l",
    "%%{init}%%; click",
    "**a** `b` _c_ $$d$$",
    " two  spaces ",
]
HIDDEN = ("resvg_py", "PIL")


def plan(*names: str, model: str = "tiny", host: str = "pc.lan", **hardware: Any) -> ResolvedRun:
    """A plan with a worker of each name."""
    raw = copy.deepcopy(_composed(model))
    workers = [{"id": name, "host": host} for name in names]
    raw["hardware"] = {"workers": workers, "launch": "none", **hardware}
    return resolve(raw, shapes_dir=SHAPES_DIR, for_drawing=True)


@functools.cache
def _composed(model: str) -> dict[str, Any]:
    return composed(f"model={model}", "shard_plan=even")


def without_dot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No program is found."""
    (tmp_path / "no-programs").mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the optional packages is found."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name in HIDDEN else real(name, *args))


def with_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """A `dot` that does something else."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "dot").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

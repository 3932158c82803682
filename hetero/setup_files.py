"""The two files of a set-up: what they hold, and how they are written without losing one that is there."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import ConfigError
from hetero.folders import write_text
from hetero.spec import CoordinatorSpec, WorkerEntry

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")


@dataclass(frozen=True)
class SetUp:
    """What was asked for, and what follows from it.

    Attributes:
        name: of both files.
        coordinator: this machine.
        workers: the others, in the order of the pipeline.
        model: a file of conf/model, or None where `model_path` says which.
        model_path: a local folder or a hub id.
        quantization: None leaves it to the model's file.
        edges: of the stages: 0, the cut points, the number of layers.
    """

    name: str
    coordinator: CoordinatorSpec
    workers: Sequence[WorkerEntry]
    model: str | None
    model_path: str | None
    quantization: str | None
    edges: Sequence[int]
    nf4: bool = False


def check_name(name: str, key: str) -> str:
    """A name that is safe in a file name, in YAML and on hydra's command line.

    Raises:
        ConfigError: it is none.
    """
    if not _NAME.match(name):
        raise ConfigError(f"{key} must be letters, digits, '_', '-' and '.', 64 at most, got {name!r}")
    return name


def hardware_text(setup: SetUp) -> str:
    """The file of conf/hardware."""
    ends = setup.coordinator
    first = [f"host: {_quoted(ends.host)}", f"device: {_quoted(ends.device)}", *_memory(ends.memory_gb)]
    lines = [
        "# Written by python -m hetero.init; train.py is started on the coordinator, worker.py on the others.",
        f"coordinator: {{{', '.join(first)}}}",
        "workers:",
    ]
    for worker in setup.workers:
        parts = [
            f"id: {_quoted(worker.id)}",
            f"host: {_quoted(worker.host)}",
            f"port: {worker.port}",
            f"device: {_quoted(worker.device)}",
            *_memory(worker.memory_gb),
        ]
        lines.append(f"  - {{{', '.join(parts)}}}")
    return "\n".join([*lines, "launch: none", ""])


def plan_text(setup: SetUp, hardware: str | None = None) -> str:
    """The file of conf/shard_plan; it chooses the model as well.

    Args:
        setup: what to write.
        hardware: the file that it goes with.
    """
    lines = [
        "# @package _global_",
        f"# Written by python -m hetero.init: {_shown_model(setup)} on hardware={hardware or setup.name}.",
    ]
    defaults = [f"  - override /model: {setup.model}"] if setup.model is not None else []
    defaults += ["  - override /adapter: qlora"] if setup.nf4 else []
    lines += ["defaults:", *defaults, ""] if defaults else [""]
    model = [f"  path: {_quoted(setup.model_path)}"] if setup.model_path is not None else []
    model += [f"  quantization: {setup.quantization}"] if setup.quantization is not None else []
    lines += ["model:", *model, ""] if model else []
    lines += ["shard_plan:", "  stages:"]
    names = ["local", *(worker.id for worker in setup.workers)]
    for name, start, end in zip(names, setup.edges[:-1], setup.edges[1:], strict=True):
        lines.append(f"    - {{id: {_quoted(name)}, start: {start}, end: {end}}}")
    return "\n".join([*lines, "  split_points: null", "  num_stages: null", ""])


def paths(conf: Path, name: str) -> tuple[Path, Path]:
    """Where the two files lie."""
    return conf / "hardware" / f"{name}.yaml", conf / "shard_plan" / f"{name}.yaml"


def check_free(conf: Path, shipped: Path, name: str, *, force: bool) -> None:
    """Refuses to overwrite a file, and a name that hydra would look up in the shipped folder first.

    Raises:
        ConfigError: the name is taken.
    """
    if conf.resolve() != shipped.resolve():
        for file in paths(shipped, name):
            if file.exists():
                raise ConfigError(f"NAME must not be that of a file in {file.parent}, which would win, got {name!r}")
    for file in paths(conf, name):
        if file.exists() and not force:
            raise ConfigError(f"NAME must be new, {file} is there already: take another one, or --force replaces it")


def write(conf: Path, setup: SetUp) -> tuple[Path, Path]:
    """Writes both files, each whole or not at all.

    Raises:
        ConfigError: the folder cannot be written.
    """
    hardware, plan = paths(conf, setup.name)
    try:
        for file, text in ((hardware, hardware_text(setup)), (plan, plan_text(setup))):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
    except OSError as exc:
        raise ConfigError(f"--conf must be a folder that can be written, got {conf} ({exc.strerror})") from None
    return hardware, plan


def _shown_model(setup: SetUp) -> str:
    shown = setup.model or setup.model_path or ""
    return shown if shown.isprintable() else repr(shown)


def _memory(memory_gb: float | None) -> list[str]:
    return [] if memory_gb is None else [f"memory_gb: {memory_gb:g}"]


def _quoted(text: str | None) -> str:
    """A YAML string; JSON's are YAML's too. A plain word stays one where YAML reads it as text.

    Raises:
        ConfigError: OmegaConf would read a reference in it.
    """
    assert text is not None
    if "${" in text:
        raise ConfigError(f"a name must not hold '${{', which is a reference in configuration files, got {text!r}")
    plain = re.fullmatch(r"[A-Za-z][\w.-]*", text) and text.lower() not in _NOT_TEXT
    return text if plain else json.dumps(text, ensure_ascii=False)


_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}

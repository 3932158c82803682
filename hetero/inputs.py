"""What a run takes from the coordinator's own disk: seen to before anything slow is imported, read or started."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path

from hetero.errors import ConfigError
from hetero.eval_rules import evaluation_source
from hetero.folders import one_line
from hetero.resolve import ResolvedRun
from hetero.spec import Config, StageSpec

SMALL_BYTES = 1 << 20


def check_inputs(resolved: ResolvedRun) -> None:
    """Checks that the files and packages are there which a configuration names; workers need none of them.

    Raises:
        ConfigError: one is not.
    """
    config = resolved.config
    _check_all_rows(config)
    init_from = config.adapter.init_from
    if init_from is not None and not Path(init_from).expanduser().is_dir():
        raise ConfigError(f"adapter.init_from must be a folder of a PEFT adapter, found none at {init_from}")
    _check_resume(config.checkpoint.resume)
    for index, stage in enumerate(resolved.stages):
        if stage.quantization == "nf4" and (index == 0 or config.hardware.launch == "local"):
            _need_bitsandbytes(index, stage)


def _check_all_rows(config: Config) -> None:
    data = config.data
    if config.task == "generate":
        return  # it reads no rows
    if data.source == "jsonl" and data.path and (config.task == "train" or data.eval_path is None):
        _check_rows("data.path", data.path)
    if data.eval_path is not None and evaluation_source(data).source == "jsonl":
        _check_rows("data.eval_path", data.eval_path)


def _check_rows(key: str, given: str) -> None:
    """A file of JSON lines is there, is a file, and holds something."""
    path = Path(given).expanduser()
    rule = f"{key} must be a file of JSON lines"
    try:
        if path.is_dir():
            raise ConfigError(f"{rule}, got the folder {path.absolute()}; name the file in it")
        if not path.exists():
            raise ConfigError(f"{rule}, found nothing at {path.absolute()}")
        empty = (
            path.is_file() and path.stat().st_size < SMALL_BYTES and not path.read_bytes().strip(b" \t\r\n\xef\xbb\xbf")
        )
    except OSError as exc:
        raise ConfigError(f"{rule} that can be read, got {path.absolute()} ({exc.strerror or one_line(exc)})") from None
    if empty:
        raise ConfigError(f"{rule} with at least one row, got {path.absolute()}, which is empty")


def _check_resume(resume: int | str | None) -> None:
    """A run's folder that is not there; what is in one that is there is read later."""
    if not isinstance(resume, str) or resume == "latest":
        return
    try:
        if Path(resume).expanduser().exists():
            return
    except OSError as exc:  # a name that is too long
        raise ConfigError(f"checkpoint.resume={resume} cannot be read: {exc.strerror or one_line(exc)}") from None
    rule = "checkpoint.resume must be latest, a step number, or a run's folder or a step's folder in it"
    if difflib.get_close_matches(resume.lower(), ["latest"], cutoff=0.7):
        raise ConfigError(f"{rule}, got {resume!r}; did you mean latest?")
    raise ConfigError(f"{rule}, got {resume!r}: found nothing at {Path(resume).expanduser().absolute()}")


def _need_bitsandbytes(index: int, stage: StageSpec) -> None:
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as exc:
        raise ConfigError(
            f"quantization=nf4 on stage {index} ({stage.id}, device {stage.device or 'auto'}) needs the package "
            f"bitsandbytes, which cannot be imported here: pip install bitsandbytes, or model.quantization=none ({exc})"
        ) from None

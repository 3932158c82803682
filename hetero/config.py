"""Hydra: runs a script's main on a composed configuration, and turns every mistake into one line.

Only this file and the scripts import hydra or omegaconf; everything behind them gets plain data.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError, HeteroError
from hetero.stopping import Terminated, end_by_signals

if sys.version_info >= (3, 14):  # hydra 1.3.8 fails there while it defines its options
    raise SystemExit("hetero needs Python 3.11, 3.12 or 3.13: hydra-core 1.3.8 does not start on 3.14")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parent
_BESIDE = _PACKAGE.parent / "conf"  # in a checkout
CONF_DIR = _BESIDE if (_BESIDE / "config.yaml").is_file() else _PACKAGE / "conf"
SHAPES_DIR = CONF_DIR / "shapes"

_NOISE = re.compile(r"HYDRA_FULL_ERROR|object_type=")  # lines of a message that help nobody
_KEY = re.compile(r"[+~]{0,2}[\w./@:-]+")  # of an argument, as far as it is told from a value that lost its key

Task = Callable[[dict[str, Any], Path], bool | None]  # True: somebody ended it before its time


def root() -> Path:
    """Where `outputs` lies: the checkout, or for an installed package the user's home."""
    return _BESIDE.parent if CONF_DIR == _BESIDE else Path.home() / "hetero"


def register_resolvers() -> None:
    """Makes `${hetero_root:}` and `${hetero_sweep:}` known to the configuration files."""
    OmegaConf.register_new_resolver("hetero_root", lambda: str(root()), replace=True)
    OmegaConf.register_new_resolver("hetero_sweep", _sweep, replace=True)


def _sweep() -> str | None:
    """The name of the folder of the sweep that is going on; None outside one."""
    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        return None
    return Path(HydraConfig.get().sweep.dir).name


def run_task(task: Task, config_name: str) -> int:
    """Composes the configuration from the command line and runs `task` on it, for a sweep once for each job.

    Args:
        task: gets the composed configuration as plain data and the run's folder.
        config_name: file in conf/.

    Returns:
        The process's exit code: 0, 1 after a failed run, 2 for a mistake, 143 after SIGTERM or SIGHUP; 1 after a sweep
        whose jobs failed in both ways.
    """
    failed: dict[int, int] = {}  # number of a job -> its exit code
    began = 0
    full_errors = bool(os.environ.get("HYDRA_FULL_ERROR"))
    stopped = False

    def job(cfg: DictConfig) -> None:
        nonlocal began, stopped
        if stopped:
            raise KeyboardInterrupt  # whoever ends a job of a sweep means the sweep
        began += 1
        try:
            with _job_of_sweep(config_name, dry_run=cfg.get("dry_run") is True):
                stopped = bool(task(_plain(cfg), Path(HydraConfig.get().runtime.output_dir)))
        except HeteroError as exc:
            if full_errors:
                raise
            log.error("%s", exc)
            failed[began - 1] = _exit_code(exc)
            if isinstance(exc, ConfigError):
                _remove_empty_run(Path(cfg.outputs))
        except Exception as exc:  # a defect; the sweep's other jobs do not share it
            if full_errors or HydraConfig.get().mode is not RunMode.MULTIRUN:
                raise
            log.exception("a defect ended this job")
            failed[began - 1] = _exit_code(exc)

    # Libraries' notes to their own developers; ours are errors in the tests.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
    register_resolvers()
    end_by_signals()
    main = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=config_name)(job)
    sys.argv[1:] = _sweep_first(sys.argv[1:])
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then raises instead of printing a traceback of its own
    try:
        main()
    except (HydraException, OmegaConfBaseException) as exc:
        if full_errors:
            raise
        sys.stderr.write(f"error: {explain(exc)}\n")
        return 2
    except (OSError, ValueError) as exc:  # the run's folder cannot be made; a value that hydra itself stumbles over
        if full_errors or began:
            raise
        sys.stderr.write(f"error: {explain(exc)}\n")
        return 2
    except Terminated:
        sys.stderr.write("terminated\n")
        return 143
    if failed and began > 1:
        numbers = ", ".join(map(str, failed))
        sys.stderr.write(f"{len(failed)} of {began} jobs failed: {numbers} (each one's log has the reason)\n")
    codes = set(failed.values())
    return codes.pop() if len(codes) == 1 else int(bool(codes))


@contextlib.contextmanager
def _job_of_sweep(config_name: str, *, dry_run: bool) -> Iterator[None]:
    """Notes in the folder of a sweep's training job what the job is and how it ended, for the sweep's page."""
    about = HydraConfig.get()
    if about.mode is not RunMode.MULTIRUN or config_name != "config" or dry_run:
        yield
        return
    from hetero.sweep import close_sweep, note_job

    note = functools.partial(
        note_job, Path(about.runtime.output_dir), about.job.num, [str(entry) for entry in about.overrides.task]
    )
    note(code=None, error=None)
    try:
        yield
    except Exception as exc:
        note(code=_exit_code(exc), error=f"{exc}" if isinstance(exc, HeteroError) else f"{type(exc).__name__}: {exc}")
        raise
    except BaseException:  # the sweep ends with it, and hydra calls nobody any more
        note(code=130, error="interrupted")
        close_sweep(Path(about.sweep.dir))
        raise
    note(code=0, error=None)


def _exit_code(exc: Exception) -> int:
    return 2 if isinstance(exc, ConfigError) else 1


def composed(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """The configuration that `train.py` would get from these arguments, for commands that are no runs.

    Args:
        overrides: as on train.py's command line.
        config_dirs: further folders with groups of their own, as train.py's --config-dir.

    Raises:
        ConfigError: they cannot be composed.
    """
    register_resolvers()
    further = [f"file://{folder.resolve()}" for folder in config_dirs]
    try:
        with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return _plain(hydra.compose("config", [*overrides, f"hydra.searchpath={further}"]))
    except (HydraException, OmegaConfBaseException) as exc:
        raise ConfigError(explain(exc)) from None


def _sweep_first(arguments: list[str]) -> list[str]:
    """The same with `-m` in front, since argparse takes overrides on one side of an option alone."""
    return sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))


def _remove_empty_run(outputs: Path) -> None:
    """Takes a refused run's folder away where it holds hydra's own files alone; a sweep's jobs keep their logs."""
    hydra_config = HydraConfig.get()
    run_dir = Path(hydra_config.runtime.output_dir).resolve()
    outputs = outputs.resolve()
    if hydra_config.mode is not RunMode.RUN or hydra_config.output_subdir is None or outputs not in run_dir.parents:
        return
    own = {run_dir / hydra_config.output_subdir, run_dir / f"{hydra_config.job.name}.log"}
    if set(run_dir.iterdir()) - own:
        return
    shutil.rmtree(run_dir, ignore_errors=True)
    with contextlib.suppress(OSError):  # a folder that holds other runs
        for folder in run_dir.parents[: run_dir.parents.index(outputs)]:
            folder.rmdir()


def _plain(cfg: DictConfig) -> dict[str, Any]:
    try:
        raw = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as exc:
        raise ConfigError(explain(exc)) from exc
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def explain(exc: Exception) -> str:
    """One line for what is wrong with a command line."""
    if isinstance(exc, OverrideParseException):
        return _unreadable(exc.override)
    text = str(exc)
    if cause := exc.__cause__:
        text = f"{text}\n{cause}"
    if missing := re.search(r"Missing mandatory value: .*full_key: (\S+)", text, re.DOTALL):
        return f"{missing[1]} must be given"
    if "Config group override must be" in text:
        group = next((arg.partition("=")[0] for arg in sys.argv[1:] if arg.endswith("=null")), "a group")
        return f"{group} must be one of {', '.join(_options_of(group))}, got null"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(unknown[1])
    if no_file := re.search(r"Could not load '(?:([^']+)/)?([^'/]+)'", text):
        return f"{no_file[1]} must be one of {', '.join(_options_of(no_file[1]))}, got {no_file[2]!r}"
    if isinstance(exc, OSError) and exc.strerror:
        return f"outputs must be a folder that can be written, got {exc.filename} ({exc.strerror})"
    if choice := re.search(r"Could not find '([^']+)'(?s:.*?)Available options in '([^']+)':\s*(.*)", text, re.DOTALL):
        group, name = choice[1].rsplit("/", 1) if "/" in choice[1] else (choice[2], choice[1])
        options = [line.strip() for line in choice[3].splitlines() if line.strip()]
        known = [option for option in options if re.fullmatch(r"[\w.-]+", option)]
        return f"{group} must be one of {', '.join(known)}, got {name!r}"
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and not _NOISE.search(line))


def _unreadable(override: str) -> str:
    """The message for an argument that hydra's grammar does not take, with how to quote its value."""
    key, given, value = override.partition("=")
    if not given or not _KEY.fullmatch(key):
        return f"an argument must be KEY=VALUE as in loop.steps=20, or an option of --help, got {override!r}"
    name, shown = key.lstrip("+~"), value if value.isprintable() else repr(value)
    if value.startswith(("[", "{")) and (value.rstrip().endswith(("]", "}")) or not re.search(r"[]}]", value)):
        return (
            f"{name} must be a list or map with every bracket closed, and with quotes around a text in it that has "
            f'special signs, as in ["it\'s"], got {shown}'
        )
    remedy = _quoted(key, value) if value.isprintable() else f"{key}='VALUE'"
    return f"{name} must have quotes around a value with special signs, got {shown}: write {remedy}"


def _quoted(key: str, value: str) -> str:
    """An argument as one types it in a shell, with quotes for the shell outside and quotes for hydra inside."""
    mark = '"' if "'" in value and '"' not in value else "'"
    inside = re.sub(rf"(\\*)({mark}|$)", lambda found: found[1] * 2 + (f"\\{mark}" if found[2] else ""), value)
    argument = f"{key}={mark}{inside}{mark}"
    return shlex.quote(argument) if re.search(r'["$`\\!]', argument) else f'"{argument}"'


def _unknown_key(key: str) -> str:
    """The message for an override of a key that is not there, with the keys that are."""
    from hetero.checked import unknown_key

    group, *inner = key.split(".")
    if inner and group != "hydra" and not _options_of(group):
        return unknown_key(group, _keys_at(""), "")
    where, _, name = key.rpartition(".")
    return unknown_key(name, _keys_at(where), where)


def _options_of(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml")) if group else []


def _keys_at(where: str) -> list[str]:
    """Keys at a place in the default files, as far as they can be read; the groups as well where it is the top."""
    group, *inner = where.split(".")
    folder = CONF_DIR / group
    keys = set() if where else {entry.name for entry in CONF_DIR.iterdir() if _options_of(entry.name)}
    for file in sorted(folder.glob("*.yaml")) if where else [CONF_DIR / "config.yaml"]:
        node: Any = OmegaConf.load(file)
        for name in inner:
            node = node.get(name) if isinstance(node, DictConfig) else None
        if isinstance(node, DictConfig):
            keys |= {str(key) for key in node if key not in ("defaults", "hydra")}
    return sorted(keys)

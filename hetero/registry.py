"""The allow list of `_target_` objects: configuration names them, and nothing else can be named."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from hetero.errors import ConfigError

# Configuration group -> the targets that may stand in it. A class of your own is added with `allow_targets=[...]`
# (on a worker: in the worker's own configuration), or here, in your own checkout.
ALLOWED: dict[str, tuple[str, ...]] = {
    "transport": ("hetero.transport.tcp.TcpTransport",),
    "stage": ("hetero.stage.build_stage",),
    "optimizer": ("hetero.optim.adamw", "hetero.optim.sgd"),
    "loop": ("hetero.loop.train",),
    "logger": (
        "hetero.csv_logger.CsvLogger",
        "hetero.loggers.JsonlLogger",
        "hetero.tensorboard_logger.TensorBoardLogger",
        "hetero.wandb_logger.WandbLogger",
    ),
}


def check(group: str, target: str, extra: Iterable[str] = ()) -> None:
    """Lets a target pass that the allow list holds for its group.

    Raises:
        ConfigError: it does not.
    """
    if target in ALLOWED[group] or target in extra:
        return
    raise ConfigError(
        f"{group}._target_ must be one of {', '.join(ALLOWED[group])} (or be listed in allow_targets, on every "
        f"machine that builds it), got {target!r}"
    )


def build(group: str, target: str, extra: Iterable[str] = ()) -> Callable[..., Any]:
    """The class or function of an allowed target.

    Raises:
        ConfigError: the target is not allowed, or does not exist.
    """
    check(group, target, extra)
    module_name, _, attribute = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"{group}._target_ must be importable, got {target!r} ({exc})") from exc
    if not callable(found):
        raise ConfigError(f"{group}._target_ must be a class or a function, got {target!r}")
    return found  # type: ignore[no-any-return]


def make(group: str, target: str, extra: Iterable[str], /, *given: Any, **args: Any) -> Any:
    """What an allowed target makes of these arguments.

    Raises:
        ConfigError: as `build`, or it does not take the arguments.
    """
    found = build(group, target, extra)
    try:
        inspect.signature(found).bind(*given, **args)
    except TypeError as exc:
        raise ConfigError(f"{group} must have the arguments that {target} takes: {exc}") from None
    return found(*given, **args)

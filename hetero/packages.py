"""Optional packages: whoever asks for one that is not here hears so in one line, and nobody else needs it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hetero.errors import ConfigError

# Logger -> package; in the order of conf/logger.
OF_LOGGERS = {
    "hetero.tensorboard_logger.TensorBoardLogger": "tensorboard",
    "hetero.wandb_logger.WandbLogger": "wandb",
}


def need(package: str, key: str) -> ModuleType:
    """The package, imported.

    Args:
        package: its name, to import and to install.
        key: what asks for it, as on the command line.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as exc:
        raise ConfigError(
            f"{key} needs the package {package}, which cannot be imported here: pip install {package} ({exc})"
        ) from None


def check_loggers(loggers: Mapping[str, Mapping[str, Any]] | None) -> None:
    """Imports what the loggers of a run need, long before they are made.

    Args:
        loggers: name -> `_target_` and arguments.

    Raises:
        ConfigError: a package is not here.
    """
    for name, logger in (loggers or {}).items():
        package = OF_LOGGERS.get(logger.get("_target_", ""))
        if package is not None:
            need(package, f"logger={name}")

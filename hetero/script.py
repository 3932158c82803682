"""Starts a script: light to import, so that Ctrl-C ends it in one line from its first moment on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_script(task: Callable[[dict[str, Any], Path], bool | None], config_name: str) -> int:
    """Composes the configuration from the command line and runs `task` on it; gives the process's exit code.

    Args:
        task: gets the composed configuration as plain data and the run's folder.
        config_name: file in conf/.
    """
    try:
        from hetero import config  # hydra takes a third of a second

        return config.run_task(task, config_name)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130

"""Serves: `python worker.py [worker.port=9999]`; lends this machine's device to run after run until interrupted."""

import logging
import sys
from pathlib import Path
from typing import Any

from hetero.config import run_script

log = logging.getLogger(__name__)


def work(raw: dict[str, Any], _: Path) -> None:
    """Listens, and works for whichever coordinator comes."""
    from hetero.checked import convert
    from hetero.errors import show_address
    from hetero.spec import WorkerConfig

    config = convert(raw, WorkerConfig)

    def announce(host: str, port: int) -> None:
        log.info("listening on %s (Ctrl-C ends)", show_address(host, port))

    from hetero.work import serve

    serve(config.worker, outputs=Path(config.outputs), allow_targets=config.allow_targets, announce=announce)


def main() -> int:
    """The command line."""
    return run_script(work, "worker")


if __name__ == "__main__":
    sys.exit(main())

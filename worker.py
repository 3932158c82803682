"""Serves: `python worker.py [worker.port=9999]`; lends this machine's device to run after run until interrupted."""

import sys
from pathlib import Path
from typing import Any

from hetero.script import run_script


def work(raw: dict[str, Any], _: Path) -> None:
    """Listens, and works for whichever coordinator comes."""
    from hetero.checked import convert
    from hetero.spec import WorkerConfig

    config = convert(raw, WorkerConfig)
    from hetero.transport.listening import start_listening

    listening = start_listening(config.worker)  # what is unsafe is refused before anything heavy is imported
    from hetero.work import serve

    serve(config.worker, listening, outputs=Path(config.outputs), allow_targets=config.allow_targets)


def main() -> int:
    """The command line."""
    return run_script(work, "worker")


if __name__ == "__main__":
    sys.exit(main())

"""Trains: `python train.py [group=choice] [key=value] ...`; this machine's part in it follows from the hardware."""

import sys
from pathlib import Path
from typing import Any

from hetero.script import run_script


def train(raw: dict[str, Any], run_dir: Path) -> bool:
    """One run: checks everything first, then coordinates it, or serves as one of its workers; or only figures for it.

    Returns:
        Whether somebody ended it before its last step.
    """
    from hetero.config import SHAPES_DIR
    from hetero.inputs import check_inputs
    from hetero.resolve import resolve
    from hetero.roles import worker_here

    if raw.get("dry_run") is True:
        from hetero.dry_run import dry_run

        dry_run(resolve(raw, shapes_dir=SHAPES_DIR, for_drawing=True), SHAPES_DIR)
        return False
    resolved = resolve(raw, shapes_dir=SHAPES_DIR)
    worker = worker_here(resolved.config)
    if worker is not None:
        from hetero.transport.listening import start_listening
        from hetero.work import serve

        serve(
            worker,
            start_listening(worker),
            outputs=Path(resolved.config.outputs),
            allow_targets=resolved.config.allow_targets,
        )
        return False
    check_inputs(resolved)
    from hetero.packages import check_loggers

    check_loggers(resolved.config.logger)
    from hetero.coordinate import coordinate
    from hetero.stopping import signals_ask
    from hetero.summary import log_summary

    result = coordinate(resolved, run_dir)
    with signals_ask(lambda _: True):  # all is written: a signal comes too late to end anything
        log_summary(result)
    return result.stopped is not None


def main() -> int:
    """The command line."""
    return run_script(train, "config")


if __name__ == "__main__":
    sys.exit(main())

"""Draws a plan: `python visualize.py shard_plan=llama8b_3stage`; from configuration alone, offline."""

import logging
import sys
from pathlib import Path
from typing import Any

from hetero.script import run_script

log = logging.getLogger(__name__)


def visualize(raw: dict[str, Any], run_dir: Path) -> None:
    """Writes the plan's pictures, and says where."""
    from hetero.config import SHAPES_DIR
    from hetero.diagram import formats_of, write_diagrams
    from hetero.memory import memory_of
    from hetero.planned import planned_timeline, write_planned_step
    from hetero.resolve import resolve

    output, formats, times = raw.pop("output"), formats_of(raw.pop("format")), raw.pop("times")
    resolved = resolve(raw, shapes_dir=SHAPES_DIR, for_drawing=True)
    place = run_dir if output is None else _of_job(Path(output).expanduser())
    memory = memory_of(resolved, SHAPES_DIR)
    planned = planned_timeline(resolved, times, memory)  # first, since it may be refused
    for path in write_diagrams(resolved, place, memory, formats):
        log.info("%s", path)
    if not place.suffix and formats is None:  # a folder, for all that can be made
        for path in write_planned_step(resolved, planned, place):
            log.info("%s", path)


def _of_job(output: Path) -> Path:
    """In a sweep each job has a file or folder of its own, with the job's number."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN:
        return output
    return output.with_name(f"{output.stem}-{hydra.job.num}{output.suffix}")


def main() -> int:
    """The command line."""
    return run_script(visualize, "visualize")


if __name__ == "__main__":
    sys.exit(main())

"""Draws a plan: `python visualize.py shard_plan=llama8b_3stage`; from configuration alone, offline."""

import logging
import sys
from pathlib import Path
from typing import Any

from hetero.config import SHAPES_DIR, run_script

log = logging.getLogger(__name__)


def visualize(raw: dict[str, Any], run_dir: Path) -> None:
    """Writes the plan as Mermaid and DOT text, and says where."""
    from hetero.diagram import write_diagrams
    from hetero.resolve import resolve

    output = raw.pop("output")
    resolved = resolve(raw, shapes_dir=SHAPES_DIR, for_drawing=True)
    for path in write_diagrams(resolved, run_dir if output is None else Path(output)):
        log.info("%s", path)


def main() -> int:
    """The command line."""
    return run_script(visualize, "visualize")


if __name__ == "__main__":
    sys.exit(main())

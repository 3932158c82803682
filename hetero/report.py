"""report.html: a run's page, rewritten while the run goes on by a thread of its own.

`python -m hetero.report FOLDER` makes the page of a finished run or sweep again from its files.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.curves import Curves
from hetero.errors import ConfigError, HeteroError
from hetero.run_files import METRICS, REPORT, RUN, STATUS, Status, read_run, write_atomically
from hetero.run_page import run_page

log = logging.getLogger(__name__)

TIMELINE = "timeline.svg"
EVERY_S = 2.0
# The next page comes no sooner than so many times what the last one took: less than 1 % of a core, however long a run.
_REST = 150
_CLOSE_S = 10.0


@dataclass(frozen=True)
class Facts:
    """What a run knows besides its records.

    Attributes:
        devices: device and dtype of each stage, once all are built.
        stages: the plan as plain data.
        memory_bytes: of each stage's device, where it is known.
        stopped: who asked for its end before its last step.
        timeline_svg: picture of the last step.
    """

    devices: list[tuple[str, str]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    memory_bytes: list[int | None] = field(default_factory=list)
    stopped: str | None = None
    timeline_svg: str | None = None


class ReportWriter:
    """Keeps a run's `report.html` and `status.json`; called as every logger is.

    The calls only note what they are given: a thread draws, and a fault there costs the page, never the run.

    Args:
        run_dir: the run's folder.
        every_s: time between two pages.
    """

    def __init__(self, run_dir: Path, every_s: float = EVERY_S) -> None:
        self._dir, self._every_s = run_dir, every_s
        self._about: dict[str, Any] = {}
        self._facts: Callable[[], Facts] = Facts
        self._new: list[tuple[str, Any]] = []  # what came since the last page
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._records: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._curves, self._status, self._began = Curves(), Status(state="running"), time.monotonic()
        self._warned = False
        self.drawing_s = 0.0  # time of this process's cores that went into pages

    def follow(self, facts: Callable[[], Facts]) -> None:
        """From now on `facts` says what else is known; it is called from another thread."""
        self._facts = facts

    def start(self, run: dict[str, Any]) -> None:
        """The run begins; `run` is what run.json holds."""
        self._about, self._began = run, time.monotonic()
        self._status.total_steps = int(run["spec"]["total_steps"])
        self._thread = threading.Thread(target=self._keep_writing, name="report", daemon=True)
        self._thread.start()

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""
        self._note("step", record)

    def evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation is done."""
        self._note("evaluation", record)

    def rewind(self, step: int) -> None:
        """Steps after this one will be taken again, after a fault."""
        self._note("rewind", step)

    def finish(self, error: str | None) -> None:
        """The run is over; `error` says why where it failed."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.warning("%s could not be finished within %g s", self._dir / REPORT, _CLOSE_S)
            return
        stopped = self._facts().stopped
        if stopped is not None or error is None:
            self._status.state, self._status.reason = ("stopped", stopped) if stopped else ("finished", None)
        else:
            self._status.state = "interrupted" if error == "interrupted" else "failed"
            self._status.reason = None if error == "interrupted" else error
        self._write(live=False)

    def _note(self, kind: str, what: Any) -> None:
        with self._lock:
            self._new.append((kind, what))

    def _keep_writing(self) -> None:
        rest = 0.0
        while not self._over.wait(rest):
            before = time.thread_time()
            self._write(live=True)
            took = time.thread_time() - before
            self.drawing_s += took
            rest = max(self._every_s, _REST * took)

    def _write(self, *, live: bool) -> None:
        try:
            self._take_in()
            facts, status = self._facts(), self._status
            status.devices = [list(device) for device in facts.devices]
            status.stages, status.memory_bytes = facts.stages, facts.memory_bytes
            status.seconds = time.monotonic() - self._began
            if not live and facts.timeline_svg is not None and not (self._dir / TIMELINE).exists():
                write_atomically(self._dir / TIMELINE, facts.timeline_svg)
            write_atomically(self._dir / STATUS, json.dumps(dataclasses.asdict(status), indent=1))
            content = run_page(self._dir, self._about, status, self._curves, timeline_svg=facts.timeline_svg, live=live)
            write_atomically(self._dir / REPORT, content)
        except Exception as exc:  # a page is never worth a run
            if not self._warned:
                log.warning("%s cannot be written: %s", self._dir / REPORT, exc or type(exc).__name__)
            self._warned = True

    def _take_in(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for kind, what in new:
            if kind == "step":
                self._records.append(what)
                self._curves.add(what)
            elif kind == "evaluation":
                self._evaluations.append(what)
                self._curves.evaluation(what)
            else:
                self._go_back(what)

    def _go_back(self, step: int) -> None:
        if self._records:
            self._status.rewinds.append([int(self._records[-1]["step"]), step])
        self._records = [record for record in self._records if record["step"] <= step]
        self._evaluations = [record for record in self._evaluations if record["step"] <= step]
        self._curves = Curves(self._records, self._evaluations)


def rebuild(folder: Path) -> Path:
    """Makes the page of a run or of a sweep again from what is in its folder.

    Returns:
        The page.

    Raises:
        ConfigError: it is no such folder, or cannot be written.
    """
    from hetero import sweep

    try:
        if (folder / RUN).is_file():
            run = read_run(folder)
            timeline = folder / TIMELINE
            svg = timeline.read_text(encoding="utf-8") if timeline.is_file() else None
            if run.status.state == "running":  # whoever says so does not run any more, or writes its page itself
                run.status.state = "unknown"
            run.status.total_steps = run.status.total_steps or int(run.about["spec"]["total_steps"])
            curves = Curves(run.records, run.evaluations)
            if not run.records:
                log.warning("%s holds no step: there are no curves", folder / METRICS)
            page = run_page(folder, run.about, run.status, curves, timeline_svg=svg)
            write_atomically(folder / REPORT, page)
            return folder / REPORT
        if sweep.is_sweep(folder):
            return sweep.write_page(folder)
    except OSError as exc:
        raise ConfigError(f"the folder {folder} must be readable and writable: {exc}") from exc
    except (KeyError, TypeError) as exc:
        raise ConfigError(f"{folder} must hold the files of one version of hetero: {exc!r}") from exc
    raise ConfigError(
        f"the folder must be a run's (with {RUN}) or a sweep's (with jobs' folders 0, 1, ...), got {folder}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.stderr.write("usage: python -m hetero.report RUN_OR_SWEEP_FOLDER\n")
        return 0 if list(argv) in (["-h"], ["--help"]) else 2
    logging.basicConfig(format="%(message)s")
    try:
        sys.stdout.write(f"{rebuild(Path(argv[0]).expanduser()).absolute()}\n")
    except HeteroError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

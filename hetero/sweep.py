"""A sweep's result: sweep.html in its folder and a table in the terminal, a row for each job."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import rich
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hetero.charts import Line, bar, line_chart, show
from hetero.curves import RECENT, Curves
from hetero.errors import ConfigError
from hetero.folders import read_object
from hetero.hiding import without_secrets
from hetero.page import page, text
from hetero.run_files import JOB, REPORT, RUN, read_run, write_atomically
from hetero.run_page import REFRESH_S, STYLE, duration
from hetero.series import Series

log = logging.getLogger(__name__)

PAGE = "sweep.html"
RULE = (
    "Sorted by step time, fastest first: the median of a job's last steps without its first. ★ is the fastest job that "
    "finished. Idle: the share of a job's time in which a stage does not compute, mean of its stages."
)
INTERRUPTED = 130
_STYLE = """.jobs td { min-width: 3em; }
.jobs td:last-child { min-width: 13em; overflow-wrap: anywhere; }
"""  # a reason needs the room that numbers leave
_MAX_CURVES = 16  # in the chart of losses: the fastest ones


@dataclass
class Job:
    """A job of a sweep; figures are None where it took no step.

    Attributes:
        number: its folder's name.
        overrides: key -> value, of the command line.
        state: finished, stopped, interrupted, failed, running.
        reason: why it failed, in one line.
        busy: share of the time in which each stage computed, by its name.
    """

    folder: Path
    number: str
    overrides: dict[str, str]
    state: str
    reason: str = ""
    curves: Curves | None = None
    busy: dict[str, float] = field(default_factory=dict)

    @property
    def step_time_s(self) -> float | None:
        """Median of the last steps."""
        return self.curves.step_time_s if self.curves else None

    @property
    def final_loss(self) -> float | None:
        """Of the last step."""
        return float(self.curves.last["loss"]) if self.curves and self.curves.last else None

    @property
    def recent_loss(self) -> float | None:
        """Mean of the last steps."""
        return self.curves.recent_loss if self.curves else None

    @property
    def idle(self) -> float | None:
        """Mean of the stages' shares of time without computing."""
        return 1 - statistics.fmean(self.busy.values()) if self.busy else None


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds jobs of a sweep."""
    return bool(_job_folders(folder))


def read_jobs(folder: Path) -> list[Job]:
    """The jobs of a sweep as they stand in its table: fastest first, those without a figure next, failed ones last.

    A folder that cannot be read is a failed job, with the reason.
    """
    jobs = []
    for found in _job_folders(folder):
        try:
            jobs.append(_read_job(found))
        except (ConfigError, OSError, KeyError, TypeError, ValueError) as exc:
            jobs.append(Job(found, found.name, {}, "failed", f"its files cannot be read: {exc}"))
    return sorted(jobs, key=_place)


def best_of(jobs: Sequence[Job]) -> Job | None:
    """The fastest job that finished."""
    finished = [job for job in jobs if job.state == "finished" and job.step_time_s is not None]
    return min(finished, key=lambda job: job.step_time_s or 0.0, default=None)


def varied(jobs: Sequence[Job]) -> tuple[list[str], dict[str, str]]:
    """Keys in which the jobs differ, in the order given, and what all of them have."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    same = {key: jobs[0].overrides.get(key, "") for key in keys if len({j.overrides.get(key) for j in jobs}) == 1}
    return [key for key in keys if key not in same], same


def write_page(folder: Path, *, live: bool = False) -> Path:
    """Writes a sweep's page.

    Args:
        folder: of the sweep.
        live: more jobs are to come, so the page is read again every few seconds.

    Returns:
        The page.
    """
    write_atomically(folder / PAGE, sweep_page(folder, read_jobs(folder), live=live))
    return folder / PAGE


def sweep_page(folder: Path, jobs: Sequence[Job], *, live: bool = False) -> str:
    """The page's HTML; its links lead to the jobs' own pages."""
    keys, same = varied(jobs)
    best, slowest = best_of(jobs), max((job.step_time_s or 0.0 for job in jobs), default=0.0)
    lowest = _lowest(jobs)
    head = [
        "job",
        *keys,
        "step time",
        "tokens/s",
        "final loss",
        f"mean of last {_num_recent(jobs)}",
        "computing",
        "idle",
        "status",
    ]
    rows = [_row(folder, job, keys, best is job, lowest is job, slowest) for job in jobs]
    failed = sum(job.state == "failed" for job in jobs)
    said = f"{len(jobs)} jobs" + (f", {failed} failed" if failed else "") + (", more to come" if live else "")
    parts = [f"<style>{STYLE}{_STYLE}</style>", f"<p>{said}. {text(RULE)}</p>"]
    if same:
        shown = ", ".join(f"{key}={without_secrets(value, key)}" for key, value in same.items())
        parts.append(f'<p class="faint">Of all jobs: <code>{text(shown)}</code></p>')
    cells = "".join(f"<th>{text(name)}</th>" for name in head)
    parts.append(f'<div class="wide"><table class="jobs"><tr>{cells}</tr>{"".join(rows)}</table></div>')
    drawn = [job for job in jobs if job.curves is not None][:_MAX_CURVES]
    if drawn:
        lines = [
            Line(f"job {job.number}", Series(_means(job.curves)), colour)
            for colour, job in enumerate(drawn)
            if job.curves is not None
        ]
        note = f" of the {_MAX_CURVES} fastest jobs" if len(drawn) < sum(j.curves is not None for j in jobs) else ""
        chart = line_chart(f"loss{note}", lines, log=None)
        parts.append(f'<h2>Losses</h2><div class="charts"><div class="card">{chart}</div></div>')
    return page(f"sweep {folder.name}", "\n".join(parts), refresh_s=REFRESH_S if live else None)


def _num_recent(jobs: Sequence[Job]) -> int:
    """Of how many steps the mean loss is; of fewer in jobs that are shorter."""
    return min(RECENT, max((job.curves.steps for job in jobs if job.curves), default=RECENT))


def table_of(jobs: Sequence[Job], *, narrow: bool = False) -> Table:
    """The same for a terminal; in a narrow one without the figures that only the page then has."""
    keys, _ = varied(jobs)
    best = best_of(jobs)
    table = Table(title="sweep: fastest step first, ★ the fastest job that finished", title_justify="left")
    table.add_column("job", no_wrap=True)
    for name in keys:
        table.add_column(name.rpartition(".")[2] if narrow else name, overflow="fold")
    names = ("step", "tokens/s", "loss", f"last {_num_recent(jobs)}", "computing", "idle")
    chosen = [index for index, name in enumerate(names) if not narrow or name in ("step", "loss", "idle")]
    for index in chosen:
        table.add_column(names[index], justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for job in jobs:
        figures = ["–"] * 6
        if job.curves is not None and job.step_time_s is not None:
            busy = " ".join(f"{share:.0%}" for share in job.busy.values())
            figures = [
                duration(job.step_time_s),
                _shown(job.curves.tokens_per_s),
                _shown(job.final_loss),
                _shown(job.recent_loss),
                busy,
                f"{job.idle or 0.0:.0%}",
            ]
        values = [escape(str(without_secrets(job.overrides.get(key, ""), key))) for key in keys]
        mark = " ★" if job is best else ""
        table.add_row(
            f"{job.number}{mark}",
            *values,
            *(figures[index] for index in chosen),
            job.state,
            style="bold" if mark else None,
        )
    return table


def show_table(folder: Path, jobs: Sequence[Job], console: Console) -> None:
    """Prints the table, why jobs failed, and where the page is."""
    if not console.is_terminal:  # a log has no width, and a folded row cannot be searched
        console = Console(file=console.file, width=200)
    table = table_of(jobs)
    if console.measure(table, options=console.options.update(max_width=10_000)).maximum > console.width:
        table = table_of(jobs, narrow=True)
    console.print(table)
    for job in jobs:
        if job.state == "failed":
            console.print(f"job {job.number} failed: {job.reason}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"sweep: {(folder / PAGE).absolute()}", markup=False, highlight=False, soft_wrap=True)


class SweepReport:
    """Hydra's callback: the page after each job, the table after the last; a fault of it never fails the sweep."""

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Nothing yet."""

    def on_job_start(self, config: Any, **kwargs: Any) -> None:
        """Nothing: a job's own page begins with its run."""

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        """The page with this job."""
        del job_return, kwargs
        if getattr(config.hydra.mode, "name", None) == "MULTIRUN":
            self._write(Path(str(config.hydra.sweep.dir)), live=True)

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        """The page and the table."""
        del kwargs
        close_sweep(Path(str(config.hydra.sweep.dir)))

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        """Nothing: this is no sweep."""

    def on_run_end(self, config: Any, **kwargs: Any) -> None:
        """Nothing: this is no sweep."""

    @staticmethod
    def _write(folder: Path, *, live: bool) -> None:
        try:
            if is_sweep(folder):
                write_page(folder, live=live)
        except Exception as exc:  # a page is never worth a sweep
            log.warning("%s cannot be written: %s", folder / PAGE, exc or type(exc).__name__)


def close_sweep(folder: Path) -> None:
    """The last page and the table of a sweep, however it ended; a fault is a warning."""
    try:
        if is_sweep(folder):
            jobs = read_jobs(folder)
            write_page(folder)
            show_table(folder, jobs, rich.get_console())
    except Exception as exc:  # a page is never worth a sweep
        log.warning("%s cannot be written: %s", folder / PAGE, exc or type(exc).__name__)


def note_job(folder: Path, number: int | None, overrides: Sequence[str], code: int | None, error: str | None) -> None:
    """Keeps in a job's folder what it was and how it ended, for the sweep's page; a fault is a warning.

    Args:
        folder: of the job.
        number: in the sweep.
        overrides: its part of the command line.
        code: its exit code; None while it runs.
        error: why it failed.
    """
    about = {"number": number, "overrides": list(overrides), "exit_code": code, "error": error}
    try:
        write_atomically(folder / JOB, json.dumps(about, indent=1, ensure_ascii=False))
    except OSError as exc:
        log.warning("%s cannot be written: %s", folder / JOB, exc)


def _job_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [inner for inner in folder.iterdir() if inner.is_dir() and (inner / JOB).is_file()]
    return sorted(found, key=lambda inner: (len(inner.name), inner.name))


def _read_job(folder: Path) -> Job:
    noted = read_object(folder / JOB)
    overrides = dict(entry.lstrip("+~").partition("=")[::2] for entry in noted["overrides"])
    error, code = noted.get("error"), noted.get("exit_code")
    job = Job(folder, folder.name, overrides, "running")
    if code is not None:
        job.state = "interrupted" if code == INTERRUPTED else "failed" if error else "finished"
    job.reason = " ".join(str(error or "").split()) if job.state == "failed" else ""
    if (folder / RUN).is_file():
        run = read_run(folder)
        if job.state == "finished" and run.status.state in ("stopped", "interrupted"):
            job.state = run.status.state
        if run.records:
            job.curves = Curves(run.records, run.evaluations)
            last = len(run.records[-1]["stages"])
            stages = list(job.curves.stages.items())[-last:]
            job.busy = {f"{index} {name}": stage.busy_share for (index, name), stage in stages}
    return job


def _place(job: Job) -> tuple[int, float, int, str]:
    kind = 2 if job.state == "failed" else 1 if job.step_time_s is None else 0
    return kind, (job.step_time_s or 0.0) if kind == 0 else 0.0, len(job.number), job.number


def _lowest(jobs: Sequence[Job]) -> Job | None:
    """The job with the lowest loss, where there is a difference that is not rounding."""
    known = [(job.recent_loss, job) for job in jobs if job.recent_loss is not None and job.state == "finished"]
    if len(known) < 2 or max(loss for loss, _ in known) - min(loss for loss, _ in known) < 1e-3:
        return None
    return min(known, key=lambda pair: pair[0])[1]


def _means(curves: Curves | None) -> list[tuple[float, float]]:
    """The loss by its means: the ranges of many jobs would hide one another."""
    buckets = curves.of_step["loss"].buckets if curves else []
    return [((bucket.first + bucket.last) / 2, bucket.mean) for bucket in buckets]


def _row(folder: Path, job: Job, keys: Sequence[str], best: bool, lowest: bool, slowest: float) -> str:
    name = text(job.number)
    pages = [job.folder / REPORT, *sorted(job.folder.glob("*.log"))]  # a job that was refused has a log alone
    if (shown := next((file for file in pages if file.is_file()), None)) is not None:
        name = f'<a href="{text(quote(shown.relative_to(folder).as_posix()))}">{name}</a>'
    mark = ' <b class="good" title="the fastest job that finished">★</b>' if best else ""
    cells = [f'<td class="nowrap">{name}{mark}</td>']
    cells += [f"<td>{text(without_secrets(job.overrides.get(key, ''), key))}</td>" for key in keys]
    if job.curves is None or job.step_time_s is None:
        cells += ['<td class="faint">–</td>'] * 6
    else:
        shares = "".join(
            f'<div class="nowrap" title="stage {text(stage)}">{share:.0%}{bar(share, colour=i)}</div>'
            for i, (stage, share) in enumerate(job.busy.items())
        )
        length = bar(job.step_time_s / slowest if slowest else 0.0, title="beside the slowest job")
        cells += [
            f'<td class="nowrap">{duration(job.step_time_s)}{length}</td>',
            f"<td>{_shown(job.curves.tokens_per_s)}</td>",
            f"<td>{_shown(job.final_loss)}</td>",
            f"<td>{_shown(job.recent_loss)}{' <b class=good>lowest</b>' if lowest else ''}</td>",
            f"<td>{shares}</td>",
            f"<td>{job.idle or 0.0:.0%}</td>",
        ]
    colour: Mapping[str, str] = {"finished": "good", "failed": "bad"}
    reason = f"<br>{text(job.reason)}" if job.reason else ""
    cells.append(f'<td><b class="{colour.get(job.state, "warn")}">{text(job.state)}</b>{reason}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _shown(value: float | None) -> str:
    return "–" if value is None else show(value)

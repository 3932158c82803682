"""The picture of a run in a terminal: how far it is, what it learns, and what each stage does.

training ━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━  75/150  0:13 left
loss 2.1043 ▇▇▆▅▄▃▃▂▂▂▁▁▁  lr 2.1e-03  grad norm 0.84  5,312 tokens/s
0 local ━━━━━━━━━━━━━━━━━━━━━━  83 % busy  12 % waits  1.2 MB/s out  0.5 of 16.8 GB
1 pc    ━━━━━━━━━━━━━━━━╸━━━━━  71 % busy  25 % waits  1.2 MB/s out  0.6 of 25.8 GB
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

WIDEST = 110
WIDE = 84  # columns from which on there is room for words
RECENT_STEPS = 20  # that rates are means over
TREND_CHARS = 16

_LEVELS = "▁▂▃▄▅▆▇█"
_TURNING, _TURNING_ASCII = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "-\\|/"


class Picture:
    """What is known of a run, and how it looks now; one thread may tell while another one draws.

    Args:
        clock: seconds, of any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._words, self._since = "starting", clock()
        self._total = 0
        self._memory: Mapping[str, int | None] = {}
        self._losses: list[tuple[int, float]] = []
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._evaluation: dict[str, Any] | None = None
        self.is_over = False

    def expect(self, total_steps: int, memory: Mapping[str, int | None]) -> None:
        """The run's length, and what memory the device of each stage id has, where that is known."""
        with self._lock:
            self._total, self._memory = total_steps, memory

    def doing(self, words: str) -> None:
        """What the run is busy with from now on."""
        with self._lock:
            if words != self._words:
                self._words, self._since = words, self._clock()

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""
        with self._lock:
            self._losses.append((record["step"], record["loss"]))
            self._recent.append(record)

    def rewind(self, step: int) -> None:
        """Steps after this one will be taken again."""
        with self._lock:
            self._losses = [(number, loss) for number, loss in self._losses if number <= step]
            self._recent.clear()

    def evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation is done."""
        with self._lock:
            self._evaluation = record

    def has_steps(self) -> bool:
        """Whether there is more to see than words."""
        return bool(self._losses)

    def left_s(self) -> float | None:
        """Seconds that the steps that are left will take, by the latest; None where none is known."""
        with self._lock:
            return self._left_s()

    def _left_s(self) -> float | None:
        if not self._recent:
            return None
        a_step = sum(record["step_time_s"] for record in self._recent) / len(self._recent)
        return float(a_step * max(0, self._total - self._recent[-1]["step"]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        plain = options.ascii_only or options.legacy_windows
        with self._lock:
            rows: list[RenderableType] = [self._progress(width, plain)]
            if self._losses:
                rows.append(self._learning(width, plain))
            if self._recent and not self.is_over:
                rows.append(_stages(list(self._recent), self._memory, width, plain))
        if not self.is_over:
            rows.append(Text())  # the cursor's: whoever ends the process here leaves a clean line
        yield from rows

    def _progress(self, width: int, plain: bool) -> RenderableType:
        step = self._losses[-1][0] if self._losses else 0
        count = f"{step:,}/{self._total:,}" if self._total else ""
        row = Table.grid(padding=(0, 1))
        row.width = width
        row.add_column(no_wrap=True, overflow=_overflow(plain))
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        row.add_column(no_wrap=True, justify="right")
        if self._words == "training" or self.is_over:
            left = self._left_s()
            time_left = "" if left is None or self.is_over else f"{show_time(left)} left"
            words = self._words if not self.is_over else "done" if step == self._total else "ended"
            row.add_row(words, ProgressBar(total=max(1, self._total), completed=step), count, time_left)
            return row
        turning = _TURNING_ASCII if plain else _TURNING
        gone = self._clock() - self._since
        sign = turning[int(gone * 4) % len(turning)]
        row.add_row(f"{sign} {self._words}", "", count if step else "", show_time(gone))
        return row

    def _learning(self, width: int, plain: bool) -> RenderableType:
        _, loss = self._losses[-1]
        bars = "" if plain else f" {trend([loss for _, loss in self._losses])}"
        parts = [f"loss {loss:.4f}"]
        if self._evaluation is not None:
            found = self._evaluation["eval_loss"]
            parts.append("eval loss not finite" if found is None else f"eval loss {found:.4f}")
        if self._recent:
            last, records = self._recent[-1], list(self._recent)
            if width >= WIDE:
                parts += [f"lr {last['lr']:.2g}", f"grad norm {last['grad_norm']:.3g}"]
            tokens, seconds = (sum(record[key] for record in records) for key in ("tokens", "step_time_s"))
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        if len("  ".join(parts)) + len(bars) <= width:  # figures go first
            parts[0] += bars
        return Text("  ".join(parts), no_wrap=True, overflow=_overflow(plain))


def _stages(
    records: Sequence[dict[str, Any]], memory: Mapping[str, int | None], width: int, plain: bool
) -> RenderableType:
    """A row for each stage of the latest plan, by the steps that were taken on it."""
    ids = [stage["id"] for stage in records[-1]["stages"]]
    same = [record for record in records if [stage["id"] for stage in record["stages"]] == ids]
    seconds = sum(record["step_time_s"] for record in same)
    rows = Table.grid(padding=(0, 1))
    rows.width = width
    rows.add_column(no_wrap=True, overflow=_overflow(plain), max_width=20 if width >= WIDE else 12)
    rows.add_column(ratio=1)
    for _ in range(4):
        rows.add_column(no_wrap=True, justify="right")
    for index, name in enumerate(ids):
        mine = [record["stages"][index] for record in same]
        busy, waits, sent = (sum(stage[key] for stage in mine) for key in ("busy_s", "wait_s", "bytes_sent"))
        cells = _cells(busy / seconds, waits / seconds, sent / seconds, mine[-1]["memory_bytes"], memory.get(name))
        bar = ProgressBar(total=1.0, completed=busy / seconds, complete_style="cyan", finished_style="cyan")
        shown = name.encode("ascii", "replace").decode() if plain else name
        rows.add_row(Text(f"{index} {shown}"), bar, *(cells if width >= WIDE else _short(cells)))
    return rows


def _overflow(plain: bool) -> Literal["crop", "ellipsis"]:
    return "crop" if plain else "ellipsis"  # whose sign is no ASCII


def _cells(busy: float, waits: float, rate: float, memory: int, has: int | None) -> list[str]:
    held = f"{memory / 1e9:.1f} GB" if has is None else f"{memory / 1e9:.1f} of {has / 1e9:.1f} GB"
    return [f"{busy:.0%} busy", f"{waits:.0%} waits", f"{show_bytes(rate)}/s out" if rate else "", held]


def _short(cells: Sequence[str]) -> list[str]:
    """The same without words, and without the waiting, for a narrow terminal."""
    busy, _, rate, held = cells
    return [busy.removesuffix(" busy"), "", rate.removesuffix(" out"), held.replace(" of ", "/")]


def trend(losses: Sequence[float]) -> str:
    """A line of bars from the first loss to the last, each the mean of as many steps as the others."""
    a_bar = -(-len(losses) // TREND_CHARS)
    means = [sum(part) / len(part) for part in _parts(losses, a_bar)]
    low, high = min(means), max(means)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((mean - low) * scale)] for mean in means)


def _parts(values: Sequence[float], size: int) -> Iterator[Sequence[float]]:
    yield from (values[start : start + size] for start in range(0, len(values), size))


def show_time(seconds: float) -> str:
    """As `0:13`, `1:02:03`, `2 d 03:04`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def show_bytes(number: float) -> str:
    """As `12 kB`, `1.2 MB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}" if number < 10 * size else f"{number / size:.0f} {unit}"
    return f"{number:.0f} B"

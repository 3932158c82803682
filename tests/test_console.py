"""What a person sees of a run: on a screen as a terminal makes it of the bytes, and as lines where there is none."""

from __future__ import annotations

import io
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rich
from rich.cells import cell_len
from rich.console import Console
from screen import Screen

from hetero.console import ConsoleHandler, RunDisplay
from hetero.download import _Shown
from hetero.live import Picture, show_bytes, show_time, trend

NAMES = ["local", "pc", "机器", "a very long name of a machine", "mac", "w5", "w6", "w7"]


def record(step: int, stages: int = 2, loss: float = 2.5) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 1000,
        "tokens_per_s": 2000.0,
        "step_time_s": 0.5,
        "stages": [
            {"id": name, "busy_s": 0.4, "wait_s": 0.05, "bytes_sent": 600_000, "memory_bytes": 512_000_000}
            for name in NAMES[:stages]
        ],
    }


def drawn(picture: Picture, width: int = 100, **options: Any) -> list[str]:
    """The lines of a picture on a console without colours."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None, _environ={}, **options)
    console.print(picture)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def picture(stages: int = 2, steps: int = 10) -> Picture:
    made = Picture(clock=lambda: 0.0)
    made.expect(100, {"local": 16_800_000_000, "pc": None})
    made.doing("training")
    for step in range(1, steps + 1):
        made.step(record(step, stages, loss=5.0 - step / 10))
    return made


def test_run_is_shown_with_rates_of_its_stages_and_what_is_left() -> None:
    progress, learning, first, second, cursor = drawn(picture())
    assert progress.startswith("training ") and progress.endswith(" 10/100 0:45 left")  # 90 steps of half a second
    assert learning.startswith("loss 4.0000 ") and learning.endswith("lr 0.001  grad norm 0.5  2,000 tokens/s")
    assert first.startswith("0 local ") and first.endswith(" 80% busy 10% waits 1.2 MB/s out 0.5 of 16.8 GB")
    assert second.startswith("1 pc ") and second.endswith("1.2 MB/s out         0.5 GB")
    assert cursor == ""


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("stages", [1, 8])
def test_picture_fits_every_terminal_with_a_line_for_each_stage(width: int, stages: int) -> None:
    lines = drawn(picture(stages), width)
    assert len(lines) == 2 + stages + 1
    assert max(cell_len(line) for line in lines) <= width
    assert all(f"{index} {NAMES[index][:2]}" in lines[2 + index] for index in range(stages))
    if width >= 60:
        assert "10/100 0:45 left" in lines[0] and "tokens/s" in lines[1] and all("80%" in line for line in lines[2:-1])


def test_words_are_shown_while_there_are_no_steps() -> None:
    now = [0.0]
    made = Picture(clock=lambda: now[0])
    assert "starting" in drawn(made)[0]
    made.doing("joining the workers")
    now[0] = 75.0
    line, cursor = drawn(made, 60)
    assert "joining the workers" in line and line.endswith("1:15") and cursor == ""


def test_evaluation_is_shown_in_words_and_by_its_loss_whatever_that_is() -> None:
    made = picture()
    made.doing("evaluating")
    assert drawn(made)[0].startswith("⠋ evaluating ") and drawn(made)[0].endswith(" 10/100 0:00")
    for loss, shown in ((2.5, "2.5000"), (None, "not finite")):
        made.evaluation({"step": 10, "eval_loss": loss, "perplexity": None, "tokens": 5})
        learning = [f"loss 4.0000 {trend([5.0 - step / 10 for step in range(1, 11)])}", f"eval loss {shown}"]
        assert drawn(made)[1].startswith("  ".join(learning))
        assert drawn(made, 50)[1] == f"loss 4.0000  eval loss {shown}  2,000 tokens/s"


def test_after_a_fault_only_what_counts_is_shown() -> None:
    made = picture()
    made.rewind(4)
    made.doing("waiting for a lost machine")
    lines = drawn(made)
    assert "waiting for a lost machine" in lines[0] and " 4/100 " in lines[0]
    assert lines[1].startswith("loss 4.6000") and len(lines) == 3


def test_stages_of_another_plan_are_shown_alone() -> None:
    made = picture(3)
    made.step(record(11, 2))
    assert [line[:3] for line in drawn(made)[2:-1]] == ["0 l", "1 p"]


def test_terminal_without_unicode_gets_ascii_alone() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=60, force_terminal=True, _environ={})
    made = picture(4)
    console.print(made)
    made.doing("saving")
    console.print(made)  # it would raise UnicodeEncodeError


def test_trend_goes_from_the_first_loss_to_the_last() -> None:
    assert trend([1.0]) == "▁" and trend([2.0, 2.0]) == "▁▁"
    assert trend([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == "█▇▆▅▄▃▂▁"
    assert len(trend([float(i) for i in range(1000)])) <= 16
    assert trend([0.0, 4.0] * 8 + [9.0, 11.0] * 8) == "▁" * 8 + "█" * 8  # means of two


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.9, "0:59"), (3661, "1:01:01"), (90061, "1 d 01:01")])
def test_times_are_shown_in_the_largest_units_that_they_need(seconds: float, shown: str) -> None:
    assert show_time(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0 B"), (999, "999 B"), (1200, "1.2 kB"), (12e6, "12 MB"), (1.25e9, "1.2 GB")]
)
def test_bytes_are_shown_in_decimal_units(number: float, shown: str) -> None:
    assert show_bytes(number) == shown


Terminal = Callable[..., io.StringIO]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Lends the console that everything here prints to, as a terminal of a kind."""
    root = logging.getLogger("hetero")
    handler, level = ConsoleHandler(), root.level

    def make(**environ: str) -> io.StringIO:
        file = io.StringIO()
        console = Console(file=file, width=60, height=24, force_terminal=True, _environ=environ)
        monkeypatch.setattr(rich, "get_console", lambda: console)
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        return file

    yield make
    root.removeHandler(handler)
    root.setLevel(level)


def on_screen(file: io.StringIO) -> list[str]:
    screen = Screen(60)
    screen.feed(file.getvalue())
    assert screen.cursor
    return screen.shown()


LONG = "a long line " * 12


def a_run(display: RunDisplay, steps: int = 5) -> None:
    """A run with lines in between, some from another thread, and a download as it goes on within one."""
    log = logging.getLogger("hetero.test")
    log.info("the first line")
    display.doing("loading")
    display.expect(5, {})
    with _Shown(10_000, 0, lambda: None) as download:
        download.arrived(10_000)
    display.doing("training")
    for step in range(1, steps + 1):
        display.step(record(step))
        log.info("after step %d", step)
    thread = threading.Thread(target=log.warning, args=(LONG,))
    thread.start()
    thread.join()


def test_lines_are_above_the_view_and_nothing_is_garbled(terminal: Terminal) -> None:
    file = terminal(TERM="xterm")
    with RunDisplay() as display:
        a_run(display)
        within = on_screen(file)
    lines = [line for line in on_screen(file) if line]
    first, rest = lines[0], lines[1:]
    assert first == "the first line"
    assert rest[0].startswith("downloading ") and "10.0/10.0 kB" in rest[0]
    assert rest[1:6] == [f"after step {step}" for step in range(1, 6)]
    said = f"warning: {LONG}".rstrip()
    assert "".join(line.ljust(60) for line in rest[6:9]).rstrip() == said  # as the terminal wraps it
    progress, learning = rest[9:]
    assert progress.startswith("done ") and progress.endswith(" 5/5") and learning.startswith("loss 2.5000")
    assert within[-1] == "" and "1 pc" in within[-2] and "0 local" in within[-3]
    assert not any("step 1/5" in line for line in within)  # the view shows it


def test_run_that_fails_before_its_first_step_leaves_its_lines_alone(terminal: Terminal) -> None:
    file = terminal(TERM="xterm")
    with RunDisplay() as display:
        display.doing("loading")
        logging.getLogger("hetero.test").info("a line")
    assert [line for line in on_screen(file) if line] == ["a line"]


def test_colours_are_off_where_nobody_wants_them(terminal: Terminal) -> None:
    file = terminal(TERM="xterm-256color", NO_COLOR="1")
    with RunDisplay() as display:
        a_run(display)
    codes = set(re.findall(r"\x1b\[([\d;]*)m", file.getvalue()))
    assert not any(part in range(30, 50) for code in codes for part in map(int, filter(None, code.split(";"))))


def test_dumb_terminal_gets_lines(terminal: Terminal) -> None:
    file = terminal(TERM="dumb")
    with RunDisplay() as display:
        a_run(display, steps=2)
    text = file.getvalue()
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert "step 1/5 loss 2.5000 lr 0.001 grad_norm 0.5 tokens/s 2000 left 0:02" in lines
    assert "step 2/5 loss 2.5000 lr 0.001 grad_norm 0.5 tokens/s 2000 left 0:01" in lines

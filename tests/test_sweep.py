"""A sweep's page and table: fastest first, failed jobs last with their reason, whatever became of a job."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import run_here
from rich.console import Console
from test_report import ABOUT, Tags, record

from hetero import report, summary, sweep
from hetero.sweep import best_of, note_job, read_jobs, sweep_page


def job(folder: Path, number: int, *overrides: str, times: tuple[float, ...] = (), **noted: Any) -> Path:
    """A job's folder, with a step for each time."""
    own = folder / str(number)
    own.mkdir(parents=True)
    note_job(own, number, overrides, noted.get("code", 0), noted.get("error"))
    if times:
        (own / "run.json").write_text(json.dumps(ABOUT), encoding="utf-8")
        lines = [record(step, loss=noted.get("loss", 2.0)) | {"step_time_s": t} for step, t in enumerate(times, 1)]
        (own / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return own


def rows(page: str) -> list[str]:
    """A line of text for each row of the table."""
    table = re.search(r"<table class=\"jobs\">(.*?)</table>", page, re.DOTALL)
    assert table
    return [" ".join(re.sub(r"<title>.*?</title>|<[^>]*>", " ", row).split()) for row in table[1].split("<tr>")[1:]]


def test_jobs_stand_by_step_time_and_failed_ones_last_with_their_reason(tmp_path: Path) -> None:
    job(tmp_path, 0, "a=1", "seed=1", times=(9.0, 0.5, 0.5, 0.6))  # the first step warms up
    job(tmp_path, 1, "a=2", "seed=1", code=2, error="a must be 1,\ngot <2>")
    job(tmp_path, 2, "a=[3,4]", "seed=1", times=(0.1, 0.2, 0.2))
    job(tmp_path, 10, "a=5", "seed=1", times=(0.1, 0.1), code=1, error="stage 1 is gone")
    jobs = read_jobs(tmp_path)
    assert [j.number for j in jobs] == ["2", "0", "1", "10"]
    assert [j.state for j in jobs] == ["finished", "finished", "failed", "failed"]
    assert best_of(jobs) is jobs[0] and jobs[0].step_time_s == 0.2 and jobs[1].step_time_s == 0.5
    page = sweep_page(tmp_path, jobs)
    table = rows(page)
    assert table[0].startswith("job a step time tokens/s")  # not the seed, which all have
    assert table[1].startswith("2 ★ [3,4] 200 ms") and "seed=1" in page
    assert table[-2].endswith("failed a must be 1, got &lt;2&gt;") and "★" not in "".join(table[2:])
    assert table[-1].endswith("failed stage 1 is gone")
    assert Tags(page).open == []


@pytest.mark.parametrize(
    ("width", "key"), [(60, "split_points"), (80, "split_points"), (110, "shard_plan.split_points")]
)
def test_table_of_a_narrow_terminal_keeps_what_tells_the_jobs_apart(tmp_path: Path, width: int, key: str) -> None:
    job(tmp_path, 0, "shard_plan.split_points=[1]", times=(1.0, 0.25))
    job(tmp_path, 1, "shard_plan.split_points=[3]", code=2, error="no")
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    sweep.show_table(tmp_path, read_jobs(tmp_path), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in shown.splitlines()]
    head = next(line for line in lines if line[0] == "job")
    assert head[:3] == ["job", key, "step"] and head[-1] == "status"
    assert ["0 ★", "[1]", "250 ms"] in [line[:3] for line in lines]
    assert ["1", "[3]", "failed"] in [[*line[:2], line[-1]] for line in lines]


def test_idle_share_is_what_the_stages_did_not_compute(tmp_path: Path) -> None:
    job(tmp_path, 0, times=(1.0, 1.0))  # busy 0.4 and 0.6 of each second
    (only,) = read_jobs(tmp_path)
    assert list(only.busy.values()) == pytest.approx([0.4, 0.6]) and only.idle == pytest.approx(0.5)


def test_lowest_loss_is_marked_where_losses_differ(tmp_path: Path) -> None:
    job(tmp_path, 0, "lr=1", times=(1.0, 1.0), loss=2.0)
    job(tmp_path, 1, "lr=2", times=(2.0, 2.0), loss=1.5)
    assert ["lowest" in row for row in rows(sweep_page(tmp_path, read_jobs(tmp_path)))[1:]] == [False, True]
    (tmp_path / "same").mkdir()
    for number in (0, 1):
        job(tmp_path / "same", number, times=(1.0, 1.0))
    assert "lowest" not in "".join(rows(sweep_page(tmp_path / "same", read_jobs(tmp_path / "same"))))


def test_job_whose_files_are_damaged_is_a_row_with_the_reason(tmp_path: Path) -> None:
    job(tmp_path, 0, times=(1.0, 1.0))
    (job(tmp_path, 1, times=(1.0, 1.0)) / "run.json").write_text("{", encoding="utf-8")
    jobs = read_jobs(tmp_path)
    assert [j.state for j in jobs] == ["finished", "failed"] and "must be a readable JSON file" in jobs[1].reason


def test_secrets_of_the_command_line_stay_away(tmp_path: Path) -> None:
    job(tmp_path, 0, "+logger.own.api_key=s3cr3t", "a=1")
    job(tmp_path, 1, "+logger.own.api_key=s3cr3t2", "a=1")
    assert "s3cr3t" not in sweep_page(tmp_path, read_jobs(tmp_path))


def test_page_is_made_again_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, 0, times=(1.0, 1.0))
    assert report.main([str(tmp_path)]) == 0 and capsys.readouterr().out.strip() == str(tmp_path / "sweep.html")
    assert (tmp_path / "sweep.html").is_file()


@pytest.fixture
def args(tmp_path: Path, rows_file: Path) -> list[str]:
    data = ["data=jsonl", f"data.path={rows_file}", "shard_plan=single", "loop.batch_size=4", "checkpoint=none"]
    return ["-m", *data, "logger=jsonl", "loop.steps=2", "optimizer=sgd", f"outputs={tmp_path}"]


def test_sweep_with_failing_jobs_ends_with_page_and_table(tmp_path: Path, args: list[str]) -> None:
    """Case H02: a job that is refused and one that fails in its steps, between good ones."""
    outcome = run_here("train", *args, "lr_schedule=constant", "optimizer.lr=1e30,-1,1e-2")
    assert outcome.code == 1, outcome.text
    (page_file,) = tmp_path.glob("multirun/*/*/sweep.html")
    page = page_file.read_text(encoding="utf-8")
    table = rows(page)
    assert table[0].startswith("job optimizer.lr step time")
    assert table[1].startswith("2 ★ 0.01") and table[1].endswith("finished")
    assert re.search(r"^0 1e\+?30 .* failed .*not finite in step", table[2])
    assert re.search(r"^1 -1 .* failed optimizer\.lr must be ", table[3])
    assert 'http-equiv="refresh"' not in page
    links = re.findall(r'href="([^"]*)"', page)
    assert sorted(links) == ["0/report.html", "1/train.log", "2/report.html"]
    assert all((page_file.parent / link).is_file() for link in links)
    assert "job 1 failed: optimizer.lr must be" in outcome.text and str(page_file) in outcome.text
    assert re.search(r"2 ★ *│ 0.01", outcome.text)


def test_defect_in_a_job_does_not_end_the_sweep(
    tmp_path: Path, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def log_summary(result: Any) -> None:
        calls.append(result)
        if len(calls) == 1:
            raise RuntimeError("a defect")

    monkeypatch.setattr(summary, "log_summary", log_summary)
    outcome = run_here("train", *args, "loop.steps=1", "seed=1,2")
    assert outcome.code == 1 and len(calls) == 2, outcome.text
    (page,) = tmp_path.glob("multirun/*/*/sweep.html")
    assert rows(page.read_text(encoding="utf-8"))[-1].endswith("failed RuntimeError: a defect")


def test_page_that_cannot_be_made_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job(tmp_path, 0, times=(1.0, 1.0))
    monkeypatch.setattr(sweep, "sweep_page", lambda *_, **__: 1 / 0)
    sweep.close_sweep(tmp_path)
    assert "sweep.html cannot be written: division by zero" in caplog.text


def test_sweep_of_drawings_or_dry_runs_has_no_page(tmp_path: Path) -> None:
    assert run_here("visualize", "-m", f"outputs={tmp_path}", "shard_plan=single").code == 0
    assert not list(tmp_path.rglob("sweep.html")) and not list(tmp_path.rglob("job.json"))

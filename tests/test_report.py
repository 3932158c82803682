"""A run's page: live while it goes on, final after its end, small however long, and never in the run's way."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from peers import wait_until
from processes import run_here, train_here

from hetero import report
from hetero.errors import ConfigError
from hetero.report import Facts, ReportWriter, rebuild
from hetero.run_page import flat

ABOUT: dict[str, Any] = {
    "run_id": "r1",
    "run_name": "<b>mine & yours",
    "digest": "d1",
    "spec": {
        "total_steps": 8,
        "model": {"path": "tiny"},
        "loop": {"max_grad_norm": 1.0},
        "stages": [{"id": "local", "start": 0, "end": 2}, {"id": "<mps>", "start": 2, "end": 6}],
        "workers": [{"id": "<mps>", "host": "::1", "port": 5000}],
    },
    "config": {"seed": 7, "logger": {"own": {"api_key": "s3cr3t", "url": "https://me:s3cr3t@host/x"}}},
    "versions": {"torch": "2.0"},
    "resumed": None,
}


def record(step: int, loss: float | None = None) -> dict[str, Any]:
    stages = [
        {"id": name, "busy_s": 0.4 + 0.2 * i, "wait_s": 0.1, "bytes_sent": 2048, "memory_bytes": 1 << 30}
        for i, name in enumerate(("local", "<mps>"))
    ]
    return {
        "step": step,
        "loss": 3.0 + 1 / step if loss is None else loss,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 100,
        "rows": [1],
        "step_time_s": 1.0,
        "tokens_per_s": 100.0,
        "stages": stages,
    }


def charts(page: str) -> dict[str, str]:
    """Title -> what a chart says on hover; each is well-formed."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)]
    return {
        svg.attrib["aria-label"]: "\n".join(e.text or "" for e in svg.iter() if e.tag.endswith("}title"))
        for svg in found
    }


def steps_of(page: str, chart: str = "loss") -> list[int]:
    return [int(step.replace(",", "")) for step in re.findall(r"^step ([\d,]+)$", charts(page)[chart], re.MULTILINE)]


def written(folder: Path, *records: dict[str, Any], error: str | None = None, **about: Any) -> str:
    writer = ReportWriter(folder, every_s=60)
    writer.start(ABOUT | about)
    for entry in records:
        writer.step(entry)
    writer.finish(error)
    return (folder / "report.html").read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Checks that tags close in order, and keeps what could ask a network."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asks: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        self.asks += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.asks += [tag] if tag in ("script", "link", "iframe") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_read_again_while_the_run_goes_on_and_not_after_its_end(tmp_path: Path) -> None:
    writer, file = ReportWriter(tmp_path, every_s=0.01), tmp_path / "report.html"
    writer.start(ABOUT)
    for step in range(1, 4):
        writer.step(record(step))
        wait_until(lambda step=step: file.is_file() and steps_of(file.read_text("utf-8")) == list(range(1, step + 1)))
    page = file.read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' in page and ">running<" in page and "step 3 of 8" in page
    writer.step(record(4))
    writer.finish(None)
    page = file.read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' not in page and ">finished<" in page and steps_of(page) == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "status.json"]


def test_page_stands_alone_and_shows_names_literally(tmp_path: Path) -> None:
    page = written(tmp_path, record(1), record(2))
    tags = Tags(page)
    assert tags.open == [] and tags.asks == []
    assert "&lt;b&gt;mine &amp; yours" in page and "1 <b>&lt;mps&gt;</b>" in page and "[::1]:5000" in page
    assert "<mps>" not in page
    assert "computing, share of each step" in page and "1 <mps> 60.0%" in charts(page)["computing, share of each step"]


def test_failed_run_says_why(tmp_path: Path) -> None:
    page = written(tmp_path, record(1), error="stage 1 at box:9999 in step 2: <gone>")
    assert ">failed<" in page and "stage 1 at box:9999 in step 2: &lt;gone&gt;" in page
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == "stage 1 at box:9999 in step 2: <gone>"


def test_interrupted_and_stopped_runs_are_told_from_failed_ones(tmp_path: Path) -> None:
    assert ">interrupted<" in written(tmp_path, record(1), error="interrupted")
    writer = ReportWriter(tmp_path, every_s=60)
    writer.start(ABOUT)
    writer.follow(lambda: Facts(stopped="SIGINT"))
    writer.finish(None)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ">stopped<" in page and "(SIGINT), with a checkpoint" in page


def test_evaluation_alone_is_shown_by_its_loss_without_empty_curves(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").touch()
    for task, what in (("evaluate", "evaluation alone"), ("generate", "answers to prompts")):
        writer = ReportWriter(tmp_path, every_s=60)
        writer.start(ABOUT | {"config": {"task": task}})
        if task == "evaluate":
            writer.evaluation({"step": 0, "eval_loss": 2.5, "perplexity": 12.25, "tokens": 4321})
        writer.finish(None)
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert what in page and "step 0 of" not in page and charts(page) == {} and 'href="samples.jsonl"' in page
        figures = re.findall(r'tile-name">([^<]*)</span><b>([^<]*)<', page)[:-1]  # without the time
        evaluated = [("evaluation loss", "2.5"), ("perplexity", "12.25"), ("label tokens", "4,321")]
        assert figures == (evaluated if task == "evaluate" else [])


def test_step_that_is_taken_again_is_there_once_with_its_new_value(tmp_path: Path) -> None:
    writer = ReportWriter(tmp_path, every_s=60)
    writer.start(ABOUT)
    for step in (1, 2, 3, 4):
        writer.step(record(step, loss=9.0))
    writer.evaluation({"step": 4, "eval_loss": 8.5, "perplexity": None, "tokens": 10})
    writer.rewind(2)
    for step in (3, 4, 5):
        writer.step(record(step, loss=2.5))
    writer.evaluation({"step": 4, "eval_loss": 2.25, "perplexity": 9.49, "tokens": 10})
    writer.finish(None)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert steps_of(page) == [1, 2, 3, 4, 5]
    assert re.findall(r"training (\S+)", charts(page)["loss"]) == ["9", "9", "2.5", "2.5", "2.5"]
    assert re.findall(r"evaluation (\S+)", charts(page)["loss"]) == ["2.25"]
    assert "Went back from step 4 to step 2" in page


def test_many_steps_stay_small_with_the_highest_value_kept(tmp_path: Path) -> None:
    page = written(tmp_path, *(record(step, loss=40.0 if step == 5555 else 3.0) for step in range(1, 10_001)))
    assert len(page) < 300_000
    assert "to 40)" in charts(page)["loss"] and "step 10,000 of 8" in page
    covered = re.findall(r"^steps ([\d,]+) to ([\d,]+)$", charts(page)["loss"], re.MULTILINE)
    spans = [(int(a.replace(",", "")), int(b.replace(",", ""))) for a, b in covered]
    assert spans[0][0] == 1 and spans[-1][1] == 10_000
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(spans))


def test_settings_are_plain_and_secrets_stay_away(tmp_path: Path) -> None:
    page = written(tmp_path, record(1))
    assert "<td>seed</td><td>7</td>" in page
    assert "s3cr3t" not in page and page.count("(hidden)") == 2
    assert dict(flat({"a": {"hf_token": "x", "pad_tokens": 3}, "b": [{"c": 1}]})) == {
        "a.hf_token": "(hidden)",
        "a.pad_tokens": 3,
        "b[0].c": 1,
    }


def test_memory_stands_beside_that_of_the_device(tmp_path: Path) -> None:
    writer = ReportWriter(tmp_path, every_s=60)
    writer.start(ABOUT)
    writer.follow(lambda: Facts(devices=[("cpu", "float32"), ("cuda:0", "bfloat16")], memory_bytes=[4 << 30, None]))
    writer.step(record(1))
    writer.finish(None)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "1 GiB of 4 GiB" in page and "25.0%" in page and "cuda:0 bfloat16" in page


def test_pictures_beside_the_page_are_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "architecture.svg").write_text('<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg><g id="plan"/></svg>')
    writer = ReportWriter(tmp_path, every_s=60)
    writer.start(ABOUT)
    writer.follow(lambda: Facts(timeline_svg='<svg id="gantt"></svg>'))
    writer.finish(None)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<svg><g id="plan"/></svg>' in page and "DOCTYPE svg" not in page and '<svg id="gantt">' in page
    (tmp_path / "run.json").write_text(json.dumps(ABOUT))
    assert '<svg id="gantt">' in rebuild(tmp_path).read_text(encoding="utf-8")


def test_folder_that_goes_away_costs_the_page_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    writer = ReportWriter(run_dir, every_s=0.01)
    writer.start(ABOUT)
    wait_until((run_dir / "report.html").is_file)
    shutil.rmtree(run_dir, ignore_errors=True)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 30):
            writer.step(record(step))
        wait_until(lambda: "cannot be written" in caplog.text)
        writer.finish(None)
    assert caplog.text.count("cannot be written") == 1


def test_record_of_another_kind_costs_the_page_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = ReportWriter(tmp_path, every_s=60)
    writer.start(ABOUT)
    writer.step({"step": 1})
    writer.finish(None)
    assert "cannot be written" in caplog.text


def test_page_of_a_finished_run_is_made_again_from_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record(step) for step in range(1, 9)]
    (tmp_path / "run.json").write_text(json.dumps(ABOUT), encoding="utf-8")
    lines = "".join(json.dumps(entry) + "\n" for entry in [*records[:3], *records])  # a rewind that was cut off
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 9, "lo', encoding="utf-8")
    live = written(tmp_path, *records)
    (tmp_path / "report.html").unlink()
    assert report.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == live


def test_killed_run_has_a_page_that_claims_no_end(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(ABOUT), encoding="utf-8")
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "total_steps": 8}), encoding="utf-8")
    page = rebuild(tmp_path).read_text(encoding="utf-8")
    assert "No end was recorded" in page and 'http-equiv="refresh"' not in page and "no step yet" in page


def test_folder_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="must be a run's"):
        rebuild(tmp_path)
    assert report.main([str(tmp_path)]) == 2 and capsys.readouterr().err.startswith("error: the folder must be a run's")
    (tmp_path / "run.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        rebuild(tmp_path)
    assert report.main([]) == 2


def test_resumed_run_has_each_step_once_and_a_failed_one_its_reason(tmp_path: Path, rows_file: Path) -> None:
    data = ["data=jsonl", f"data.path={rows_file}", "shard_plan=single", "loop.batch_size=4", "optimizer=sgd"]
    data += ["optimizer.lr=1e-2", "lr_schedule=constant", "logger=jsonl"]
    train_here(tmp_path / "first", *data, "loop.steps=2")
    records = train_here(tmp_path / "second", *data, "loop.steps=4", f"checkpoint.resume={tmp_path / 'first'}")
    page = (tmp_path / "second" / "report.html").read_text(encoding="utf-8")
    assert steps_of(page) == [1, 2, 3, 4] == [entry["step"] for entry in records]
    assert "Went on after step 2" in page and "step 4 of 4" in page and str(tmp_path / "second" / "adapter") in page
    said = [float(loss) for loss in re.findall(r"^training (\S+)", charts(page)["loss"], re.MULTILINE)]
    assert said == pytest.approx([entry["loss"] for entry in records], rel=1e-3)
    args = [*data, "loop.steps=4", "optimizer.lr=1e30", f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / 'bad'}"]
    assert run_here("train", *args).code == 1
    page = (tmp_path / "bad" / "report.html").read_text(encoding="utf-8")
    assert ">failed<" in page and "not finite in step" in page and 'http-equiv="refresh"' not in page

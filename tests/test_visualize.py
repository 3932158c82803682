"""Diagrams of a plan from configuration alone (cases V04, V06, V02)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from choosing import mostly_by_hand
from diagrams import without_dot, without_packages
from peers import wait_until
from processes import composed, run_here, started

from hetero.config import CONF_DIR, SHAPES_DIR


@pytest.mark.by_hand
@pytest.mark.slow
def test_known_plan_is_drawn_without_weights_workers_or_net_in_little_memory(tmp_path: Path) -> None:
    """An 80-layer configuration without weights as well; as processes, whose memory is watched."""
    big = tmp_path / "llama70b"
    big.mkdir()
    config = json.loads(next(SHAPES_DIR.glob("meta-llama*")).read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    (big / "config.json").write_text(json.dumps(config), encoding="utf-8")
    cases = {
        "known": ["shard_plan=llama8b_3stage", "hardware=mac_and_two_pcs"],
        "big": [f"model.path={big}", "shard_plan=even", "shard_plan.num_stages=8", "model.dtype=bfloat16"],
    }
    for name, args in cases.items():
        with started("visualize", *args, f"outputs={tmp_path}", f"output={tmp_path / name}", cwd=tmp_path) as running:
            peak = 0
            process = psutil.Process(running.process.pid)

            def watch(process: psutil.Process = process) -> bool:
                nonlocal peak
                try:
                    peak = max(peak, process.memory_info().rss)
                except psutil.Error:
                    return True
                return process.status() == psutil.STATUS_ZOMBIE

            wait_until(watch, 60)
            outcome = running.wait()
        assert outcome.code == 0, outcome.text
        assert peak < 1 << 30
        for line in outcome.text.splitlines():
            assert Path(line).is_absolute() and Path(line).is_file()
    text = (tmp_path / "known" / "architecture.mmd").read_text(encoding="utf-8")
    for expected in ("layers 0-9", "layers 10-23", "layers 24-31", "embedding", "norm, head", "nf4", "8 KiB/token"):
        assert expected in text
    for expected in ("2,706.5 M parameters", "GiB of memory", "MiB/step in all"):
        assert expected in text
    assert "pc1.example" in text and "pc2.example" in text
    assert "layers 70-79" in (tmp_path / "big" / "architecture.mmd").read_text(encoding="utf-8")


PLANS = {
    "qwen14b_2stage": ("mac_and_pc", ["layers 0-22", "layers 23-39"], "10 KiB/token"),
    "qwen32b_3stage": ("mac_and_two_pcs", ["layers 0-19", "layers 20-47", "layers 48-63"], "10 KiB/token"),
    "llama70b_4stage": (
        "mac_and_three_pcs",
        ["layers 0-23", "layers 24-52", "layers 53-69", "layers 70-79"],
        "16 KiB/token",
    ),
    "llama8b_2stage": ("mac_and_pc", ["layers 0-13", "layers 14-31"], "8 KiB/token"),
    "llama8b_3stage": ("mac_and_two_pcs", ["layers 0-9", "layers 10-23", "layers 24-31"], "8 KiB/token"),
}


def test_every_plan_of_a_known_model_is_in_the_list_above() -> None:
    shipped = {file.stem for file in (CONF_DIR / "shard_plan").glob("*_*stage.yaml")}
    assert shipped == PLANS.keys()


@pytest.mark.parametrize("name", mostly_by_hand(PLANS, ["llama8b_3stage"]))
def test_plan_of_a_known_model_is_drawn_with_the_machines_that_it_is_meant_for(tmp_path: Path, name: str) -> None:
    """From the shape that comes along, with 4-bit stages and the adapter for them; locally, too."""
    hardware, layers, width = PLANS[name]
    target = tmp_path / "a.mmd"
    args = [f"shard_plan={name}", f"outputs={tmp_path}", f"output={target}"]
    assert run_here("visualize", *args, f"hardware={hardware}").code == 0
    text = target.read_text(encoding="utf-8")
    assert all(part in text for part in [*layers, width]) and text.count("bfloat16, nf4") == len(layers)
    assert run_here("visualize", *args).code == 0
    composed_plan = composed(f"shard_plan={name}", f"hardware={hardware}")
    assert composed_plan["adapter"]["r"] == 16 and composed_plan["model"]["quantization"] == "nf4"
    assert run_here("visualize", *args, "--cfg", "job").code == 0


def test_diagrams_go_into_a_folder_of_their_own_by_default(tmp_path: Path) -> None:
    outcome = run_here("visualize", f"outputs={tmp_path}")
    assert outcome.code == 0
    paths = [Path(line) for line in outcome.text.splitlines() if line.startswith("/")]
    assert [path.name for path in paths[-2:]] == ["timeline.svg", "timeline.json"]
    drawn = [path.suffix for path in paths[:-2]]
    assert drawn[:4] == [".svg", ".html", ".mmd", ".dot"] and {*drawn[4:]} <= {".png", ".pdf"}
    assert all(path.stem == "architecture" for path in paths[:-2])
    assert all(path.is_file() and path.is_relative_to(tmp_path / "diagrams") for path in paths)
    assert len({path.stat().st_mode for path in paths}) == 1  # whoever may see one may see all


@pytest.mark.parametrize("suffix", [".mmd", ".dot", ".svg", ".HTML"])
def test_output_may_be_one_file(tmp_path: Path, suffix: str) -> None:
    target = tmp_path / "pics" / f"a{suffix}"
    outcome = run_here("visualize", f"outputs={tmp_path}", f"output={target}")
    assert outcome.code == 0 and outcome.text.split() == [str(target)]
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_relative_output_is_meant_from_the_current_folder_and_printed_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_here("visualize", f"outputs={tmp_path}", "output=pics/a.mmd")
    assert outcome.code == 0 and outcome.text.split() == [str(tmp_path / "pics" / "a.mmd")]


def test_output_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    outcome = run_here("visualize", f"outputs={tmp_path}", "output='~/a.mmd'")
    assert outcome.code == 0 and outcome.text.split() == [str(tmp_path / "a.mmd")]


@pytest.mark.parametrize("output", ["/proc/no/a.mmd", "/proc/no", "{file}/a.mmd"])
def test_output_that_cannot_be_written_is_named(tmp_path: Path, output: str) -> None:
    file = tmp_path / "file"
    file.touch()
    output = output.format(file=file)
    outcome = run_here("visualize", f"outputs={tmp_path}", f"output={output}")
    assert outcome.code == 2 and f"output must be a place that can be written, got {output}" in outcome.one_line()


def test_unknown_format_is_refused_with_those_there_are(tmp_path: Path) -> None:
    outcome = run_here("visualize", f"outputs={tmp_path}", f"output={tmp_path / 'a.bmp'}")
    assert outcome.code == 2 and re.search(r"output must end in one of \.svg, .* got '.*a\.bmp'", outcome.one_line())


@pytest.mark.parametrize("output", [None, "pics", "pics/a.mmd"])
def test_sweep_gives_each_job_its_own_files(tmp_path: Path, output: str | None) -> None:
    where = [] if output is None else [f"output={tmp_path / output}"]
    plans = "shard_plan=llama8b_2stage,llama8b_3stage"
    outcome = run_here("visualize", "-m", f"outputs={tmp_path}", plans, "format=mermaid", *where)
    assert outcome.code == 0, outcome.text
    files = sorted(path for path in tmp_path.rglob("*.mmd"))
    assert len(files) == 2
    assert [file.read_text(encoding="utf-8").count("layers") for file in files] == [2, 3]


@pytest.mark.parametrize(
    ("args", "code", "names"),
    [
        (["format=svg"], 0, ["architecture.svg"]),
        (["format=[mermaid,svg]"], 0, ["architecture.mmd", "architecture.svg"]),
        (["format=all"], 2, ["architecture.dot", "architecture.html", "architecture.mmd", "architecture.svg"]),
        (["format=png"], 2, []),
        (
            [],
            0,
            [
                "architecture.dot",
                "architecture.html",
                "architecture.mmd",
                "architecture.svg",
                "timeline.json",
                "timeline.svg",
            ],
        ),
    ],
)
def test_formats_that_are_asked_for_are_drawn_and_one_that_cannot_be_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, names: list[str]
) -> None:
    """Case V01: neither the program nor the packages."""
    without_dot(monkeypatch, tmp_path)
    without_packages(monkeypatch)
    outcome = run_here("visualize", f"outputs={tmp_path}", f"output={tmp_path / 'pics'}", *args)
    assert outcome.code == code, outcome.text
    assert sorted(path.name for path in (tmp_path / "pics").glob("*")) == names
    assert ("pip install resvg-py" in outcome.text) == (code == 2 or not args) and "Traceback" not in outcome.text


def test_output_with_another_ending_than_the_format_is_refused(tmp_path: Path) -> None:
    outcome = run_here("visualize", f"outputs={tmp_path}", f"output={tmp_path / 'a.svg'}", "format=dot")
    assert outcome.code == 2 and "output must be a folder for format=dot, or end in its ending" in outcome.one_line()


def test_sample_hosts_and_missing_data_are_no_fault_of_a_drawing(tmp_path: Path) -> None:
    args = ["hardware=mac_and_pc", "shard_plan=even", "data=jsonl", f"outputs={tmp_path}"]
    assert run_here("visualize", *args).code == 0
    assert run_here("train", *args).code == 2


def test_mistake_in_a_plan_is_the_same_as_in_training(tmp_path: Path) -> None:
    args = ["shard_plan=split", "shard_plan.split_points=[9]", f"outputs={tmp_path}"]
    assert run_here("visualize", *args).one_line() == run_here("train", *args).one_line()


def test_mistake_in_the_times_comes_before_any_picture(tmp_path: Path) -> None:
    outcome = run_here("visualize", f"outputs={tmp_path}", f"output={tmp_path / 'pics'}", "times.forward_s=-1")
    assert outcome.code == 2 and "times.forward_s must be" in outcome.one_line()
    assert not (tmp_path / "pics").exists()

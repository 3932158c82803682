"""Diagrams of a plan from configuration alone (cases V04, V06, V02)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
from peers import wait_until
from processes import composed, run_here, started

from hetero.config import CONF_DIR, SHAPES_DIR
from hetero.diagram import dot, mermaid
from hetero.resolve import ResolvedRun, resolve

ODD = [
    "192.168.1.5:5000",
    "[::1]:5000",
    "C:\\models\\x",
    "<mps> a <b>",
    'he said "hi"',
    "a|b{c}",
    "x" * 300,
    "中文 🙂",
    "end",
    "s0-->s1",
    "a\\n\\N\\G",
    "%%{init}%%; click",
]


def resolved_with(worker_id: str) -> ResolvedRun:
    raw = composed()
    raw["hardware"] = {"workers": [{"id": worker_id, "host": "pc.lan"}], "launch": "none"}
    return resolve(raw, shapes_dir=SHAPES_DIR, for_drawing=True)


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


@pytest.mark.parametrize("name", PLANS)
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
    paths = [Path(line) for line in outcome.text.splitlines()]
    assert [path.name for path in paths] == ["architecture.mmd", "architecture.dot", "timeline.svg", "timeline.json"]
    assert all(path.is_file() and path.is_relative_to(tmp_path / "diagrams") for path in paths)


@pytest.mark.parametrize("suffix", [".mmd", ".dot"])
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
    assert outcome.code == 2 and re.search(r"output must end in \.mmd .* got '.*a\.bmp'", outcome.one_line())


@pytest.mark.parametrize("output", [None, "pics", "pics/a.mmd"])
def test_sweep_gives_each_job_its_own_files(tmp_path: Path, output: str | None) -> None:
    where = [] if output is None else [f"output={tmp_path / output}"]
    outcome = run_here("visualize", "-m", f"outputs={tmp_path}", "shard_plan=llama8b_2stage,llama8b_3stage", *where)
    assert outcome.code == 0, outcome.text
    files = sorted(path for path in tmp_path.rglob("*.mmd"))
    assert len(files) == 2
    assert [file.read_text(encoding="utf-8").count("layers") for file in files] == [2, 3]


@pytest.mark.parametrize("name", ODD)
def test_label_that_is_syntax_shows_literally_and_joins_the_right_nodes(name: str) -> None:
    run = resolved_with(name)
    text = mermaid(run)
    # Undo Mermaid's entity codes: what is shown is the name itself.
    shown = re.sub(r"#(\d+);", lambda match: chr(int(match[1])), text)
    assert f"stage 1: {name}<br/>" in shown
    label = re.search(r'^    s1\["(.*)"\]$', text, re.MULTILINE)
    assert label and not set(label[1].replace("<br/>", "")) & set('"<>[]{}|\\')
    assert [line.split()[0] for line in text.splitlines()[1:]] == ['s0["stage', 's1["stage', "s0"]
    assert re.search(r"^    s0 -->\|.*\| s1$", text, re.MULTILINE)

    graph = dot(run)
    (label_text,) = re.findall(r'^    s1 \[label="((?:[^"\\]|\\.)*)"\];$', graph, re.MULTILINE)
    assert re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], label_text).split("\n")[0] == f"stage 1: {name}"
    assert re.search(r"^    s0 -> s1 \[", graph, re.MULTILINE)


@pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz program `dot`")
@pytest.mark.parametrize("name", ODD)
def test_graphviz_takes_the_dot_text(name: str) -> None:
    done = subprocess.run(["dot", "-Tsvg"], input=dot(resolved_with(name)).encode(), capture_output=True)
    assert done.returncode == 0 and not done.stderr


def test_sample_hosts_and_missing_data_are_no_fault_of_a_drawing(tmp_path: Path) -> None:
    args = ["hardware=mac_and_pc", "shard_plan=even", "data=jsonl", f"outputs={tmp_path}"]
    assert run_here("visualize", *args).code == 0
    assert run_here("train", *args).code == 2


def test_mistake_in_a_plan_is_the_same_as_in_training(tmp_path: Path) -> None:
    args = ["shard_plan=split", "shard_plan.split_points=[9]", f"outputs={tmp_path}"]
    assert run_here("visualize", *args).one_line() == run_here("train", *args).one_line()

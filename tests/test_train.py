"""Whole runs of `train.py`: what they compute, and what they leave in their folder."""

from __future__ import annotations

import json
import math
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny
from processes import (
    REPO,
    Worker,
    hardware,
    losses,
    metrics,
    run,
    run_here,
    started,
    train_here,
    write_jsonl,
)
from reference import run_reference, whole_model
from safetensors.torch import load_file

from hetero.data import Example
from hetero.families import FAMILIES

KEYS = {"step", "loss", "lr", "grad_norm", "tokens", "rows", "step_time_s", "tokens_per_s", "stages"}
STAGE_KEYS = {"id", "busy_s", "wait_s", "bytes_sent", "memory_bytes"}
SINGLE = "shard_plan=single"


@pytest.fixture
def data(rows_file: Path) -> list[str]:
    """12 tokenised rows."""
    return ["data=jsonl", f"data.path={rows_file}"]


def adapter_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "adapter" / "adapter_model.safetensors")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=atol, msg=lambda text, k=key: f"{k}: {text}")


# ---- the run as a whole, as a process


@pytest.mark.slow
def test_default_run_learns_over_tcp_and_leaves_its_folder_and_nothing_else(tmp_path: Path) -> None:
    """Started from another folder: everything lands under `outputs`, no process and no port is left."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    before = sorted(REPO.iterdir()), sorted((REPO / "outputs").rglob("*"))
    outcome = run("train", "loop.steps=40", f"outputs={tmp_path / 'out'}", cwd=elsewhere)
    assert outcome.code == 0, outcome.text
    assert list(elsewhere.iterdir()) == []
    assert (sorted(REPO.iterdir()), sorted((REPO / "outputs").rglob("*"))) == before
    (run_json,) = (tmp_path / "out").glob("*/*/run.json")
    run_dir = run_json.parent

    records = metrics(run_dir)
    assert [record["step"] for record in records] == list(range(1, 41))
    for record in records:
        check_record(record, ["local", "local-1"])
    found = losses(records)
    assert found[0] == pytest.approx(math.log(260), abs=0.3)  # a random model over 260 tokens
    assert sum(found[-5:]) / 5 < found[0] - 1.5
    assert records[0]["lr"] == 3e-3 and records[-1]["lr"] < 1e-4
    assert "40 steps" in outcome.text and str(run_dir / "adapter") in outcome.text

    about = json.loads(run_json.read_text(encoding="utf-8"))
    assert {"run_id", "digest", "spec", "config", "versions"} <= about.keys()
    assert [(s["id"], s["start"], s["end"]) for s in about["spec"]["stages"]] == [("local", 0, 3), ("local-1", 3, 6)]
    assert about["config"]["loop"]["steps"] == about["spec"]["total_steps"] == 40
    assert {"torch", "transformers", "peft", "python", "hetero"} <= about["versions"].keys()
    assert b"embedding + layers 0-2" in (run_dir / "architecture.svg").read_bytes()
    assert (run_dir / "architecture.html").is_file() and (run_dir / "architecture.mmd").is_file()
    assert (run_dir / ".hydra" / "overrides.yaml").is_file() and (run_dir / "train.log").is_file()
    assert sorted(path.name for path in (run_dir / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def check_record(record: dict[str, Any], stages: list[str]) -> None:
    assert record.keys() == KEYS
    for key in ("loss", "lr", "grad_norm", "step_time_s", "tokens_per_s"):
        assert isinstance(record[key], float) and math.isfinite(record[key]) and record[key] > 0
    assert isinstance(record["tokens"], int) and record["tokens"] > 0
    assert record["rows"] and all(isinstance(row, int) for row in record["rows"])
    assert [stage["id"] for stage in record["stages"]] == stages
    for stage in record["stages"]:
        assert stage.keys() == STAGE_KEYS
        assert 0 < stage["busy_s"] < record["step_time_s"] and stage["wait_s"] >= 0
        assert stage["memory_bytes"] > 1 << 20 and (stage["bytes_sent"] > 0) == (len(stages) > 1)


@pytest.mark.by_hand
def test_starts_at_the_same_moment_get_folders_of_their_own(tmp_path: Path) -> None:
    """With the script that loads nothing (case H06)."""
    with ExitStack() as stack:
        running = [stack.enter_context(started("visualize", f"outputs={tmp_path}", cwd=tmp_path)) for _ in range(3)]
        assert [process.wait().code for process in running] == [0, 0, 0]
    assert len(list(tmp_path.glob("diagrams/*/*/architecture.mmd"))) == 3


def test_second_start_into_a_folder_that_holds_a_run_is_refused(tmp_path: Path, data: list[str]) -> None:
    run_dir = tmp_path / "run"
    train_here(run_dir, *data, SINGLE, "loop.steps=1")
    before = {path: path.read_bytes() for path in (run_dir / "metrics.jsonl", run_dir / "run.json")}
    again = run_here("train", f"outputs={tmp_path}", f"hydra.run.dir={run_dir}", *data, SINGLE, "loop.steps=1")
    assert again.code == 2
    assert (
        again.one_line() == f"error: the run's folder must be a new one, {run_dir} holds a run already (hydra.run.dir)"
    )
    assert {path: path.read_bytes() for path in before} == before


# ---- steps, epochs and rows


def test_zero_steps_write_the_initial_adapter_that_peft_loads(tmp_path: Path, data: list[str], tiny: Tiny) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run_dir = tmp_path / "run"
    assert train_here(run_dir, *data, SINGLE, "loop.steps=0", f"model.path={tiny('llama')}") == []
    base = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    inputs = torch.arange(3, 20)[None]
    expected = base(inputs).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # what PEFT says of missing or unexpected keys
        model = PeftModel.from_pretrained(base, run_dir / "adapter")
    assert any("lora_A" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(model(inputs).logits, expected)
    saved = adapter_of(run_dir)
    assert all(not value.any() for key, value in saved.items() if "lora_B" in key)
    assert len({value.numpy().tobytes() for key, value in saved.items() if "lora_A" in key}) == len(saved) // 2


@pytest.mark.parametrize(
    ("num_rows", "loop", "windows"),
    [
        (5, ["loop.steps=null", "loop.epochs=2", "loop.batch_size=4"], [[0, 1, 2, 3], [4], [0, 1, 2, 3], [4]]),
        (1, ["loop.steps=null", "loop.epochs=2", "loop.batch_size=8"], [[0], [0]]),
        (3, ["loop.steps=10", "loop.batch_size=2"], [[0, 1], [2]] * 5),
        (7, ["loop.steps=2", "loop.batch_size=4", "loop.microbatch_size=2"], [[0, 1, 2, 3], [4, 5, 6]]),
        (3, ["loop.steps=null", "loop.epochs=0"], []),
    ],
)
def test_rows_of_each_step_with_short_windows_and_tiny_data(
    tmp_path: Path, rows: list[Example], num_rows: int, loop: list[str], windows: list[list[int]]
) -> None:
    """Cases N02 and D08; in the order of the file."""
    file = write_jsonl(
        tmp_path / "rows.jsonl", [{"input_ids": r.input_ids, "labels": r.labels} for r in rows[:num_rows]]
    )
    records = train_here(
        tmp_path / "run", "data=jsonl", f"data.path={file}", "data.shuffle=false", SINGLE, "adapter.r=1", *loop
    )
    assert [record["rows"] for record in records] == windows
    tokens = [sum(label != -100 for label in row.labels[1:]) for row in rows]
    assert [record["tokens"] for record in records] == [sum(tokens[i] for i in window) for window in windows]


def test_shuffled_epochs_hold_each_row_once(tmp_path: Path, data: list[str]) -> None:
    records = train_here(tmp_path / "run", *data, SINGLE, "loop.steps=6", "loop.batch_size=4", "adapter.r=1")
    epochs = [[row for record in records[i : i + 3] for row in record["rows"]] for i in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12)) and epochs[0] != epochs[1]


# ---- equality


@pytest.mark.slow
def test_run_with_launched_workers_equals_plain_transformers_and_peft(
    tmp_path: Path, data: list[str], rows: list[Example], tiny: Tiny
) -> None:
    """Three processes on a folder without a tokenizer; losses, norms and adapter are those of one plain process."""
    model = [*data, f"model.path={tiny('llama_tied')}", "lr_schedule=constant", "optimizer.lr=2e-3"]
    train_here(tmp_path / "initial", *model, SINGLE, "loop.steps=0")
    records = train_here(
        tmp_path / "run",
        *model,
        "shard_plan=split",
        "shard_plan.split_points=[1,4]",
        "loop.steps=4",
        "loop.batch_size=5",
        "loop.microbatch_size=2",
    )
    assert [len(record["rows"]) for record in records] == [5, 5, 2, 5]
    assert [stage["id"] for stage in records[0]["stages"]] == ["local", "local-1", "local-2"]
    reference = run_reference(
        tiny("llama_tied"),
        [[rows[index] for index in record["rows"]] for record in records],
        lora={"r": 8, "lora_alpha": 16, "target_modules": list(FAMILIES["llama"].default_targets)},
        initial=adapter_of(tmp_path / "initial"),
        lr=2e-3,
    )
    assert losses(records) == pytest.approx(reference.losses, abs=1e-5)
    assert [record["grad_norm"] for record in records] == pytest.approx(reference.norms, rel=1e-5)
    assert_same(adapter_of(tmp_path / "run"), reference.adapter, atol=1e-5)

    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(tiny("llama_tied")) and config["peft_type"] == "LORA"
    assert sorted(config["target_modules"]) == sorted(FAMILIES["llama"].default_targets)
    whole_model(tiny("llama_tied"), {"r": 8, "lora_alpha": 16, "target_modules": config["target_modules"]})


def test_three_stages_over_tcp_equal_one_from_the_same_configuration(
    tmp_path: Path, data: list[str], workers: tuple[Worker, Worker]
) -> None:
    """With dropout, whose masks must not depend on the split (case N06)."""
    same = [*data, "loop.steps=4", "loop.batch_size=6", "loop.microbatch_size=2", "adapter.dropout=0.1"]
    one = train_here(tmp_path / "one", *same, SINGLE)
    three = train_here(tmp_path / "three", *same, *hardware(*workers))
    for record in three:
        check_record(record, ["local", "w1", "w2"])
    assert losses(three) == pytest.approx(losses(one), abs=1e-5)
    assert [r["grad_norm"] for r in three] == pytest.approx([r["grad_norm"] for r in one], rel=1e-5)
    assert [r["rows"] for r in three] == [r["rows"] for r in one]
    assert_same(adapter_of(tmp_path / "three"), adapter_of(tmp_path / "one"), atol=1e-6)


def test_run_starts_from_the_adapter_of_another_on_every_stage(
    tmp_path: Path, data: list[str], workers: tuple[Worker, Worker]
) -> None:
    train_here(tmp_path / "first", *data, SINGLE, "loop.steps=2")
    goes_on = [*data, f"adapter.init_from={tmp_path / 'first' / 'adapter'}"]
    train_here(tmp_path / "copy", *goes_on, *hardware(*workers), "loop.steps=0")
    assert_same(adapter_of(tmp_path / "copy"), adapter_of(tmp_path / "first"))
    one = train_here(tmp_path / "one", *goes_on, SINGLE, "loop.steps=2", "seed=3")
    three = train_here(tmp_path / "three", *goes_on, *hardware(*workers), "loop.steps=2", "seed=3")
    assert losses(three) == pytest.approx(losses(one), abs=1e-5)
    fresh = train_here(tmp_path / "fresh", *data, SINGLE, "loop.steps=1", "seed=3")
    assert abs(losses(fresh)[0] - losses(one)[0]) > 0.1


# ---- what ends a run


@pytest.mark.parametrize("num_stages", [1, 3])
def test_loss_that_is_not_finite_ends_the_run_naming_stage_and_step(
    tmp_path: Path, data: list[str], workers: tuple[Worker, Worker], num_stages: int
) -> None:
    where = [SINGLE] if num_stages == 1 else hardware(*workers)
    args = [*data, *where, "optimizer.lr=1e30", "loop.steps=9", f"hydra.run.dir={tmp_path / 'run'}"]
    outcome = run_here("train", f"outputs={tmp_path}", *args)
    name = "stage 0 (local)" if num_stages == 1 else "stage 2 (w2)"
    assert outcome.code == 1 and "Traceback" not in outcome.text
    assert f"error: {name} has a loss or a gradient that is not finite in step 2" in outcome.text
    assert "optimizer.lr" in outcome.text
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1]
    assert not (tmp_path / "run" / "adapter").exists()
    for worker in workers:
        worker.wait_idle()


def test_mistake_in_the_data_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "fine"}\n{"text": \n', encoding="utf-8")
    outcome = run_here("train", f"outputs={tmp_path}", "data=jsonl", f"data.path={file}", SINGLE)
    assert outcome.code == 2
    assert outcome.one_line().startswith(f"error: {file} line 2 must be one JSON object")


def test_rows_with_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [1, 999]}])
    outcome = run_here("train", f"outputs={tmp_path}", "data=jsonl", f"data.path={file}", SINGLE)
    assert outcome.code == 2 and "token id 999 >= vocab 260" in outcome.one_line()


@pytest.mark.parametrize("targets", ["[q_porj]", "[q_proj,typo]", "[c_attn]"])
def test_adapter_target_that_no_module_has_is_named_with_those_there_are(tmp_path: Path, targets: str) -> None:
    """Case P10."""
    outcome = run_here("train", f"outputs={tmp_path}", f"adapter.target_modules={targets}", SINGLE)
    wrong = targets.strip("[]").split(",")[-1]
    assert outcome.code == 2 and "Traceback" not in outcome.text
    assert f"got '{wrong}'" in outcome.text and "gate_proj" in outcome.text

"""Where metrics go, and that a logger's package is needed only by whoever asks for it."""

from __future__ import annotations

import csv
import json
import logging
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peers import wait_until
from processes import losses, metrics, run_here, train_here

from hetero.csv_logger import CsvLogger
from hetero.errors import ConfigError
from hetero.loggers import JsonlLogger, RunLogger
from hetero.tensorboard_logger import TensorBoardLogger
from hetero.wandb_logger import WandbLogger

RECORD: dict[str, Any] = {
    "step": 1,
    "loss": 2.5,
    "rows": [3, 1],
    "stages": [{"id": "local", "busy_s": 0.1}, {"id": "pc 1", "busy_s": 0.2}],
}


@pytest.fixture
def data(rows_file: Path) -> list[str]:
    return ["data=jsonl", f"data.path={rows_file}", "shard_plan=single", "loop.batch_size=4"]


@pytest.fixture
def no_wandb_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key in the environment, none at home, and nobody to ask."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def test_jsonl_holds_each_record_at_once_as_one_object_a_line(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.start({})
    logger.step(RECORD)
    assert metrics(tmp_path) == [RECORD]  # before the run is over
    logger.step(RECORD | {"step": 2})
    logger.finish("it broke")
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2]


def test_jsonl_holds_evaluations_in_a_file_of_their_own_and_goes_back_in_both(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.start({})
    logger.step(RECORD)
    assert not (tmp_path / "eval.jsonl").exists()
    found = [{"step": step, "eval_loss": 2.0, "perplexity": None, "tokens": 9} for step in (0, 1, 2)]
    for record in found:
        logger.evaluation(record)
    logger.rewind(1)
    logger.evaluation(found[2])
    logger.rewind(1)
    lines = (tmp_path / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == found[:2]
    assert metrics(tmp_path) == [RECORD]


def test_jsonl_has_a_file_of_another_name(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path, file_name="other.jsonl")
    logger.start({})
    logger.step(RECORD)
    logger.finish(None)
    assert json.loads((tmp_path / "other.jsonl").read_text(encoding="utf-8")) == RECORD


def test_jsonl_never_holds_what_is_no_json(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.start({})
    with pytest.raises(ValueError, match="JSON compliant"):
        logger.step(RECORD | {"loss": math.nan})
    logger.finish(None)
    assert metrics(tmp_path) == []


def test_logger_that_never_started_can_be_finished(tmp_path: Path) -> None:
    JsonlLogger(tmp_path).finish("the run never began")
    assert list(tmp_path.iterdir()) == []


def test_run_without_a_logger_has_its_metrics_and_needs_no_package(
    tmp_path: Path, data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case L06."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    (record,) = train_here(tmp_path / "run", *data, "logger=none", "loop.steps=1")
    assert record["step"] == 1
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not names & {"wandb", "tensorboard", "metrics.csv", "eval.jsonl"} and "adapter" in names


def test_csv_tensorboard_and_jsonl_of_one_run_hold_the_same_numbers(
    tmp_path: Path, data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case L06 for logger=csv; several at once."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    records = train_here(tmp_path / "run", *data, "logger=[csv,tensorboard]", "loop.steps=3", "adapter.r=2")
    with (tmp_path / "run" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in table] == losses(records)
    assert [float(row["stage/local/busy_s"]) for row in table] == [r["stages"][0]["busy_s"] for r in records]
    board = read_tensorboard(tmp_path / "run")
    for step, loss in board["train/loss"].items():
        assert loss == pytest.approx(records[step - 1]["loss"], rel=1e-6)
    assert {"train/lr", "train/grad_norm", "train/tokens_per_s", "stage/local/memory_bytes"} <= board.keys()
    assert len(board["train/loss"]) == 3


@pytest.mark.usefixtures("no_wandb_key")
def test_wandb_is_offline_without_a_key_and_gets_a_run_of_plain_data(tmp_path: Path, data: list[str]) -> None:
    """Cases L02 and L04; beside the JSONL logger."""
    pytest.importorskip("wandb")
    records = train_here(
        tmp_path / "run", *data, "logger=[jsonl,wandb]", "loop.steps=2", "run_name=mine", "adapter.r=2"
    )
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    stored = finished_wandb(file)
    about = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert stored["exit"] == 0 and stored["name"] == "mine" and stored["id"] == about["run_id"]
    assert stored["group"] == "" and ("step", "") in stored["axes"] and ("*", "step") in stored["axes"]
    history = stored["history"]
    assert [row["loss"] for row in history] == losses(records)
    assert [row["step"] for row in history] == [1, 2]
    assert {"lr", "grad_norm", "tokens_per_s", "stage/local/busy_s", "stage/local/memory_bytes"} <= history[0].keys()
    config = stored["config"]
    assert config["adapter"]["r"] == 2 and config["loop"]["_target_"] == "hetero.loop.train"
    assert "${" not in json.dumps(config) and "adapter.r=2" in config["overrides"]
    assert config["run"]["stages"][0]["end"] == 6 and config["run"]["digest"] == about["digest"]


@pytest.mark.usefixtures("no_wandb_key")
def test_each_job_of_a_sweep_is_a_wandb_run_and_a_failed_one_is_closed_as_failed(
    tmp_path: Path, data: list[str]
) -> None:
    """Case L01, and of H02 what loggers have to do with it."""
    pytest.importorskip("wandb")
    args = [*data, "logger=wandb", "loop.steps=3", "optimizer=sgd", "optimizer.lr=1e-2,1e30,1e-3"]
    outcome = run_here("train", "-m", *args, f"outputs={tmp_path}")
    assert outcome.code == 1 and "not finite in step" in outcome.text
    files = sorted(tmp_path.glob("multirun/*/*/*/wandb/offline-run-*/*.wandb"))
    assert [file.parents[2].name for file in files] == ["0", "1", "2"]
    stored = [finished_wandb(file) for file in files]
    assert [run["exit"] for run in stored] == [0, 1, 0]
    assert len({run["id"] for run in stored}) == 3
    (sweep,) = tmp_path.glob("multirun/*/*")
    assert [run["group"] for run in stored] == [sweep.name] * 3
    assert [run["name"] for run in stored] == [f"{sweep.name}/{number}" for number in range(3)]
    assert [run["config"]["optimizer"]["lr"] for run in stored] == [1e-2, 1e30, 1e-3]
    assert [len(run["history"]) for run in stored] == [3, 1, 3]
    assert "not finite" in stored[1]["summary"]["error"] and "error" not in stored[0]["summary"]


@pytest.mark.usefixtures("no_wandb_key")
@pytest.mark.parametrize(
    ("name", "checkpoint", "code", "why"),
    [
        ("SIGINT", "none", 130, "interrupted"),  # at once
        ("SIGTERM", "every_50", 0, "stopped before its last step (SIGTERM)"),  # after the step, with a checkpoint
    ],
)
def test_wandb_run_that_somebody_ends_is_closed_as_failed(
    tmp_path: Path, data: list[str], monkeypatch: pytest.MonkeyPatch, name: str, checkpoint: str, code: int, why: str
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HETERO_TEST_SIGNAL", name)
    own = "own_parts.signal_in_four"
    args = [*data, "logger=wandb", "loop.steps=6", f"checkpoint={checkpoint}", f"loop._target_={own}"]
    outcome = run_here("train", *args, f"allow_targets=[{own}]", f"outputs={tmp_path}", f"hydra.run.dir={tmp_path}/r")
    assert outcome.code == code, outcome.text
    (file,) = (tmp_path / "r" / "wandb").glob("offline-run-*/*.wandb")
    stored = finished_wandb(file)
    assert (stored["exit"], stored["summary"]["error"]) == (1, why)
    assert [row["step"] for row in stored["history"]] == [1, 2, 3, 4]


@pytest.mark.usefixtures("no_wandb_key")
def test_wandb_online_without_a_key_is_refused_before_training(tmp_path: Path, data: list[str]) -> None:
    """Before local workers are started, and without leaving what looks like a run."""
    pytest.importorskip("wandb")
    outcome = run_here("train", *data, "logger=wandb", "logger.wandb.mode=online", f"outputs={tmp_path}")
    assert outcome.code == 2
    assert outcome.one_line().startswith("error: logger.wandb.mode=online needs a key (wandb login), or use offline")
    assert not list(tmp_path.rglob("run.json")) and not list(tmp_path.rglob("worker-*"))


def test_wandb_has_two_modes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logger\.wandb\.mode must be offline or online, got 'maybe'"):
        WandbLogger(tmp_path, mode="maybe")


def test_wandb_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"logger=wandb needs the package wandb, .*pip install wandb"):
        WandbLogger(tmp_path)


def test_tensorboard_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"logger=tensorboard needs the package tensorboard, .*pip install tensorb"):
        TensorBoardLogger(tmp_path)


ABOUT: dict[str, Any] = {
    "run_id": "0123abc",
    "run_name": None,
    "digest": "d",
    "versions": {"torch": "2"},
    "spec": {"stages": [{"id": "local"}], "total_steps": 5},
    "config": {"seed": 1, "logger": {"own": {"api_key": "HUSH"}}},
    "resumed": None,
}
EVALUATION = {"step": 4, "eval_loss": 1.5, "perplexity": 4.48, "tokens": 12}


def taken_again(logger: RunLogger) -> None:
    """Five steps of which the last three were taken two times, on another plan then, and an evaluation each time."""
    logger.start(ABOUT)
    for step in (1, 2, 3, 4):
        logger.step(RECORD | {"step": step, "loss": float(step)})
    logger.evaluation(EVALUATION | {"eval_loss": 9.0})
    logger.rewind(2)
    left = [{"id": "local", "busy_s": 0.1, "wait_s": 0.4}]
    for step in (3, 4, 5):
        logger.step(RECORD | {"step": step, "loss": 10.0 + step, "stages": left})
    logger.evaluation(EVALUATION)
    logger.finish(None)


def test_steps_taken_again_replace_those_before_in_jsonl_and_csv(tmp_path: Path) -> None:
    taken_again(JsonlLogger(tmp_path))
    assert [(r["step"], r["loss"]) for r in metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]
    assert [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()] == [EVALUATION]
    taken_again(CsvLogger(tmp_path))
    table = list(csv.DictReader((tmp_path / "metrics.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["step"], row["loss"]) for row in table][1:3] == [("2", "2.0"), ("3", "13.0")] and len(table) == 5
    assert [row["stage/pc 1/busy_s"] for row in table] == ["0.2", "0.2", "", "", ""]
    assert [row["stage/local/wait_s"] for row in table] == ["", "", "0.4", "0.4", "0.4"]
    assert (tmp_path / "eval.csv").read_text() == "step,eval/loss,eval/perplexity,eval/tokens\n4,1.5,4.48,12\n"


def test_steps_taken_again_replace_those_before_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    taken_again(TensorBoardLogger(tmp_path))
    board = read_tensorboard(tmp_path)
    assert board["train/loss"] == {1: 1.0, 2: 2.0, 3: 13.0, 4: 14.0, 5: 15.0}
    assert board["eval/loss"] == {4: 1.5}
    assert not any(b"HUSH" in file.read_bytes() for file in tmp_path.rglob("events*"))


@pytest.mark.usefixtures("no_wandb_key")
def test_steps_taken_again_are_kept_beside_those_before_in_wandb(tmp_path: Path) -> None:
    """Its history only grows; on an axis of its own the step comes twice, told apart by `rewinds`."""
    pytest.importorskip("wandb")
    before = tmp_path / "before"
    before.mkdir()
    (before / "run.json").write_text('{"run_id": "earlier"}', encoding="utf-8")
    about = ABOUT | {"resumed": {"step": 2, "checkpoints": str(before / "checkpoints")}}
    logger = WandbLogger(tmp_path)
    logger.start(about)
    logger.step(RECORD)
    logger.step(RECORD | {"step": 2})
    logger.rewind(1)
    logger.step(RECORD | {"step": 2, "loss": 1.25})
    logger.evaluation(EVALUATION)
    logger.finish("the machine is gone")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    stored = finished_wandb(file)
    rows = stored["history"]
    assert [(row["step"], row.get("loss"), row.get("rewinds")) for row in rows] == [
        (1, 2.5, None), (2, 2.5, None), (2, 1.25, 1), (4, None, None),
    ]  # fmt: skip
    assert rows[-1]["eval/loss"] == 1.5 and rows[-1]["eval/perplexity"] == 4.48
    assert stored["config"]["run"]["resumed"]["run_id"] == "earlier"
    assert stored["exit"] == 1 and stored["summary"]["error"] == "the machine is gone"
    assert not any(b"HUSH" in found.read_bytes() for found in tmp_path.rglob("*") if found.is_file())


def read_tensorboard(run_dir: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value, as TensorBoard itself reads a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of each purge
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {name: {e.step: e.value for e in found.Scalars(name)} for name in found.Tags()["scalars"]}


def finished_wandb(file: Path) -> dict[str, Any]:
    """What an offline run's file holds once wandb's own process has written the end."""
    wait_until(lambda: "exit" in read_wandb(file))
    return read_wandb(file)


def read_wandb(file: Path) -> dict[str, Any]:
    """What an offline run's file holds."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"history": [], "config": {}, "summary": {}, "axes": []}
    for raw in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {"id": record.run.run_id, "name": record.run.display_name, "group": record.run.run_group}
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            found["history"].append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        elif kind == "metric":
            found["axes"].append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
        elif kind == "summary":
            found["summary"] |= {item.key: json.loads(item.value_json) for item in record.summary.update}
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def log_records(raw: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format (its doc/log_format.md), after a file header of seven bytes."""
    position, parts = 7, b""
    while position + 7 <= len(raw):
        if 32768 - position % 32768 < 7:  # a block's end that holds no record
            position += 32768 - position % 32768
        _, length, kind = struct.unpack_from("<IHB", raw, position)
        if position + 7 + length > len(raw):
            return  # being written
        parts += raw[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""

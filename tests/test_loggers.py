"""Where metrics go, and that a logger's package is needed only by whoever asks for it."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peers import wait_until
from processes import losses, metrics, run_here, train_here

from hetero.errors import ConfigError
from hetero.loggers import JsonlLogger, WandbLogger

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


def test_run_without_a_logger_keeps_no_metrics(tmp_path: Path, data: list[str]) -> None:
    outcome = run_here(
        "train", *data, "logger=none", "loop.steps=1", f"outputs={tmp_path}", f"hydra.run.dir={tmp_path}/run"
    )
    assert outcome.code == 0 and "step 1/1" in outcome.text
    assert not list(tmp_path.rglob("metrics.jsonl")) and not list(tmp_path.rglob("wandb"))
    assert (tmp_path / "run" / "adapter").is_dir()


@pytest.mark.usefixtures("no_wandb_key")
def test_wandb_is_offline_without_a_key_and_gets_a_run_of_plain_data(tmp_path: Path, data: list[str]) -> None:
    """Cases L02 and L04; beside the JSONL logger."""
    pytest.importorskip("wandb")
    records = train_here(
        tmp_path / "run", *data, "logger=[jsonl,wandb]", "loop.steps=2", "run_name=mine", "adapter.r=2"
    )
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    stored = finished_wandb(file)
    assert stored["exit"] == 0 and stored["name"] == "mine"
    history = stored["history"]
    assert [row["loss"] for row in history] == losses(records)
    assert [row["_step"] for row in history] == [1, 2]
    assert {"lr", "grad_norm", "tokens_per_s", "stage/local/busy_s", "stage/local/memory_bytes"} <= history[0].keys()
    config = stored["config"]
    assert config["adapter"]["r"] == 2 and config["loop"]["_target_"] == "hetero.loop.train"
    assert "${" not in json.dumps(config)


@pytest.mark.usefixtures("no_wandb_key")
def test_each_job_of_a_sweep_is_a_wandb_run_and_a_failed_one_is_closed_as_failed(
    tmp_path: Path, data: list[str]
) -> None:
    """Case L01."""
    pytest.importorskip("wandb")
    args = [*data, "logger=wandb", "loop.steps=3", "optimizer=sgd", "optimizer.lr=1e-2,1e30", f"outputs={tmp_path}"]
    outcome = run_here("train", "-m", *args)
    assert outcome.code == 1 and "not finite in step" in outcome.text
    files = sorted(tmp_path.glob("multirun/*/*/*/wandb/offline-run-*/*.wandb"))
    assert [file.parents[2].name for file in files] == ["0", "1"]
    stored = [finished_wandb(file) for file in files]
    assert [run["exit"] for run in stored] == [0, 1]
    assert stored[0]["id"] != stored[1]["id"]
    assert [len(run["history"]) for run in stored] == [3, 1]


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


def finished_wandb(file: Path) -> dict[str, Any]:
    """What an offline run's file holds once wandb's own process has written the end."""
    wait_until(lambda: "exit" in read_wandb(file))
    return read_wandb(file)


def read_wandb(file: Path) -> dict[str, Any]:
    """What an offline run's file holds."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"history": [], "config": {}}
    for raw in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {"id": record.run.run_id, "name": record.run.display_name}
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            found["history"].append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
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

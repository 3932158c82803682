"""What becomes of a run whose logger fails, and that every run has its metrics."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import composed

from hetero.checked import convert
from hetero.errors import ConfigError
from hetero.log_file import LogFile
from hetero.loggers import JsonlLogger
from hetero.run_loggers import Guarded, loggers_of, logging_to
from hetero.spec import Config


class Breaking:
    """A logger of one's own, without rewind and evaluation, that breaks in its second step."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self._error = error or OSError(errno.ENOSPC, "No space left on device")

    def start(self, run: dict[str, Any]) -> None:
        self.calls.append("start")

    def step(self, record: dict[str, Any]) -> None:
        self.calls.append(f"step {record['step']}")
        if record["step"] == 2:
            raise self._error

    def finish(self, error: str | None) -> None:
        self.calls.append(f"finish {error}")


def steps(numbers: range) -> Iterator[dict[str, Any]]:
    yield from ({"step": number, "stages": []} for number in numbers)


def test_logger_that_breaks_costs_one_warning_and_the_others_get_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = Breaking(), JsonlLogger(tmp_path)
    loggers = [Guarded(broken, "mine"), whole]
    with logging_to(loggers, {}, []):
        for record in steps(range(1, 5)):
            for logger in loggers:
                logger.step(record)
        loggers[0].rewind(3)
        loggers[0].evaluation({"step": 3})
    assert broken.calls == ["start", "step 1", "step 2", "finish None"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    (said,) = [record.getMessage() for record in caplog.records]
    assert "logger.mine failed" in said and "No space left on device" in said and "\n" not in said


def test_logger_that_cannot_start_is_a_mistake_in_one_line() -> None:
    class Unable(Breaking):
        def start(self, run: dict[str, Any]) -> None:
            raise RuntimeError("no database\nat all")

    with pytest.raises(ConfigError, match=r"^logger\.mine cannot start: no database$"):
        Guarded(Unable(), "mine").start({})


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("it broke"), "it broke"), (KeyboardInterrupt(), "interrupted"), (None, None)],
)
def test_loggers_hear_why_a_run_ended(error: BaseException | None, said: str | None) -> None:
    logger = Breaking()
    try:
        with logging_to([logger], {}, [{"step": 1}]):  # type: ignore[list-item]
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert logger.calls == ["start", "step 1", f"finish {said}"]


def test_run_that_was_stopped_did_not_come_to_its_end() -> None:
    logger = Breaking()
    with logging_to([logger], {}, []) as ending:  # type: ignore[list-item]
        ending.stopped = "SIGINT"
    assert logger.calls == ["start", "finish stopped before its last step (SIGINT)"]


@pytest.mark.parametrize("choice", ["jsonl", "none", "csv", "[csv,jsonl]"])
def test_every_run_writes_its_metrics_once(tmp_path: Path, choice: str) -> None:
    config = convert(composed(f"logger={choice}"), Config)
    loggers = loggers_of(config, tmp_path)
    assert len(loggers) == 1 + ("csv" in choice)  # two writers of one file would overwrite each other
    with logging_to(loggers, {}, []):
        for logger in loggers:
            logger.step({"step": 1, "stages": []})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    assert (tmp_path / "metrics.csv").exists() == ("csv" in choice)


class FullDisk:
    """A file on a disk that takes only so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._file.write(data[: self.room])
        self.room -= taken
        return int(taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_full_disk_costs_a_warning_and_no_line_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = LogFile(tmp_path / "a.jsonl")
    disk = FullDisk(file._file, room=14)
    file._file = disk  # type: ignore[assignment]
    for number in range(1, 4):
        file.write(json.dumps({"step": number}))
        held = (tmp_path / "a.jsonl").read_text()
        assert held == '{"step": 1}\n'  # whole lines alone, at any time
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1
    assert file.lines() == ['{"step": 1}', '{"step": 2}', '{"step": 3}']
    file.cut(lambda line: json.loads(line)["step"] <= 2)
    disk.room = 1000
    file.write('{"step": 3, "again": true}')
    file.close()
    assert (tmp_path / "a.jsonl").read_text().splitlines() == [
        '{"step": 1}',
        '{"step": 2}',
        '{"step": 3, "again": true}',
    ]
    assert len(caplog.records) == 1


def test_lines_that_the_disk_never_took_are_counted_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = LogFile(tmp_path / "a.jsonl")
    file.write("1")
    file._file = FullDisk(file._file, room=0)  # type: ignore[assignment]
    file.write("2")
    file.write("3")
    file.close()
    assert (tmp_path / "a.jsonl").read_text() == "1\n"
    assert "lacks its last 2 lines" in caplog.records[-1].getMessage()


def test_wandb_whose_process_dies_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the next job of a sweep has one again."""
    pytest.importorskip("wandb")
    from test_loggers import ABOUT, RECORD

    from hetero.wandb_logger import WandbLogger

    first = Guarded(WandbLogger(tmp_path / "1"), "wandb")
    first.start(ABOUT)
    first.step(RECORD)
    cores = [p for p in psutil.Process().children(recursive=True) if "wandb-core" in " ".join(p.cmdline())]
    assert cores
    for process in cores:
        process.kill()
        process.wait(10)
    for _ in range(3):
        first.step(RECORD)
    first.finish(None)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "hetero.run_loggers"]
    assert said.startswith("logger.wandb failed")
    second = Guarded(WandbLogger(tmp_path / "2"), "wandb")
    second.start(ABOUT | {"run_id": "another"})
    second.step(RECORD)
    second.finish(None)
    assert list((tmp_path / "2").glob("wandb/offline-run-*/*.wandb"))

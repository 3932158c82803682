"""A run of three processes that can be killed anywhere: a coordinator and two workers that stay up, over real TCP."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkserver import Child, ForkServer
from peers import wait_until
from processes import environment

from hetero.checkpoint import CheckpointStore
from hetero.failpoints import VARIABLE

STEPS, EVERY = 10, 3
WORKERS = ("w1", "w2")
LIMIT_S = 60.0  # of a run that is interrupted once, on a busy machine
_SAME = ("step", "loss", "lr", "grad_norm", "tokens", "rows")  # of a record: everything but times and memory


@dataclass(frozen=True)
class Result:
    """What a run left, as bytes: adapters, the files of its last checkpoint, and what each step and evaluation was."""

    adapter: bytes
    best: bytes
    evaluations: list[dict[str, Any]]
    state: dict[str, bytes]
    records: list[dict[str, Any]]


class Cluster:
    """Two workers that stay up, and coordinators that come and go.

    Args:
        server: starts the processes.
        folder: everything lies in here.
        model: of the runs.
        rows_file: of the runs.
    """

    def __init__(self, server: ForkServer, folder: Path, model: Path, rows_file: Path) -> None:
        self._server, self._folder, self._model, self._rows_file = server, folder, model, rows_file
        self._ports = dict.fromkeys(WORKERS, 0)
        self._starts = 0
        self.workers: dict[str, Child] = {}
        for name in WORKERS:
            self.start_worker(name)
        for name, child in self.workers.items():
            self._ports[name] = _port_of(child)

    def start_worker(self, name: str, failpoint: str = "") -> Child:
        """Starts a worker, on the port that it had before if it ran before."""
        child = self._server.start(
            "worker",
            f"worker.port={self._ports[name]}",
            f"worker.models_dir={self._model.parent}",
            f"outputs={self._folder}",
            log=self._log(name),
            env={VARIABLE: failpoint},
        )
        self.workers[name] = child
        return child

    def start_coordinator(self, outputs: Path, failpoint: str = "", *overrides: str) -> Coordinator:
        """Starts a run under `outputs`, or goes on with the one that has a checkpoint there; each in a new folder."""
        entries = ", ".join(f'{{id: {name}, host: "127.0.0.1", port: {port}}}' for name, port in self._ports.items())
        resume = any(outputs.glob("**/step-????????/manifest.json"))
        run_dir = outputs / f"run-{self._starts}"
        child = self._server.start(
            "train",
            "hardware.launch=none",
            f"hardware.workers=[{entries}]",
            f"model.path={self._model}",
            "data=jsonl",
            f"data.path={self._rows_file}",
            "data.shuffle=true",
            "adapter.dropout=0.1",
            "adapter.target_modules=[q_proj,down_proj]",
            f"loop.steps={STEPS}",
            "loop.batch_size=4",
            "lr_schedule.warmup_steps=4",
            f"checkpoint.every_steps={EVERY}",
            "checkpoint.keep_best=true",
            f"data.eval_path={self._rows_file}",
            f"loop.eval_every={EVERY}",
            "checkpoint.keep_last=2",
            f"checkpoint.resume={'latest' if resume else 'null'}",
            "recovery.wait_s=60",
            f"outputs={outputs}",
            f"hydra.run.dir={run_dir}",
            *overrides,
            log=self._log("coordinator"),
            env={VARIABLE: failpoint},
        )
        return Coordinator(child, run_dir)

    def finish(self, coordinator: Coordinator, within_s: float) -> None:
        """Waits until the run is over; it must have ended well."""
        code = coordinator.child.wait(within_s)
        assert code == 0, f"{coordinator.child.command}: {code}\n{self.all_logs()}"

    def all_logs(self) -> str:
        """What the last processes printed."""
        files = sorted(self._folder.glob("*.log"))[-6:]
        return "\n".join(f"---- {file.name}\n{file.read_text(encoding='utf-8')}" for file in files)

    def _log(self, name: str) -> Path:
        self._starts += 1
        return self._folder / f"{self._starts:05d}-{name}.log"


@dataclass
class Coordinator:
    """A coordinator's process and its run's folder."""

    child: Child
    run_dir: Path

    def last_step(self) -> int:
        """The last step in its metrics, 0 where there is none; a line that was torn by a kill is none."""
        records = read_records(self.run_dir)
        return int(records[-1]["step"]) if records else 0

    def began_at(self) -> int:
        """The finished steps that it began with."""
        found = re.search(r"going on after step (\d+) of", self.child.text)
        return int(found[1]) if found else 0

    def repeated(self) -> int:
        """Completed steps that it went back over after faults of workers."""
        found = re.findall(r"goes back from step (\d+) to step (\d+)", self.child.text)
        return sum(int(reached) - int(restored) for reached, restored in found)


@contextmanager
def cluster(folder: Path, model: Path, rows_file: Path) -> Iterator[Cluster]:
    """Lends two workers; nothing is left of them and of their runs."""
    with ForkServer(environment()) as server:
        yield Cluster(server, folder, model, rows_file)


def result_of(run_dir: Path, checkpoints: Path | None = None) -> Result:
    """What a finished run left; its last checkpoint must be whole."""
    folder = checkpoints or run_dir / "checkpoints"
    assert CheckpointStore(folder).load(STEPS).step == STEPS
    files = sorted((folder / f"step-{STEPS:08d}").glob("*.safetensors"))
    return Result(
        adapter=(run_dir / "adapter" / "adapter_model.safetensors").read_bytes(),
        best=(run_dir / "adapter-best" / "adapter_model.safetensors").read_bytes(),
        evaluations=read_records(run_dir, "eval.jsonl"),
        state={file.name: file.read_bytes() for file in files},
        records=[{key: record[key] for key in _SAME} for record in read_records(run_dir)],
    )


def assert_same(found: Result, expected: Result) -> None:
    """Equal to the last bit, steps without gap and without duplicate."""
    assert [record["step"] for record in found.records] == list(range(1, STEPS + 1))
    assert found.records == expected.records
    assert found.state == expected.state, "other optimizer moments or weights in the last checkpoint"
    assert found.adapter == expected.adapter, "another adapter"
    assert [record["step"] for record in found.evaluations] == [0, *range(EVERY, STEPS, EVERY), STEPS]
    assert found.evaluations == expected.evaluations
    assert found.best == expected.best, "another adapter of the best step"


def leftovers(outputs: Path) -> list[Path]:
    """Files and folders of unfinished saves."""
    return [path for suffix in ("tmp", "old") for path in outputs.rglob(f"*.{suffix}")]


def read_records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, or of another log."""
    file = run_dir / name
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_death(victim: Child, coordinator: Child, within_s: float, logs: Any) -> None:
    """Waits until a process has died by SIGKILL; the run must not end before."""
    deadline = time.monotonic() + within_s
    while victim.code() is None:
        assert coordinator is victim or coordinator.code() is None, f"{victim.command} lives\n{logs()}"
        assert time.monotonic() < deadline, f"{victim.command} lives after {within_s:g} s\n{logs()}"
        time.sleep(0.005)
    assert victim.code() == -signal.SIGKILL, f"{victim.command}: {victim.code()}\n{logs()}"


def _port_of(child: Child) -> int:
    wait_until(lambda: "listening on" in (child.text if child.log.exists() else ""))
    found = re.search(r"listening on \S+:(\d+) ", child.text)
    assert found and os.path.exists(child.log)
    return int(found[1])

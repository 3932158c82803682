"""A run that was interrupted and goes on equals the one that was not, to the last bit, on any split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import metrics, train_here
from safetensors.torch import load_file
from threads import hardware_of, worker_threads

from hetero.checkpoint import CheckpointStore

STOPS = ["loop._target_=own_parts.stop_after_four", "allow_targets=[own_parts.stop_after_four]"]
SINGLE = "shard_plan=single"
# 12 rows make 3 steps an epoch: step 4 is in the middle of the second. Two micro-batches a step.
COMMON = [
    "data=jsonl",
    "data.shuffle=true",
    "loop.steps=10",
    "loop.batch_size=4",
    "loop.microbatch_size=2",
    "adapter.dropout=0.1",
    "lr_schedule=cosine",
    "lr_schedule.warmup_steps=3",
    "checkpoint.every_steps=3",
]
SGD = ["optimizer=sgd", "optimizer.momentum=0.9"]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """Four workers in threads."""
    with worker_threads(4, tmp_path_factory.mktemp("workers")) as found:
        yield found


def split(ports: list[int], *cuts: int) -> list[str]:
    """A stage for each cut on top of the first, on workers in threads."""
    if not cuts:
        return [SINGLE]
    points = ",".join(map(str, cuts))
    return [*hardware_of(ports[: len(cuts)]), "shard_plan=split", f"shard_plan.split_points=[{points}]"]


@dataclass
class Whole:
    """An uninterrupted run, and one with the same settings that stopped after step 4."""

    run: Path
    stopped: Path
    args: list[str]
    records: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def base(rows_file: Path) -> list[str]:
    return [*COMMON, f"data.path={rows_file}"]


def make_whole(folder: Path, args: list[str], where: list[str]) -> Whole:
    records = train_here(folder / "run", *args, *where)
    assert [record["step"] for record in records] == list(range(1, 11))
    before = train_here(folder / "stopped", *args, *where, *STOPS)
    assert [record["step"] for record in before] == [1, 2, 3, 4]
    return Whole(folder / "run", folder / "stopped", args, records)


@pytest.fixture(scope="module")
def adamw(tmp_path_factory: pytest.TempPathFactory, base: list[str], ports: list[int]) -> Whole:
    return make_whole(tmp_path_factory.mktemp("adamw"), base, split(ports, 2, 4))


@pytest.fixture(scope="module")
def sgd(tmp_path_factory: pytest.TempPathFactory, base: list[str], ports: list[int]) -> Whole:
    return make_whole(tmp_path_factory.mktemp("sgd"), [*base, *SGD], split(ports, 2, 4))


def state_of(run_dir: Path, step: int = 10) -> dict[str, torch.Tensor]:
    return CheckpointStore(run_dir / "checkpoints").load(step).tensors


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    unequal = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert unequal == []


def assert_same_run(run_dir: Path, whole: Whole) -> None:
    """Every step's numbers, the adapter, and everything in the last checkpoint."""
    keys = ("step", "loss", "lr", "grad_norm", "tokens", "rows")
    found = [{key: record[key] for key in keys} for record in metrics(run_dir)]
    assert found == [{key: record[key] for key in keys} for record in whole.records]
    adapters = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (run_dir, whole.run)]
    assert_equal(*adapters)
    assert_equal(state_of(run_dir), state_of(whole.run))


def test_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, adamw: Whole, ports: list[int]) -> None:
    """Case C01: shuffling, accumulation, dropout, warm-up and cosine, from the middle of an epoch, on 3 stages."""
    train_here(tmp_path / "run", *adamw.args, *split(ports, 2, 4), f"checkpoint.resume={adamw.stopped}")
    assert_same_run(tmp_path / "run", adamw)

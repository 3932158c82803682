"""Runs that stop after step 4 of 10, and what a run that goes on from there must equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from processes import metrics, train_here
from safetensors.torch import load_file

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


@dataclass
class Whole:
    """An uninterrupted run, and one with the same settings that stopped after step 4."""

    run: Path
    stopped: Path
    args: list[str]
    records: list[dict[str, Any]] = field(default_factory=list)


def make_whole(folder: Path, args: list[str], where: list[str]) -> Whole:
    records = train_here(folder / "run", *args, *where)
    assert [record["step"] for record in records] == list(range(1, 11))
    before = train_here(folder / "stopped", *args, *where, *STOPS)
    assert [record["step"] for record in before] == [1, 2, 3, 4]
    return Whole(folder / "run", folder / "stopped", args, records)


def state_of(run_dir: Path, step: int = 10) -> dict[str, torch.Tensor]:
    return CheckpointStore(run_dir / "checkpoints").load(step).tensors


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    unequal = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert unequal == []


def assert_same_run(run_dir: Path, whole: Whole, checkpoints: Path | None = None) -> None:
    """Every step's numbers, the adapter, and everything in the last checkpoint."""
    keys = ("step", "loss", "lr", "grad_norm", "tokens", "rows")
    found = [{key: record[key] for key in keys} for record in metrics(run_dir)]
    assert found == [{key: record[key] for key in keys} for record in whole.records]
    adapters = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (run_dir, whole.run)]
    assert_equal(*adapters)
    assert_equal(CheckpointStore(checkpoints or run_dir / "checkpoints").load(10).tensors, state_of(whole.run))

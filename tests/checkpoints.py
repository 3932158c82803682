"""Snapshots to save, and disks that do not wait or that fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch

from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.disk import Disk

KEY = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"
GPT2_KEY = "base_model.model.transformer.h.{}.attn.c_attn.lora_B.weight"
ABOUT = {"run": "r-1", "spec": {"seed": 7, "lr": 1e-4, "names": ["a", "ä"]}, "nothing": None}


class FastDisk(Disk):
    """The real disk without waiting for it: for tests that cut no power."""

    def flush(self, descriptor: int) -> None:
        os.fstat(descriptor)


class FailingDisk(FastDisk):
    """Fails at one operation, counted from 0, or at all from there on; what the operation was half through stays."""

    def __init__(self, fail_at: int, code: int = errno.EIO, *, for_good: bool = False, written: float = 0.5) -> None:
        self.fail_at, self.num_operations, self.failed = fail_at, 0, False
        self._code, self._for_good, self._written = code, for_good, written

    def _count(self, path: Path) -> None:
        number, self.num_operations = self.num_operations, self.num_operations + 1
        if number == self.fail_at or (self._for_good and number > self.fail_at):
            self.failed = True
            raise OSError(self._code, os.strerror(self._code), str(path))

    def make_dir(self, path: Path) -> None:
        self._count(path)
        super().make_dir(path)

    def write(self, path: Path, data: bytes | memoryview) -> None:
        try:
            self._count(path)
        except OSError:
            path.write_bytes(data[: int(len(data) * self._written)])
            raise
        super().write(path, data)

    def sync_dir(self, path: Path) -> None:
        self._count(path)
        super().sync_dir(path)

    def rename(self, old: Path, new: Path) -> None:
        self._count(old)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._count(path)
        super().remove(path)

    def remove_dir(self, path: Path) -> None:
        self._count(path)
        super().remove_dir(path)


def snapshot(step: int, seed: int | None = None, size: int = 4) -> Snapshot:
    """Three layers of Llama, of which the last belongs to no layer, with moments; 2 files more than layers."""
    generator = torch.Generator().manual_seed(step if seed is None else seed)
    tensors: dict[str, torch.Tensor] = {}
    for key in [KEY.format(0), KEY.format(3), KEY.format(11), "base_model.model.lm_head.lora_A.weight"]:
        tensors[f"adapter:{key}"] = torch.randn(2, size, generator=generator).to(torch.bfloat16)
        tensors[f"optimizer.exp_avg:{key}"] = torch.randn(2, size, generator=generator)
        tensors[f"optimizer.exp_avg_sq:{key}"] = torch.randn(2, size, generator=generator).square()
        tensors[f"optimizer.step:{key}"] = torch.tensor(float(step))
    return Snapshot(step, tensors, ABOUT | {"tokens": step * 1000})


def small(step: int, seed: int | None = None) -> Snapshot:
    """Two files and a manifest: little to write where every state of them is tried."""
    value = float(step if seed is None else seed)
    return Snapshot(step, {f"adapter:{KEY.format(1)}": torch.full((2,), value), "adapter:x": torch.tensor(value)}, {})


def same(first: Snapshot | None, second: Snapshot) -> bool:
    return (
        first is not None
        and first.step == second.step
        and first.about == second.about
        and first.tensors.keys() == second.tensors.keys()
        and all(
            value.dtype == second.tensors[name].dtype and torch.equal(value, second.tensors[name])
            for name, value in first.tensors.items()
        )
    )


def store_of(folder: Path, *saved: Snapshot, keep_last: int = 2) -> CheckpointStore:
    store = CheckpointStore(folder / "checkpoints", keep_last=keep_last, disk=FastDisk())
    for one in saved:
        store.save(one)
    return store


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and every folder with nothing in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"folder"
        for path in sorted(folder.rglob("*"))
        if path.is_file() or not any(path.iterdir())
    }

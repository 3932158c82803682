"""Writes the adapter of a run's best step, from its checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from hetero.adapter_files import check_complete, save_adapter
from hetero.adapters import ResolvedAdapter
from hetero.best import Best
from hetero.checkpoint import CheckpointStore
from hetero.errors import HeteroError
from hetero.training_state import adapter_of

log = logging.getLogger(__name__)


def write_best(
    folder: Path,
    ranked: Sequence[Best],
    store: CheckpointStore | None,
    resolved: ResolvedAdapter,
    last: tuple[int, dict[str, torch.Tensor]],
) -> Best | None:
    """Writes the adapter of the best step that can be read; each better one that cannot is said.

    Args:
        folder: where it goes.
        ranked: the steps, best first.
        store: the run's own checkpoints.
        resolved: the adapter.
        last: the last step and its adapter, by global key.

    Returns:
        The step; None where there is none.
    """
    for found in ranked:
        try:
            adapter = last[1] if found.step == last[0] else _read(found, store, resolved)
        except HeteroError as exc:
            log.warning("step %d, with the loss %.4f, cannot be kept: %s", found.step, found.eval_loss, exc)
            continue
        save_adapter(folder, resolved, adapter)
        return found
    return None


def _read(best: Best, store: CheckpointStore | None, resolved: ResolvedAdapter) -> dict[str, torch.Tensor]:
    if best.folder is not None:
        store = CheckpointStore(Path(best.folder))
    assert store is not None  # checkpoint.keep_best needs checkpoints
    adapter = adapter_of(store.load(best.step).tensors)
    check_complete(resolved, adapter)
    return adapter

"""The best step of a run by its evaluations, which `checkpoint.keep_best` keeps: remembered in every checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from hetero.errors import ConfigError

BEST, EVAL_ROWS = "best", "eval_rows"  # in what is recorded of a checkpoint: the best step, and digest of the rows
FOLDER = "adapter-best"  # in a run's folder


class Best(Struct, frozen=True, forbid_unknown_fields=True):
    """A step whose evaluation gave the smallest loss.

    Attributes:
        step: from 1; what was there before the first is no candidate.
        eval_loss: its.
        folder: of checkpoints that holds it; None for the run's own.
    """

    step: int
    eval_loss: float
    folder: str | None = None


def ranked(records: Iterable[Mapping[str, Any]], before: Best | None = None) -> list[Best]:
    """The steps of evaluations from the best on; of equal ones the earlier is better.

    Args:
        records: as in `eval.jsonl`.
        before: the best of what the records may lack, since a run before had it.
    """
    found = {
        record["step"]: Best(record["step"], record["eval_loss"])
        for record in records
        if record["step"] > 0 and record["eval_loss"] is not None
    }
    if before is not None:
        found[before.step] = before
    return sorted(found.values(), key=lambda best: (best.eval_loss, best.step))


def best_before(about: Mapping[str, Any], folder: str | None) -> Best | None:
    """The best step that a checkpoint remembers.

    Args:
        about: what is recorded of the checkpoint.
        folder: that the checkpoint is in, where the run now has another one; None where it goes on in the same.

    Raises:
        ConfigError: the record is none of this program's.
    """
    raw = about.get(BEST)
    if raw is None:
        return None
    try:
        best = msgspec.convert(raw, Best)
    except msgspec.ValidationError as exc:
        raise ConfigError(
            f"checkpoint.resume must lead to a checkpoint of this version: its best step: {exc}"
        ) from None
    return msgspec.structs.replace(best, folder=best.folder or folder)

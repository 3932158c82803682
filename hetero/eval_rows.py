"""The rows that a run trains on and those that it evaluates on: from files of their own, or held out."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch

from hetero.data import DataSet, Example, load
from hetero.errors import ConfigError
from hetero.eval_rules import evaluation_source
from hetero.keys import key64
from hetero.spec import Config, DataSpec

log = logging.getLogger(__name__)


def load_all(
    config: Config, tokenizer: Any | None, *, vocab_size: int, max_length: int
) -> tuple[DataSet, tuple[Example, ...]]:
    """Reads what a run trains on, and what it evaluates on.

    A run that only evaluates trains on nothing, so both are the same then: the rows for evaluation, or where none are
    given those of `data` itself.

    Args:
        config: the run's.
        tokenizer, vocab_size, max_length: as for `data.load`.

    Returns:
        The data set, and the rows to evaluate on; none where none are given.

    Raises:
        ConfigError: a value, file or row that cannot work.
    """
    spec = config.data
    limits = {"vocab_size": vocab_size, "max_length": max_length}
    only_evaluates = config.task == "evaluate"
    if spec.eval_path is not None or spec.eval_split is not None:
        evaluated = _load_for_evaluation(spec, tokenizer, **limits)
        if only_evaluates:
            return evaluated, evaluated.examples
        data_set = load(spec, tokenizer, **limits)
        log.info("data: %s", data_set.summary)
        return data_set, evaluated.examples
    data_set = load(spec, tokenizer, **limits)
    log.info("data: %s", data_set.summary)
    if spec.eval_fraction is None:
        return data_set, data_set.examples if only_evaluates else ()
    kept, held_out = hold_out(data_set.examples, spec.eval_fraction)
    log.info("evaluation: %d of %d rows are held out", len(held_out), len(data_set.examples))
    return DataSet(held_out if only_evaluates else kept, data_set.summary), held_out


def hold_out(examples: Sequence[Example], fraction: float) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Rows to train on and rows to evaluate on, each in the source's order; the same ones whatever the seed.

    So runs with several seeds have one yardstick, and a later `task=evaluate` finds the rows that were not trained on.

    Args:
        examples: all rows.
        fraction: of them that is held out, rounded; one row at least.

    Raises:
        ConfigError: no row is left to train on.
    """
    count = max(1, round(fraction * len(examples)))
    if count >= len(examples):
        raise ConfigError(
            f"data.eval_fraction must leave a row to train on, got {fraction} of {len(examples)} rows; use a smaller "
            "one, or data.eval_path=FILE"
        )
    generator = torch.Generator().manual_seed(key64("held out", len(examples)))
    chosen = set(torch.randperm(len(examples), generator=generator)[:count].tolist())
    kept = tuple(example for index, example in enumerate(examples) if index not in chosen)
    return kept, tuple(example for index, example in enumerate(examples) if index in chosen)


def _load_for_evaluation(spec: DataSpec, tokenizer: Any | None, *, vocab_size: int, max_length: int) -> DataSet:
    """The rows of `evaluation_source`; messages name its keys."""
    try:
        found = load(evaluation_source(spec), tokenizer, vocab_size=vocab_size, max_length=max_length)
    except ConfigError as exc:
        text = str(exc).replace("a row to train on", "a row to evaluate on")
        if spec.eval_path is not None:
            text = re.sub(r"\bdata\.path\b", "data.eval_path", text)
        if spec.eval_split is not None:
            text = re.sub(r"\bdata\.split\b", "data.eval_split", text)
        key = "data.eval_path" if spec.eval_path is not None else "data.eval_split"
        raise ConfigError(text if "data.eval_" in text else f"{key}: {text}") from None
    log.info("evaluation: %s", found.summary)
    return found

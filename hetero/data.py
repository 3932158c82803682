"""Data: the configured rows -> examples, the order of a run's steps, and padded micro-batches.

Only the coordinator reads data. Order is a pure function of (seed, epoch, step): a resume needs the step number only.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hetero.chat import Encoded, encode
from hetero.errors import ConfigError
from hetero.packing import pack, positions
from hetero.rows import IGNORE, Row, Rows, read_rows
from hetero.spec import DataSpec

logger = logging.getLogger(__name__)

# Steps whose rows `data.bucket` sorts together: enough for rows of one length, few enough to stay a shuffle.
BUCKET_STEPS = 50
# What it pads lengths to, so that allocators that keep memory by size see few sizes.
BUCKET_MULTIPLE = 32


@dataclass(frozen=True)
class Example:
    """One row to train on.

    Attributes:
        row: its id in the data set, from 0, skipped rows counted.
        input_ids: token ids, at least two.
        labels: as long as input_ids, aligned with them (the loss shifts); -100 = not trained.
        packed: (row id, start) of each document where the row holds several; empty where it is one document.
    """

    row: int
    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    packed: tuple[tuple[int, int], ...] = ()

    def rows(self) -> tuple[int, ...]:
        """The ids of the data set's rows in it."""
        return tuple(row for row, _start in self.packed) or (self.row,)


@dataclass(frozen=True)
class DataSet:
    """The examples in the source's order, and one line on what was kept, skipped and cut."""

    examples: tuple[Example, ...]
    summary: str

    def digest(self) -> str:
        """SHA-256 of all rows, tokens and labels in order, in hex: two runs with the same one see the same steps."""
        found = hashlib.sha256()
        for example in self.examples:
            found.update(repr((example.row, example.input_ids, example.labels, *example.packed)).encode())
        return found.hexdigest()


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows padded to the longest of them.

    Attributes:
        rows: the data set's row ids, B of them, or more where rows are packed.
        input_ids: [B, T] int64.
        attention_mask: [B, T] bool, False on padding; None when nothing is padded or rows are packed.
        position_ids: [B, T] int64, from 0 at each row's first real token, where packed at each document's and at the
            padding's; None when nothing is padded.
        labels: [B, T] int64, -100 on padding and on each row's first real token: in a left-padded row that one would be
            predicted from a position that sees only padding.
        label_tokens: number of labels that are predicted, those of labels[:, 1:] that are not -100.
    """

    rows: tuple[int, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    labels: torch.Tensor
    label_tokens: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """What `Stage.forward` takes, by name; nothing for a mask and positions that are None."""
        named = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def real_tokens(self) -> int:
        """Number of tokens without padding."""
        return self.input_ids.numel() if self.attention_mask is None else int(self.attention_mask.sum())


def load(spec: DataSpec, tokenizer: Any | None, *, vocab_size: int, max_length: int) -> DataSet:
    """Read, tokenise, check and cut the configured rows; every example has at least one label that is predicted.

    Args:
        spec: the run's data configuration.
        tokenizer: a `PreTrainedTokenizerBase`; None is enough for rows that are tokenised already.
        vocab_size: rows of the model's embedding.
        max_length: most tokens of a row; longer ones are cut.

    Raises:
        ConfigError: a value, file or row that cannot work, or no row is left.
    """
    found = read_rows(spec)
    encoded = encode(found.rows, tokenizer, response_only=spec.response_only)
    if spec.source == "pydocs":
        return _windows(found, encoded, vocab_size, max_length)
    share = list(range(vocab_size)).__getitem__  # equal ids are one int object: a third of the memory
    examples: list[Example] = []
    cut = without = without_by_cut = 0
    for row, item in zip(found.rows, encoded, strict=True):
        _check_vocabulary(row, item, vocab_size)
        example = _example(row, item, max_length, share)
        if example is None:
            without += 1
            without_by_cut += _is_trained(item.labels)
        else:
            examples.append(example)
            cut += len(item.input_ids) > max_length
    summary = _summary(found, len(examples), cut, without, max_length)
    if not examples and without_by_cut:
        raise ConfigError(
            f"data.max_length must leave a label in at least one row, got {max_length}; "
            f"raise it or shorten the prompts: {summary}"
        )
    if not examples:
        raise ConfigError(f"data.path must hold a row to train on (an answer, or two tokens of text), got {summary}")
    if without:
        logger.warning(
            "%d of %d rows of %s have no label to train (%d since data.max_length=%d cuts it off) and are left out",
            without, found.total, found.name, without_by_cut, max_length,
        )  # fmt: skip
    if spec.packing:
        packed = pack(examples, max_length)
        share_of = sum(len(example.input_ids) for example in packed) / (len(packed) * max_length)
        return DataSet(packed, f"{summary}; packed into {len(packed)} rows, {share_of:.0%} full")
    return DataSet(tuple(examples), summary)


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Steps that see each example once; the last one may have fewer rows, nothing crosses the epoch's border."""
    return -(-num_examples // batch_size)


def indices_of_step(
    num_examples: int,
    batch_size: int,
    step: int,
    *,
    seed: int,
    shuffle: bool,
    length_of: Callable[[int], int] | None = None,
) -> list[int]:
    """Which examples a step trains on, in order.

    Args:
        num_examples: at least 1.
        batch_size: rows a step.
        step: from 1, over all epochs.
        seed: of the run; another seed is another order.
        shuffle: a new order in each epoch; else the order of the data set in every epoch.
        length_of: tokens of an example; given, rows of like length come together (`data.bucket`): within
            `BUCKET_STEPS` steps that would follow one another, rows are sorted by length, and the steps shuffled.
    """
    epoch, window = divmod(step - 1, steps_per_epoch(num_examples, batch_size))
    first = window * batch_size
    # Hashed, since with seed + epoch the second epoch of one seed is the first of the next.
    order = torch.randperm(num_examples, generator=_draws(seed, epoch)) if shuffle else torch.arange(num_examples)
    if length_of is not None:
        return _bucketed(order, batch_size, window, length_of, _draws(seed, epoch, window // BUCKET_STEPS), shuffle)
    picked: list[int] = order[first : first + batch_size].tolist()
    return picked


def _draws(*key: int) -> torch.Generator:
    hashed = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(hashed[:8], "big") >> 1)


def _bucketed(
    order: torch.Tensor,
    batch_size: int,
    window: int,
    length_of: Callable[[int], int],
    draws: torch.Generator,
    shuffle: bool,
) -> list[int]:
    """The rows of step `window` of an epoch; only full steps change places, so the short one stays the last."""
    group, place = divmod(window, BUCKET_STEPS)
    first = group * BUCKET_STEPS * batch_size
    rows: list[int] = order[first : first + BUCKET_STEPS * batch_size].tolist()
    rows.sort(key=length_of, reverse=True)
    full = len(rows) // batch_size
    if shuffle and place < full:
        place = int(torch.randperm(full, generator=draws)[place])
    return rows[place * batch_size : (place + 1) * batch_size]


def micro_batches(
    examples: Sequence[Example],
    microbatch_size: int,
    *,
    padding_side: Literal["right", "left"],
    pad_id: int,
    multiple_of: int = 1,
    max_length: int | None = None,
) -> list[MicroBatch]:
    """A step's examples as micro-batches, in order; the last may be short, each is padded to its own longest row.

    Args:
        examples: of the step.
        microbatch_size: rows of a micro-batch.
        padding_side: where short rows are filled up.
        pad_id: with what.
        multiple_of: the padded length is one, if `max_length` allows: fewer different shapes.
        max_length: most tokens of a row.
    """
    return [
        _micro_batch(examples[start : start + microbatch_size], padding_side, pad_id, multiple_of, max_length)
        for start in range(0, len(examples), microbatch_size)
    ]


def _micro_batch(
    examples: Sequence[Example], padding_side: str, pad_id: int, multiple_of: int, max_length: int | None
) -> MicroBatch:
    lengths = [len(example.input_ids) for example in examples]
    width = -(-max(lengths) // multiple_of) * multiple_of
    if max_length is not None:
        width = max(min(width, max_length), *lengths)
    input_ids = torch.full((len(examples), width), pad_id)  # [B, T]
    labels = torch.full_like(input_ids, IGNORE)
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for i, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        start = 0 if padding_side == "right" else width - length
        input_ids[i, start : start + length] = torch.tensor(example.input_ids)
        labels[i, start + 1 : start + length] = torch.tensor(example.labels[1:])
        mask[i, start : start + length] = True
    padded, packed = min(lengths) < width, any(example.packed for example in examples)
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0) if padded else None
    if packed:
        position_ids = torch.tensor([_positions(example, width, padding_side) for example in examples])  # [B, T]
    return MicroBatch(
        rows=tuple(row for example in examples for row in example.rows()),
        input_ids=input_ids,
        attention_mask=mask if padded and not packed else None,
        position_ids=position_ids,
        labels=labels,
        label_tokens=int((labels[:, 1:] != IGNORE).sum()),
    )


def _positions(example: Example, width: int, padding_side: str) -> list[int]:
    begin = 0 if padding_side == "right" else width - len(example.input_ids)
    starts = [start for _row, start in example.packed]
    return positions(starts, begin, begin + len(example.input_ids), width)


def _is_trained(labels: Sequence[int]) -> bool:
    return any(label != IGNORE for label in labels[1:])


def _example(row: Row, item: Encoded, max_length: int, share: Callable[[int], int]) -> Example | None:
    """The row cut to max_length; None if no label is left."""
    ids, labels = item.input_ids[:max_length], item.labels[:max_length]
    if not _is_trained(labels):
        return None
    shared = tuple(map(share, ids))
    if item.labels is item.input_ids:
        return Example(row.id, shared, shared)
    return Example(row.id, shared, tuple(label if label == IGNORE else share(label) for label in labels))


def _check_vocabulary(row: Row, item: Encoded, vocab_size: int) -> None:
    for key, ids in (("input_ids", item.input_ids), ("labels", item.labels)):
        largest = max(ids, default=0)
        if largest >= vocab_size:
            what, remedy = (f"{row.where}: {key}", "choose the model that the rows were tokenised for")
            if row.form != "tokens":
                what, remedy = (row.where, "the tokenizer of model.path has tokens that the model lacks")
            raise ConfigError(f"{what}: token id {largest} >= vocab {vocab_size}; {remedy}")


def _windows(found: Rows, encoded: Iterable[Encoded], vocab_size: int, max_length: int) -> DataSet:
    """Running text as rows of max_length tokens; the rest at the end is left out unless it is all there is."""
    ids: list[int] = []
    for row, item in zip(found.rows, encoded, strict=True):
        _check_vocabulary(row, item, vocab_size)
        ids += item.input_ids
    pieces = [tuple(ids[start : start + max_length]) for start in range(0, len(ids), max_length)]
    rest = 0
    if len(pieces) > 1 and len(pieces[-1]) < max_length:
        rest = len(pieces.pop())
    if not pieces or len(pieces[0]) < 2:
        raise ConfigError(f"data.source=pydocs must give at least two tokens, the tokenizer of model.path gives {ids}")
    examples = tuple(Example(i, piece, piece) for i, piece in enumerate(pieces))
    return DataSet(
        examples, f"pydocs: {len(pieces)} rows of {len(pieces[0])} tokens, {rest} tokens at the end left out"
    )


def _summary(found: Rows, kept: int, cut: int, without: int, max_length: int) -> str:
    reasons = [f"{count} {reason}" for reason, count in sorted(found.skipped.items())]
    if without:
        reasons.append(f"{without} without a label")
    parts = [f"{found.name}: kept {kept} of {found.total} rows"]
    if reasons:
        parts.append("skipped " + ", ".join(reasons))
    if cut:
        parts.append(f"cut {cut} to {max_length} tokens")
    if found.blank_lines:
        parts.append(f"blank lines: {found.blank_lines}")
    return "; ".join(parts)

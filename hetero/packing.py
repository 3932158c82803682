"""Packing: several short documents in one row, so that little of a micro-batch is padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from hetero.rows import IGNORE

if TYPE_CHECKING:
    from hetero.data import Example


def bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which items share a bin: best-fit decreasing, which wastes at most two ninths of the best packing and a bit.

    Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing algorithms".

    Args:
        lengths: of the items, each at most `capacity`.
        capacity: of a bin.

    Returns:
        The items' indices, ascending in a bin; bins by their first item.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])  # stable: equal lengths stay in order
    by_space: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit s is set where a bin has exactly s left
    found: list[list[int]] = []
    for index in order:
        fitting = spaces >> lengths[index]
        if fitting:
            space = (fitting & -fitting).bit_length() - 1 + lengths[index]
            bin_ = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, bin_ = capacity, []
            found.append(bin_)
        bin_.append(index)
        left = space - lengths[index]
        by_space[left].append(bin_)
        spaces |= 1 << left
    return sorted(sorted(bin_) for bin_ in found)


def pack(examples: Sequence[Example], max_length: int) -> tuple[Example, ...]:
    """Examples of at most `max_length` tokens that hold several documents each.

    A document's first token is no label: what would predict it is the end of another document.
    """
    lengths = [len(example.input_ids) for example in examples]
    return tuple(_joined([examples[index] for index in bin_]) for bin_ in bins(lengths, max_length))


def _joined(documents: Sequence[Example]) -> Example:
    ids: list[int] = []
    labels: list[int] = []
    starts = []
    for document in documents:
        starts.append((document.row, len(ids)))
        ids += document.input_ids
        labels += (IGNORE, *document.labels[1:])
    return type(documents[0])(documents[0].row, tuple(ids), tuple(labels), tuple(starts))


def positions(starts: Sequence[int], begin: int, end: int, width: int) -> list[int]:
    """Position ids of a row that is padded to `width`: each document counts from 0, and so does the padding.

    transformers tells documents apart by these where there is no attention mask; padding is one more document, which
    nothing else sees.

    Args:
        starts: of the documents, from the row's first real token on.
        begin: where the first real token stands; padding is before it or after `end`.
        end: one past the last real token.
        width: of the padded row.
    """
    edges = [0, *(begin + start for start in starts), end, width]
    return [at for left, right in pairwise(edges) for at in range(right - left)]

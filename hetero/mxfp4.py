"""Experts in mxfp4, as gpt-oss is published: turned into the stage's numbers while they are loaded.

OCP Microscaling Formats (MX) Specification 1.0: 32 values of 4 bits (e2m1) share a power of two (e8m0). They take no
gradient, not even one that only passes through, so nothing is gained by keeping them. Imports neither torch nor
transformers before something of theirs is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# What follows a parameter's name in a file.
BLOCKS, SCALES = "_blocks", "_scales"
_PIECE_BLOCKS = 1 << 15  # of 32 values


def loaded_as_numbers() -> dict[str, Any]:
    """The `quantization_config` by which transformers turns stored experts into the numbers of the stage."""
    return {"quant_method": "mxfp4", "dequantize": True}


def values_of(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers that packed ones stand for, by transformers' own arithmetic; bfloat16 holds them exactly.

    Args:
        blocks: uint8 [experts, out, in / 32, 16], two values a byte, the lower half first.
        scales: uint8 [experts, out, in / 32], exponents of two with a bias of 127.

    Returns:
        [experts, in, out], as the model has them.
    """
    from transformers.integrations import mxfp4

    with dequantised_in_pieces():
        found: torch.Tensor = mxfp4.convert_moe_packed_tensors(blocks, scales)
    return found


@contextmanager
def dequantised_in_pieces(num_blocks: int = _PIECE_BLOCKS) -> Iterator[None]:
    """Lets transformers turn mxfp4 into numbers in pieces, bit for bit what it makes of the whole.

    Its way takes three times of what a layer's experts are in the end: 3 GB more for a layer of gpt-oss-20b. Wraps
    the private `_convert_moe_packed_tensors`, whose pieces are as large as any known layer.

    Args:
        num_blocks: of a piece.
    """
    from transformers.integrations import mxfp4

    original = mxfp4._convert_moe_packed_tensors

    def convert(blocks: Any, scales: Any, *, dtype: Any, rows_per_chunk: int = 0) -> Any:
        del rows_per_chunk
        return original(blocks, scales, dtype=dtype, rows_per_chunk=num_blocks)

    warns = logging.getLogger("transformers.quantizers.quantizer_mxfp4")  # that a CPU has no kernels for mxfp4
    level = warns.level
    mxfp4._convert_moe_packed_tensors = convert
    warns.setLevel(logging.ERROR)
    try:
        yield
    finally:
        mxfp4._convert_moe_packed_tensors = original
        warns.setLevel(level)

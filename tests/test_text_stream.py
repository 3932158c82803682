"""Text while it comes: never half a character, and together the whole."""

from __future__ import annotations

import random

import pytest

from hetero.text_stream import TextStream
from hetero.tiny import _tiny_tokenizer

TEXT = "Grüße, 世界! 👩‍👩‍👧 ok\n\tnaïve"


@pytest.fixture(scope="module")
def tokenizer() -> object:
    """One token a byte."""
    return _tiny_tokenizer()


def pieces_of(tokenizer: object, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.add(token) for token in ids), stream.end()]


def test_each_character_comes_with_its_last_byte(tokenizer: object) -> None:
    pieces = pieces_of(tokenizer, list(TEXT.encode()))
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_special_tokens_are_no_text(tokenizer: object) -> None:
    assert "".join(pieces_of(tokenizer, [257, 72, 105, 258])) == "Hi"


def test_pieces_of_any_bytes_are_the_text_of_all(tokenizer: object) -> None:
    """Bytes that are no UTF-8 as well, in the middle and at the end."""
    draw = random.Random(3)
    for _ in range(200):
        ids = [draw.choice([draw.randrange(256), *"aü世".encode()]) for _ in range(draw.randrange(1, 30))]
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)  # type: ignore[attr-defined]

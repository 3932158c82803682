"""Token ids -> text while they come, without half characters."""

from __future__ import annotations

from typing import Any

_HALF = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for the first bytes of a character


class TextStream:
    """The text of one row; its pieces together are the text of all tokens.

    What a token adds depends on those before it (a space, the second half of a character), so a few of them are decoded
    again with it, and the difference is new.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._told = 0  # tokens that are decoded again; tokens whose text was given

    def add(self, token: int) -> str:
        """The text that a token completes; empty where it ends in the middle of a character."""
        self._ids.append(token)
        new = self._new()
        if not new or new.endswith(_HALF):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return new

    def end(self) -> str:
        """What is left: bytes that have become no character."""
        new = self._new()
        self._start, self._told = self._told, len(self._ids)
        return new

    def _new(self) -> str:
        before = self._text(self._ids[self._start : self._told])
        return self._text(self._ids[self._start :])[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

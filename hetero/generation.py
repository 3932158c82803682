"""One batch of prompts through one stage: from the stage before, or on the first from whoever decides, to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetero.decoding import Decoder
from hetero.errors import RemoteProtocolError
from hetero.sampling import Sampling, choose
from hetero.stage import Stage
from hetero.transport.link import Link, Received
from hetero.watchdog import Phase, Progress
from hetero.wire.generation_flow import pack_prompts, unpack_prompts
from hetero.wire.headers import Chosen, Ended, FrameType, Hidden, Prompt, TensorEntry
from hetero.wire.tensors import DTYPES, NAMES, as_bytes, unpack


@dataclass(frozen=True)
class PromptBatch:
    """A batch of prompts as its PROMPT announces it: the header, and each row's length and number in the run."""

    header: Prompt
    lengths: list[int]
    numbers: list[int]


class StageGeneration:
    """A batch of prompts on one stage.

    Args:
        stage: what computes, in evaluation mode.
        batch: the prompts.
        downstream: link to the stage after, None on the last.
        dtype: of hidden states on that link.
        progress: told of each piece.
    """

    def __init__(
        self, stage: Stage, batch: PromptBatch, *, downstream: Link | None, dtype: str, progress: Progress
    ) -> None:
        self._stage, self._batch, self._downstream = stage, batch, downstream
        self._dtype, self._progress = DTYPES[dtype], progress
        self._decoder = Decoder(stage, batch.lengths)
        self._position = 0
        header = batch.header
        self._sampling = Sampling(header.temperature, header.top_k, header.top_p, header.seed)
        if downstream is not None:
            downstream.send(FrameType.PROMPT, header, [memoryview(pack_prompts(batch.lengths, batch.numbers))])

    def piece(self, piece: torch.Tensor) -> torch.Tensor | None:
        """Takes the next piece through the stage and on to the next.

        Args:
            piece: on the host, as `Decoder.forward` takes it.

        Returns:
            On the last stage the next token of each row, int64 [B] on the host; None on the others.
        """
        position = self._position
        with self._progress.doing(Phase.STEP, "a forward"):
            out = self._decoder.forward(piece)
            if self._stage.is_last:
                chosen = choose(out, self._sampling, self._batch.numbers, position)
            else:
                hidden = self._stage.device.to_host(out.to(self._dtype))
        self._position += 1
        if self._stage.is_last:
            return chosen
        assert self._downstream is not None
        entry = TensorEntry("hidden", NAMES[hidden.dtype], list(hidden.shape))  # type: ignore[arg-type]
        header = Hidden(batch=self._batch.header.batch, position=position, tensor=entry)
        self._downstream.send(FrameType.HIDDEN, header, [as_bytes(hidden)])
        return None

    def end(self) -> None:
        """The batch is over for this stage and those after it."""
        if self._downstream is not None:
            self._downstream.send(FrameType.ENDED, Ended(batch=self._batch.header.batch))


def serve_batch(
    batch: PromptBatch,
    begin: Callable[[PromptBatch], StageGeneration],
    next_piece: Callable[[], Received],
    answer: Callable[[Chosen, memoryview], None],
) -> None:
    """A worker's part in a batch of prompts, from its PROMPT to its ENDED.

    Args:
        batch: the prompts.
        begin: makes the stage's part.
        next_piece: gives the next HIDDEN, or ENDED.
        answer: sends CHOSEN to the coordinator; on the last stage only.
    """
    generation = begin(batch)
    while isinstance((piece := next_piece().frame).header, Hidden):
        hidden = unpack([piece.header.tensor], piece.payload)["hidden"]
        chosen = generation.piece(hidden)
        if chosen is not None:
            answer(Chosen(batch=batch.header.batch, position=piece.header.position), as_bytes(chosen))
    generation.end()


def batch_of(order: Received) -> PromptBatch:
    """The batch that a received PROMPT announces."""
    header = order.frame.header
    assert isinstance(header, Prompt)
    return PromptBatch(header, *unpack_prompts(order.frame.payload))


def checked_tokens(payload: memoryview, vocab_size: int) -> torch.Tensor:
    """Tokens that a peer chose, int64 [B]; they index the embedding.

    Raises:
        RemoteProtocolError: one is not in the vocabulary.
    """
    tokens = torch.frombuffer(payload, dtype=torch.int64).clone()
    if bool(((tokens < 0) | (tokens >= vocab_size)).any()):
        raise RemoteProtocolError(f"a chosen token must be below the vocabulary of {vocab_size}, got {tokens.tolist()}")
    return tokens

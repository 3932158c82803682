"""Generation from the coordinator's side: batches of prompts through all stages, token by token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hetero.errors import RemoteProtocolError
from hetero.generation import PromptBatch, StageGeneration, checked_tokens
from hetero.member import Member
from hetero.prompts import Prompt
from hetero.session import CoordinatorSession
from hetero.spec import GenerationSpec
from hetero.stopping import Stop
from hetero.text_stream import TextStream
from hetero.wire import headers

log = logging.getLogger(__name__)

Finish = Literal["end", "max_new_tokens", "max_position_embeddings", "stopped"]


@dataclass
class Sample:
    """What the model answered to a prompt, as far as it has.

    Attributes:
        prompt: that it answers.
        output_ids: the new tokens, an end token included.
        text: of them, without special tokens.
        finish: why it ended: an end token, the number of tokens asked for, the longest text that the model can read, or
            somebody who stopped it.
    """

    prompt: Prompt
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish = "stopped"

    def record(self) -> dict[str, Any]:
        """As samples.jsonl holds it."""
        return {
            "prompt": self.prompt.shown,
            "text": self.text,
            "finish": self.finish,
            "prompt_tokens": len(self.prompt.input_ids),
            "output_ids": self.output_ids,
        }


@dataclass(frozen=True)
class Generator:
    """What generation works with, built and connected.

    Attributes:
        member: stage 0.
        session: the other stages.
        tokenizer: of the model.
        settings: how tokens are chosen, and how many.
        end_ids: tokens that end a text.
        pad_id: fills up short rows and those that have ended.
        max_positions: the longest text that the model can read; None: any.
        on_text: told of each piece of text of a sample, and with None of its end.
        stop: says whether to end before the next token.
    """

    member: Member
    session: CoordinatorSession
    tokenizer: Any
    settings: GenerationSpec
    end_ids: frozenset[int]
    pad_id: int
    max_positions: int | None
    on_text: Callable[[Sample, str | None], None] = lambda sample, text: None
    stop: Stop = field(default_factory=Stop)


def generate(generator: Generator, prompts: Sequence[Prompt]) -> Iterator[list[Sample]]:
    """Answers all prompts, batch by batch in their order; gives each batch's samples, ended or stopped.

    Raises:
        PeerError: a worker failed.
    """
    limits = generator.member.spec.generation
    assert limits is not None
    for number, start in enumerate(range(0, len(prompts), limits.batch_size)):
        samples = [Sample(prompt) for prompt in prompts[start : start + limits.batch_size]]
        try:
            with generator.member.evaluating():
                _Batch(generator, number, samples).run()
        finally:
            yield samples
        if generator.stop.reason is not None:
            return


class _Batch:
    """A batch of prompts on its way."""

    def __init__(self, generator: Generator, number: int, samples: list[Sample]) -> None:
        self._generator, self._number, self._samples = generator, number, samples
        self._streams = [TextStream(generator.tokenizer) for _ in samples]
        self._live = [True] * len(samples)

    def run(self) -> None:
        """Token by token until all rows have ended."""
        generator, settings = self._generator, self._generator.settings
        generation = generator.member.begin_batch(self._announced())
        piece = self._padded()
        for position in range(settings.max_new_tokens):
            if generator.stop.reason is not None:
                break
            tokens = self._next(generation, piece, position)
            for row, token in enumerate(tokens.tolist()):
                if self._live[row]:
                    self._take(row, token)
            if not any(self._live):
                break
            piece = tokens.masked_fill(~torch.tensor(self._live), generator.pad_id)[:, None]
        generation.end()
        for row, live in enumerate(self._live):
            if live:
                self._end(row, "stopped")

    def _announced(self) -> PromptBatch:
        settings = self._generator.settings
        lengths = [len(sample.prompt.input_ids) for sample in self._samples]
        header = headers.Prompt(
            batch=self._number,
            rows=len(lengths),
            length=max(lengths),
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=settings.seed,
        )
        return PromptBatch(header, lengths, [sample.prompt.number for sample in self._samples])

    def _padded(self) -> torch.Tensor:
        """The prompts' tokens [B, T], padded on the left."""
        rows = [sample.prompt.input_ids for sample in self._samples]
        longest = max(map(len, rows))
        return torch.tensor([[self._generator.pad_id] * (longest - len(row)) + list(row) for row in rows])

    def _next(self, generation: StageGeneration, piece: torch.Tensor, position: int) -> torch.Tensor:
        """The next token of each row, int64 [B]."""
        session, spec = self._generator.session, self._generator.member.spec
        if spec.workers:
            session.await_tokens(self._number, position, len(self._samples))
        chosen = generation.piece(piece)
        if chosen is not None:
            return chosen
        payload = session.wait_tokens().payload
        try:
            return checked_tokens(payload, spec.vocab_size)
        except RemoteProtocolError as exc:
            raise session.peer(len(spec.workers)).error(str(exc)) from None

    def _take(self, row: int, token: int) -> None:
        sample, generator = self._samples[row], self._generator
        sample.output_ids.append(token)
        if token in generator.end_ids:
            self._end(row, "end")
            return
        self._tell(row, self._streams[row].add(token))
        length = len(sample.prompt.input_ids) + len(sample.output_ids)
        if generator.max_positions is not None and length >= generator.max_positions:
            self._end(row, "max_position_embeddings")
        elif len(sample.output_ids) == generator.settings.max_new_tokens:
            self._end(row, "max_new_tokens")

    def _end(self, row: int, finish: Finish) -> None:
        self._tell(row, self._streams[row].end())
        self._live[row] = False
        self._samples[row].finish = finish
        self._generator.on_text(self._samples[row], None)

    def _tell(self, row: int, text: str) -> None:
        if text:
            self._samples[row].text += text
            self._generator.on_text(self._samples[row], text)

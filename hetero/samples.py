"""What a person sees of generated text, and the file that keeps it."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from types import TracebackType

import rich
from rich.console import Group
from rich.live import Live
from rich.text import Text

from hetero.generate import Sample

FILE_NAME = "samples.jsonl"

_CUT = {
    "max_new_tokens": "cut: generation.max_new_tokens",
    "max_position_embeddings": "cut: the model can read no longer text (max_position_embeddings)",
    "stopped": "stopped",
}


class SampleView:
    """Shows text as it comes in a terminal, elsewhere a block for each prompt once it has ended.

    Args:
        num_prompts: of a batch; one alone is written as it comes, several are drawn again with each piece.
    """

    def __init__(self, num_prompts: int) -> None:
        self._console = rich.get_console()
        self._one = num_prompts == 1 and self._console.is_terminal
        self._open: dict[int, Sample] = {}
        several = num_prompts > 1 and self._console.is_terminal
        self._live = Live(console=self._console, transient=True, refresh_per_second=12) if several else None

    def __enter__(self) -> SampleView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._one and self._open:
            self._console.print()

    def on_text(self, sample: Sample, text: str | None) -> None:
        """A sample has grown by this text, or with None has ended."""
        number = sample.prompt.number
        began = number not in self._open
        self._open[number] = sample
        if self._one:
            if began:
                self._print(f"> {shown(sample.prompt.shown)}\n", style="bold", end="")
            self._print(f"{_reason(sample)}\n\n" if text is None else shown(text), end="")
        elif text is None and self._live is None:
            self._print(block(sample))
        elif text is None:
            self._console.print(block(sample), markup=False, highlight=False, soft_wrap=True)
        if text is None:
            del self._open[number]
        if self._live is not None:
            self._live.update(Group(*(Text(block(each, ended=False)) for each in self._open.values())))

    def _print(self, text: str, *, style: str | None = None, end: str = "\n") -> None:
        self._console.print(text, style=style, end=end, markup=False, highlight=False, soft_wrap=True)


def block(sample: Sample, *, ended: bool = True) -> str:
    """A prompt and its answer as lines."""
    reason = _reason(sample) if ended else ""
    return f"> {shown(sample.prompt.shown)}\n{shown(sample.text)}{reason}\n"


def shown(text: str) -> str:
    """Text fit for a terminal: a model may write control characters, which would act there."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) != "Cc" else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def write_samples(run_dir: Path, samples: list[Sample]) -> Path:
    """Writes all samples of a run, one JSON object a line."""
    path = run_dir / FILE_NAME
    lines = [json.dumps(sample.record(), ensure_ascii=False, allow_nan=False) + "\n" for sample in samples]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _reason(sample: Sample) -> str:
    reason = _CUT.get(sample.finish)
    return "" if reason is None else f" [{reason}]"

"""Encoding: checked rows -> token ids and labels, through the tokenizer's own rules and chat template.

    form                  ids                                             labels (response_only)
    text                  tokenizer(text), no EOS added                   all
    completion            [BOS] prompt | completion EOS                   completion EOS
    alpaca                messages with a chat template, else completion  as there
    messages              apply_chat_template(messages)                   each assistant turn with its end token
    tokens                as given                                        as given

What is trained of a conversation is found by the prefix difference: an assistant turn is what
`messages[:i+1]` has beyond `messages[:i]` with the generation prompt. (`return_assistant_tokens_mask` would need
`{% generation %}` in the template, which most lack: the mask is all zeros then, with only a warning.)
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

from hetero.errors import ConfigError
from hetero.rows import IGNORE, Row

logger = logging.getLogger(__name__)

_BATCH = 1024  # rows tokenised in one call: enough for the tokenizer's threads, little memory

# https://github.com/tatsu-lab/stanford_alpaca, as the `text` column of its data set writes it
_ALPACA = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n{input}"
    "### Response:\n"
)
_ALPACA_PAIRED = ", paired with an input that provides further context"


class Encoded(NamedTuple):
    """Token ids and labels of one row, of equal length; -100 = not trained."""

    input_ids: list[int]
    labels: list[int]


def encode(rows: Sequence[Row], tokenizer: Any | None, *, response_only: bool) -> Iterator[Encoded]:
    """Token ids and labels of each row, in order, not cut and not checked against the vocabulary.

    Args:
        rows: checked rows.
        tokenizer: a `PreTrainedTokenizerBase`; None is enough for rows that are tokenised already.
        response_only: train answers only (prompt/completion, Alpaca and messages); else every token.

    Raises:
        ConfigError: a row needs a tokenizer or a chat template that is not there, the template refuses the row, or
            where the row's answers begin and end cannot be told.
    """
    if tokenizer is None:
        text = next((row for row in rows if row.form != "tokens"), None)
        if text is not None:
            raise ConfigError(
                f"model.path must hold a tokenizer, since {text.where} is text; "
                "copy the tokenizer's files there or give rows with input_ids and labels"
            )
        yield from _tokens(rows, tokenizer, response_only)
        return
    ends = ("completion",) if tokenizer.chat_template else ("completion", "alpaca")
    if tokenizer.eos_token_id is None and any(row.form in ends for row in rows):
        logger.warning("the tokenizer of model.path has no end token: the model will not learn where an answer ends")
    for start in range(0, len(rows), _BATCH):
        yield from _encode_batch(rows[start : start + _BATCH], tokenizer, response_only)


def _encode_batch(rows: Sequence[Row], tokenizer: Any, response_only: bool) -> list[Encoded]:
    rows = [_without_alpaca(row, bool(tokenizer.chat_template)) if row.form == "alpaca" else row for row in rows]
    encoders = {"tokens": _tokens, "text": _texts, "completion": _completions, "messages": _conversations}
    encoded: dict[int, Encoded] = {}
    for form, encoder in encoders.items():
        places = [place for place, row in enumerate(rows) if row.form == form]
        if places:
            encoded |= zip(places, encoder([rows[place] for place in places], tokenizer, response_only), strict=True)
    return [encoded[place] for place in range(len(rows))]


def _tokens(rows: Sequence[Row], tokenizer: Any, response_only: bool) -> list[Encoded]:
    return [Encoded(row.fields["input_ids"], row.fields["labels"]) for row in rows]


def _texts(rows: Sequence[Row], tokenizer: Any, response_only: bool) -> list[Encoded]:
    return [Encoded(ids, ids) for ids in _tokenize([row.fields["text"] for row in rows], tokenizer, special=True)]


def _completions(rows: Sequence[Row], tokenizer: Any, response_only: bool) -> list[Encoded]:
    # Apart, so that no token lies across the border: generation starts from the prompt's own tokens.
    first = _leading_special_tokens(tokenizer)
    prompts = _tokenize([row.fields["prompt"] for row in rows], tokenizer, special=False)
    answers = _tokenize([row.fields["completion"] for row in rows], tokenizer, special=False)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = []
    for prompt, answer in zip(prompts, answers, strict=True):
        prompt = first + prompt
        answer = answer if answer[-1:] == end else answer + end
        ids = prompt + answer
        encoded.append(Encoded(ids, [IGNORE] * len(prompt) + answer if response_only else ids))
    return encoded


def _conversations(rows: Sequence[Row], tokenizer: Any, response_only: bool) -> list[Encoded]:
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{rows[0].where} holds messages, and the tokenizer of model.path has no chat template; "
            "choose an instruct model or give rows with prompt and completion"
        )
    texts = [_render(row, row.fields["messages"], tokenizer) for row in rows]
    # The template writes BOS itself: this is what apply_chat_template(tokenize=True) does.
    all_ids = _tokenize(texts, tokenizer, special=False)
    if not response_only:
        return [Encoded(ids, ids) for ids in all_ids]
    prompted = _writes_generation_prompt(rows[0], tokenizer)
    spans = [_answers(row, text, tokenizer, prompted) for row, text in zip(rows, texts, strict=True)]
    encoded = []
    for ids, borders in zip(all_ids, _token_borders(texts, all_ids, spans, tokenizer), strict=True):
        labels = [IGNORE] * len(ids)
        for start, end in zip(borders[::2], borders[1::2], strict=True):
            labels[start:end] = ids[start:end]
        encoded.append(Encoded(ids, labels))
    return encoded


def _token_borders(
    texts: list[str], all_ids: list[list[int]], spans: list[list[tuple[int, int]]], tokenizer: Any
) -> Iterator[list[int]]:
    """For each text the index of the token at each border of its spans; a token across a border counts as after it."""
    all_cuts = [[at for span in row for at in span] for row in spans]
    pieces = [text[a:b] for text, cuts in zip(texts, all_cuts, strict=True) for a, b in pairwise([0, *cuts])]
    pieced = iter(_tokenize(pieces, tokenizer, special=False))
    for text, ids, cuts in zip(texts, all_ids, all_cuts, strict=True):
        borders = [0]
        exact = cuts == sorted(cuts)
        for piece in islice(pieced, len(cuts)):
            start, end = borders[-1], borders[-1] + len(piece)
            exact = exact and ids[start:end] == piece
            borders.append(end)
        if exact:
            yield borders[1:]
        else:  # the text of a span has other tokens alone than in its place: what stands before it tells, at more cost
            prefixes = _tokenize([text[:at] for at in cuts], tokenizer, special=False)
            yield [_common(prefix, ids) for prefix in prefixes]


def _answers(row: Row, text: str, tokenizer: Any, prompted: bool) -> list[tuple[int, int]]:
    """Where in the rendered text each assistant turn that says something begins and ends, its end token included."""
    messages = row.fields["messages"]
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not (message["content"].strip() or message.get("tool_calls")):
            continue
        span = _span_by_prefix(row, i, text, tokenizer) if prompted else None
        spans.append(span or _span_by_substitution(row, i, text, tokenizer))
    return spans


def _span_by_prefix(row: Row, i: int, text: str, tokenizer: Any) -> tuple[int, int] | None:
    """The turn as the difference of two prefixes; None where the template writes earlier turns in another way."""
    messages = row.fields["messages"]
    try:
        before = _render(row, messages[:i], tokenizer, prompt=True)
        until = text if i + 1 == len(messages) else _render(row, messages[: i + 1], tokenizer)
    except ConfigError:  # the template accepts whole conversations only
        return None
    return (len(before), len(until)) if text.startswith(until) and until.startswith(before) else None


def _span_by_substitution(row: Row, i: int, text: str, tokenizer: Any) -> tuple[int, int]:
    """The turn as what changes when its content does, plus the end that the template writes after a last turn.

    For templates that drop the thoughts of earlier turns (Qwen3) or move the system prompt to the last question
    (Mistral), so that no prefix of the conversation is a prefix of its text.
    """
    messages = row.fields["messages"]
    mark = next(char for char in map(chr, range(0xE000, 0xF8FF)) if char not in text)  # private use: in no real text
    marked = {**messages[i], "content": mark}
    other = _render(row, [*messages[:i], marked, *messages[i + 1 :]], tokenizer)
    start = _common(text, other)
    after = _common(text[start:][::-1], other[start:][::-1])
    if other[start : len(other) - after] != mark:
        raise ConfigError(
            f"{row.where}: where the chat template of model.path writes the answer messages[{i}] cannot be told; "
            "give the row as prompt and completion, or train every token with data.response_only=false"
        )
    end = len(text) - after
    closing = _render(row, [*messages[:i], marked], tokenizer).rpartition(mark)[2]
    return start, end + _common(closing, text[end:])


def _writes_generation_prompt(row: Row, tokenizer: Any) -> bool:
    """Whether the template knows add_generation_prompt; without it a prefix difference holds the turn's header too."""
    probe = [{"role": "user", "content": "a"}]
    try:
        return _render(row, probe, tokenizer, prompt=True) != _render(row, probe, tokenizer)
    except ConfigError:
        return True


def _render(row: Row, messages: list[dict[str, Any]], tokenizer: Any, *, prompt: bool = False) -> str:
    from jinja2 import TemplateError

    if not messages:
        raise ConfigError(f"{row.where}: a template needs a message")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except (TemplateError, TypeError, ValueError, LookupError) as exc:
        cause = " ".join(str(exc).split())[:300]
        raise ConfigError(f"{row.where}: the chat template of model.path refuses the messages: {cause}") from exc


def _without_alpaca(row: Row, has_template: bool) -> Row:
    """The same row as messages, or as prompt and completion where there is no chat template."""
    instruction, extra, output = (row.fields[key] for key in ("instruction", "input", "output"))
    if has_template:
        question = "\n\n".join(part for part in (instruction, extra) if part.strip())
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        return Row(row.id, row.where, "messages", {"messages": messages})
    paired, given = (_ALPACA_PAIRED, f"### Input:\n{extra}\n\n") if extra.strip() else ("", "")
    prompt = _ALPACA.format(paired=paired, instruction=instruction, input=given)
    return Row(row.id, row.where, "completion", {"prompt": prompt, "completion": output})


def _tokenize(texts: list[str], tokenizer: Any, *, special: bool) -> list[list[int]]:
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(
        texts, add_special_tokens=special, padding=False, truncation=False, return_attention_mask=False, verbose=False
    )["input_ids"]
    return ids


def _leading_special_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text (BOS), without what it may put after it (EOS)."""
    whole, plain = (_tokenize(["a"], tokenizer, special=special)[0] for special in (True, False))
    start = next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)
    return whole[:start]


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common prefix."""
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

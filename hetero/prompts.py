"""Prompts -> token ids, by the tokenizer's rules and chat template; where a text ends, and how long it may be."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.resolve import ResolvedRun
from hetero.spec import GenerationLimits, GenerationSpec, PromptSpec, Turn

log = logging.getLogger(__name__)

# Of a generation_config.json: what changes generate()'s greedy tokens and is not done here, with its value for nothing.
_NOT_DONE = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None, "bad_words_ids": None}


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the model.

    Attributes:
        number: among the run's prompts, from 0.
        shown: what a person asked, in one text.
        input_ids: its tokens.
    """

    number: int
    shown: str
    input_ids: tuple[int, ...]


def read_prompts(resolved: ResolvedRun, tokenizer: Any | None, model_path: Path) -> list[Prompt]:
    """The tokens of the prompts that a run is to continue; empty where there are none.

    Raises:
        ConfigError: a prompt cannot be tokenised, or leaves no room for an answer.
    """
    config = resolved.config
    key = "prompts" if config.task == "generate" else "loop.sample_prompts"
    given = config.prompts if config.task == "generate" else config.loop.sample_prompts
    if not given:
        return []
    if tokenizer is None:
        raise ConfigError(f"model.path must hold a tokenizer for {key}: copy the tokenizer's files there")
    limit = resolved.facts.max_position_embeddings
    prompts = []
    for number, prompt in enumerate(given):
        where = f"{key}[{number}]"
        ids = _tokens(prompt, tokenizer, config.generation, where)
        if not ids:
            raise ConfigError(f"{where} must have at least one token, got {prompt!r}")
        if limit is not None and len(ids) >= limit:
            raise ConfigError(
                f"{where} must leave room for an answer: it has {len(ids)} tokens, the model at most {limit} "
                "(max_position_embeddings)"
            )
        if max(ids) >= resolved.facts.vocab_size:
            raise ConfigError(
                f"{where} must have tokens of the model's vocabulary of {resolved.facts.vocab_size}, got {max(ids)}: "
                "is the tokenizer another model's?"
            )
        prompts.append(Prompt(number, _shown(prompt), tuple(ids)))
    _say_what_is_not_done(model_path)
    return prompts


def limits_of(prompts: list[Prompt], resolved: ResolvedRun) -> GenerationLimits | None:
    """What the generation of a run can grow to; None where there are no prompts.

    Raises:
        ConfigError: the prompts together do not fit a frame.
    """
    if not prompts:
        return None
    config = resolved.config
    generation = config.generation
    batch_size = min(generation.batch_size, len(prompts))
    longest = max(len(prompt.input_ids) for prompt in prompts)
    num_bytes = batch_size * longest * resolved.facts.hidden_size * 4
    if num_bytes > config.transport.max_frame_bytes:
        raise ConfigError(
            f"transport.max_frame_bytes must hold a batch of prompts ({num_bytes} bytes: generation.batch_size x "
            f"{longest} tokens x {resolved.facts.hidden_size} x 4), got {config.transport.max_frame_bytes}; or a "
            "smaller generation.batch_size"
        )
    return GenerationLimits(
        batch_size=batch_size,
        max_length=longest + generation.max_new_tokens,
        base_only=config.task == "generate" and config.adapter.init_from is None,
    )


def end_tokens(model_path: Path) -> frozenset[int]:
    """Tokens that end a text: those of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        found = _json(model_path / name).get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def _tokens(prompt: PromptSpec, tokenizer: Any, generation: GenerationSpec, where: str) -> list[int]:
    has_template = bool(tokenizer.chat_template)
    if isinstance(prompt, str) and not (has_template if generation.chat == "auto" else generation.chat):
        if generation.system is not None:
            raise ConfigError(f"generation.system must be null where no chat template is used ({where})")
        return [int(token) for token in tokenizer(prompt, verbose=False)["input_ids"]]
    if not has_template:
        raise ConfigError(
            f"{where} needs a chat template, and the tokenizer of model.path has none: a plain text and "
            "generation.chat=false, or an instruct model"
        )
    turns = [Turn("user", prompt)] if isinstance(prompt, str) else prompt
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    if generation.system is not None and messages[:1] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": generation.system})
    return _render(messages, tokenizer, where)


def _render(messages: list[dict[str, str]], tokenizer: Any, where: str) -> list[int]:
    from jinja2 import TemplateError

    if not messages:
        raise ConfigError(f"{where} must hold at least one message")
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError, LookupError) as exc:
        cause = " ".join(str(exc).split())[:300]
        raise ConfigError(f"{where}: the chat template of model.path refuses the messages: {cause}") from exc
    return [int(token) for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def _shown(prompt: PromptSpec) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn.role}: {turn.content}" for turn in prompt)


def _say_what_is_not_done(model_path: Path) -> None:
    """The model's own settings for generation that would change its texts, and are left out here."""
    own = _json(model_path / "generation_config.json")
    for key, nothing in _NOT_DONE.items():
        if own.get(key, nothing) not in (nothing, None):
            log.warning("the model's generation_config.json asks for %s=%s, which is not done here", key, own[key])


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

"""Why a model that is known to transformers cannot be cut into stages: said from its `config.json` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetero.errors import ConfigError

# Keys under which multimodal models keep the configuration of their language part.
_NESTED = ("text_config", "llm_config", "language_config")
# Their files say `is_encoder_decoder` too, unless somebody wrote them by hand.
_ENCODER_DECODERS = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "led", "longt5", "m2m_100"),
    *("marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet"),
    *("switch_transformers", "t5", "t5gemma", "t5gemma2", "umt5", "whisper", "xlm-prophetnet"),
)
_PER_LAYER_INPUTS = "each of its layers reads embeddings of the token ids, which only the first stage has"
_BY_TYPE = {
    "gemma3n": _PER_LAYER_INPUTS,
    "gemma3n_text": _PER_LAYER_INPUTS,
    "llama4_text": "its layers' chunked attention has not been verified stage by stage",
    "opt": "its layers lie in a decoder inside its base model, which a stage cannot be called through",
}


def _gemma4(config: dict[str, Any]) -> str | None:
    if config.get("hidden_size_per_layer_input", 256):  # transformers assumes 256 where the key is absent
        return f"with hidden_size_per_layer_input > 0 {_PER_LAYER_INPUTS}"
    if config.get("num_kv_shared_layers"):
        return "with num_kv_shared_layers > 0 its last layers read keys and values of layers on other stages"
    return None


_BY_CONFIG: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "gemma4_text": _gemma4,
}


def check_suitable(config: dict[str, Any]) -> str:
    """The `model_type` of a parsed `config.json` that nothing is known to speak against.

    Raises:
        ConfigError: it names no type, or something does; the reason is given.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"model.path: config.json must name its model_type, got {model_type!r}")
    nested = [key for key in _NESTED if isinstance(config.get(key), dict)]
    if nested:
        raise ConfigError(
            f"model.path must be a text-only model, got the multimodal model_type {model_type!r} (its config.json "
            f"nests the language model under {nested[0]}); use a text-only checkpoint of it"
        )
    if config.get("is_encoder_decoder") or model_type in _ENCODER_DECODERS:
        raise ConfigError(
            f"model.path must be a decoder-only model, got the encoder-decoder model_type {model_type!r}; "
            "choose a model that continues text"
        )
    by_config = _BY_CONFIG.get(model_type)
    reason = _BY_TYPE.get(model_type) or (by_config(config) if by_config is not None else None)
    if reason is not None:
        raise ConfigError(f"model.path cannot be cut into stages, got model_type {model_type!r}: {reason}")
    return model_type

"""What a transformers `config.json` says about a model's size: read without torch and without transformers."""

from typing import Any, NamedTuple

import msgspec

from hetero.errors import ConfigError
from hetero.unsuitable import check_suitable


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder-only model, under the names that Llama's configuration gives them.

    `max_position_embeddings` is None where nothing limits positions (ALiBi). Where layers differ (Gemma 4), `head_dim`
    and `num_key_value_heads` are those of the layers with a sliding window.
    """

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    tie_word_embeddings: bool
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool = False
    mlp_bias: bool = False


class ParameterCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of parameters of a model's parts; `layer` is one decoder layer and all layers are alike.

    `head` is the size of the head's weight even where it is the embedding's own tensor (tied), because a last stage
    that is not the first holds its own copy; `total` counts a tied weight once.
    """

    embedding: int
    layer: int
    norm: int
    head: int
    total: int


class _Absent(NamedTuple):
    """What transformers assumes for keys that a config.json leaves out; None: computed from the other sizes."""

    tied: bool
    num_key_value_heads: int | None = None
    head_dim: int | None = None


# The class defaults of transformers 5.24, models/*/configuration_*.py; compared with the installed classes by a test.
_WHEN_ABSENT = {
    "bloom": _Absent(True),
    "cohere": _Absent(True),
    "cohere2": _Absent(True),
    "deepseek_v3": _Absent(False, 128, 64),
    "exaone4": _Absent(False, 32),
    "falcon": _Absent(True),
    "gemma": _Absent(True, 16, 256),
    "gemma2": _Absent(True, 4, 256),
    "gemma3_text": _Absent(True, 4, 256),
    "gemma4_text": _Absent(True, 4, 256),
    "glm4": _Absent(False, 2, 128),
    "gpt2": _Absent(True),
    "gpt_neox": _Absent(False),
    "gpt_oss": _Absent(False, 8, 64),
    "granite": _Absent(False),
    "llama": _Absent(False),
    "mistral": _Absent(False, 8),
    "mixtral": _Absent(False, 8),
    "nemotron": _Absent(False),
    "olmo": _Absent(False),
    "olmo2": _Absent(False),
    "olmo3": _Absent(False),
    "phi": _Absent(False),
    "phi3": _Absent(False),
    "qwen2": _Absent(False, 32),
    "qwen2_moe": _Absent(False, 16),
    "qwen3": _Absent(False, 32, 128),
    "qwen3_5_text": _Absent(False, 4, 256),
    "qwen3_moe": _Absent(False, 4),
    "qwen3_next": _Absent(False, 2, 256),
    "smollm3": _Absent(True, 4),
    "stablelm": _Absent(False, 32),
    "starcoder2": _Absent(True, 2),
}
# The families' own names (GPT2Config.attribute_map and the like), tried where Llama's are absent.
_NAMES = {
    "gpt2": {
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
    },
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embed"},
    "falcon": {"hidden_size": "n_embed", "intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"},
}
# Families whose layers widen to four times the hidden size unless the file says otherwise.
_FOUR_TIMES = ("gpt2", "bloom", "falcon")


def read_facts(config: dict[str, Any]) -> ModelFacts:
    """Read the sizes out of a model's `config.json`, as transformers 5.24 would understand it.

    Args:
        config: the parsed file.

    Raises:
        ConfigError: a key is missing or is no size, or the model cannot be cut into stages at all.
    """
    model_type = check_suitable(config)
    read = _Reader(config, model_type)
    hidden_size, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
    absent = _WHEN_ABSENT.get(model_type, _Absent(False))
    return ModelFacts(
        model_type=model_type,
        num_hidden_layers=read.size("num_hidden_layers"),
        hidden_size=hidden_size,
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=read.max_position_embeddings(),
        tie_word_embeddings=read.tied(),
        intermediate_size=read.size("intermediate_size", 4 * hidden_size if model_type in _FOUR_TIMES else None),
        num_attention_heads=num_heads,
        num_key_value_heads=read.num_key_value_heads(absent.num_key_value_heads, num_heads),
        head_dim=read.head_dim(absent.head_dim, hidden_size, num_heads),
        attention_bias=read.flag("attention_bias", False),
        mlp_bias=read.flag("mlp_bias", False),
    )


def num_parameters(facts: ModelFacts) -> ParameterCounts:
    """Count the parameters of each part of a Llama, Mistral, Qwen2, Qwen3 or GPT-2 model.

    Raises:
        ConfigError: the counts of this `model_type` are not known here.
    """
    hidden, inner = facts.hidden_size, facts.intermediate_size
    embedding = head = facts.vocab_size * hidden
    match facts.model_type:
        case "llama" | "mistral" | "qwen2" | "qwen3":
            layer, norm = _llama_layer(facts), hidden
        case "gpt2":
            assert facts.max_position_embeddings is not None
            embedding += facts.max_position_embeddings * hidden
            attention = 3 * (hidden * hidden + hidden) + hidden * hidden + hidden
            layer = 2 * (2 * hidden) + attention + 2 * hidden * inner + inner + hidden
            norm = 2 * hidden
        case other:
            raise ConfigError(
                f"model_type must be one of gpt2, llama, mistral, qwen2, qwen3 for parameters to be counted, "
                f"got {other!r}"
            )
    total = embedding + facts.num_hidden_layers * layer + norm + (0 if facts.tie_word_embeddings else head)
    return ParameterCounts(embedding=embedding, layer=layer, norm=norm, head=head, total=total)


def _llama_layer(facts: ModelFacts) -> int:
    hidden, inner = facts.hidden_size, facts.intermediate_size
    query, key_value = facts.num_attention_heads * facts.head_dim, facts.num_key_value_heads * facts.head_dim
    weights = 2 * hidden * query + 2 * hidden * key_value + 3 * hidden * inner + 2 * hidden
    qkv_bias = query + 2 * key_value
    if facts.model_type == "qwen2":  # always has these three biases, and none on the output
        return weights + qkv_bias
    # Mistral's modules have no biases and ignore the keys.
    biased = facts.model_type != "mistral"
    attention_bias = qkv_bias + hidden if biased and facts.attention_bias else 0
    mlp_bias = 2 * inner + hidden if facts.model_type == "llama" and facts.mlp_bias else 0
    head_norms = 2 * facts.head_dim if facts.model_type == "qwen3" else 0
    return weights + attention_bias + mlp_bias + head_norms


class _Reader:
    """Checked access to one config.json."""

    def __init__(self, config: dict[str, Any], model_type: str) -> None:
        self._config, self._model_type = config, model_type

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; null counts as absent, as in transformers."""
        name = key
        if key not in self._config:
            name = _NAMES.get(self._model_type, {}).get(key, key)
        value = self._config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(
                f"model.path: config.json of model_type {self._model_type!r} must hold {name!r}, which is missing; "
                f"take the file that belongs to the model"
            )
        if type(value) is not int or value < 1:  # bool is a subclass of int
            raise ConfigError(f"model.path: {name!r} in config.json must be a whole number >= 1, got {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false; null counts as absent."""
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"model.path: {key!r} in config.json must be true or false, got {value!r}")
        return value

    def tied(self) -> bool:
        """Whether head and embedding are one tensor; a family whose default is not known here must say so."""
        if self._config.get("tie_word_embeddings") is None and self._model_type not in _WHEN_ABSENT:
            raise ConfigError(
                f"model.path: config.json of model_type {self._model_type!r} must say 'tie_word_embeddings' "
                f"(true or false), because the default of this family is not known here"
            )
        absent = _WHEN_ABSENT.get(self._model_type, _Absent(False))
        return self.flag("tie_word_embeddings", absent.tied)

    def max_position_embeddings(self) -> int | None:
        """Most positions of a row; None for ALiBi, which has no limit."""
        if self._model_type == "bloom" or (self._model_type == "falcon" and self.flag("alibi", False)):
            return None
        # FalconConfig's own default: the original Falcon models do not write theirs.
        return self.size("max_position_embeddings", 2048 if self._model_type == "falcon" else None)

    def num_key_value_heads(self, default: int | None, num_heads: int) -> int:
        """Absent: the family's default; null: one for each attention head."""
        if self._model_type == "falcon" and not self.flag("new_decoder_architecture", False):
            return 1 if self.flag("multi_query", True) else num_heads
        if default is None or "num_key_value_heads" in self._config:
            default = num_heads
        value = self.size("num_key_value_heads", default)
        if num_heads % value:
            raise ConfigError(
                f"model.path: 'num_attention_heads' in config.json must be a multiple of 'num_key_value_heads', "
                f"got {num_heads} and {value}"
            )
        return value

    def head_dim(self, default: int | None, hidden_size: int, num_heads: int) -> int:
        """Absent: the family's default, else the hidden size shared out among the heads."""
        if default is None and self._config.get("head_dim") is None and hidden_size % num_heads:
            raise ConfigError(
                f"model.path: 'hidden_size' in config.json must be a multiple of 'num_attention_heads', "
                f"got {hidden_size} and {num_heads}"
            )
        return self.size("head_dim", default or hidden_size // num_heads)

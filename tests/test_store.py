import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetero import folders, tiny
from hetero.errors import ConfigError
from hetero.facts import num_parameters, read_facts
from hetero.folders import local_name, write_folder
from hetero.store import find_by_name, find_config, find_weights
from hetero.tiny import TINY, make_tiny, tiny_config

ROOT = Path(__file__).parents[1]
HUB_ID = "some-org/some-model"
NO_TENSORS = struct.pack("<Q", 2) + b"{}"  # the smallest safetensors file
TINY_SHA256 = "ac2597486dd056c0e0af397db4b7e858fff947039509c8b4ac3df59d684bf1c8"


@pytest.fixture(scope="module")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    make_tiny(cache)
    return cache


@pytest.fixture(scope="module")
def tokenizer(tiny_cache: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(make_tiny(tiny_cache))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the hub, and a hub that nothing can reach."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def make_model(folder: Path, mark: str = "", weights: str | None = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"mark": mark}))
    if weights is not None:
        (folder / weights).write_bytes(NO_TENSORS)
    return folder


def put_in_hub_cache(hub: Path, mark: str, weights: str | None = "model.safetensors", branch: str = "main") -> Path:
    repository, commit = hub / ("models--" + HUB_ID.replace("/", "--")), "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / branch).write_text(commit)
    return make_model(repository / "snapshots" / commit, mark, weights)


def answer_with(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], Exception | None]) -> None:
    """Let the hub raise what `answer` says for the URL of a file."""
    import huggingface_hub

    def get_hf_file_metadata(url: str, **_: object) -> None:
        error = answer(url)
        if error is not None:
            raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", get_hf_file_metadata)


def hub_error(name: str) -> Exception:
    import httpx2
    from huggingface_hub import errors

    response = httpx2.Response(403, request=httpx2.Request("HEAD", "http://hub.invalid/x"))
    error: Exception = getattr(errors, name)(f"{name}: no\nsecond line", response=response)
    return error


# --- the tiny model


def test_tiny_weights_are_the_same_bits_everywhere(tiny_cache: Path) -> None:
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(make_tiny(tiny_cache) / "model.safetensors").items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
    assert digest.hexdigest() == TINY_SHA256


def test_tiny_weights_are_a_plain_mersenne_twister(tiny_cache: Path) -> None:
    # The reference is numpy's frozen legacy generator, so that no choice of torch's hides in the bits.
    numpy = pytest.importorskip("numpy")
    from safetensors.torch import load_file

    head = load_file(make_tiny(tiny_cache) / "model.safetensors")["lm_head.weight"]
    words = numpy.random.RandomState(20_250_101).randint(0, 2**32, size=head.numel(), dtype=numpy.uint32)
    bound = round(0.02 * 3**0.5 * 2**28)
    draws = words.astype(numpy.int64) % (2 * bound + 1) - bound
    assert (head.flatten().double().numpy() == draws / 2.0**28).all()


def test_tiny_weights_have_the_spread_of_a_fresh_model(tiny_cache: Path) -> None:
    from safetensors.torch import load_file

    for name, tensor in load_file(make_tiny(tiny_cache) / "model.safetensors").items():
        if "norm" in name:
            assert tensor.eq(1).all()
        else:
            assert tensor.std().item() == pytest.approx(0.02, rel=0.02)
            assert abs(tensor.mean().item()) < 5 * 0.02 / tensor.numel() ** 0.5
            assert tensor.unique().numel() > 0.9 * tensor.numel()
            assert tensor.mul(2.0**28).frac().eq(0).all()


def test_tiny_loads_as_an_ordinary_model(tiny_cache: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(make_tiny(tiny_cache), output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in model.parameters()) == num_parameters(read_facts(tiny_config())).total == 1_155_712
    said, loaded = tiny_config(), model.config.to_dict()
    assert {key: loaded[key] for key in said} == said
    assert model.generation_config.eos_token_id == 258


def test_making_tiny_leaves_the_random_state(tmp_path: Path) -> None:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        make_tiny(tmp_path)
        assert torch.equal(torch.get_rng_state(), before)


def test_processes_that_race_make_one_tiny(tiny_cache: Path, tmp_path: Path) -> None:
    # Each says that its draft is full and waits, so that both have one before either may rename it.
    program = """
import pathlib, shutil, sys
from hetero import tiny
def fill(folder):
    shutil.copytree(sys.argv[2], folder, dirs_exist_ok=True)
    (folder / "by").write_text(sys.argv[3])
    print("full", flush=True)
    sys.stdin.readline()
tiny._fill_tiny = fill
print(tiny.make_tiny(pathlib.Path(sys.argv[1])))
"""
    command = [sys.executable, "-c", program, str(tmp_path), str(make_tiny(tiny_cache))]
    runs = [
        subprocess.Popen([*command, by], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for by in ("first", "second")
    ]
    for run in runs:
        assert run.stdout is not None
        assert run.stdout.readline() == "full\n"
    assert len(list((tmp_path / "models").iterdir())) == 2
    for run in runs:
        assert run.communicate("go\n", timeout=60) == (f"{tmp_path / 'models' / 'tiny-v1'}\n", None)
        assert run.returncode == 0
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny-v1"]
    assert (tmp_path / "models" / "tiny-v1" / "by").read_text() == "first"


def test_tiny_is_made_once(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "_fill_tiny", pytest.fail)
    assert find_weights(TINY, cache=tiny_cache) == tiny_cache / "models" / "tiny-v1"


def test_incomplete_tiny_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "tiny-v1")
    with pytest.raises(ConfigError, match=r"lacks tokenizer.json; delete the folder"):
        make_tiny(tmp_path)


def test_tiny_tokens_are_bytes(tokenizer: Any) -> None:
    assert len(tokenizer) == tiny_config()["vocab_size"] == 260
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer("hé\n").input_ids == list("hé\n".encode())
    assert tokenizer("a<eos>").input_ids == [97, 258]
    assert tokenizer.decode([104, 258, 256], skip_special_tokens=True) == "h"


@settings(deadline=None, max_examples=300)
@example("<pad>")
@example("e\u0301 \u00e9 \ufb01")  # would change under a Unicode normalisation
@example("\r\n\t  a  .\x00\ufeff \U0001f999 ")
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_its_tokens(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    if not any(special in text for special in ("<pad>", "<bos>", "<eos>", "<spare>")):
        assert ids == list(text.encode())


# --- where a configuration is found


def test_config_of_tiny_needs_no_file_and_no_big_library(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from hetero.store import find_config\n"
        "assert find_config('tiny')[1] is None\n"
        f"assert find_config({str(make_model(tmp_path / 'm'))!r})[1] is not None\n"
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=False).returncode == 0
    assert not (tmp_path / "home").exists()


def test_cache_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert folders.cache_dir() == tmp_path / ".cache" / "hetero"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert folders.cache_dir() == tmp_path / "Library" / "Caches" / "hetero"


def test_places_of_a_hub_model_are_tried_in_order(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places: dict[str, Any] = {"shapes_dir": tmp_path / "shapes", "cache": tmp_path / "cache"}
    with pytest.raises(ConfigError, match="was not found on"):
        find_config(HUB_ID, **places)
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "some-org--some-model.json").write_text('{"mark": "shape"}')
    assert find_config(HUB_ID, **places) == ({"mark": "shape"}, None)
    snapshot = put_in_hub_cache(hub, "hub cache")
    assert find_config(HUB_ID, **places) == ({"mark": "hub cache"}, snapshot)
    fetched = make_model(tmp_path / "cache" / "models" / "some-org--some-model", "fetched")
    assert find_config(HUB_ID, **places) == ({"mark": "fetched"}, fetched)
    assert find_weights(HUB_ID, cache=places["cache"]) == fetched
    local = make_model(tmp_path / "some-org" / "some-model", "local")
    assert find_config(HUB_ID, **places) == ({"mark": "local"}, local)


def test_places_of_a_local_name_are_tried_in_order(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "cache" / "models" / "mine", "fetched")
    named = make_model(tmp_path / "models" / "mine", "named")
    places: dict[str, Any] = {"models_dir": tmp_path / "models", "cache": tmp_path / "cache"}
    assert find_config("mine", **places) == ({"mark": "named"}, named)
    assert find_weights("mine", **places) == named
    here = make_model(tmp_path / "mine", "here")
    assert find_config("mine", **places) == ({"mark": "here"}, here)
    assert find_weights("mine", **places) == here


def test_fetched_copy_is_no_answer_to_a_revision(hub: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "some-org--some-model", "fetched")
    with pytest.raises(ConfigError, match="was not found on"):
        find_config(HUB_ID, revision="v2", cache=tmp_path)
    snapshot = put_in_hub_cache(hub, "v2", branch="v2")
    assert find_config(HUB_ID, revision="v2", cache=tmp_path) == ({"mark": "v2"}, snapshot)
    assert find_weights(HUB_ID, revision="v2", cache=tmp_path) == snapshot


def test_config_comes_from_the_hub_at_last(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    file = make_model(tmp_path / "got", "hub") / "config.json"
    answer_with(monkeypatch, lambda url: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: str(file))
    assert find_config(HUB_ID, cache=tmp_path) == ({"mark": "hub"}, tmp_path / "got")


def test_name_from_another_machine_is_no_path_of_this_one(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "some-org" / "some-model", "here")
    for find in (find_config, find_weights):
        with pytest.raises(ConfigError, match="was not found on"):
            find(HUB_ID, cache=tmp_path, local_paths=False)
        with pytest.raises(ConfigError, match="or a hub id like ORG/NAME"):
            find(str(tmp_path / "some-org" / "some-model"), cache=tmp_path, local_paths=False)


# --- refusals


@pytest.mark.parametrize(
    "path", ["", "../x", "/no/such/folder", "a/b/c", "a--b/c", "a/..", ".hidden", "x\0", "a b", "x\n"]
)
def test_what_is_neither_folder_nor_hub_id_is_refused(path: str, hub: Path, tmp_path: Path) -> None:
    for find in (find_config, find_weights):
        with pytest.raises(ConfigError, match=r"model.path must be 'tiny', an existing folder"):
            find(path, cache=tmp_path)


@pytest.mark.parametrize("revision", ["../../x", "/x", "a b", ""])
def test_revision_that_is_none_is_refused(revision: str, hub: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.revision must be a branch"):
        find_config(HUB_ID, revision=revision, cache=tmp_path)


def test_file_and_folder_without_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="got the file"):
        find_config(str(tmp_path / "model.gguf"))
    with pytest.raises(ConfigError, match=r"must be a folder with a model's config.json, but .* has none"):
        find_weights(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_damaged_config_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config.json must"):
        find_config(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, r"has no \*\.safetensors"),
        ({"adapter_model.safetensors": b""}, r"has no \*\.safetensors"),
        ({"pytorch_model.bin": b""}, r"has the pickle pytorch_model\.bin, which can run code"),
        ({"pytorch_model-00001-of-00002.bin": b""}, r"has the pickle pytorch_model-00001-of-00002\.bin"),
        ({"model.gguf": b""}, r"has only model\.gguf; convert it"),
        (
            {"model.safetensors": b"version https"},
            r"a Git LFS pointer in place of model\.safetensors; run `git lfs pull`",
        ),
        (
            {"model.safetensors": NO_TENSORS[:-1]},
            r"a damaged model\.safetensors \(it ends within its header\); copy it",
        ),
        ({"model.safetensors": NO_TENSORS + b"0"}, r"damaged .*\(its tensors end at byte 10 and the file at byte 11\)"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}'}
            | {"m1.safetensors": NO_TENSORS, "m2.safetensors": b""},
            r"holds a damaged m2\.safetensors",
        ),
        ({"model.safetensors.index.json": b"{}"}, "without a weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../x"}}'}, "names files elsewhere"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}'}
            | {"m1.safetensors": b"\0" * 8},
            r"lacks m2\.safetensors \(1 of 2 files missing\)",
        ),
    ],
)
def test_weights_that_cannot_be_loaded_are_refused_by_name(files: dict[str, bytes], fault: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "models" / "m", weights=None)
    for name, content in files.items():
        (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=fault):
        find_weights(str(model))
    with pytest.raises(ConfigError, match=fault):
        find_by_name("m", tmp_path / "models")


def test_shards_that_are_all_there_are_found(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", weights="m1.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "m1.safetensors"}}')
    assert find_weights(str(model)) == model


@pytest.mark.parametrize("name", ["", ".", "..", "../m", "a/b", "/etc", "a\\b", ".m", "m\n", "m\0", "é", "m" * 129])
def test_name_cannot_lead_out_of_models_dir(name: str, tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    make_model(tmp_path / "models" / "a" / "b")
    with pytest.raises(ConfigError, match="must be named with letters"):
        find_by_name(name, tmp_path / "models")


def test_named_model_is_found_or_its_absence_explained(tmp_path: Path) -> None:
    model = make_model(tmp_path / "My-model_1.0")
    assert find_by_name("My-model_1.0", tmp_path) == model
    with pytest.raises(ConfigError, match=r"worker\.models_dir must be set"):
        find_by_name("m", None)
    with pytest.raises(ConfigError, match="must hold the model 'm'; copy its folder there"):
        find_by_name("m", tmp_path)


def test_local_name_is_the_folder_of_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(make_model(tmp_path / "my-model"))
    assert [local_name(path) for path in (".", "../my-model/", tmp_path / "my-model")] == ["my-model"] * 3
    with pytest.raises(ConfigError, match="got 'my model'; rename"):
        local_name("/data/my model")


# --- the hub's refusals


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", r"'some-org/some-model' is gated: .* run `hf auth login` on"),
        ("RepositoryNotFoundError", "absent or private"),
        ("RevisionNotFoundError", r"model\.revision must exist on the hub, but .* has no 'v9'"),
        ("HfHubHTTPError", r"the hub cannot be asked \(HfHubHTTPError: no\)"),
        ("RemoteEntryNotFoundError", r"must be a transformers model, but .* has no"),
    ],
)
def test_refusal_of_the_hub_is_one_line_with_a_remedy(
    error: str, message: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, lambda url: hub_error(error))
    for find in (find_config, find_weights):
        with pytest.raises(ConfigError, match=message) as caught:
            find(HUB_ID, revision="v9", cache=tmp_path)
        assert "\n" not in str(caught.value)


def test_missing_network_is_one_line_with_the_fetch_command(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run `python -m hetero\.models fetch smollm2_135m`, or give a folder"):
        find_config("HuggingFaceTB/SmolLM2-135M-Instruct", cache=tmp_path)
    with pytest.raises(ConfigError, match=r"fetch smollm2_135m` and set model\.revision=null, or"):
        find_weights("HuggingFaceTB/SmolLM2-135M-Instruct", revision="main", cache=tmp_path)


def test_weights_only_the_hub_has_go_into_its_cache(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of them only the index is downloaded, and all of one commit."""
    import huggingface_hub

    folder = put_in_hub_cache(hub, "config only", weights=None)
    with pytest.raises(ConfigError, match="was not found on"):
        find_weights(HUB_ID, cache=tmp_path)
    index = "model.safetensors.index.json"
    got: list[tuple[str, str | None]] = []

    def hf_hub_download(path: str, name: str, revision: str | None) -> str:
        got.append((name, revision))
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    answer_with(monkeypatch, lambda url: None if url.endswith(index) else hub_error("RemoteEntryNotFoundError"))
    assert find_weights(HUB_ID, cache=tmp_path) == folder
    assert got == [("config.json", None), (index, folder.name)]


def test_pickles_of_the_hub_are_refused(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, lambda url: None if url.endswith(".bin") else hub_error("RemoteEntryNotFoundError"))
    with pytest.raises(ConfigError, match=r"which has the pickle pytorch_model\.bin, which can run code"):
        find_weights(HUB_ID, cache=tmp_path)


# --- writing a folder


def test_folder_appears_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    drafts = []

    def fill(folder: Path) -> None:
        (folder / "a").touch()
        assert not (tmp_path / "x" / "m").exists()
        drafts.append(folder.stat().st_ino)

    assert write_folder(tmp_path / "x" / "m", fill) == tmp_path / "x" / "m"
    assert drafts == [(tmp_path / "x" / "m").stat().st_ino]  # renamed: no moment shows a part of it
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["m"]
    for error in (ValueError("no"), KeyboardInterrupt(), OSError(errno.ECONNRESET, "no")):

        def fail(folder: Path, error: BaseException = error) -> None:
            (folder / "a").touch()
            raise error

        with pytest.raises(type(error)):
            write_folder(tmp_path / "y" / "m", fail)
        assert list((tmp_path / "y").iterdir()) == []


def test_place_that_cannot_be_written_is_a_plain_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="must be writable and have space"):
        make_tiny(tmp_path / "file")

    for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENAMETOOLONG, errno.ESTALE):

        def fill(folder: Path, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with pytest.raises(ConfigError, match=f"must be writable and have space: .*{os.strerror(number)}"):
            write_folder(tmp_path / "x" / "m", fill)
        assert list((tmp_path / "x").iterdir()) == []

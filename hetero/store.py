"""Where a model's files are: the built-in tiny model, a local folder, the user's cache, the hub."""

import errno
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError

TINY = "tiny"
# Models that `python -m hetero.models fetch NAME` can get without the hub, by their hub id.
FETCHABLE = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2_135m"}
_TINY_FOLDER = "tiny-v1"  # a change of the weights or of the tokenizer needs a new name
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")
_HUB_TIMEOUT_S = 3.0  # a wrong configuration has to end in under 5 seconds
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_CONVERT = "which can run code when it is loaded; load it with transformers where you trust it, and save_pretrained it"
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


def cache_dir() -> Path:
    """The user's cache folder of hetero; it need not exist."""
    home = Path.home()
    return (home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache") / "hetero"


def models_cache(cache: Path | None = None) -> Path:
    """The folder in the cache that holds one folder for each model."""
    return (cache or cache_dir()) / "models"


def fetched_folder(hub_id: str, cache: Path | None = None) -> Path:
    """Where the fetched copy of a hub model belongs; it need not exist."""
    return models_cache(cache) / _flat(hub_id)


def local_name(path: str | Path) -> str:
    """The name under which other machines look up a local model: its folder's name.

    Raises:
        ConfigError: the folder's name holds something else than letters, digits, `.`, `_` and `-`.
    """
    return _checked_name(Path(os.path.abspath(os.path.expanduser(path))).name)


def find_config(
    path: str,
    *,
    revision: str | None = None,
    models_dir: Path | None = None,
    shapes_dir: Path | None = None,
    cache: Path | None = None,
    local_paths: bool = True,
) -> tuple[dict[str, Any], Path | None]:
    """Get a model's `config.json`, from the first place that has it; imports neither torch nor transformers.

    The places: `tiny`; an existing folder; `models_dir/NAME`; the fetched copy, unless a revision is asked for (it has
    none); the hub's cache; `shapes_dir/ORG--NAME.json`, which is the configuration without weights; the hub.

    Args:
        path: `tiny`, a hub id or a local folder.
        revision: branch, tag or commit on the hub.
        models_dir: folder of local models, each in a folder of its own.
        shapes_dir: folder of configurations.
        cache: hetero's cache; None: `cache_dir()`.
        local_paths: False where `path` comes from another machine: then it is never a path of this one.

    Returns:
        The parsed file and its folder, which may lack weights; no folder for `tiny` and for a shape.

    Raises:
        ConfigError: no place has it, or the place that has the model cannot be used.
    """
    if path == TINY:
        return tiny_config(), None
    folder = _local_folder(path, revision, models_dir, cache, local_paths)
    folder = folder or _hub_snapshot(path, revision)
    if folder is not None:
        return _read_object(folder / "config.json"), folder
    shape = shapes_dir / f"{_flat(path)}.json" if shapes_dir is not None else None
    if shape is not None and shape.is_file():
        return _read_object(shape), None
    _ask_hub(path, revision, ["config.json"])
    from huggingface_hub import hf_hub_download

    with _hub_errors(path, revision):
        file = Path(hf_hub_download(path, "config.json", revision=revision))
    return _read_object(file), file.parent


def find_weights(
    path: str,
    *,
    revision: str | None = None,
    models_dir: Path | None = None,
    cache: Path | None = None,
    local_paths: bool = True,
) -> str | Path:
    """Get the folder that holds a model's safetensors, or the hub id where only the hub has them.

    Looks in the same places as `find_config`, without the shapes. Makes `tiny` if the cache does not hold it yet. The
    hub is asked whether it has the weights and lets this machine have them; nothing of them is downloaded.

    Raises:
        ConfigError: no place has them, they are not safetensors, or some of the files are missing.
    """
    if path == TINY:
        return make_tiny(cache)
    folder = _local_folder(path, revision, models_dir, cache, local_paths)
    if folder is not None:
        check_weights(folder)
        return folder
    folder = _hub_snapshot(path, revision)
    if folder is not None and _weights_fault(folder) is None:
        return folder
    found = _ask_hub(path, revision, [_WEIGHTS, _INDEX, *_PICKLES])
    if found in _PICKLES:
        raise ConfigError(f"model.path must have safetensors, got {path!r}, which has the pickle {found}, {_CONVERT}")
    return path


def find_by_name(name: str, models_dir: Path | None) -> Path:
    """Get the folder of a local model that another machine names; the name cannot lead out of `models_dir`.

    Raises:
        ConfigError: the name is no plain name, or `models_dir` does not hold such a model with its weights.
    """
    _checked_name(name)
    here = platform.node() or "this machine"
    if models_dir is None:
        raise ConfigError(f"worker.models_dir must be set on {here} to the folder that holds the model {name!r}")
    folder = models_dir / name
    if not folder.is_dir():
        raise ConfigError(
            f"worker.models_dir ({models_dir} on {here}) must hold the model {name!r}; copy its folder there from the "
            f"coordinator"
        )
    _need_config(folder)
    check_weights(folder)
    return folder


def check_weights(folder: Path) -> None:
    """Check that a model's folder holds all of its safetensors; reads no tensor.

    Raises:
        ConfigError: it does not; says what is there instead and what to do.
    """
    fault = _weights_fault(folder)
    if fault is not None:
        raise ConfigError(f"model.path must be a folder with all of the model's safetensors, but {folder} {fault}")


def write_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Create a folder as a whole or not at all; where another process was faster, its folder stays.

    Args:
        target: the folder to create; its parents are created too.
        fill: writes the content into an empty folder beside `target`, which gets its name when all is on the disk.

    Raises:
        ConfigError: the place cannot be written.
    """
    draft = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        fill(draft)
        for file in draft.iterdir():
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # a rename never replaces a folder that holds something
                raise
    except OSError as exc:
        if exc.errno not in _NOT_WRITABLE:
            raise
        raise ConfigError(f"the folder {target.parent} must be writable and have space: {_one_line(exc)}") from exc
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)  # not there any more where it was renamed
    return target


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


def _local_folder(
    path: str, revision: str | None, models_dir: Path | None, cache: Path | None, local_paths: bool
) -> Path | None:
    """The folder of this machine that `path` means; None: it can only be on the hub."""
    given = os.path.expanduser(path)
    if local_paths and os.path.isdir(given):
        return _need_config(Path(os.path.abspath(given)))
    if local_paths and os.path.exists(given):
        raise ConfigError(f"model.path must be a folder with config.json and *.safetensors, got the file {path!r}")
    if models_dir is not None and _NAME.fullmatch(path) and (models_dir / path).is_dir():
        return _need_config(models_dir / path)
    _check_hub_id(path, revision)
    copy = fetched_folder(path, cache)
    return _need_config(copy) if revision is None and copy.is_dir() else None


def _need_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path must be a folder with a model's config.json, but {folder} has none")
    return folder


def _weights_fault(folder: Path) -> str | None:
    """What keeps the folder from being loaded, as the rest of a sentence; None: nothing."""
    names = [_WEIGHTS]
    if not (folder / _WEIGHTS).exists() and (folder / _INDEX).is_file():
        weight_map = _read_object(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            return f"has a {_INDEX} without a weight_map; copy it again"
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            return f"has a {_INDEX} that names files elsewhere; copy the model again"
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        pointers = [name for name in names if _is_lfs_pointer(folder / name)]
        return f"holds a Git LFS pointer in place of {pointers[0]}; run `git lfs pull` there" if pointers else None
    if names != [_WEIGHTS]:
        return f"lacks {missing[0]} ({len(missing)} of {len(names)} files missing); copy the rest"
    for pattern in ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt"):
        for pickled in sorted(folder.glob(pattern)):
            return f"has the pickle {pickled.name}, {_CONVERT}"
    for gguf in sorted(folder.glob("*.gguf")):
        return f"has only {gguf.name}; convert it to safetensors"
    return f"has no *.safetensors ({_WEIGHTS}, or {_INDEX} and its files); copy them there"


def _is_lfs_pointer(file: Path) -> bool:
    """A clone without Git LFS holds such text files; a safetensors file cannot start so (it starts with a length)."""
    with file.open("rb") as stream:
        return stream.read(8) == b"version "


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{file} must be a readable JSON file: {_one_line(exc)}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, got a {type(content).__name__}")
    return content


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"a local model's folder must be named with letters, digits, '.', '_' and '-' only and not start with '.', "
            f"got {name!r}; rename the folder"
        )
    return name


def _flat(hub_id: str) -> str:
    return hub_id.replace("/", "--")


def _check_hub_id(path: str, revision: str | None) -> None:
    """Without `--`, which keeps `_flat` unambiguous, and without `..`; the hub allows neither."""
    if not _HUB_ID.fullmatch(path) or "--" in path or ".." in path:
        raise ConfigError(
            f"model.path must be '{TINY}', an existing folder with config.json, or a hub id like ORG/NAME, got {path!r}"
        )
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(f"model.revision must be a branch, a tag or a commit of the hub, got {revision!r}")


def _hub_snapshot(path: str, revision: str | None) -> Path | None:
    """The folder of the hub's own cache that holds the model's config.json."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _ask_hub(path: str, revision: str | None, names: Sequence[str]) -> str:
    """The first of the files that the hub has and lets this machine read.

    One short try: the downloads of huggingface_hub retry for 23 s before they say that there is no network.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    with _hub_errors(path, revision):
        for name in names:
            try:
                get_hf_file_metadata(hf_hub_url(path, name, revision=revision), timeout=_HUB_TIMEOUT_S)
            except EntryNotFoundError:
                continue
            return name
    raise ConfigError(f"model.path must be a transformers model, but {path!r} has no {names[0]} on the hub")


@contextmanager
def _hub_errors(path: str, revision: str | None) -> Iterator[None]:
    """Turn the hub's refusals into one line with a remedy."""
    from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    here = platform.node() or "this machine"
    try:
        yield
    except GatedRepoError as exc:
        raise ConfigError(
            f"model.path {path!r} is gated: accept its terms on its hub page, then run `hf auth login` on {here}"
        ) from exc
    except RevisionNotFoundError as exc:
        raise ConfigError(f"model.revision must exist on the hub, but {path!r} has no {revision!r}") from exc
    except RepositoryNotFoundError as exc:
        raise ConfigError(
            f"model.path {path!r} must exist: no folder here has this name, and on the hub it is absent or private; "
            f"check the name, or run `hf auth login` on {here}"
        ) from exc
    except (HTTPError, OSError) as exc:
        remedy = "give a folder with config.json and *.safetensors, or connect this machine"
        if path in FETCHABLE:
            unpinned = "" if revision is None else " and set model.revision=null"
            remedy = f"run `python -m hetero.models fetch {FETCHABLE[path]}`{unpinned}, or {remedy}"
        raise ConfigError(
            f"model.path {path!r} was not found on {here}: not as a folder, in hetero's cache or in the hub's cache, "
            f"and the hub cannot be asked ({_one_line(exc)}); {remedy}"
        ) from exc


def _one_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__

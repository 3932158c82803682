"""Where a model's files are: the built-in tiny model, a local folder, the user's cache, the hub."""

import os
import platform
from pathlib import Path
from typing import Any

from hetero import hub
from hetero.errors import ConfigError
from hetero.folders import checked_name, fetched_folder, flat_name, is_plain_name, read_object
from hetero.shards import own_weight_files
from hetero.tensor_files import read_entries
from hetero.tiny import TINY, make_tiny, tiny_config

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_CONVERT = "which can run code when it is loaded; load it with transformers where you trust it, and save_pretrained it"


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
    folder = folder or hub.snapshot(path, revision)
    if folder is not None:
        return read_object(folder / "config.json"), folder
    shape = shapes_dir / f"{flat_name(path)}.json" if shapes_dir is not None else None
    if shape is not None and shape.is_file():
        return read_object(shape), None
    hub.ask(path, revision, ["config.json"])
    from huggingface_hub import hf_hub_download

    with hub.refusals_in_one_line(path, revision):
        file = Path(hf_hub_download(path, "config.json", revision=revision))
    return read_object(file), file.parent


def find_weights(
    path: str,
    *,
    revision: str | None = None,
    commit: str | None = None,
    layers: tuple[int, int] | None = None,
    models_dir: Path | None = None,
    cache: Path | None = None,
    local_paths: bool = True,
) -> Path:
    """Get the folder that holds a model's safetensors, or is to hold them where only the hub has them.

    Looks in the same places as `find_config`, without the shapes. Makes `tiny` if the cache does not hold it yet. The
    hub is asked whether it has the weights and lets this machine have them; of them only the index is downloaded, the
    rest by `hetero.download`, and the folder is that of the model's commit in the hub's cache.

    Args:
        path: `tiny`, a hub id or a local folder.
        revision: branch, tag or commit on the hub.
        commit: what the other machines of a run take from the hub; other copies are only taken where it cannot be had.
        layers: start and end of those whose weights are needed; None: all.
        models_dir: folder of local models, each in a folder of its own.
        cache: hetero's cache; None: `cache_dir()`.
        local_paths: False where `path` comes from another machine: then it is never a path of this one.

    Raises:
        ConfigError: no place has them, they are not safetensors, or some of the files are missing.
    """
    if path == TINY:
        return make_tiny(cache)
    if commit is not None and (folder := _whole_snapshot(path, commit, layers)) is not None:
        return folder
    local = _local_folder(path, revision, models_dir, cache, local_paths)
    if local is not None and commit is None:
        check_weights(local, layers)
        return local
    snapshot = _whole_snapshot(path, revision, layers)
    if snapshot is not None and commit is None:
        return snapshot
    try:
        return _ask_for_weights(path, commit or revision)
    except ConfigError:
        if commit is None or (other := local or snapshot) is None:
            raise
        check_weights(other, layers)
        return other  # the coordinator compares what both hold


def _whole_snapshot(path: str, revision: str | None, layers: tuple[int, int] | None) -> Path | None:
    """The folder of the hub's cache with all weights that are needed."""
    folder = hub.snapshot(path, revision)
    return folder if folder is not None and _weights_fault(folder, layers) is None else None


def _ask_for_weights(path: str, revision: str | None) -> Path:
    """What the hub has, with only the small files downloaded."""
    found = hub.ask(path, revision, [_WEIGHTS, _INDEX, *_PICKLES])
    if found in _PICKLES:
        raise ConfigError(f"model.path must have safetensors, got {path!r}, which has the pickle {found}, {_CONVERT}")
    return hub.download_about(path, revision, ["config.json", *([found] if found == _INDEX else [])])


def check_local_weights(
    path: str,
    *,
    revision: str | None = None,
    layers: tuple[int, int] | None = None,
    cache: Path | None = None,
) -> None:
    """Check what `find_weights` would find on this machine, where that is a folder; asks no hub and makes nothing.

    Raises:
        ConfigError: some of the files are missing or damaged, or they are not safetensors.
    """
    folder = None if path == TINY else _local_folder(path, revision, None, cache, True)
    if folder is not None:
        check_weights(folder, layers)


def find_by_name(name: str, models_dir: Path | None, layers: tuple[int, int] | None = None) -> Path:
    """Get the folder of a local model that another machine names; the name cannot lead out of `models_dir`.

    Args:
        name: of the folder.
        models_dir: folder of local models.
        layers: start and end of those whose weights are needed; None: all.

    Raises:
        ConfigError: the name is no plain name, or `models_dir` does not hold such a model with these weights.
    """
    checked_name(name)
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
    check_weights(folder, layers)
    return folder


def check_weights(folder: Path, layers: tuple[int, int] | None = None) -> None:
    """Check that a model's folder holds its safetensors, all or those of layers [start, end); reads no tensor.

    Raises:
        ConfigError: it does not; says what is there instead and what to do.
    """
    fault = _weights_fault(folder, layers)
    if fault is not None:
        raise ConfigError(f"model.path must be a folder with all of the model's safetensors, but {folder} {fault}")


def _local_folder(
    path: str, revision: str | None, models_dir: Path | None, cache: Path | None, local_paths: bool
) -> Path | None:
    """The folder of this machine that `path` means; None: it can only be on the hub."""
    given = os.path.expanduser(path)
    if local_paths and os.path.isdir(given):
        return _need_config(Path(os.path.abspath(given)))
    if local_paths and os.path.exists(given):
        raise ConfigError(f"model.path must be a folder with config.json and *.safetensors, got the file {path!r}")
    if models_dir is not None and is_plain_name(path) and (models_dir / path).is_dir():
        return _need_config(models_dir / path)
    hub.check_hub_id(path, revision)
    copy = fetched_folder(path, cache)
    return _need_config(copy) if revision is None and copy.is_dir() else None


def _need_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path must be a folder with a model's config.json, but {folder} has none")
    return folder


def _weights_fault(folder: Path, layers: tuple[int, int] | None = None) -> str | None:
    """What keeps the folder's layers from being loaded, as the rest of a sentence; None: nothing."""
    names = [_WEIGHTS]
    if not (folder / _WEIGHTS).exists() and (folder / _INDEX).is_file():
        weight_map = read_object(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            return f"has a {_INDEX} without a weight_map; copy it again"
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            return f"has a {_INDEX} that names files elsewhere; copy the model again"
        if layers is not None:
            names = own_weight_files(folder, *layers)
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        pointers = [name for name in names if _is_lfs_pointer(folder / name)]
        if pointers:
            return f"holds a Git LFS pointer in place of {pointers[0]}; run `git lfs pull` there"
        return _damage(folder, names)
    if names != [_WEIGHTS]:
        return f"lacks {missing[0]} ({len(missing)} of {len(names)} files missing); copy the rest"
    for pattern in ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt"):
        for pickled in sorted(folder.glob(pattern)):
            return f"has the pickle {pickled.name}, {_CONVERT}"
    for gguf in sorted(folder.glob("*.gguf")):
        return f"has only {gguf.name}; convert it to safetensors"
    return f"has no *.safetensors ({_WEIGHTS}, or {_INDEX} and its files); copy them there"


def _damage(folder: Path, names: list[str]) -> str | None:
    """Which of the files has not arrived as a whole, by its header and its size."""
    for name in names:
        try:
            read_entries(folder / name)
        except ValueError as exc:
            return f"holds a damaged {name} ({exc}); copy it again"
    return None


def _is_lfs_pointer(file: Path) -> bool:
    """A clone without Git LFS holds such text files; a safetensors file cannot start so (it starts with a length)."""
    with file.open("rb") as stream:
        return stream.read(8) == b"version "

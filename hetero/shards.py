"""Which weight files a stage needs; transformers is shown a model in several files without those of other stages.

transformers opens every file that the index names, for its header; a stage needs neither to open nor to have them all.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetero.errors import ConfigError
from hetero.facts import read_facts
from hetero.families import Family, family_of
from hetero.folders import read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def holds(key: str, family: Family, start: int, end: int, *, num_layers: int, tied: bool) -> bool:
    """Whether layers [start, end), with what belongs to the first and last of all, need the tensor of this name."""
    first, last = start == 0, end == num_layers
    if key.startswith(family.left_out):
        return False
    if layer := re.search(rf"(?:^|\.){re.escape(family.layers)}\.(\d+)\.", key):
        return start <= int(layer[1]) < end
    dotted = f".{key}"
    if f".{family.embedding}." in dotted:
        return first or (last and tied)
    if ".lm_head." in dotted or f".{family.head_in_files}." in dotted:
        return last or (first and tied)
    if f".{family.final_norm}." in dotted:
        return last
    return first or not any(f".{name}." in dotted for name in family.first_only)


def own_weight_files(folder: Path, start: int, end: int) -> list[str]:
    """The weight files of a model that layers [start, end) need, whether they are there or not.

    Args:
        folder: of the model, with its config.json and, where it has several weight files, their index.
        start: first layer.
        end: one past the last.

    Raises:
        ConfigError: config.json or the index cannot be read, or the family is not verified.
    """
    if (folder / SINGLE).exists() or not (folder / INDEX).is_file():
        return [SINGLE]
    facts = read_facts(read_object(folder / "config.json"))
    family = family_of(facts.model_type)
    num_layers, tied = facts.num_hidden_layers, facts.tie_word_embeddings
    return sorted(set(_own_weights(folder, family, start, end, num_layers=num_layers, tied=tied).values()))


def _own_weights(folder: Path, family: Family, start: int, end: int, *, num_layers: int, tied: bool) -> dict[str, str]:
    """Key -> file of the weights that layers [start, end) need, by the index."""
    return {
        key: file
        for key, file in read_object(folder / INDEX)["weight_map"].items()
        if holds(key, family, start, end, num_layers=num_layers, tied=tied)
    }


@contextmanager
def own_files(
    path: str | Path, family: Family, start: int, end: int, *, num_layers: int, tied: bool
) -> Iterator[str | Path]:
    """Lends a path to load from: the model's own, or a folder of links to the files that the stage needs.

    Args:
        path: a folder, or a hub id, which is given back as it is.
        family: of the model.
        start: first layer.
        end: one past the last.
        num_layers: of the whole model.
        tied: embedding and head are one tensor.

    Raises:
        ConfigError: a file that the stage needs is not there.
    """
    folder = Path(path)
    if (folder / SINGLE).exists() or not (folder / INDEX).is_file():
        yield path
        return
    index = read_object(folder / INDEX)
    own = _own_weights(folder, family, start, end, num_layers=num_layers, tied=tied)
    for file in sorted(set(own.values())):
        if not (folder / file).is_file():
            raise ConfigError(
                f"model.path must hold {file}, which layers [{start}, {end}) need, found none in {folder}"
            )
    with tempfile.TemporaryDirectory(prefix="hetero-stage-") as name:
        view = Path(name)
        (view / INDEX).write_text(json.dumps(index | {"weight_map": own}), encoding="utf-8")
        for file in {"config.json", *own.values()}:
            os.symlink((folder / file).resolve(), view / file)
        yield view

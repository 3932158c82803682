"""4-bit weights by bitsandbytes: where they can be, what a checkpoint holds already, and how they stay trainable.

Imports neither torch nor bitsandbytes before something of theirs is asked for.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hetero.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

# What bitsandbytes' MPS backend asks for.
_MPS_TORCH, _MPS_MACOS = (2, 9), (14, 0)
_CUDA_CAPABILITY = (6, 0)
_PIECE_VALUES = 1 << 20


def stored_quantization(about: Any) -> str:
    """In which numbers a checkpoint is: `none` (16 or 32 bits), `nf4` (its linear layers) or `mxfp4` (its experts).

    Args:
        about: `quantization_config` of its config.json; None where there is none.

    Raises:
        ConfigError: in others.
    """
    if about is None:
        return "none"
    given = dict(about) if isinstance(about, Mapping) else {}
    if given.get("quant_method") == "mxfp4":
        return "mxfp4"
    if given.get("quant_method") == "bitsandbytes" and given.get("load_in_4bit"):
        kind = given.get("bnb_4bit_quant_type")
        if kind == "nf4":
            return "nf4"
        held = f"4 bits of the type {kind!r}"
    else:
        held = f"numbers of the method {given.get('quant_method')!r}"
    raise ConfigError(
        "model.path must hold weights in 16 or 32 bits, in bitsandbytes' nf4 or in mxfp4, got "
        f"{held} (quantization_config of its config.json); take the model's 16-bit checkpoint"
    )


def check_stored(about: Any, quantizations: Sequence[str | None]) -> None:
    """Checks what the stages want against what a checkpoint holds.

    Args:
        about: `quantization_config` of its config.json; None where there is none.
        quantizations: of each stage, in order.

    Raises:
        ConfigError: the checkpoint is in nf4 and a stage wants 16 or 32 bits, or it is in mxfp4 and a stage wants nf4.
    """
    stored = stored_quantization(about)
    for index, wanted in enumerate(quantizations):
        where = f"shard_plan.stages[{index}].quantization must be"
        if stored == "nf4" and wanted != "nf4":
            raise ConfigError(
                f"{where} nf4 where model.path holds 4-bit weights already "
                f"(quantization_config of its config.json), got {wanted!r}; give model.quantization=nf4, or take the "
                "model's 16-bit checkpoint"
            )
        if stored == "mxfp4" and wanted == "nf4":
            raise ConfigError(
                f"{where} none where model.path holds experts in mxfp4 (quantization_config of its config.json), which "
                "become 16 bits while they are loaded, got 'nf4'; give model.quantization=none"
            )


def check_nf4(device: torch.device, *, where: str) -> None:
    """Checks that this machine can hold and train 4-bit weights on a device.

    Args:
        device: which.
        where: the stage, for the message.

    Raises:
        ConfigError: it cannot.
    """
    if fault := _fault(device):
        raise ConfigError(f"quantization=nf4 on {where}, device {device} needs {fault}")


def _fault(device: torch.device) -> str | None:
    """What is missing and what to do, as the rest of a sentence."""
    import torch

    try:
        import bitsandbytes
    except ImportError as exc:
        return (
            "the package bitsandbytes, which cannot be imported here: pip install bitsandbytes, or "
            f"model.quantization=none ({exc})"
        )
    if device.type not in getattr(bitsandbytes, "supported_torch_devices", {"cuda"}):
        return (
            f"a package bitsandbytes that supports {device.type}, which {bitsandbytes.__version__} does not: pip "
            "install -U bitsandbytes, or device=cpu"
        )
    if device.type == "mps":
        if _numbers(torch.__version__) < _MPS_TORCH:
            return f"torch 2.9 or later for the package bitsandbytes, got {torch.__version__}: pip install -U torch"
        if _numbers(platform.mac_ver()[0]) < _MPS_MACOS:
            return f"macOS 14 or later for the package bitsandbytes, got {platform.mac_ver()[0]}: device=cpu works"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < _CUDA_CAPABILITY:
            found = ".".join(map(str, capability))
            return f"a card of compute capability 6.0 or higher for the package bitsandbytes, got {found}: device=cpu"
    return None


def _numbers(version: str) -> tuple[int, int]:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return int(major) if major.isdigit() else 0, int(minor) if minor.isdigit() else 0


def nf4_on_load(dtype: torch.dtype) -> Any:
    """The configuration by which transformers makes 4-bit weights while it loads 16- or 32-bit ones."""
    from transformers import BitsAndBytesConfig

    # The head by name: the automatic rule also exempts "the last module", which differs on a pruned model.
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["lm_head"],
    )


def nf4_as_stored(about: Any, dtype: torch.dtype) -> dict[str, Any]:
    """A 4-bit checkpoint's own `quantization_config`, computing in the stage's numbers and not in its maker's."""
    return dict(about) | {
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "llm_int8_skip_modules": about.get("llm_int8_skip_modules") or ["lm_head"],
    }


@contextmanager
def quantised_in_pieces(num_values: int = _PIECE_VALUES) -> Iterator[None]:
    """Lets bitsandbytes quantise weights on a CPU in pieces, bit for bit what it makes of the whole.

    Its way on a CPU takes about 20 bytes a value at once: 1 GB for one matrix of Llama 8B, of which 30 MB remain.
    Wraps the private `Params4bit._quantize`, the one place where a whole matrix is quantised.

    Args:
        num_values: of a piece, a multiple of every block size.
    """
    import torch
    from bitsandbytes import functional
    from bitsandbytes.nn import Params4bit

    original = Params4bit._quantize

    def quantise(self: Any, device: Any) -> Any:
        values = self.data.contiguous().view(-1)
        if torch.device(device).type != "cpu" or values.device.type != "cpu" or not self.compress_statistics:
            return original(self, device)
        made = [
            functional.quantize_4bit(piece, blocksize=self.blocksize, quant_type=self.quant_type)
            for piece in values.split(num_values)
        ]
        absmax = torch.cat([state.absmax for _, state in made])
        offset = absmax.mean()
        compressed, second = functional.quantize_blockwise(absmax - offset, blocksize=256)  # as bitsandbytes does
        state = functional.QuantState(
            absmax=compressed,
            shape=self.data.shape,
            dtype=self.data.dtype,
            blocksize=self.blocksize,
            code=made[0][1].code,
            quant_type=self.quant_type,
            offset=offset,
            state2=second,
        )
        self.data, self.quant_state = torch.cat([packed for packed, _ in made]), state
        if self.module is not None:
            self.module.quant_state = state
        self.bnb_quantized = True
        return self

    Params4bit._quantize = quantise
    try:
        yield
    finally:
        Params4bit._quantize = original


def keep_trainable_layout(model: nn.Module) -> None:
    """Keeps bitsandbytes from repacking 4-bit weights on AVX512-BF16 CPUs: that layout has no gradient.

    One evaluation forward would repack in place and make the next training gradient silently wrong.
    """
    import bitsandbytes

    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False

"""Importing PEFT, with bitsandbytes only where 4-bit weights are in play.

PEFT imports bitsandbytes wherever it is installed. That takes nearly two seconds of processor time (it brings in
torch's compiler), says things on stderr, and breaks plain LoRA where the package is broken.
"""

from __future__ import annotations

import sys


def load_peft(*, four_bit: bool) -> None:
    """Imports PEFT; without bitsandbytes, as if it were not installed, unless 4-bit weights need it.

    Args:
        four_bit: PEFT is to know bitsandbytes' modules. A process may begin without and need them later.
    """
    if four_bit:
        _with_bitsandbytes()
    elif "peft" not in sys.modules and "bitsandbytes" not in sys.modules:
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # what find_spec and import take for absent
        try:
            from peft import import_utils

            import_utils.is_bnb_available()  # both remember their answers
            import_utils.is_bnb_4bit_available()
        finally:
            del sys.modules["bitsandbytes"]


def _with_bitsandbytes() -> None:
    import bitsandbytes
    from peft import helpers, import_utils

    if not import_utils.is_bnb_available():
        import_utils.is_bnb_available.cache_clear()
        import_utils.is_bnb_4bit_available.cache_clear()
        helpers.bnb = bitsandbytes

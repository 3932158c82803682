"""PEFT is imported with bitsandbytes only where 4-bit weights need it, and may get it later."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import REPO

pytest.importorskip("bitsandbytes")

CODE = """
import sys, torch
from hetero.peft_import import load_peft

load_peft(four_bit=False)
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
assert "bitsandbytes" not in sys.modules and "torch._inductor.compile_fx" not in sys.modules

class Small(torch.nn.Module):
    def __init__(self, four_bit):
        super().__init__()
        import bitsandbytes as bnb
        self.q = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4") if four_bit else torch.nn.Linear(64, 64)
        self.is_loaded_in_4bit = four_bit
        self.config = {}

config = LoraConfig(target_modules=["q"])
assert type(get_peft_model(Small(False), config).base_model.model.q) is lora.Linear
load_peft(four_bit=True)
wrapped = get_peft_model(Small(True), LoraConfig(target_modules=["q"])).base_model.model.q
assert type(wrapped).__name__ == "Linear4bit", type(wrapped)
load_peft(four_bit=False)  # changes nothing any more
assert type(get_peft_model(Small(True), LoraConfig(target_modules=["q"])).base_model.model.q).__name__ == "Linear4bit"
print("done")
"""


def test_bitsandbytes_comes_in_when_it_is_needed_and_not_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=REPO, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "done", done.stderr


def test_starting_a_run_imports_neither() -> None:
    code = "import sys, hetero.coordinate, hetero.work; print(sorted({'peft', 'bitsandbytes'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"

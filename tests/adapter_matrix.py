"""Every option of an adapter: trained on three stages, saved, and loaded by PEFT in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pipeline import Outcome, build_stages, lively, make_spec, pipeline_logits, run_stages
from safetensors.torch import load_file

from hetero import adapters, data
from hetero.adapter_files import check_complete, save_adapter
from hetero.adapters import ResolvedAdapter
from hetero.data import Example
from hetero.families import FAMILIES
from hetero.merge import merge_full
from hetero.merge_sources import find_source
from hetero.models import meta_model
from hetero.spec import AdapterSpec
from hetero.stage import Stage

QV = AdapterSpec(r=4, alpha=8, target_modules=["q_proj", "v_proj"])
AUTO = AdapterSpec(r=4, alpha=8)
CUTS = (1, 4)


def _with(spec: AdapterSpec, **changes: Any) -> AdapterSpec:
    return msgspec.structs.replace(spec, **changes)


# Case -> small model and adapter. Cases whose names start alike share what the tests say of them.
CASES: dict[str, tuple[str, AdapterSpec]] = {
    "plain": ("llama", QV),
    "tied": ("qwen2", AUTO),
    "gpt2": ("gpt2", AUTO),
    "gpt2_all_kinds": (
        "gpt2",
        _with(QV, target_modules=["c_attn", "c_proj", "c_fc"], bias="all", modules_to_save=["wpe"]),
    ),
    "all_linear": ("llama", _with(AUTO, target_modules="all-linear")),
    "all_linear_but": (
        "llama",
        _with(AUTO, target_modules="all-linear", exclude_modules=["k_proj", "layers.0.mlp.up_proj"]),
    ),
    "regex": ("llama", _with(AUTO, target_modules=r".*layers\.[13]\..*_proj")),
    "regex_but": ("llama", _with(AUTO, target_modules=r".*_proj", exclude_modules=r".*(0|5)\.mlp.*")),
    "dora": ("llama", _with(AUTO, use_dora=True)),
    "dora_gpt2": ("gpt2", _with(AUTO, use_dora=True)),
    "dora_ends": ("llama", _with(QV, target_modules=["embed_tokens", "lm_head"], use_dora=True)),
    "rslora": ("llama", _with(AUTO, use_rslora=True)),
    "patterns": ("llama", _with(QV, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3.0})),
    "patterns_by_full_name": (
        "llama",
        _with(
            QV,
            rank_pattern={"model.layers.3.self_attn.q_proj": 6, r"layers\.[45]\.self_attn\.v_proj": 2},
            alpha_pattern={"layers.0.self_attn.q_proj": 32.0},
            use_rslora=True,
        ),
    ),
    "layers": ("llama", _with(QV, layers_to_transform=[0, 4])),
    "layers_of_one_stage": ("llama", _with(QV, layers_to_transform=[5])),
    "bias_of_targets": ("llama_bias", _with(QV, bias="lora_only")),
    "bias_all": ("llama_bias", _with(QV, bias="all", layers_to_transform=[2])),
    "bias_tied": ("qwen2", _with(QV, bias="all")),
    "lora_bias": ("llama_bias", _with(AUTO, lora_bias=True)),
    "gaussian": ("llama", _with(AUTO, init_lora_weights="gaussian")),
    "not_zero": ("llama", _with(AUTO, init_lora_weights=False)),
    "orthogonal": ("llama", _with(AUTO, init_lora_weights="orthogonal")),
    "orthogonal_gpt2": ("gpt2", _with(AUTO, init_lora_weights="orthogonal")),
    "pissa": ("llama", _with(AUTO, init_lora_weights="pissa", rank_pattern={"up_proj": 3})),
    "pissa_gpt2": ("gpt2", _with(AUTO, init_lora_weights="pissa")),
    "pissa_dora": ("llama", _with(QV, init_lora_weights="pissa", use_dora=True)),
    "pissa_head": ("llama", _with(QV, target_modules=["q_proj", "lm_head"], init_lora_weights="pissa")),
    "olora": ("llama", _with(AUTO, init_lora_weights="olora", use_rslora=True)),
    "olora_dora": ("llama", _with(QV, init_lora_weights="olora", use_dora=True)),
    "head_saved": ("llama", _with(QV, modules_to_save=["lm_head"])),
    "norms_saved": ("llama", _with(QV, modules_to_save=["norm"])),
    "saved_beside_no_target": (
        "llama",
        _with(QV, layers_to_transform=[2], modules_to_save=["embed_tokens", "lm_head", "norm"]),
    ),
    "saved_alone": ("llama", _with(QV, target_modules=[], modules_to_save=["lm_head", "layers.2.mlp"])),
    "mlp_saved_over_targets": ("llama", _with(AUTO, modules_to_save=["layers.3.mlp"])),
    "tied_head_saved": ("llama_tied", _with(QV, modules_to_save=["lm_head"])),
    "tied_head": ("llama_tied", _with(QV, target_modules=["q_proj", "lm_head"])),
    "both_ends": ("llama", _with(QV, target_modules=["embed_tokens", "lm_head", "q_proj"])),
}

_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
for _family in ("mixtral", "qwen3_moe", "gpt_oss"):  # where the table has them
    if _family in FAMILIES:
        CASES[f"experts_{_family}"] = _family, _with(QV, target_modules=[], target_parameters=_EXPERTS)
        CASES[f"experts_beside_{_family}"] = (
            _family,
            _with(QV, target_parameters=["layers.1.mlp.experts.down_proj"], rank_pattern={"v_proj": 2}),
        )
        CASES[f"experts_copied_{_family}"] = _family, QV
# PEFT takes what this names for parameters of experts, with a rank of their own.
_LINEAR = ("mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3")
CASES |= {f"experts_linear_{name}": (name, _with(AUTO, target_modules="all-linear")) for name in _LINEAR}
CASES["experts_regex"] = "qwen3_moe", _with(AUTO, target_modules=r".*_proj", rank_pattern={"q_proj": 2})
# Cases that cannot be made one model with their base, by design.
NOT_MERGED = {
    name for name, (_, spec) in CASES.items() if spec.target_parameters or name.startswith(("experts_l", "experts_r"))
}

# Runs in a process of its own, as a user would; every warning about the adapter is an error.
_LOAD = """
import json, sys, warnings
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
cases, logits, faults = json.load(open(sys.argv[1])), {}, {}
for name, case in cases.items():
    ids = torch.tensor(case["input_ids"])
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", FutureWarning)  # transformers' own, about names that peft still uses
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # true, and meant
            # Of patterns that PEFT itself adds for parameters: it looks for modules, and uses them all the same.
            warnings.filterwarnings("ignore", r"The following \\w+_pattern keys.*gate_up_proj'\\]")
            base = AutoModelForCausalLM.from_pretrained(case["base"], dtype=torch.float32)
            if case["adapter"]:
                base = PeftModel.from_pretrained(base, case["adapter"])
            logits[name] = base.eval()(input_ids=ids).logits.clone()
    except Exception as exc:
        faults[name] = repr(exc)
save_file(logits, sys.argv[2])
json.dump(faults, open(sys.argv[3], "w"))
"""


@dataclass
class Trained:
    """A case after two steps on three stages.

    Attributes:
        base: folder of the base model.
        folder: of the saved adapter.
        resolved: what the adapter is on the whole model.
        outcome: of training.
        logits: of the trained stages.
        moved: by how much training changed the logits.
    """

    base: Path
    folder: Path
    resolved: ResolvedAdapter
    outcome: Outcome
    logits: torch.Tensor
    moved: float

    @property
    def full(self) -> Path:
        """Where base and adapter are as one model."""
        return self.folder.with_name(f"{self.folder.name}.full")


@dataclass
class Matrix:
    """All cases, what PEFT makes of them in another process, and transformers of the full merges (`NAME.full`)."""

    trained: dict[str, Trained] = field(default_factory=dict)
    loaded: dict[str, torch.Tensor] = field(default_factory=dict)
    merged: dict[str, torch.Tensor] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


def probe() -> torch.Tensor:
    """The tokens [2, T] that logits are compared at."""
    return torch.tensor([list(range(3, 15)), list(range(40, 52))])


def resolved(path: Path, spec: AdapterSpec) -> ResolvedAdapter:
    """The adapter on the whole model in a folder."""
    return adapters.resolve(meta_model(path), spec, path.name)


def gathered(stages: list[Stage]) -> dict[str, torch.Tensor]:
    """What trains on all stages."""
    return {key: value for stage in stages for key, value in stage.state().items()}


def train_case(base: Path, spec: AdapterSpec, rows: list[Example], folder: Path) -> Trained:
    """Two steps on three stages from lively values, saved."""
    run = make_spec(base, CUTS, adapter=spec, optimizer="sgd", lr=0.5)
    stages = build_stages(run, base)
    before = pipeline_logits(stages, {"input_ids": probe()})
    steps = [data.micro_batches(rows[i : i + 2], 1, padding_side="right", pad_id=0) for i in (0, 2)]
    initial = gathered(stages)
    if spec.init_lora_weights is True:
        initial = lively(initial)
    outcome = run_stages(run, stages, steps, initial=initial)
    logits = pipeline_logits(stages, {"input_ids": probe()})
    whole = resolved(base, spec)
    check_complete(whole, outcome.adapter)
    save_adapter(folder, whole, outcome.adapter)
    return Trained(base, folder, whole, outcome, logits, float((logits - before).abs().max()))


def load_elsewhere(
    cases: dict[str, tuple[Path, Path | None]], root: Path
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Logits of each base, with an adapter on it where one is given, and what went wrong, from a fresh process."""
    ids = probe().tolist()
    plain = {
        name: {"base": str(base), "adapter": None if adapter is None else str(adapter), "input_ids": ids}
        for name, (base, adapter) in cases.items()
    }
    (root / "load.py").write_text(_LOAD)
    (root / "cases.json").write_text(json.dumps(plain))
    files = [str(root / name) for name in ("cases.json", "logits.safetensors", "faults.json")]
    done = subprocess.run([sys.executable, str(root / "load.py"), *files], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stderr.splitlines():
        assert "newly initialized" not in line and "not used when initializing" not in line, line
    return load_file(files[1]), json.loads(Path(files[2]).read_text())


@pytest.fixture(scope="session")
def matrix(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Every case trained, saved and loaded again."""
    from conftest import make_rows

    root = tmp_path_factory.mktemp("matrix")
    rows = make_rows((5, 9, 12, 7))
    found = Matrix()
    for name, (model_name, spec) in CASES.items():
        found.trained[name] = train_case(tiny(model_name), spec, rows, root / name)
    cases: dict[str, tuple[Path, Path | None]] = {}
    for name, case in found.trained.items():
        cases[name] = case.base, case.folder
        if name not in NOT_MERGED:
            cases[f"{name}.full"] = merge_full(find_source(case.folder, None), case.full, base=str(case.base)), None
    logits, found.faults = load_elsewhere(cases, root)
    found.loaded = {name: logits[name] for name in found.trained if name in logits}
    found.merged = {name: logits[f"{name}.full"] for name in found.trained if f"{name}.full" in logits}
    return found

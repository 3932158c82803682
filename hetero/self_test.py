"""Checks this machine's own device: that a split computes what one process does, gradients, and 4-bit weights."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero import device as devices
from hetero import quantization
from hetero.device import Device
from hetero.errors import ConfigError
from hetero.folders import write_text
from hetero.interfaces import system_name
from hetero.spec import (
    AdapterSpec,
    LoopSpec,
    LrScheduleSpec,
    ModelSpec,
    ObjectSpec,
    RunSpec,
    ScheduleSpec,
    StageSpec,
    TransportSpec,
    WorkerEntry,
)
from hetero.stage import Stage, build_stage
from hetero.tiny import TINY, make_tiny, tiny_config
from hetero.versions import versions
from hetero.wire.tensors import DTYPES

FORMAT = 1
ROWS, LENGTH, LAYERS, CUT = 2, 24, 6, 3
_SEED = 5
_SAME = 1e-6  # the same operations on the same device
_SPLIT = {"float32": 1e-5, "bfloat16": 2e-2}  # of the split against transformers and PEFT, whose loss differs in kind
_ACROSS = {"float32": 2e-4, "bfloat16": 5e-2}  # of this device against the CPU in float32
_SLOPE = 2e-2  # of a gradient against a difference quotient in float32

# The 16 values of nf4: quantiles of a normal distribution (Dettmers et al., "QLoRA", 2023, appendix E).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class Check:
    """One check: passed, failed or not run (`why`), with its figures."""

    name: str
    result: str
    figures: dict[str, float] = field(default_factory=dict)
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """What is shared: the device, versions and checks; nothing that names the machine or its user."""

    format: int
    device: str
    device_name: str
    memory_bytes: int
    system: str
    versions: dict[str, str]
    checks: list[Check]
    passed: bool


class _NotHereError(Exception):
    """A check cannot run on this machine."""


def self_test(device_name: str = "auto") -> Report:
    """Runs every check; takes well under a minute.

    Raises:
        ConfigError: this machine does not have the device.
    """
    device = devices.resolve(device_name)
    folder = make_tiny()
    tests: dict[str, Callable[[], tuple[bool, dict[str, float]]]] = {
        "two stages equal plain PEFT, float32": lambda: _split(folder, device, "float32"),
        "two stages equal plain PEFT, bfloat16": lambda: _split(folder, device, "bfloat16"),
        "recomputation equals none": lambda: _recomputed(folder, device),
        "this device equals the CPU, float32": lambda: _across(folder, device, "float32"),
        "this device equals the CPU, bfloat16": lambda: _across(folder, device, "bfloat16"),
        "gradient equals difference quotient": lambda: _gradient(folder, device),
        "nf4 values": lambda: _nf4_values(device),
        "nf4 two stages equal one": lambda: _nf4_split(folder, device),
    }
    checks = [_run(name, test) for name, test in tests.items()]
    return Report(
        FORMAT,
        str(device),
        device.description(),
        device.total_memory_bytes(),
        system_name(),
        versions(),
        checks,
        all(check.result != "failed" for check in checks),
    )


def write_report(report: Report, file: Path) -> None:
    """Writes the JSON to share.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        write_text(file, json.dumps(asdict(report), indent=1) + "\n")
    except OSError as exc:
        raise ConfigError(f"--self-test must name a file that can be written, got {file} ({exc.strerror})") from None


def show_report(report: Report, file: Path) -> str:
    """The checks, a line each."""
    lines = [f"{report.device}: {report.device_name}, {report.system}"]
    for check in report.checks:
        figures = ", ".join(f"{name} {value:.2g}" for name, value in check.figures.items())
        lines.append(f"{check.result:>8}  {check.name}  {check.why or figures}  ({check.seconds:.1f} s)")
    lines.append(f"written to {file}: share it as the proof for this device")
    return "\n".join(lines) + "\n"


def _run(name: str, test: Callable[[], tuple[bool, dict[str, float]]]) -> Check:
    began = time.perf_counter()
    try:
        passed, figures = test()
        result, why = "passed" if passed else "failed", ""
    except _NotHereError as exc:
        result, figures, why = "not run", {}, str(exc)
    except Exception as exc:  # an accelerator's fault is what this looks for, and the other checks go on
        result, figures, why = "failed", {}, " ".join(f"{type(exc).__name__}: {exc}".split())[:500]
    finite = {key: value if math.isfinite(value) else -1.0 for key, value in figures.items()}
    if finite != figures:
        why = "a figure is not finite (shown as -1)"
    return Check(name, result, finite, why, round(time.perf_counter() - began, 3))


@dataclass(frozen=True)
class _Outcome:
    """A step's loss and gradients on the host, by name."""

    loss: float
    grads: dict[str, torch.Tensor]

    def differences(self, other: _Outcome) -> dict[str, float]:
        """Relative difference of the losses, and the largest of the gradients relative to their norms."""
        if self.grads.keys() != other.grads.keys() or not self.grads:
            raise RuntimeError("the two do not train the same tensors")
        grads = [
            float((grad - other.grads[key]).norm() / other.grads[key].norm().clamp_min(1e-12))
            for key, grad in self.grads.items()
        ]
        return {"loss": abs(self.loss - other.loss) / abs(other.loss), "gradients": max(grads)}


def _spec(cuts: list[int], dtype: str, quantization_: str = "none", recompute: str = "none") -> RunSpec:
    config = tiny_config()
    edges = [0, *cuts, config["num_hidden_layers"]]
    names = ["local", *(f"w{i}" for i in range(1, len(cuts) + 1))]
    stages = [
        StageSpec(id=name, start=start, end=end, dtype=dtype, quantization=quantization_)  # type: ignore[arg-type]
        for name, start, end in zip(names, edges[:-1], edges[1:], strict=True)
    ]
    return RunSpec(
        seed=_SEED,
        model=ModelSpec(path=TINY),
        local_model=False,
        num_hidden_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_length=LENGTH,
        total_steps=1,
        adapter=AdapterSpec(r=4, alpha=8, dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"]),
        stages=stages,
        workers=[WorkerEntry(id=name, host="127.0.0.1") for name in names[1:]],
        boundary_dtypes=[dtype] * len(cuts),  # type: ignore[list-item]
        transport=TransportSpec(),
        schedule=ScheduleSpec(),
        stage=ObjectSpec("hetero.stage.build_stage"),
        optimizer=ObjectSpec("hetero.optim.sgd", {"lr": 1e-3}),
        lr_schedule=LrScheduleSpec(name="constant"),
        loop=LoopSpec(steps=1, batch_size=ROWS, recompute=recompute),  # type: ignore[arg-type]
    )


def _stages(folder: Path, device: Device, spec: RunSpec) -> list[Stage]:
    """The stages of a plan, with adapters whose second factor is not zero, so that every tensor has a gradient."""
    stages = [build_stage(spec, index, folder, device) for index in range(len(spec.stages))]
    named = sorted((key, value) for stage in stages for key, value in stage.trained.items())
    draw = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for key, parameter in named:
            if "lora_B" in key:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=draw))
    return stages


def _batch() -> dict[str, torch.Tensor]:
    """Random tokens [B, T] that are their own labels."""
    draw = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(0, tiny_config()["vocab_size"], (ROWS, LENGTH), generator=draw)
    return {"input_ids": tokens, "labels": tokens}


def _step(stages: list[Stage]) -> _Outcome:
    """One micro-batch through all stages and back; hidden and grad pass the host as they do between machines."""
    batch, label_tokens = _batch(), ROWS * (LENGTH - 1)
    inputs = dict(batch)
    for stage in stages:
        hidden = stage.forward(1, 0, inputs, label_tokens)
        if hidden is not None:
            inputs = {"hidden": stage.device.to_host(hidden), "labels": batch["labels"]}
    grad: torch.Tensor | None = None
    for stage in reversed(stages):
        grad = stage.backward(0, grad)
        grad = None if grad is None else stage.device.to_host(grad)
    grads = {
        key: value.grad.detach().to("cpu", torch.float32)
        for stage in stages
        for key, value in stage.trained.items()
        if value.grad is not None
    }
    outcome = _Outcome(stages[-1].loss(), grads)
    for stage in stages:
        stage.end_step()
    return outcome


def _need_dtype(device: Device, dtype: str) -> None:
    try:
        device.check_dtype(dtype, key="dtype")
    except ConfigError as exc:
        raise _NotHereError(str(exc)) from None


def _split(folder: Path, device: Device, dtype: str) -> tuple[bool, dict[str, float]]:
    _need_dtype(device, dtype)
    two = _stages(folder, device, _spec([CUT], dtype))
    plain = _plain_step(folder, device, dtype, {key: value for stage in two for key, value in stage.trained.items()})
    figures = _step(two).differences(plain)
    return max(figures.values()) <= _SPLIT[dtype], figures


def _plain_step(folder: Path, device: Device, dtype: str, trained: dict[str, torch.nn.Parameter]) -> _Outcome:
    """The same micro-batch through transformers and PEFT as everybody uses them, in one process."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    given = _spec([], dtype).adapter
    settings = peft.LoraConfig(
        r=given.r, lora_alpha=given.alpha, lora_dropout=0.0, target_modules=list(given.target_modules)
    )
    model = peft.get_peft_model(base, settings).to(device.torch_device)
    own = {name.replace(".default.", "."): value for name, value in model.named_parameters() if value.requires_grad}
    if own.keys() != trained.keys():
        raise RuntimeError("PEFT trains other tensors")
    with torch.no_grad():
        for key, value in own.items():
            value.copy_(trained[key])
    batch = {key: value.to(device.torch_device) for key, value in _batch().items()}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    grads = {key: value.grad.detach().to("cpu", torch.float32) for key, value in own.items()}
    return _Outcome(float(loss.detach()), grads)


def _recomputed(folder: Path, device: Device) -> tuple[bool, dict[str, float]]:
    plain = _step(_stages(folder, device, _spec([CUT], "float32")))
    again = _step(_stages(folder, device, _spec([CUT], "float32", recompute="layer")))
    figures = again.differences(plain)
    return max(figures.values()) <= _SAME, figures


def _across(folder: Path, device: Device, dtype: str) -> tuple[bool, dict[str, float]]:
    if device.torch_device.type == "cpu" and dtype == "float32":
        raise _NotHereError("this device is the CPU itself")
    _need_dtype(device, dtype)
    cpu = _step(_stages(folder, devices.resolve("cpu"), _spec([], "float32")))
    figures = _step(_stages(folder, device, _spec([], dtype))).differences(cpu)
    return max(figures.values()) <= _ACROSS[dtype], figures


def _gradient(folder: Path, device: Device) -> tuple[bool, dict[str, float]]:
    """Loss along the gradient's own direction: its slope is the gradient's norm."""
    stages = _stages(folder, device, _spec([CUT], "float32"))
    grads = _step(stages).grads
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
    width = 0.02 / norm
    losses = []
    for sign in (1, -2):
        with torch.no_grad():
            for stage in stages:
                for key, parameter in stage.trained.items():
                    parameter.add_(grads[key].to(parameter.device), alpha=sign * width)
        losses.append(_step(stages).loss)
    slope = (losses[0] - losses[1]) / (2 * width)
    error = abs(slope - norm * norm) / (norm * norm)
    return error <= _SLOPE, {"relative error": error, "norm": norm}


def _need_nf4(device: Device) -> Any:
    try:
        quantization.check_nf4(device.torch_device, where="this machine")
    except ConfigError as exc:
        raise _NotHereError(str(exc)) from None
    import bitsandbytes.functional

    return bitsandbytes.functional


def _nf4_values(device: Device) -> tuple[bool, dict[str, float]]:
    """Quantised by the library on this device, and by the definition of nf4 on the CPU."""
    functional = _need_nf4(device)
    draw = torch.Generator().manual_seed(_SEED)
    weight = torch.randn(128, 256, generator=draw)
    packed, state = functional.quantize_4bit(weight.to(device.torch_device), blocksize=64, quant_type="nf4")
    theirs = functional.dequantize_4bit(packed, state).to("cpu", torch.float32)
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    codes = torch.tensor(_NF4)
    nearest = (blocks / scale)[..., None].sub(codes).abs().argmin(-1)
    mine = (codes[nearest] * scale).reshape(weight.shape)
    wrong = (theirs - mine).abs() > 1e-5 * scale.max()
    figures = {"share that differs": float(wrong.float().mean()), "largest": float((theirs - mine).abs().max())}
    return figures["share that differs"] <= 1e-3, figures  # values half way between two codes may go either way


def _nf4_split(folder: Path, device: Device) -> tuple[bool, dict[str, float]]:
    _need_nf4(device)
    one, two = (_step(_stages(folder, device, _spec(cuts, "float32", "nf4"))) for cuts in ([], [CUT]))
    figures = two.differences(one)
    return max(figures.values()) <= _SAME, figures

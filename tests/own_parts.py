"""A user's own classes, as they would lie on PYTHONPATH of every machine; each leaves a trace of its work."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hetero.device import Device
from hetero.loop import Training, run_step, train
from hetero.spec import RunSpec
from hetero.stage import Stage, build_stage
from hetero.transport.tcp import TcpTransport


class PatientTransport(TcpTransport):
    """TCP with another time limit than asked for, which shows in its messages."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args | {"connect_timeout_s": args["connect_timeout_s"] + 1.5})


def frozen_stage(spec: RunSpec, index: int, model_path: str | Path, device: Device, keep: str = "v_proj") -> Stage:
    """A stage that trains the modules of one name only."""
    stage = build_stage(spec, index, model_path, device)
    for key, parameter in stage.trained.items():
        parameter.requires_grad_(keep in key)
    return stage


def sign_descent(parameters: Iterable[torch.nn.Parameter], lr: float, scale: float = 1.0) -> torch.optim.Optimizer:
    """An optimizer whose step does not depend on the gradient's size."""
    return SignDescent(parameters, {"lr": lr, "scale": scale})


class SignDescent(torch.optim.Optimizer):
    """p -= lr * scale * sign(grad)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= group["lr"] * group["scale"] * parameter.grad.sign()


def every_step_twice(training: Training) -> None:
    """A loop that logs each step's record two times."""
    for step in range(1, training.spec.total_steps + 1):
        record = run_step(training, step)
        training.on_step(record)
        training.on_step(record)


def stop_after_four(training: Training) -> None:
    """The loop of every run, and somebody who asks for its end in step 4."""

    def on_step(record: dict[str, Any]) -> None:
        training.on_step(record)
        if record["step"] == 4:
            training.stop.ask("four steps are enough")

    train(dataclasses.replace(training, on_step=on_step))


def signal_in_four(training: Training) -> None:
    """The loop of every run, which gets a signal in step 4."""

    def on_step(record: dict[str, Any]) -> None:
        training.on_step(record)
        if record["step"] == 4:
            os.kill(os.getpid(), signal.Signals[os.environ["HETERO_TEST_SIGNAL"]])

    train(dataclasses.replace(training, on_step=on_step))


class TextLogger:
    """Writes a line for each call."""

    def __init__(self, run_dir: Path, title: str) -> None:
        self._path, self._title = run_dir / "own.txt", title

    def start(self, run: dict[str, Any]) -> None:
        self._write(f"start {self._title} {run['spec']['total_steps']}")

    def step(self, record: dict[str, Any]) -> None:
        self._write(f"step {json.dumps(record['step'])}")

    def finish(self, error: str | None) -> None:
        self._write(f"finish {error}")

    def _write(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def sleepy_stage(
    spec: RunSpec, index: int, model_path: str | Path, device: Device, where: int, step: int, s: float, once: str = ""
) -> Stage:
    """A stage whose forward sleeps in one step; only where `once`, a file that is then made, is not there yet."""
    stage = build_stage(spec, index, model_path, device)
    forward = stage.forward

    def slow_forward(at: int, micro_batch: int, *args: Any) -> torch.Tensor | None:
        if index == where and (at == step or step == 0) and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            time.sleep(s)
        return forward(at, micro_batch, *args)

    stage.forward = slow_forward  # type: ignore[method-assign]
    return stage


def slow_train(training: Training) -> None:
    """The usual loop with a tenth of a second between steps."""
    on_step = training.on_step

    def pause(record: dict[str, Any]) -> None:
        on_step(record)
        time.sleep(0.1)

    train(dataclasses.replace(training, on_step=pause))

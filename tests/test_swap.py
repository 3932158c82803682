"""Transport, stage builder, loop, optimizer and logger are swapped by configuration alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from processes import Worker, hardware, losses, metrics, run, run_here, train_here, worker
from safetensors.torch import load_file

OWN = {
    "stage": "own_parts.frozen_stage",
    "optimizer": "own_parts.sign_descent",
    "loop": "own_parts.every_step_twice",
    "transport": "own_parts.PatientTransport",
    "logger.jsonl": "own_parts.TextLogger",
}
ALLOW = f"allow_targets=[{','.join(OWN.values())}]"
PATH = {"PYTHONPATH": str(Path(__file__).parent)}
NOT_ADAMW = ["~optimizer.betas", "~optimizer.eps", "~optimizer.weight_decay"]


@pytest.fixture
def data(rows_file: Path) -> list[str]:
    return ["data=jsonl", f"data.path={rows_file}", "loop.steps=2", "loop.batch_size=4"]


def swap(*groups: str) -> list[str]:
    return [ALLOW, *(f"{group}._target_={OWN[group]}" for group in groups)]


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "adapter" / "adapter_model.safetensors")


@pytest.mark.slow
def test_all_five_at_once_on_a_launched_worker(tmp_path: Path, data: list[str]) -> None:
    """As processes: the coordinator hands its allow list to the workers that it starts."""
    own = [*swap(*OWN), *NOT_ADAMW, "+stage.keep=q_proj", "+logger.jsonl.title=mine"]
    outcome = run("train", *data, *own, f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}", env=PATH)
    assert outcome.code == 0, outcome.text
    lines = (tmp_path / "run" / "own.txt").read_text(encoding="utf-8").splitlines()
    assert lines == ["start mine 2", "step 1", "step 1", "step 2", "step 2", "finish None"]
    moved = [key for key, value in tensors(tmp_path / "run").items() if "lora_B" in key and value.any()]
    assert moved and all("q_proj" in key for key in moved)
    assert {re.search(r"layers\.(\d)", key)[1] for key in moved} == set("012345")  # type: ignore[index]


def test_own_stage_builder_gets_its_arguments(tmp_path: Path, data: list[str]) -> None:
    train_here(tmp_path / "run", *data, *swap("stage"), "+stage.keep=v_proj", "shard_plan=single")
    moved = {key for key, value in tensors(tmp_path / "run").items() if "lora_B" in key and value.any()}
    assert moved and all("v_proj" in key for key in moved)


@pytest.mark.by_hand
def test_own_optimizer_steps_by_its_rule_on_every_stage(
    tmp_path: Path, data: list[str], workers: tuple[Worker, Worker]
) -> None:
    """The step of signs moves every weight by lr at most; a worker of another configuration does not know it."""
    own = [*swap("optimizer"), *NOT_ADAMW, "optimizer.lr=1e-3"]
    constant = ["lr_schedule=constant", "+optimizer.scale=0.5"]
    one = train_here(tmp_path / "one", *data, *own, *constant, "shard_plan=single")
    moved = [value.abs().max().item() for key, value in tensors(tmp_path / "one").items() if "lora_B" in key]
    assert max(moved) == pytest.approx(2 * 0.5e-3)
    with worker(tmp_path / "w", ALLOW, env=PATH) as informed:
        two = train_here(tmp_path / "two", *data, *own, *constant, *hardware(informed))
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    args = [*data, *own, *constant, *hardware(workers[0]), f"outputs={tmp_path}"]
    outcome = run_here("train", *args)
    assert outcome.code == 1 and "Traceback" not in outcome.text
    assert f"stage 1 at 127.0.0.1:{workers[0].port}: optimizer._target_ must be one of" in outcome.text
    assert "allow_targets" in outcome.text
    workers[0].wait_idle()


def test_own_loop_decides_what_a_run_does(tmp_path: Path, data: list[str]) -> None:
    records = train_here(tmp_path / "run", *data, *swap("loop"), "shard_plan=single")
    assert [record["step"] for record in records] == [1, 1, 2, 2]


def test_own_transport_is_what_dials(tmp_path: Path, data: list[str]) -> None:
    """Its time limit is 1.5 s longer than the configured one."""
    nobody = ["hardware.launch=none", "hardware.workers=[{id: a, host: 127.0.0.1, port: 9}]"]
    args = [
        *data,
        *swap("transport"),
        *nobody,
        "transport.connect_timeout_s=0.5",
        "recovery=none",
        f"outputs={tmp_path}",
    ]
    outcome = run_here("train", *args)
    assert outcome.code == 1 and "stage 1 at 127.0.0.1:9: no connection within 2 s" in outcome.text


@pytest.mark.parametrize("group", list(OWN))
def test_own_class_must_be_allowed_by_name(tmp_path: Path, data: list[str], group: str) -> None:
    outcome = run_here("train", *data, f"{group}._target_={OWN[group]}", f"outputs={tmp_path}")
    assert outcome.code == 2
    assert f"{group.split('.')[0]}._target_ must be one of" in outcome.one_line()
    assert OWN[group] in outcome.text and "allow_targets" in outcome.text


def test_allowed_name_that_does_not_exist_is_one_line(tmp_path: Path, data: list[str]) -> None:
    args = [*data, "shard_plan=single", "loop._target_=own_parts.nothing", "allow_targets=[own_parts.nothing]"]
    outcome = run_here("train", *args, f"outputs={tmp_path}")
    assert outcome.code == 2 and "Traceback" not in outcome.text
    assert "loop._target_ must be importable, got 'own_parts.nothing'" in outcome.text


def test_argument_that_the_own_class_does_not_take_is_one_line(tmp_path: Path, data: list[str]) -> None:
    args = [*data, *swap("logger.jsonl"), "+logger.jsonl.titel=x", f"outputs={tmp_path}"]
    outcome = run_here("train", *args)
    assert outcome.code == 2
    assert "logger must have the arguments that own_parts.TextLogger takes" in outcome.one_line()


def test_metrics_are_the_same_with_the_default_parts_by_name(tmp_path: Path, data: list[str]) -> None:
    explicit = ["optimizer._target_=hetero.optim.adamw", "loop._target_=hetero.loop.train"]
    found = train_here(tmp_path / "a", *data, *explicit, "shard_plan=single")
    assert losses(found) == losses(train_here(tmp_path / "b", *data, "shard_plan=single"))
    assert metrics(tmp_path / "a") == found

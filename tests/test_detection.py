"""A peer that is dead, frozen or stuck is noticed at both ends; one that is only slow is left alone."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from conftest import Tiny
from fleet import EVERY, Fleet, Process, adapter_of
from processes import END_S, metrics, started, train_here

SILENCE_S = 3
BUSY_S = 2.0  # until a process on a busy machine has said what it noticed
SLEEPY = "stage._target_=own_parts.sleepy_stage"


def frozen(ships: Fleet, place: str, silence_s: float) -> tuple[Process, Process, Process, float]:
    """A run whose last worker stands still at a place; the run, its workers, and when it froze."""
    first, last = ships.worker(), ships.worker(f"{place}@SIGSTOP")
    train = ships.train("out", [first, last], f"transport.io_timeout_s={silence_s}")
    last.wait_stopped()
    return train, first, last, time.monotonic()


@pytest.mark.parametrize(
    ("silence_s", "place"),
    [
        (SILENCE_S, "worker.forward_done@9"),
        pytest.param(SILENCE_S, "worker.decision_here@5", marks=pytest.mark.by_hand),
        pytest.param(SILENCE_S, "worker.state_taken@1", marks=pytest.mark.by_hand),
        pytest.param(SILENCE_S, "worker.built@1", marks=pytest.mark.by_hand),
        pytest.param(15, "worker.forward_done@9", marks=pytest.mark.by_hand),
    ],
)
def test_frozen_worker_is_noticed_at_both_ends_and_goes_on_when_it_wakes(
    ships: Fleet, undisturbed: bytes, silence_s: float, place: str
) -> None:
    """Case F04; what it still had in mind when it froze changes nothing."""
    train, first, last, froze_at = frozen(ships, place, silence_s)
    step = r" in step \d+" if "built" not in place else ""
    where = rf"stage 2 at 127\.0\.0\.1:{last.port}{step}: silent for {silence_s} s \(transport\.io_timeout_s\)"
    train.wait_for(rf"{where}; everyone goes back from step \d+ to step \d+")
    first.wait_for(rf"run \w+(:| ended:) stage 2 at 127\.0\.0\.1:{last.port}.*silent for {silence_s} s")
    assert time.monotonic() - froze_at < silence_s + 2 + BUSY_S
    last.send(signal.SIGCONT)
    last.wait_for(r"run \w+(:| ended:) ")
    assert train.wait() == 0, train.text
    assert adapter_of(train.outputs) == undisturbed
    for worker in (first, last):
        worker.assert_idle()


def test_frozen_coordinator_is_noticed_and_refused_when_it_wakes(ships: Fleet, undisturbed: bytes) -> None:
    """Its workers are free for the run that goes on with its checkpoint."""
    workers = [ships.worker(), ships.worker()]
    train = ships.train(
        "out", workers, f"transport.io_timeout_s={SILENCE_S}", failpoint="coordinator.all_ready@5@SIGSTOP"
    )
    train.wait_stopped()
    froze_at = time.monotonic()
    for worker in workers:
        worker.wait_for(rf"stage \d at (the coordinator|127\S+) in step 5: silent for {SILENCE_S} s")
    assert time.monotonic() - froze_at < SILENCE_S + 2 + BUSY_S
    for worker in workers:
        worker.assert_idle()
    train.send(signal.SIGCONT)
    assert train.wait() == 0, train.text
    assert re.search(r"everyone goes back from step [45] to step 3", train.text)  # it may finish its step alone
    assert adapter_of(train.outputs) == undisturbed


def test_killed_worker_is_noticed_at_once_at_both_ends(ships: Fleet) -> None:
    """Case F03."""
    first, last = ships.worker(), ships.worker("worker.backward_done@9@SIGSTOP")
    train = ships.train("out", [first, last], "recovery=none", "recovery.wait_s=0")
    last.wait_stopped()
    last.child.kill()
    died_at = time.monotonic()
    named = rf"stage 2 at 127\.0\.0\.1:{last.port} in step 5: (closed the connection|connection lost .*|.* of a frame)"
    train.wait_for(f"error: {named}", 1.0 + BUSY_S)
    first.wait_for(rf"run \w+(:| ended:) {named}", 1.0 + BUSY_S)
    assert time.monotonic() - died_at < 1.0 + BUSY_S
    assert train.wait(END_S) == 1
    first.assert_idle()


@pytest.mark.parametrize(("sleep_s", "silence_s"), [(5, 1.5), pytest.param(20, 5, marks=pytest.mark.by_hand)])
def test_slow_forward_of_a_healthy_worker_is_waited_for(
    ships: Fleet, undisturbed: bytes, sleep_s: float, silence_s: float
) -> None:
    """G9: longer than a peer may be silent; that it is slower than usual is said, and no more."""
    workers = [ships.worker(), ships.worker()]
    once = ships.folder / "slept"
    sleep = [SLEEPY, "+stage.where=1", "+stage.step=6", f"+stage.s={sleep_s}", f"+stage.once={once}"]
    train = ships.train("out", workers, *sleep, f"transport.io_timeout_s={silence_s}")
    assert train.wait() == 0, train.text
    assert once.exists() and "goes back" not in train.text
    (line,) = re.findall(
        r"stage (\S+) is slow: it computed for ([\d.]+) s in step (\d+), and for ([\d.]+) s usually", train.text
    )
    assert line[0] == "w1" and float(line[1]) >= sleep_s and line[2] == "6" and float(line[3]) < sleep_s / 3
    assert max(record["step_time_s"] for record in metrics(train.outputs / "run")) > sleep_s
    assert adapter_of(train.outputs) == undisturbed


def test_stuck_worker_is_reported_with_stacks_on_both_sides_and_replaced(
    ships: Fleet, tmp_path: Path, tiny: Tiny, rows_file: Path
) -> None:
    """G10: a launched worker whose forward never ends, though it is alive and its heartbeats go on."""
    settings = [*ships.settings(), f"checkpoint.every_steps={EVERY - 1}"]
    train_here(tmp_path / "alone", *settings, "shard_plan=even")
    stuck = [SLEEPY, "+stage.where=1", "+stage.step=3", "+stage.s=1000", f"+stage.once={tmp_path / 'once'}"]
    args = [*settings, *stuck, "recovery.stuck_s=2", "allow_targets=[own_parts.sleepy_stage]"]
    run_dir = tmp_path / "run"
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    with started("train", *args, f"outputs={tmp_path}", f"hydra.run.dir={run_dir}", env=path) as train:
        reason = r"has been in a forward of step 3|has been in a forward"
        train.wait_for(rf"stage 1 at 127\.0\.0\.1:\d+ in step 3: ({reason}).* for \d+ s .*; everyone goes back")
        outcome = train.wait()
        assert outcome.code == 0, outcome.text
        train.assert_gone()
    log = (run_dir / "worker-1.log").read_text(encoding="utf-8")
    for text in (log, outcome.text):
        assert re.search(r"(Current thread|Thread) 0x", text), text
    assert "slow_forward" in log and "the stacks of all threads were dumped" in log
    assert "starting the local worker of stage 1 again" in outcome.text
    assert adapter_of(tmp_path) == (tmp_path / "alone" / "adapter/adapter_model.safetensors").read_bytes()

"""SIGINT, SIGTERM and SIGHUP at every moment of a run, on each of its processes: it ends soon, and nothing is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fleet import (
    EVERY,
    STEPS,
    Fleet,
    Process,
    adapter_of,
    assert_no_leftovers,
    checkpoints_of,
)
from peers import wait_until
from processes import REPO, START_S, metrics, refuses_connections, started

from hetero.tiny import make_tiny

END_S = 10.0  # what the README promises
SECOND_S = 2.0
CODES = {"SIGINT": 130, "SIGTERM": 143}
SLEEPY = "stage._target_=own_parts.sleepy_stage"

# Phase -> the place where a coordinator, or the worker of the last stage, gets the signal (hetero/failpoints.py).
COORDINATOR = {
    "loading": "coordinator.joined@1",
    "joined": "coordinator.synced@1",
    "forward": "coordinator.step_begun@5",
    "after-backward": "coordinator.all_ready@5",
    "optimizer-step": "coordinator.decided@5",
    "stepped": "coordinator.applied@5",
    "checkpoint-begun": "coordinator.state_taken@2",
    "checkpoint-written": "checkpoint.before_manifest@1",
    "checkpoint-renamed": "checkpoint.before_rename@2",
    "between-steps": "coordinator.step_logged@5",
    "last-step": f"coordinator.step_logged@{STEPS}",
    "adapter": "coordinator.adapter_written@1",
}
WORKER = {
    "welcomed": "worker.welcomed@1",
    "loading": "worker.built@1",
    "restored": "worker.restored@1",
    "joined": "worker.synced@1",
    "step-begun": "worker.step_begun@5",
    "forward": "worker.forward_done@9",
    "backward": "worker.backward_done@9",
    "after-backward": "worker.ready_sent@5",
    "optimizer-step": "worker.decision_here@5",
    "between-steps": "worker.applied@5",
    "checkpoint": "worker.state_queued@1",
    "last-step": f"worker.applied@{STEPS}",
}
UNSAID = {("coordinator", "loading"), ("coordinator", "joined"), ("coordinator", "adapter"), ("worker", "welcomed")}
QUICK = {
    ("coordinator", "forward", "SIGINT"),
    ("coordinator", "checkpoint-renamed", "SIGINT"),
    ("coordinator", "last-step", "SIGTERM"),
    ("worker", "loading", "SIGINT"),
    ("worker", "forward", "SIGTERM"),
    ("worker", "checkpoint", "SIGTERM"),
}
CASES = [
    pytest.param(role, phase, number, marks=() if (role, phase, number) in QUICK else pytest.mark.by_hand)
    for role, phases in (("coordinator", COORDINATOR), ("worker", WORKER))
    for phase in phases
    for number in CODES
]


@pytest.mark.parametrize(("role", "phase", "number"), CASES)
def test_signal_in_any_phase_ends_the_run_with_a_checkpoint(
    ships: Fleet, undisturbed: bytes, role: str, phase: str, number: str
) -> None:
    """G21: whichever process gets it; the run that goes on afterwards gives what the undisturbed one gives."""
    at = f"{(COORDINATOR if role == 'coordinator' else WORKER)[phase]}@{number}"
    first = ships.worker()
    last = ships.worker(at if role == "worker" else "")
    train = ships.train("out", [first, last], failpoint=at if role == "coordinator" else "")
    victim = train if role == "coordinator" else last
    if (role, phase) in UNSAID:
        code = train.wait()
    else:
        victim.wait_for(number)
        began = time.monotonic()
        code = train.wait(END_S)
        assert time.monotonic() - began < END_S
    assert_ended_well(train, role, phase, number, code)
    if role == "worker":
        assert last.wait(END_S) == 0 and refuses_connections(last.host, last.port)
        last = ships.worker(port=last.port)
    for worker in (first, last):
        worker.assert_idle()
    out = ships.folder / "out"
    assert_no_leftovers(out)
    finished = checkpoints_of(out)
    if finished and finished[-1] == STEPS:
        assert adapter_of(out) == undisturbed
        return
    again = ships.train("out" if finished else "anew", [first, last], resume=bool(finished))
    assert again.wait() == 0, again.text
    assert adapter_of(again.outputs, resumed=bool(finished)) == undisturbed
    assert_no_leftovers(again.outputs)


def assert_ended_well(train: Process, role: str, phase: str, number: str, code: int) -> None:
    """Exit 0 with a checkpoint of the last finished step, or as a signal ends a program before there was a step."""
    if role == "coordinator" and phase in ("loading", "joined"):
        assert code == CODES[number], train.text
        return
    assert code == 0, train.text
    logged = [line for line in train.text.splitlines() if line.startswith("step ")]
    last = int(logged[-1].split()[1].partition("/")[0]) if logged else 0
    assert checkpoints_of(train.outputs)[-1] == last, train.text
    if phase in ("last-step", "adapter"):
        assert last == STEPS


def test_signal_after_the_last_step_leaves_what_follows_for_a_resume(ships: Fleet) -> None:
    """The last evaluation, the best step that it decides, and the answers to prompts: it is said, and made up for."""
    model = make_tiny(None)  # it has a tokenizer
    first, last = (ships.worker(args=[f"worker.models_dir={model.parent}"]) for _ in range(2))
    follows = [f"model.path={model}", f"loop.eval_every={STEPS}", "data.eval_fraction=0.2", "checkpoint.keep_best=true"]
    follows += ["loop.sample_prompts=['1 2']", "generation.max_new_tokens=3"]
    train = ships.train("out", [first, last], *follows, failpoint=f"coordinator.step_logged@{STEPS}@SIGTERM")
    assert train.wait() == 0, train.text
    assert f"stopped after step {STEPS} of {STEPS} (SIGTERM)" in train.text
    assert "all steps are done, and the run ends without what follows" in train.text
    again = ships.train("out", [first, last], *follows, resume=True)
    assert again.wait() == 0, again.text
    *_, evaluation = (json.loads(line) for line in (again.outputs / "again" / "eval.jsonl").read_text().splitlines())
    (sample,) = (json.loads(line) for line in (again.outputs / "again" / "samples.jsonl").read_text().splitlines())
    assert evaluation["step"] == STEPS and sample["finish"] != "stopped"
    assert "stopped after" not in again.text


@pytest.mark.parametrize("number", CODES)
def test_signal_while_a_worker_is_waited_for_ends_at_once(ships: Fleet, number: str) -> None:
    """There is nothing to save yet."""
    worker = ships.worker()
    worker.child.kill()
    train = ships.train("out", [worker])
    train.wait_for("adapter: ")
    train.send(signal.Signals[number])
    assert train.wait(END_S) == CODES[number]
    assert not checkpoints_of(train.outputs)


@pytest.mark.parametrize("number", CODES)
def test_signal_without_checkpoints_ends_at_once(ships: Fleet, number: str) -> None:
    worker = ships.worker()
    args = ["checkpoint.every_steps=null", "checkpoint.every_minutes=null"]
    train = ships.train("out", [worker], *args, failpoint=f"coordinator.step_logged@2@{number}")
    assert train.wait() == CODES[number]
    worker.assert_idle()
    assert not (train.outputs / "run" / "checkpoints").exists()


def asleep(ships: Fleet, *workers: Process) -> Process:
    """A run with a checkpoint, whose coordinator's forward of step 5 takes a minute and has begun."""
    once = ships.folder / "slept"
    sleep = [SLEEPY, "+stage.where=0", "+stage.step=5", "+stage.s=60", f"+stage.once={once}"]
    train = ships.train("out", workers, *sleep)
    wait_until(lambda: once.exists() and checkpoints_of(train.outputs) == [EVERY], START_S)
    return train


@pytest.mark.parametrize("number", CODES)
def test_second_signal_ends_the_process_at_once(ships: Fleet, number: str) -> None:
    """The step would go on for a minute; the checkpoint before it stays, and the workers are free again."""
    first, last = ships.worker(), ships.worker()
    train = asleep(ships, first, last)
    train.send(signal.Signals[number])
    train.wait_for("again: at once")
    train.send(signal.Signals[number])
    began = time.monotonic()
    assert train.wait(SECOND_S) == CODES[number]
    assert time.monotonic() - began < SECOND_S
    for worker in (first, last):
        worker.assert_idle()
    assert checkpoints_of(train.outputs) == [EVERY]


@pytest.mark.by_hand
def test_step_that_does_not_end_is_abandoned(ships: Fleet, undisturbed: bytes) -> None:
    """Within the time; the newest checkpoint is gone on with."""
    first, last = ships.worker(), ships.worker()
    train = asleep(ships, first, last)
    train.send(signal.SIGINT)
    began = time.monotonic()
    assert train.wait(END_S + 5) == 130
    assert time.monotonic() - began < END_S
    for worker in (first, last):
        worker.assert_idle()
    again = ships.train("out", [first, last], resume=True)
    assert again.wait() == 0, again.text
    assert adapter_of(train.outputs, resumed=True) == undisturbed


def test_idle_worker_and_one_between_runs_end_as_a_signal_ends_a_program(ships: Fleet) -> None:
    worker = ships.worker()
    assert ships.train("out", [worker]).wait() == 0
    worker.assert_idle()
    worker.send(signal.SIGTERM)
    assert worker.wait(END_S) == 143 and refuses_connections(worker.host, worker.port)


def test_sweep_ends_with_the_job_that_was_interrupted(ships: Fleet) -> None:
    worker = ships.worker()
    sweep = ["-m", "seed=1,2,3", f"hydra.sweep.dir={ships.folder / 'sweep'}"]
    train = ships.train("out", [worker], *sweep, failpoint="coordinator.step_logged@2@SIGINT")
    assert train.wait() == 130, train.text
    assert (ships.folder / "sweep" / "0" / "checkpoints").is_dir()
    assert not list((ships.folder / "sweep").glob("[12]/metrics.jsonl"))
    worker.assert_idle()


@pytest.mark.parametrize("number", CODES)
def test_run_that_is_to_end_does_not_wait_for_a_worker_that_dies_meanwhile(ships: Fleet, number: str) -> None:
    """The step cannot be finished; the checkpoint before stays."""
    first, last = ships.worker(), ships.worker("worker.backward_done@9@SIGSTOP")
    train = ships.train("out", [first, last], failpoint=f"coordinator.step_begun@5@{number}")
    last.wait_stopped()
    train.wait_for("again: at once")
    wait_until(lambda: checkpoints_of(train.outputs) == [EVERY], START_S)
    last.child.kill()
    assert train.wait(END_S) == CODES[number], train.text
    assert "the run was to end, so nobody is waited for" in train.text
    assert_no_leftovers(train.outputs)
    first.assert_idle()


@pytest.mark.parametrize("place", ["checkpoint.renamed@3", "coordinator.adapter_written@1"])
def test_worker_that_dies_after_the_last_checkpoint_is_no_failure(ships: Fleet, undisturbed: bytes, place: str) -> None:
    """G24: the coordinator stands still at that place while the worker dies."""
    first, last = ships.worker(), ships.worker()
    train = ships.train("out", [first, last], failpoint=f"{place}@SIGSTOP")
    train.wait_stopped()
    first.child.kill()
    train.send(signal.SIGCONT)
    began = time.monotonic()
    assert train.wait() == 0, train.text
    assert time.monotonic() - began < 5
    assert adapter_of(train.outputs) == undisturbed
    last.assert_idle()


@pytest.mark.by_hand
@pytest.mark.parametrize("number", CODES)
def test_signal_to_a_launched_worker_asks_the_coordinator(ships: Fleet, tmp_path: Path, number: str) -> None:
    """The run ends with a checkpoint of the last finished step, and no process is left."""
    args = [*ships.settings(), "loop.steps=100000", "loop._target_=own_parts.slow_train"]
    args += ["allow_targets=[own_parts.slow_train]", f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"]
    with started("train", *args, env={"PYTHONPATH": str(Path(__file__).parent)}) as train:
        train.wait_for(r"step 3/")
        (worker,) = [p for p in train.relatives() if p.pid != train.process.pid]
        worker.send_signal(signal.Signals[number])
        outcome = train.wait(END_S + START_S)
        assert outcome.code == 0, outcome.text
        train.assert_gone()
    assert checkpoints_of(tmp_path)[-1] == metrics(tmp_path / "run")[-1]["step"]
    assert_no_leftovers(tmp_path)
    assert f"{number}: asking the coordinator" in (tmp_path / "run" / "worker-1.log").read_text(encoding="utf-8")


HANGUP = """
import signal, sys, time
from pathlib import Path
from hetero.stopping import end_by_signals, signals_ask
asked = []
end_by_signals()
with signals_ask(lambda name: asked.append(name) or True):
    Path(sys.argv[1]).touch()
    while not asked:
        time.sleep(0.01)
    print("to nobody", flush=True)
    signal.raise_signal(signal.SIGHUP)  # again, as of a shell
Path(sys.argv[2]).write_text(*asked)
"""


def test_process_whose_terminal_goes_away_is_asked_to_end_and_may_still_speak(tmp_path: Path) -> None:
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    spawn = "import pty, sys; pty.spawn(sys.argv[1:])"
    command = [sys.executable, "-c", spawn, sys.executable, "-c", HANGUP, str(ready), str(ended)]
    terminal = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=REPO)
    try:
        wait_until(ready.exists, START_S)
    finally:
        terminal.kill()
        terminal.wait()
    wait_until(lambda: ended.is_file() and ended.read_text() == "SIGHUP", END_S)

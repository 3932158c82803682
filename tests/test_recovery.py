"""A run that loses a machine goes on with it when it is back, with the others, or ends in a message that says why."""

from __future__ import annotations

import dataclasses
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from fleet import Fleet, Process, adapter_of, checkpoints_of
from forwarding import forwarded
from msgspec.structs import replace
from peers import wait_until
from pipeline import make_spec
from processes import END_S, metrics, started, train_here

from hetero.fingerprint import fingerprint
from hetero.inbox import Inbox
from hetero.secret import secret_of_this_machine
from hetero.session import CoordinatorSession
from hetero.spec import RunSpec
from hetero.transport.identity import identity_of
from hetero.work import make_transport_of

SLOW = "loop._target_=own_parts.slow_train"
MID_STEP = "worker.backward_done@9"  # in step 5


def error_of(train: Process) -> str:
    """The one line that says what was wrong."""
    (line,) = [line for line in train.text.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


# ---- the machine comes back


@pytest.mark.by_hand
def test_killed_worker_that_is_started_again_takes_part_again(ships: Fleet, undisturbed: bytes) -> None:
    first, last = ships.worker(), ships.worker(MID_STEP)
    train = ships.train("out", [first, last])
    train.wait_for(r"everyone goes back from step 4 to step 3 and waits up to 40 s")
    ships.worker(port=last.port)
    assert train.wait() == 0, train.text
    assert adapter_of(train.outputs) == undisturbed
    assert [record["step"] for record in metrics(train.outputs / "run")] == list(range(1, 9))


def test_worker_that_restarts_before_its_death_is_seen_is_another_one(ships: Fleet, undisturbed: bytes) -> None:
    """The coordinator stands still while the worker dies and is started again."""
    first, last = ships.worker(), ships.worker()
    train = ships.train("out", [first, last], failpoint="coordinator.step_begun@5@SIGSTOP")
    train.wait_stopped()
    last.child.kill()
    last = ships.worker(port=last.port)
    train.send(signal.SIGCONT)
    assert train.wait() == 0, train.text
    assert re.search(r"everyone goes back from step [45] to step 3", train.text)
    assert adapter_of(train.outputs) == undisturbed
    for worker in (first, last):
        worker.assert_idle()


@pytest.mark.by_hand
def test_killed_local_worker_is_started_again(ships: Fleet, tmp_path: Path) -> None:
    settings = [*ships.settings(), "checkpoint.every_steps=2"]
    train_here(tmp_path / "alone", *settings, "shard_plan=even")
    args = [*settings, SLOW, "allow_targets=[own_parts.slow_train]"]
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    with started("train", *args, f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}", env=path) as train:
        train.wait_for(r"step 3/")
        (worker,) = [p for p in train.relatives() if p.pid != train.process.pid]
        worker.kill()
        train.wait_for(r"starting the local worker of stage 1 again")
        outcome = train.wait()
        assert outcome.code == 0, outcome.text
        train.assert_gone()
    assert adapter_of(tmp_path) == (tmp_path / "alone" / "adapter/adapter_model.safetensors").read_bytes()


def test_frozen_worker_that_wakes_beside_its_replacement_changes_nothing(ships: Fleet, undisturbed: bytes) -> None:
    """G20: one address that leads to the old one and then to the new one, as after a machine was replaced.

    What the old one says when it wakes is about the step that its replacement is in just then.
    """
    first, old = ships.worker(), ships.worker(f"{MID_STEP}@SIGSTOP")
    with forwarded(old.port) as address:
        train = ships.train(
            "out", [first, dataclasses.replace(old, port=address.port)], "transport.io_timeout_s=2", SLOW
        )
        old.wait_stopped()
        new = ships.worker()
        address.leads_to = new.port
        mark = train.wait_for(r"everyone goes back from step 4 to step 3").end()
        train.wait_for(r"step 4/", after=mark)
        old.send(signal.SIGCONT)
        old.wait_for(r"run \w+(:| ended:) ")
        assert train.wait() == 0, train.text
        assert train.text.count("everyone goes back") == 1
        assert adapter_of(train.outputs) == undisturbed
        new.wait_for(r"run \w+ ended: finished")
        for worker in (first, old, new):
            worker.assert_idle()
    assert ships.train("next", [first, old]).wait() == 0


# ---- it does not


def test_worker_that_dies_in_every_session_ends_the_run_after_a_few(ships: Fleet) -> None:
    first, last = ships.worker(), ships.worker("worker.step_begun@1")
    train = ships.train("out", [first, last])
    while train.child.code() is None:
        if last.child.code() is not None:
            last = ships.worker("worker.step_begun@1", port=last.port)
        time.sleep(0.02)
    assert train.wait() == 1
    assert train.text.count("everyone goes back from step 0 to step 0") == 5, train.text
    text = error_of(train)
    assert re.match(rf"stage 2 at 127\.0\.0\.1:{last.port} in step 1: ", text)
    assert "5 sessions in a row ended before a new step" in text
    first.assert_idle()


def test_without_recovery_a_lost_worker_ends_the_run_by_name(ships: Fleet) -> None:
    first, last = ships.worker(), ships.worker(MID_STEP)
    train = ships.train("out", [first, last], "recovery=none", "recovery.wait_s=0")
    assert train.wait() == 1
    assert re.match(rf"stage 2 at 127\.0\.0\.1:{last.port} in step 5: ", error_of(train)), train.text
    assert checkpoints_of(train.outputs) == [3]
    assert error_of(train).endswith("; the same command with checkpoint.resume=latest goes on after step 3"), train.text
    first.assert_idle()


def test_worker_that_stays_away_ends_the_run_when_the_time_is_over(ships: Fleet) -> None:
    """The other worker is free again."""
    first, last = ships.worker(MID_STEP), ships.worker()
    train = ships.train("out", [first, last], "recovery.wait_s=3")
    train.wait_for("waits up to 3 s")
    began = time.monotonic()
    assert train.wait() == 1
    assert time.monotonic() - began < 3 + END_S
    text = error_of(train)
    assert re.match(rf"stage 1 at 127\.0\.0\.1:{first.port}: no connection within \S+ s \(connection refused\)", text)
    assert "recovery.wait_s" in text, text
    last.assert_idle()


@pytest.mark.parametrize("gone", [1, 2])
def test_others_take_the_layers_of_a_worker_that_stays_away(ships: Fleet, undisturbed: bytes, gone: int) -> None:
    workers = [ships.worker(MID_STEP if stage == gone else "") for stage in (1, 2)]
    train = ships.train("out", workers, "recovery.wait_s=2", "recovery.replan=true")
    assert train.wait() == 0, train.text
    assert f"w{gone} stays away, and the others take its layers" in train.text
    assert adapter_of(train.outputs) == undisturbed
    workers[2 - gone].assert_idle()


@pytest.mark.by_hand
def test_zombie_that_wakes_beside_those_who_took_its_layers_changes_nothing(ships: Fleet, undisturbed: bytes) -> None:
    """G20: it still has a session, a gradient and frames on their way."""
    first, last = ships.worker(), ships.worker(f"{MID_STEP}@SIGSTOP")
    args = ["recovery.wait_s=2", "recovery.replan=true", "transport.io_timeout_s=2", SLOW]
    train = ships.train("out", [first, last], *args)
    last.wait_stopped()
    train.wait_for("w2 stays away, and the others take its layers")
    mark = len(train.text)
    train.wait_for(r"step 5/", after=mark)
    last.send(signal.SIGCONT)
    assert train.wait() == 0, train.text
    assert adapter_of(train.outputs) == undisturbed
    for worker in (first, last):
        worker.assert_idle()
    assert ships.train("next", [first, last]).wait() == 0


# ---- the coordinator


def test_workers_wait_for_a_coordinator_that_died_and_take_part_again(ships: Fleet, undisturbed: bytes) -> None:
    """G19: they cost nothing meanwhile."""
    workers = [ships.worker(), ships.worker()]
    train = ships.train("out", workers, failpoint="coordinator.decided@5")
    assert train.wait() == -signal.SIGKILL
    for worker in workers:
        worker.assert_idle()
    busy = [sum(psutil.Process(worker.child.pid).cpu_times()[:2]) for worker in workers]
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 3)
    for worker, before in zip(workers, busy, strict=True):
        assert sum(psutil.Process(worker.child.pid).cpu_times()[:2]) - before < 0.01 * 3 + 0.02  # the clock's tick
    again = ships.train("out", workers, resume=True)
    again.wait_for("adapter: ")
    again.wait_for("stage w2: ", 5 + END_S)
    assert again.wait() == 0, again.text
    assert adapter_of(train.outputs, resumed=True) == undisturbed


def test_second_run_waits_for_a_busy_worker(ships: Fleet, undisturbed: bytes) -> None:
    workers = [ships.worker(), ships.worker()]
    first = ships.train("one", workers, failpoint="coordinator.step_begun@3@SIGSTOP")
    first.wait_stopped()
    second = ships.train("two", workers)
    workers[0].wait_for("refused control from .*: busy with another run")
    first.send(signal.SIGCONT)
    for train in (first, second):
        assert train.wait() == 0, train.text
        assert adapter_of(train.outputs) == undisturbed


@pytest.mark.parametrize("place", ["worker.decision_here@5", "worker.state_taken@1"])
def test_worker_that_dies_between_the_others_decisions_leaves_no_mixed_weights(
    ships: Fleet, undisturbed: bytes, place: str
) -> None:
    """One stage has taken the optimizer's step, the other has not."""
    first, last = ships.worker(place), ships.worker()
    train = ships.train("out", [first, last])
    train.wait_for("everyone goes back")
    ships.worker(port=first.port)
    assert train.wait() == 0, train.text
    assert adapter_of(train.outputs) == undisturbed


# ---- leaks


def test_sessions_leave_no_descriptor_and_no_thread_at_either_end(ships: Fleet) -> None:
    """G25: a hundred of one run, each with the worker's stage built, linked and synced."""
    worker = ships.worker()
    spec = make_spec(ships.model, [3])
    spec = replace(spec, workers=[replace(spec.workers[0], port=worker.port)])
    spec = RunSpec.from_json(spec.to_json())  # as a worker reads it, so that the digests are equal
    identity, model = identity_of(secret_of_this_machine()[0]), fingerprint(ships.model)
    processes = psutil.Process(worker.child.pid), psutil.Process()
    before: list[tuple[int, int]] = []
    for epoch in range(1, 111):
        session = CoordinatorSession(
            spec,
            run_id="run",
            epoch=epoch,
            inbox=Inbox(),
            transport=make_transport_of(spec, [], identity),
            instance="test",
            recovers=True,
        )
        session.join(model)
        session.sync(0)
        session.connect_downstream()
        session.wait_synced()
        session.end(stop=False, reason="another session follows", again=True)
        worker.assert_idle()
        if epoch == 10:
            before = [(p.num_fds(), p.num_threads()) for p in processes]
    assert [(p.num_fds(), p.num_threads()) for p in processes] == before
    assert worker.text.count("layers [3, 6) on cpu") == 110

"""Machines that only a network joins: the README's walk-through, who may join, three machines, and lines that break."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import netns
import pytest
from forkserver import ForkServer
from netns import Forked, Machine
from processes import END_S, Outcome, Running, metrics, train_here

from hetero.errors import PeerError
from hetero.transport.tcp import TcpTransport

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not())),
]

PORT = 9999
QUICK = ["loop.steps=3", "loop.batch_size=4", "data.max_length=32"]
FOREVER = ["loop.steps=1000000", "loop.batch_size=4", "data.max_length=32"]
THREE = ["loop.steps=3", "loop.batch_size=8", "data.max_length=32"]
ADAPTER = "adapter/adapter_model.safetensors"

Expected = Callable[[list[str]], Path]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Gives the folder of a run of one stage with the same settings, made when it is first asked for."""
    made: dict[str, Path] = {}

    def run(settings: list[str]) -> Path:
        key = " ".join(settings)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("alone") / "run"
            train_here(made[key], "shard_plan=single", *settings)
        return made[key]

    return run


# ---- helpers: what a person types


def pair(first: Machine, *others: Machine) -> None:
    """One machine makes the secret; the others take the code that it shows."""
    shown = first.run("python", "-m", "hetero.pair")
    assert shown.code == 0, shown.text
    code = re.search(r"^ {4}([A-Z2-7-]+)$", shown.text, re.MULTILINE)
    assert code
    for other in others:
        joined = other.run("python", "-m", "hetero.pair", "join", typed=code[1] + "\n")
        assert joined.code == 0 and joined.text.startswith("Joined; "), joined.text


@contextlib.contextmanager
def worker(machine: Machine, *args: str) -> Iterator[Running | Forked]:
    """Lends a worker that listens, started as the README says."""
    with machine.started("python", "worker.py", f"outputs={machine.outputs}", *args) as running:
        running.wait_for(r"on the coordinator: .*\n")
        yield running


def command_of(running: Running | Forked) -> list[str]:
    """The command that a worker printed for the coordinator."""
    return shlex.split(running.wait_for(r"on the coordinator: (.*)\n")[1])


def entries(*machines: Machine) -> list[str]:
    """A command with these machines as workers."""
    listed = ", ".join(f"{{id: {m.name}, host: {m.host}, port: {PORT}}}" for m in machines)
    return ["python", "train.py", "hardware.launch=none", f"hardware.workers=[{listed}]"]


def train(machine: Machine, command: list[str], *args: str) -> tuple[Outcome, Path]:
    """Trains; gives how it ended and the run's folder."""
    run_dir = machine.outputs / f"run-{time.monotonic_ns()}"
    outcome = machine.run(*command, f"outputs={machine.outputs}", f"hydra.run.dir={run_dir}", *args)
    assert "Traceback" not in outcome.text, outcome.text
    return outcome, run_dir


def error_of(outcome: Outcome, code: int = 1) -> str:
    """The one line that says what was wrong."""
    lines = [line for line in outcome.text.splitlines() if line.startswith("error: ")]
    assert outcome.code == code and len(lines) == 1, outcome.text
    return lines[0].removeprefix("error: ")


def assert_same(outcome: Outcome, run_dir: Path, expected: Path) -> None:
    """Every figure of every step but the times, and every byte of the adapter."""
    assert outcome.code == 0, outcome.text
    assert [results(r) for r in metrics(run_dir)] == [results(r) for r in metrics(expected)]
    assert (run_dir / ADAPTER).read_bytes() == (expected / ADAPTER).read_bytes()


def results(record: dict[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in ("step", "loss", "lr", "grad_norm", "tokens", "rows")}


# ---- two machines


@pytest.mark.parametrize("default_route", [True, pytest.param(False, marks=pytest.mark.by_hand)])
def test_two_machines_train_as_the_readme_says(tmp_path: Path, alone: Expected, default_route: bool) -> None:
    """With a default route the machines have `.local` names and b another network card; without, addresses only."""
    with netns.lan(tmp_path, "a", "b", prefix="198.51.100", local_names=default_route) as (a, b):
        if default_route:
            b.ip("link", "add", "docker0", "type", "bridge")
            b.ip("addr", "add", "172.17.0.1/16", "dev", "docker0")
            b.ip("link", "set", "docker0", "up")
            b.ip("route", "add", "default", "via", a.host)
        pair(a, b)
        with worker(b) as running:
            running.wait_for(rf"listening on {re.escape(b.host)}:{PORT} \(Ctrl-C ends\)")
            command = command_of(running)
            reached = "b.local" if default_route else b.host
            assert command == [*entries(b)[:3], f"hardware.workers=[{{id: b, host: {reached}, port: {PORT}}}]"]
            outcome, run_dir = train(a, command, *QUICK)
            assert_same(outcome, run_dir, alone(QUICK))
            running.wait_for(r"run \w+ ended: finished")
        listed = a.run("python", "-m", "hetero.pair", "machines")
        assert listed.text == f"b: {reached}:{PORT}, device auto\n"
        assert_secret_is_nowhere_else(tmp_path, a, b)


def assert_secret_is_nowhere_else(folder: Path, *machines: Machine) -> None:
    """No file of the machines but the secret's own holds it, in any of its forms."""
    files = {machine.folder / ".config" / "hetero" / "secret" for machine in machines}
    (secret,) = {file.read_bytes() for file in files}
    for file in folder.rglob("*"):
        if file.is_file() and file not in files:
            data = file.read_bytes()
            assert secret not in data and secret.hex().encode() not in data, file


def test_worker_with_several_networks_and_no_default_route_asks_which(tmp_path: Path) -> None:
    """Case F07: no guess is offered to others."""
    with netns.apart(tmp_path) as (a, _, _):
        a.ip("addr", "del", f"{a.host}/24", "dev", "eth0")  # where the address lies that chooses a route
        a.ip("addr", "add", "10.77.0.1/24", "dev", "eth0")
        pair(a)
        outcome = a.run("python", "worker.py", f"outputs={a.outputs}")
        assert outcome.code == 2
        assert outcome.one_line().endswith(
            "worker.host must be given where this machine has several networks and no default route: one of "
            "10.77.0.1 (eth0), 198.51.100.1 (eth1)"
        )


def test_machines_that_are_not_paired_say_how_to_pair(tmp_path: Path) -> None:
    with netns.lan(tmp_path, "a", "b") as (a, b), worker(b) as running:
        assert f"listening on 127.0.0.1:{PORT} " in running.text
        assert "only this machine can connect; to let others: python -m hetero.pair on one machine" in running.text
        text = error_of(train(a, entries(b), *QUICK)[0], code=2)
        assert text == (
            f"hardware.workers[0].host is another machine, '{b.host}', and this one is not paired: "
            "python -m hetero.pair here, python -m hetero.pair join there, then start the worker there"
        )
        pair(a)
        text = error_of(train(a, entries(b), *QUICK, "transport.connect_timeout_s=1")[0])
        assert text.startswith(f"stage 1 at {b.host}:{PORT}: no connection within 1 s (connection refused)")


def test_machine_of_another_group_is_refused_on_both_sides(tmp_path: Path, server: ForkServer, alone: Expected) -> None:
    with netns.lan(tmp_path, "a", "b", server=server) as (a, b):
        pair(a)
        pair(b)
        with worker(b) as running:
            began = time.monotonic()
            text = error_of(train(a, entries(b), *QUICK)[0])
            assert time.monotonic() - began < 30  # half of connect_timeout_s: it was told, and did not wait
            assert re.match(
                rf"stage 1 at {b.host}:{PORT}: could not prove to be a member of this group \(.*\); pair it: "
                "python -m hetero.pair",
                text,
            ), text
            running.wait_for(
                rf"a connection from {a.host} \(of \d+ lately\) ended before HELLO: the peer: could not prove to be a "
                r"member of this group \(.*\); pair it: python -m hetero.pair",
                END_S,
            )
        again = b.run("python", "-m", "hetero.pair", "join", typed=code_of(a))
        assert again.code == 2 and again.one_line().endswith("python -m hetero.pair join --new leaves it")
        assert b.run("python", "-m", "hetero.pair", "join", "--new", typed=code_of(a)).code == 0
        with worker(b):
            assert_same(*train(a, entries(b), *QUICK), alone(QUICK))


def code_of(machine: Machine) -> str:
    return str(machine.run("python", "-m", "hetero.pair").text.splitlines()[2]) + "\n"


def test_one_file_of_hardware_tells_every_machine_its_part(tmp_path: Path, server: ForkServer, alone: Expected) -> None:
    """The same command on both: a file of the user's own names the machines, and `role=auto` finds them."""
    conf = tmp_path / "conf"
    (conf / "hardware").mkdir(parents=True)
    with netns.lan(tmp_path, "a", "b", server=server) as (a, b):
        workers = [{"id": "box", "host": b.host, "port": 9998, "device": "cpu"}]
        home = {"coordinator": {"host": a.host, "device": "cpu"}, "workers": workers, "launch": "none"}
        (conf / "hardware" / "home.yaml").write_text(json.dumps(home), encoding="utf-8")
        command = ["python", "train.py", "--config-dir", str(conf), "hardware=home"]
        pair(a, b)
        with b.started(*command, f"outputs={b.outputs}", f"hydra.run.dir={b.outputs}") as running:
            running.wait_for(rf"listening on {b.host}:9998 ")
            assert_same(*train(a, command, *QUICK), alone(QUICK))
            running.wait_for(r"run \w+ ended: finished")


# ---- three machines


def test_three_machines_on_one_network_train_as_chain_and_as_star(
    tmp_path: Path, server: ForkServer, alone: Expected
) -> None:
    with netns.lan(tmp_path, "a", "b", "c", server=server) as (a, b, c):
        pair(a, b, c)
        with worker(b), worker(c):
            assert_same(*train(a, entries(b, c), *THREE), alone(THREE))
            assert_same(*train(a, entries(c, b), *THREE, "transport.topology=star"), alone(THREE))


@pytest.mark.by_hand
@pytest.mark.parametrize("reason", [pytest.param("network is unreachable", marks=pytest.mark.by_hand), "timed out"])
def test_workers_that_cannot_reach_one_another_train_as_star(
    tmp_path: Path, server: ForkServer, alone: Expected, reason: str
) -> None:
    with netns.apart(tmp_path, server) as (a, b, c):
        if reason == "timed out":  # a router that drops what it does not forward
            b.ip("route", "add", "default", "via", a.addresses[0])
        pair(a, b, c)
        with worker(b), worker(c) as last:
            outcome, run_dir = train(a, entries(b, c), *THREE)
            text = error_of(outcome)
            assert text == (
                f"stage 2 at {c.host}:{PORT}: stage 1 cannot link to it: no connection within 10 s ({reason}); if "
                "these two machines cannot reach one another, transport.topology=star lets the coordinator relay"
            )
            assert not (run_dir / "metrics.jsonl").exists() or not metrics(run_dir)
            last.wait_for(r"run \w+ ended: ", END_S)
            assert_same(*train(a, entries(b, c), *THREE, "transport.topology=star"), alone(THREE))


# ---- lines that break, and slow ones


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        ("nobody listens", "connection refused"),
        ("packets are dropped", "timed out"),
        ("packets are rejected", "connection refused"),
        ("no such machine", "timed out|no route to host"),
        ("no network", "network is unreachable"),
        ("route that rejects", "no route to host"),
        ("route that drops", "no route to host; .*"),
    ],
)
def test_each_way_not_to_connect_is_told_with_its_reason_in_time(tmp_path: Path, cut: str, reason: str) -> None:
    """Case F15."""
    with netns.lan(tmp_path, "a", "b") as (a, b):
        host = b.host
        if cut == "packets are dropped":
            b.drop(f"ip saddr {a.host}")
        elif cut == "packets are rejected":
            b.tool("iptables", *shlex.split("-A INPUT -p tcp --dport 9999 -j REJECT --reject-with tcp-reset"))
        elif cut == "no such machine":
            host = "192.0.2.99"
        elif cut == "no network":
            host = "198.51.100.1"
        elif cut.startswith("route"):
            a.ip("route", "add", "unreachable" if "rejects" in cut else "blackhole", f"{host}/32")
        began = time.monotonic()
        with pytest.raises(PeerError) as caught:
            a.inside(lambda: TcpTransport(connect_timeout_s=1.5).dial(host, PORT, stage=1))
        assert time.monotonic() - began < 1.5 + 1
        assert re.fullmatch(
            rf"stage 1 at {host}:{PORT}: no connection within 1\.5 s \(({reason})\); is worker.py running there .*",
            str(caught.value),
        ), str(caught.value)


@pytest.mark.by_hand
def test_line_that_breaks_ends_the_run_at_both_ends_and_the_worker_serves_again(
    tmp_path: Path, server: ForkServer, alone: Expected
) -> None:
    """Case F04: a card that goes down says nothing to anyone."""
    silence_s = 4
    with netns.lan(tmp_path, "a", "b", server=server) as (a, b):
        pair(a, b)
        with worker(b) as running:
            args = ["recovery=none", f"transport.io_timeout_s={silence_s}", f"outputs={a.outputs}"]
            command = [*entries(b), *FOREVER, *args]
            with a.started(*command) as training:
                training.wait_for(r"step 2/")
                b.ip("link", "set", netns.CARD, "down")
                told = silence_s + 2
                running.wait_for(rf"stage 0 at the coordinator.*: silent for {silence_s} s", told)
                training.wait_for(rf"error: stage 1 at {b.host}:{PORT} in step \d+: silent for {silence_s} s", told)
                outcome = training.wait(END_S)
            error_of(outcome)
            b.ip("link", "set", netns.CARD, "up")
            assert_same(*train(a, entries(b), *QUICK), alone(QUICK))


@pytest.mark.by_hand
def test_firewall_that_drops_in_the_middle_of_a_run_is_noticed_at_both_ends(tmp_path: Path, server: ForkServer) -> None:
    """As above, in one direction only: what b sends arrives, what a sends does not."""
    silence_s = 4
    with netns.lan(tmp_path, "a", "b", server=server) as (a, b):
        pair(a, b)
        with worker(b) as running:
            args = ["recovery=none", f"transport.io_timeout_s={silence_s}", f"outputs={a.outputs}"]
            command = [*entries(b), *FOREVER, *args]
            with a.started(*command) as training:
                training.wait_for(r"step 2/")
                b.drop(f"ip saddr {a.host}")
                running.wait_for(rf"stage 0 at the coordinator.*: silent for {silence_s} s", silence_s + 2)
                b.undrop()
                error_of(training.wait(silence_s + END_S))


@pytest.mark.by_hand
def test_slow_line_makes_a_run_slow_and_does_not_end_it(tmp_path: Path, server: ForkServer, alone: Expected) -> None:
    """A message takes longer than a peer may be silent: 10 MiB at 20 Mbit/s are 4 s."""
    wide = ["loop.steps=1", "loop.batch_size=160", "loop.microbatch_size=160", "data.max_length=128"]
    with netns.lan(tmp_path, "a", "b", server=server) as (a, b):
        pair(a, b)
        for machine in (a, b):
            machine.shape("20mbit")
        with worker(b):
            outcome, run_dir = train(a, entries(b), *wide, "transport.io_timeout_s=2")
            assert_same(outcome, run_dir, alone(wide))
            (record,) = metrics(run_dir)
            assert record["step_time_s"] > 2 * 3

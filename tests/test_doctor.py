"""The doctor: what it makes of each way in which two machines can fail to train; and its self-test."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import netns
import pytest
from netns import Machine
from processes import Outcome
from threads import hardware_of, worker_threads

from hetero import doctor, doctor_checks, self_test, versions
from hetero.doctor_checks import Finding, diagnose
from hetero.spec import HardwareSpec, WorkerEntry


def examine(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, dict[str, Any]]:
    """The doctor's exit code and its JSON."""
    code = doctor.main([*overrides, "--json"])
    return code, json.loads(capsys.readouterr().out)


def finding(found: dict[str, Any], machine: str, check: str) -> dict[str, str]:
    """The one finding of a check of a machine."""
    rows = [row for row in found["findings"] if (row["machine"], row["check"]) == (machine, check)]
    assert len(rows) == 1, found
    return rows[0]


@contextlib.contextmanager
def program(says: bytes) -> Iterator[int]:
    """Lends the port of a program that greets whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as sock:
                        sock.sendall(says)
                        sock.settimeout(0.5)
                        with contextlib.suppress(OSError):
                            sock.recv(100)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_two_workers_are_well_and_every_line_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with worker_threads(2, tmp_path) as ports:
        code, found = examine(capsys, *hardware_of(ports))
        assert code == 0 and found["well"], found
        assert [(line["sender"], line["receiver"]) for line in found["lines"]] == [("local", "w1"), ("w1", "w2")]
        assert all(line["forward"] > 1e6 and line["backward"] > 1e6 for line in found["lines"])
        assert finding(found, "w2", "versions")["found"] == "the same as here"
        same = [WorkerEntry(id=name, host="127.0.0.1", port=ports[0]) for name in ("w1", "w2")]
        twice = diagnose(HardwareSpec(workers=same), same, "star")
    assert [f.found for f in twice.findings if f.state == "fail"] == ["the same worker as w1"]


def test_foreign_program_and_closed_port_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with program(b"SSH-2.0-OpenSSH_9.6\r\n") as port, socket.create_server(("127.0.0.1", 0)) as closing:
        closed = closing.getsockname()[1]
        closing.close()
        code, found = examine(capsys, *hardware_of([port, closed]))
    assert code == 1 and not found["well"]
    foreign, nothing = finding(found, "w1", "reach"), finding(found, "w2", "reach")
    assert foreign["found"].startswith("another program") and "SSH-2.0-OpenSSH_9.6" in foreign["found"]
    assert nothing["found"].startswith("nothing listens") and "python worker.py" in nothing["remedy"]
    assert finding(found, "w1 - w2", "line")["state"] == "not run"


def test_other_versions_fail_with_a_remedy_and_other_builds_do_not() -> None:
    mine = versions.versions()
    other = doctor_checks._versions("pc", mine | {"torch": "2.9.1+cu130", "hetero": "0.0.1"})
    assert other.state == "fail" and "git pull" in other.remedy and "pip install torch==" in other.remedy
    torch = mine["torch"].partition("+")[0]
    assert doctor_checks._versions("pc", mine | {"torch": f"{torch}+cu130", "python": "3.13.1"}).state == "ok"


def test_table_has_a_remedy_under_each_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closing:
        port = closing.getsockname()[1]
    assert doctor.main(hardware_of([port])) == 1
    text = capsys.readouterr().out
    assert "->" in text and "python worker.py" in re.sub(r"\s*│\s*", " ", re.sub(r"\n", "", text)) and "failed" in text


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["hardware=mac_and_pc"]) == 2
    assert capsys.readouterr().err.startswith("error: hardware.workers[0].host is the sample name")
    assert doctor.main(["hardware=nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: hardware must be one of")


# ---- the self-test


def test_self_test_passes_here_and_writes_what_can_be_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert doctor.main(["--self-test", str(file), "--device", "cpu"]) == 0
    report = json.loads(file.read_text())
    results = {check["name"]: check["result"] for check in report["checks"]}
    assert report["passed"] and report["device"] == "cpu"
    assert results["two stages equal plain PEFT, float32"] == "passed"
    skipped = [check for check in report["checks"] if check["result"] == "not run"]
    assert skipped and all(check["why"] for check in skipped)
    assert socket.gethostname() not in file.read_text()


def test_self_test_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = self_test.Stage.backward

    def wrong(stage: Any, micro_batch: int, grad: Any, *rest: Any) -> Any:
        return backward(stage, micro_batch, None if grad is None else grad * 1.2, *rest)

    monkeypatch.setattr(self_test.Stage, "backward", wrong)
    device = self_test.devices.resolve("cpu")
    folder = self_test.make_tiny()
    assert not self_test._split(folder, device, "float32")[0]
    assert not self_test._gradient(folder, device)[0]


# ---- two machines

apart = pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))


def pair(first: Machine, *others: Machine) -> None:
    code = re.search(r"^ {4}([A-Z2-7-]+)$", first.run("python", "-m", "hetero.pair").text, re.MULTILINE)
    assert code
    for other in others:
        assert other.run("python", "-m", "hetero.pair", "join", "--new", typed=code[1] + "\n").code == 0


def doctor_on(machine: Machine, *workers: Machine, args: tuple[str, ...] = ()) -> tuple[Outcome, dict[str, Any]]:
    listed = ", ".join(f"{{id: {m.name}, host: {m.host}, port: 9999}}" for m in workers)
    overrides = ["hardware.launch=none", f"hardware.workers=[{listed}]", *args]
    outcome = machine.run("python", "-m", "hetero.doctor", "--json", *overrides)
    return outcome, json.loads(outcome.text[outcome.text.index("{\n") :])


@apart
@pytest.mark.by_hand
def test_doctor_on_three_machines(tmp_path: Path) -> None:
    with netns.lan(tmp_path, "a", "b", "c") as (a, b, c):
        outcome, found = doctor_on(a, b)
        assert outcome.code == 1 and finding(found, "local", "group")["state"] == "fail"
        assert finding(found, "b", "reach")["found"].startswith("nothing listens")
        pair(a, b, c)
        listening = r"listening on .*\n"
        with b.started("python", "worker.py", f"outputs={b.outputs}", f"worker.host={b.host}") as on_b:
            on_b.wait_for(listening)
            with c.started("python", "worker.py", f"outputs={c.outputs}", f"worker.host={c.host}") as on_c:
                on_c.wait_for(listening)
                outcome, found = doctor_on(a, b, c)
                assert outcome.code == 0, outcome.text
                assert finding(found, "b", "network")["found"].startswith("Ethernet (eth0")
                assert [(line["sender"], line["receiver"]) for line in found["lines"]] == [("local", "b"), ("b", "c")]

                b.shape("20mbit")
                outcome, found = doctor_on(a, b, c)
                there, between = found["lines"]
                for slow in (there["backward"], between["forward"]):  # what leaves b
                    assert 15e6 / 8 < slow < 24e6 / 8
                assert min(there["forward"], between["backward"]) > 50e6 / 8
                assert outcome.code == 0 and finding(found, "local - b", "line")["state"] == "note"

                c.drop(f"ip saddr {b.host}")
                outcome, found = doctor_on(a, b, c)
                between_row = finding(found, "b - c", "line")
                assert outcome.code == 1 and "topology=star" in between_row["remedy"], between_row
                assert finding(found, "c", "reach")["state"] == "ok"
                c.undrop()

                c.drop(f"ip saddr {a.host}")
                outcome, found = doctor_on(a, b, c)
                assert outcome.code == 1 and "firewall" in finding(found, "c", "reach")["remedy"]
                c.undrop()

                training = ["hardware.launch=none", f"hardware.workers=[{{id: c, host: {c.host}}}]"]
                with a.started(
                    "python", "train.py", f"outputs={a.outputs}", *training, "loop.steps=100000", "data.max_length=32"
                ):
                    on_c.wait_for(r"layers \[")
                    outcome, found = doctor_on(a, b, c)
                    assert outcome.code == 0 and "busy" in finding(found, "c", "reach")["found"], outcome.text
                    assert finding(found, "b - c", "line")["state"] == "not run"
            assert a.run("python", "-m", "hetero.pair", "--new").code == 0
            outcome, found = doctor_on(a, b)
            other = finding(found, "b", "reach")
            assert outcome.code == 1 and other["found"].startswith("a worker of another group"), other


@apart
@pytest.mark.by_hand
def test_worker_of_an_older_version_is_named(tmp_path: Path) -> None:
    with netns.lan(tmp_path, "a", "b") as (a, b):
        pair(a, b)
        older = (
            "import sys, hetero, hetero.versions; hetero.__version__ = hetero.versions.__version__ = '0.0.9'; "
            f"sys.argv[1:] = ['outputs={b.outputs}', 'worker.host={b.host}']; import worker; worker.main()"
        )
        with b.started("python", "-c", older) as on_b:
            on_b.wait_for(r"listening on .*\n")
            outcome, found = doctor_on(a, b)
            assert outcome.code == 1 and "git pull" in finding(found, "b", "versions")["remedy"], found


def test_findings_of_other_machines_cannot_carry_terminal_codes() -> None:
    odd = doctor_checks._device("pc", "cpu", "\x1b[2J", 1 << 30, None, "key")
    assert isinstance(odd, Finding) and odd.found.isprintable()

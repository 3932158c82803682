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

import pytest
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


@pytest.mark.by_hand
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


def test_findings_of_other_machines_cannot_carry_terminal_codes() -> None:
    odd = doctor_checks._device("pc", "cpu", "\x1b[2J", 1 << 30, None, "key")
    assert isinstance(odd, Finding) and odd.found.isprintable()

"""`python -m hetero.pair`, as people use it: processes with standard input, each with a home of its own."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import REPO, environment

from hetero.machines import remember
from hetero.pair import main
from hetero.secret import from_code, to_code
from hetero.spec import WorkerEntry

CODE = re.compile(r"(?:[A-Z2-7]{7}-){7}[A-Z2-7]{7}")


@dataclass(frozen=True)
class Machine:
    """A home folder that stands for a machine."""

    home: Path

    def pair(self, *args: str, typed: str = "", code: int = 0) -> str:
        """Runs the command; gives what it printed on either stream."""
        done = subprocess.run(
            [sys.executable, "-m", "hetero.pair", *args],
            input=typed, capture_output=True, text=True, timeout=60, cwd=REPO,
            env=environment() | {"HOME": str(self.home)},
        )  # fmt: skip
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr
        assert bool(done.stderr) == (code != 0)
        return done.stdout + done.stderr

    def files(self) -> list[Path]:
        return [path for path in self.home.rglob("*") if path.is_file()]

    def secret(self) -> bytes:
        (file,) = [path for path in self.files() if path.name == "secret"]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        return file.read_bytes()


@pytest.fixture
def machines(tmp_path: Path) -> tuple[Machine, Machine]:
    for name in ("mac", "pc"):
        (tmp_path / name).mkdir()
    return Machine(tmp_path / "mac"), Machine(tmp_path / "pc")


def code_in(text: str) -> str:
    (code,) = CODE.findall(text)
    return str(code)


def test_two_machines_pair_by_a_code_on_standard_input(machines: tuple[Machine, Machine]) -> None:
    mac, pc = machines
    shown = mac.pair()
    code = code_in(shown)
    assert from_code(code) == mac.secret() and "python -m hetero.pair join" in shown
    joined = pc.pair("join", typed=f"{code.lower()}\n")
    assert pc.secret() == mac.secret() and "python worker.py" in joined
    assert code not in joined and code.replace("-", "") not in joined
    assert "joined that group already" in pc.pair("join", typed=code)
    again = mac.pair()
    assert code_in(again) == code and "has a secret already" in again


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("", "has 56 letters and digits, got 0"),
        ("\n", "got 0"),
        ("ABC\n", "got 3"),
        (f"{to_code(bytes(32))[:-1]}2\n", "checksum is wrong"),
        ("1" * 56 + "\n", "the digits 2 to 7"),
    ],
)
def test_mistyped_code_changes_nothing(machines: tuple[Machine, Machine], typed: str, why: str) -> None:
    _, pc = machines
    text = pc.pair("join", typed=typed, code=2)
    assert text.startswith("error: ") and why in text and len(text.splitlines()) == 1
    assert pc.files() == []


def test_machine_of_another_group_joins_only_when_told_to_leave_it(machines: tuple[Machine, Machine]) -> None:
    mac, pc = machines
    pc.pair()
    before, code = pc.secret(), code_in(mac.pair())
    text = pc.pair("join", typed=code, code=2)
    assert "belongs to another group" in text and "python -m hetero.pair join --new" in text
    assert pc.secret() == before
    pc.pair("join", "--new", typed=code)
    assert pc.secret() == mac.secret() != before


def test_new_makes_another_secret_which_ends_the_old_group(machines: tuple[Machine, Machine]) -> None:
    mac, pc = machines
    old = code_in(mac.pair())
    pc.pair("join", typed=old)
    assert code_in(mac.pair("--new")) != old and mac.secret() != pc.secret()


def test_secret_that_others_may_read_is_not_shown(machines: tuple[Machine, Machine]) -> None:
    mac, _ = machines
    mac.pair()
    (file,) = mac.files()
    file.chmod(0o644)
    text = mac.pair(code=2)
    assert "chmod 600" in text and not CODE.search(text)
    code_in(mac.pair("--new"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_code_is_no_argument_so_it_is_in_no_process_list(machines: tuple[Machine, Machine]) -> None:
    """What a user types after `join` by mistake is refused, and not taken as a code."""
    _, pc = machines
    code = to_code(bytes(range(32)))
    pc.pair("join", code, code=2)
    pc.pair(code, code=2)
    assert pc.files() == []
    with subprocess.Popen(
        [sys.executable, "-m", "hetero.pair", "join"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=REPO, env=environment() | {"HOME": str(pc.home)},
    ) as joining:  # fmt: skip
        assert joining.stdin is not None
        if Path(f"/proc/{joining.pid}").is_dir():
            seen = Path(f"/proc/{joining.pid}/cmdline").read_bytes() + Path(f"/proc/{joining.pid}/environ").read_bytes()
            assert code.encode() not in seen and bytes(range(32)) not in seen
        out, _ = joining.communicate(code + "\n", timeout=60)
    assert joining.returncode == 0 and code not in out and pc.secret() == bytes(range(32))


def test_machines_lists_those_that_trained_with_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["machines"]) == 0 and not capsys.readouterr().out.strip()
    remember([WorkerEntry("mac", "mac.local", 9999), WorkerEntry("pc", "fd00::7", 9998, "cuda:1")])
    remember([WorkerEntry(f"w{number}", host, 7) for number, host in enumerate(["127.0.0.1", "::1", "localhost"])])
    assert main(["machines"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "w0: 127.0.0.1:7, device auto, on this machine",
        "w1: [::1]:7, device auto, on this machine",
        "w2: localhost:7, device auto, on this machine",
        "mac: mac.local:9999, device auto",
        "pc: [fd00::7]:9998, device cuda:1",
    ]


def test_interrupted_joining_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    class Keyboard:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Keyboard())
    assert main(["join"]) == 130
    found = capsys.readouterr()
    assert found.out == "pairing code: " and "nothing was changed" in found.err
    assert os.listdir(tmp_path) == []

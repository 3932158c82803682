import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from peers import wait_until

from hetero.awake import kept_awake

WAIT_S = 30.0
StandIn = Callable[..., Path]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Puts a program named caffeinate on PATH, which leaves its arguments and its process id in a file."""

    def make(*, before: str = "", lasting: str = "exec sleep 60") -> Path:
        started, program = tmp_path / "started", tmp_path / "bin" / "caffeinate"
        program.parent.mkdir()
        lines = ["#!/bin/sh", before, f'echo "$$ $*" > "{started}.new"', f'mv "{started}.new" "{started}"', lasting]
        program.write_text("\n".join(lines) + "\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return started

    return make


def started_as(started: Path) -> tuple[int, list[str]]:
    """Process id and arguments of the stand-in, once it runs."""
    wait_until(started.exists, WAIT_S)
    pid, *arguments = started.read_text().split()
    return int(pid), arguments


def test_a_mac_is_kept_awake_as_long_as_the_block_and_this_process_last(stand_in: StandIn) -> None:
    started = stand_in()
    with kept_awake("darwin"):
        pid, arguments = started_as(started)
        assert arguments == ["-i", "-w", str(os.getpid())]
        assert psutil.Process(pid).ppid() == os.getpid()
    assert not psutil.pid_exists(pid)


def test_an_error_in_the_block_ends_it_too_and_is_passed_on(stand_in: StandIn) -> None:
    started = stand_in()

    def fail() -> None:
        with kept_awake("darwin"):
            started_as(started)
            raise ValueError("oops")

    with pytest.raises(ValueError, match="oops"):
        fail()
    assert not psutil.pid_exists(started_as(started)[0])


def test_a_program_that_does_not_end_when_asked_is_killed(stand_in: StandIn) -> None:
    started = stand_in(before="trap '' TERM")
    with kept_awake("darwin"):
        pid, _ = started_as(started)
    assert not psutil.pid_exists(pid)


def test_a_program_that_has_ended_already_is_no_error(stand_in: StandIn) -> None:
    started = stand_in(lasting="exit 1")
    with kept_awake("darwin"):
        pid, _ = started_as(started)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, WAIT_S)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("platform", ["linux", "win32", "freebsd14"])
def test_other_systems_do_nothing_and_say_nothing(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture, platform: str
) -> None:
    started = stand_in()
    caplog.set_level(logging.DEBUG)
    before = psutil.Process().children()
    with kept_awake(platform):
        assert psutil.Process().children() == before
    assert not started.exists() and caplog.records == []


@pytest.mark.skipif(sys.platform == "darwin", reason="this system is the one that does something")
def test_the_platform_is_that_of_this_machine_unless_told(stand_in: StandIn) -> None:
    started = stand_in()
    before = psutil.Process().children()
    with kept_awake():
        assert psutil.Process().children() == before
    assert not started.exists()


def test_a_mac_without_the_program_says_so_in_one_line_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with kept_awake("darwin"):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "this machine may go to sleep while it trains: no caffeinate on PATH"
    ]


def test_a_program_that_cannot_be_started_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "caffeinate"
    program.write_text("#!/nowhere/interpreter\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with kept_awake("darwin"):
        pass
    assert len(caplog.records) == 1 and "/caffeinate" in caplog.text


def test_no_argument_goes_through_a_shell(stand_in: StandIn, tmp_path: Path) -> None:
    """The stand-in is a direct child, also where a path would be taken apart by a shell."""
    started = stand_in()
    odd = tmp_path / "a b; touch taken"
    (tmp_path / "bin").rename(odd)
    script = textwrap.dedent(f"""
        import os
        os.environ["PATH"] = {str(odd)!r} + ":" + os.environ["PATH"]
        from hetero.awake import kept_awake
        with kept_awake("darwin"):
            print(os.getpid(), flush=True)
            input()
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    try:
        pid, arguments = started_as(started)
        assert psutil.Process(pid).ppid() == process.pid
        assert arguments[-1] == str(process.pid)
        process.communicate("\n", WAIT_S)
        assert process.returncode == 0 and not psutil.pid_exists(pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)

"""A folder is one process's at a time, and free again when that process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetero import folder_lock
from hetero.folder_lock import LOCK_FILE, FolderInUse, holder_of, only_one

HOLD = """
import sys, pathlib
from hetero.folder_lock import only_one
with only_one(pathlib.Path(sys.argv[1]), "run elsewhere"):
    print("has it", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Lends a process that has the folder until its input ends."""
    repo = Path(__file__).parents[1]
    argv = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=repo) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "has it\n"
            yield process
        finally:
            process.kill()


def test_second_process_is_told_which_one_has_the_folder(tmp_path: Path) -> None:
    with another_process(tmp_path / "c") as process:
        expected = f"process {process.pid} on {os.uname().nodename}, run elsewhere"
        assert holder_of(tmp_path / "c") == expected
        with pytest.raises(FolderInUse, match=f"^{expected}$"), only_one(tmp_path / "c", "run here"):
            pass
        assert holder_of(tmp_path / "c") == expected  # who was refused has taken nothing away
        process.communicate("", timeout=20)
    assert not (tmp_path / "c").exists()  # it was made for that, and nothing was put into it


def test_killed_process_has_nothing_any_more(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        process.kill()
        process.wait(20)
        assert (tmp_path / LOCK_FILE).is_file() and holder_of(tmp_path) is None
        with only_one(tmp_path, "run here"):
            assert "run here" in str(holder_of(tmp_path))
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())


def test_folder_that_holds_something_stays(tmp_path: Path) -> None:
    with only_one(tmp_path / "a" / "b", "run"):
        (tmp_path / "a" / "file").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]
    with only_one(tmp_path / "c" / "d", "run"):
        assert (tmp_path / "c" / "d").is_dir()
    assert not (tmp_path / "c").exists()


def test_many_that_come_and_go_never_have_it_together(tmp_path: Path) -> None:
    """The file is removed with the lock, so some lock a file that has lost its name."""
    inside, most, times = 0, 0, 0
    guard = threading.Lock()

    def come_and_go() -> None:
        nonlocal inside, most, times
        for _ in range(30):
            try:
                with only_one(tmp_path, "run"):
                    with guard:
                        inside, times = inside + 1, times + 1
                        most = max(most, inside)
                    holder_of(tmp_path)
                    with guard:
                        inside -= 1
            except FolderInUse:
                pass

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1 and times > 30


def test_file_that_loses_its_name_before_it_is_locked_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who had the lock before removes the file between its opening and its locking here."""
    flock, calls = fcntl.flock, 0

    def late(descriptor: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (tmp_path / LOCK_FILE).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(folder_lock.fcntl, "flock", late)
    with only_one(tmp_path, "run"):
        assert calls == 2 and holder_of(tmp_path) is not None
        with pytest.raises(FolderInUse), only_one(tmp_path, "another run"):
            pass


def test_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    with only_one(tmp_path, "run"):
        assert holder_of(tmp_path) is None
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / LOCK_FILE} cannot be locked (No locks available): see to it that no other run")


@pytest.mark.parametrize("what", ["file", "link"])
def test_what_is_no_folder_or_no_file_is_an_error_of_the_disk(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "file")
    with pytest.raises(OSError), only_one(tmp_path / "file" if what == "file" else tmp_path, "run"):
        pass
    assert (tmp_path / "file").read_bytes() == b""

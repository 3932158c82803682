"""The secret of a run's processes: in a pipe or in its file, and nowhere else. Case S07."""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from peers import wait_until
from processes import Worker, hardware, run_here, started, worker

from hetero import coordinate
from hetero.secret import config_dir, new_secret, secret_file, to_code, write_secret
from hetero.transport.identity import identity_of

STEPS = ["loop.steps=3", "loop.batch_size=4"]


def traces(secret: bytes) -> list[bytes]:
    """Everything by which a secret could be recognised."""
    code = to_code(secret)
    certificate = identity_of(secret).certificate
    texts = [secret.hex(), secret.hex().upper(), code, code.replace("-", ""), base64.b64encode(secret).decode()[:42]]
    return [secret, *(text.encode() for text in texts), certificate.hex().encode(), str(list(secret))[1:-1].encode()]


def found_in(places: Iterable[tuple[str, bytes]], secret: bytes) -> list[str]:
    return [name for name, content in places for trace in traces(secret) if trace in content]


def files_below(folder: Path) -> list[tuple[str, bytes]]:
    return [(str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file()]


def visible_of(process: psutil.Process) -> list[tuple[str, bytes]]:
    """What other programs of this machine are shown of a process."""
    shown = [(f"{process.pid} argv", "\0".join(process.cmdline()).encode())]
    if sys.platform == "linux":
        shown += [(f"{process.pid} {n}", Path(f"/proc/{process.pid}/{n}").read_bytes()) for n in ("cmdline", "environ")]
    return shown


def test_traces_would_be_found(tmp_path: Path) -> None:
    secret = new_secret()
    for number, trace in enumerate(traces(secret)):
        (tmp_path / str(number)).write_bytes(b"before " + trace + b" after")
    assert len(set(found_in(files_below(tmp_path), secret))) == len(traces(secret))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of its own, but for the cache of models."""
    home = tmp_path / "home"
    home.mkdir()
    if (Path.home() / ".cache").is_dir():
        (home / ".cache").symlink_to(Path.home() / ".cache")
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.mark.slow
def test_secret_of_launched_workers_is_in_their_pipe_alone(
    home: Path, tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run: outputs, .hydra, logs, run.json, metrics, adapter, what is printed, and /proc meanwhile."""
    made: list[bytes] = []

    def note() -> bytes:
        made.append(new_secret())
        return made[-1]

    monkeypatch.setattr(coordinate, "new_secret", note)
    seen: list[tuple[str, bytes]] = []
    watched: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            for child in psutil.Process().children(recursive=True):
                try:
                    if child.pid not in watched and "hetero.launch" in child.cmdline():
                        seen.extend(visible_of(child))
                        watched.add(child.pid)
                except (psutil.Error, OSError):
                    continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        args = ["data=jsonl", f"data.path={rows_file}", *STEPS, f"outputs={tmp_path / 'out'}"]
        outcome = run_here("train", *args)
    finally:
        over.set()
        thread.join(20)
    assert outcome.code == 0, outcome.text
    (secret,) = made
    assert len(watched) == 1
    files = files_below(tmp_path / "out")
    names = {Path(name).name for name, _ in files}
    assert {"run.json", "metrics.jsonl", "worker-1.log", "train.log", "overrides.yaml", "config.yaml"} <= names
    printed = [("printed", outcome.text.encode())]
    assert found_in([*files, *files_below(home), *seen, *printed, *visible_of(psutil.Process())], secret) == []
    assert not config_dir().exists()  # a run of its own processes needs no secret that lasts


@pytest.mark.by_hand
@pytest.mark.slow
def test_group_s_secret_is_in_its_file_alone(home: Path, tmp_path: Path, rows_file: Path) -> None:
    """A paired worker and its coordinator, each a process."""
    secret = new_secret()
    write_secret(secret_file(), secret)
    env = {"HOME": str(home)}
    with worker(tmp_path / "w", "worker.host=127.0.0.1", env=env) as one:
        args = [
            "data=jsonl",
            f"data.path={rows_file}",
            *hardware(one),
            "loop.steps=1000000",
            f"outputs={tmp_path / 'o'}",
        ]
        with started("train", *args, env=env) as train:
            train.wait_for(r"step 2/")
            shown = [
                place for process in [*train.relatives(), *one.running.relatives()] for place in visible_of(process)
            ]
            assert len(shown) >= 2
            printed = [("train", train.text.encode()), ("worker", one.running.text.encode())]
        wait_until(lambda: "ended" in one.running.text or "coordinator" in one.running.text)
        files = files_below(tmp_path)
        assert any(Path(name).name == "run.json" for name, _ in files)
        where = found_in([*files, *shown, *printed], secret)
        assert where == [str(secret_file())]
        assert (config_dir() / "machines.json").is_file()


def test_diagram_and_composed_configuration_hold_no_secret(home: Path, tmp_path: Path) -> None:
    secret = new_secret()
    write_secret(secret_file(), secret)
    outcome = run_here("visualize", f"outputs={tmp_path / 'out'}")
    assert outcome.code == 0, outcome.text
    assert found_in([*files_below(tmp_path / "out"), ("printed", outcome.text.encode())], secret) == []
    outcome = run_here("train", "--cfg", "all")
    assert found_in([("printed", outcome.text.encode())], secret) == [] and outcome.code == 0


def test_coordinator_that_is_not_paired_does_not_dial_another_machine(home: Path, tmp_path: Path) -> None:
    where = ["hardware.launch=none", "hardware.workers=[{id: pc, host: pc.invalid, port: 9999}]"]
    outcome = run_here("train", *where, "loop.steps=1", f"outputs={tmp_path / 'out'}")
    assert outcome.code == 2
    line = outcome.text.strip().splitlines()[-1]
    assert "hardware.workers[0].host is another machine, 'pc.invalid'" in line
    assert "python -m hetero.pair here, python -m hetero.pair join there" in line


# --- local workers that die


def test_local_worker_that_dies_before_its_session_is_started_again(tmp_path: Path, rows_file: Path) -> None:
    """It is this run's own process, so nobody waits for somebody to start `worker.py`."""
    log = tmp_path / "run" / "worker-1.log"
    args = ["data=jsonl", f"data.path={rows_file}", *STEPS, f"outputs={tmp_path}", f"hydra.run.dir={log.parent}"]
    with started("train", *args) as train:
        wait_until(lambda: log.exists() and "listening on" in log.read_text(encoding="utf-8"))
        (child,) = [process for process in train.relatives() if "hetero.launch" in process.cmdline()]
        child.kill()
        outcome = train.wait(60)
    assert outcome.code == 0, outcome.text
    assert "the local worker was ended by SIGKILL" in outcome.text
    assert "starting the local worker of stage 1 again" in outcome.text


# --- two workers, one stage --------------------------------------------------------------------------------------


def test_worker_that_is_listed_twice_is_refused_by_name(
    tmp_path: Path, rows_file: Path, workers: tuple[Worker, Worker]
) -> None:
    """However it is spelled: the worker itself knows that it is in this run already."""
    one = workers[0]
    other = Worker(one.running, "localhost", one.port, one.outputs)
    data = ["data=jsonl", f"data.path={rows_file}", *STEPS]
    outcome = run_here("train", *data, *hardware(one, other), f"outputs={tmp_path / 'out'}")
    assert outcome.code in (1, 2), outcome.text
    line = next(line for line in outcome.text.splitlines() if line.startswith("error: "))
    assert "hardware.workers must list each worker once" in line and str(one.port) in line
    assert not list((tmp_path / "out").rglob("adapter"))
    one.wait_idle()
    again = run_here("train", *data, *hardware(one), f"outputs={tmp_path / 'again'}")
    assert again.code == 0, again.text

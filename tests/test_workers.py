"""Workers that stay up: run after run, faults, ends by hand, and whatever strangers send to their port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from peers import hostile_blobs, raw_frame, wait_until
from processes import (
    END_S,
    START_S,
    Outcome,
    Worker,
    hardware,
    losses,
    metrics,
    refuses_connections,
    run_here,
    started,
    train_here,
    worker,
)
from safetensors.torch import load_file

from hetero.adapter_files import read_part, shapes_digest
from hetero.fingerprint import fingerprint
from hetero.secret import new_secret, secret_file, write_secret
from hetero.tiny import make_tiny
from hetero.wire.headers import FrameType

FOREVER = ["loop.steps=1000000", "recovery=none", "checkpoint=none"]  # test_ends and test_recovery have the others
QUICK = ["loop.steps=2", "loop.batch_size=4"]


@pytest.fixture
def data(rows_file: Path) -> list[str]:
    return ["data=jsonl", f"data.path={rows_file}"]


@pytest.fixture
def paired() -> Iterator[None]:
    """This machine, whose home is the tests' own, has the secret of a group."""
    write_secret(secret_file(), new_secret())
    yield
    secret_file().unlink()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> list[float]:
    """Losses of a quick run of one stage, which every split must give."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    return losses(train_here(run_dir, "data=jsonl", f"data.path={rows_file}", "shard_plan=single", *QUICK))


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Does something on another thread; what it raises is raised at the end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
    if errors:
        raise errors[0]


def after_steps(run_dir: Path, num: int, act: Callable[[], None]) -> Callable[[], None]:
    """Waits until a run has done some steps, then acts."""

    def wait_and_act() -> None:
        wait_until(lambda: (run_dir / "metrics.jsonl").is_file() and len(metrics(run_dir)) >= num, 60)
        act()

    return wait_and_act


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def entries(*addresses: tuple[str, int]) -> list[str]:
    listed = ", ".join(f'{{id: w{n}, host: "{host}", port: {port}}}' for n, (host, port) in enumerate(addresses, 1))
    return ["hardware.launch=none", f"hardware.workers=[{listed}]"]


def fail_here(tmp_path: Path, *args: str) -> Outcome:
    """A run in this process that must fail without a traceback."""
    outcome = run_here("train", f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / 'failed'}", "recovery=none", *args)
    assert outcome.code == 1 and "Traceback" not in outcome.text, outcome.text
    return outcome


def error_of(outcome: Outcome) -> str:
    """The one line that says what was wrong."""
    lines = [line for line in outcome.text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, outcome.text
    return lines[0].removeprefix("error: ")


def assert_serves(tmp_path: Path, data: list[str], alone: list[float], *workers: Worker) -> None:
    """The workers are idle and do the next run right."""
    for one in workers:
        one.wait_idle()
    run_dir = tmp_path / f"next-{time.monotonic_ns()}"
    assert losses(train_here(run_dir, *data, *hardware(*workers), *QUICK)) == pytest.approx(alone, abs=1e-5)


# ---- run after run


def test_workers_serve_runs_with_other_specs_and_keep_their_latest_part(
    tmp_path: Path, data: list[str], workers: tuple[Worker, Worker]
) -> None:
    specs = [
        ["adapter.r=2", "optimizer=sgd", "seed=5", "loop.microbatch_size=1", "schedule=gpipe"],
        ["adapter.dropout=0.2", "loop.recompute=layer", "lr_schedule=constant", "data.padding_side=left"],
        ["adapter.use_dora=true", "adapter.target_modules=[q_proj,v_proj]", "loop.max_grad_norm=null"],
    ]
    placed = [hardware(*workers), hardware(workers[1]), hardware(workers[1], workers[0])]
    for number, (spec, where) in enumerate(zip(specs, placed, strict=True)):
        expected = losses(train_here(tmp_path / f"one-{number}", *data, "shard_plan=single", *QUICK, *spec))
        found = losses(train_here(tmp_path / f"split-{number}", *data, *where, *QUICK, *spec))
        assert found == pytest.approx(expected, abs=1e-5)
    whole = load_file(tmp_path / "split-2" / "adapter" / "adapter_model.safetensors")
    shapes = {key: list(value.shape) for key, value in whole.items()}
    for one, layers in ((workers[1], {2, 3}), (workers[0], {4, 5})):
        folder = one.outputs / f"worker-{one.port}" / "adapter-stage"
        part = load_file(folder / "adapter_model.safetensors")
        own = {int(found[1]) for key in part if (found := re.search(r"\.layers\.(\d+)\.", key))}
        assert own == layers and (folder / "adapter_config.json").is_file()
        assert all(bool((whole[key] == value).all()) for key, value in part.items())
        said = read_part(folder)
        assert said is not None and said.quantizations == ("none",) * 3
        assert said.model == fingerprint(make_tiny()) and said.adapter == shapes_digest(shapes)


def test_train_may_start_before_its_worker(tmp_path: Path, data: list[str], alone: list[float]) -> None:
    """The worker comes when the coordinator is already dialling it."""
    port = free_port()
    done = threading.Event()

    def bring_worker() -> None:
        wait_until(lambda: (tmp_path / "run" / "run.json").is_file(), 60)
        with worker(tmp_path / "worker", port=port):
            assert done.wait(60)

    with meanwhile(bring_worker):
        try:
            records = train_here(tmp_path / "run", *data, *entries(("127.0.0.1", port)), *QUICK)
        finally:
            done.set()
    assert losses(records) == pytest.approx(alone, abs=1e-5)


def test_sweep_over_split_points_is_independent_jobs(
    tmp_path: Path, data: list[str], alone: list[float], workers: tuple[Worker, Worker]
) -> None:
    """Case H02: job 1 is invalid; the others finish and equal a single run, and job 1's own log holds its error."""
    outcome = run_here(
        "train", "-m", f"outputs={tmp_path}", *data, *hardware(workers[0]), *QUICK,
        "shard_plan=split", "shard_plan.split_points=[1],[99],[2],[3]",
    )  # fmt: skip
    assert outcome.code != 0 and "Traceback" not in outcome.text
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    jobs = [sweep / str(number) for number in range(4)]
    for number, job in enumerate(jobs):
        log = (job / "train.log").read_text(encoding="utf-8")
        if number == 1:
            assert "shard_plan.split_points must rise between 1 and 5" in log and "[99]" in log
            assert not (job / "metrics.jsonl").exists()
        else:
            assert losses(metrics(job)) == pytest.approx(alone, abs=1e-5) and "ERROR" not in log
            assert (job / "adapter" / "adapter_model.safetensors").is_file()
    workers[0].wait_idle()


def test_sweep_over_three_stages_runs_on_the_same_workers(
    tmp_path: Path, data: list[str], alone: list[float], workers: tuple[Worker, Worker]
) -> None:
    outcome = run_here(
        "train", "-m", f"outputs={tmp_path}", *data, *hardware(*workers), *QUICK,
        "shard_plan=split", "shard_plan.split_points=[1,3],[2,5]",
    )  # fmt: skip
    assert outcome.code == 0, outcome.text
    found = [losses(metrics(file.parent)) for file in sorted((tmp_path / "multirun").glob("*/*/*/metrics.jsonl"))]
    assert found == [pytest.approx(alone, abs=1e-5)] * 2


@pytest.mark.by_hand
def test_sweep_starts_and_ends_local_workers_job_by_job(tmp_path: Path, data: list[str], alone: list[float]) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    outcome = run_here(
        "train", "-m", f"outputs={tmp_path}", *data, *QUICK,
        "shard_plan=split", "shard_plan.split_points=[99],[4]",
    )  # fmt: skip
    assert outcome.code == 2, outcome.text
    (job,) = (tmp_path / "multirun").glob("*/*/1")
    assert losses(metrics(job)) == pytest.approx(alone, abs=1e-5)
    assert "layers [4, 6)" in (job / "worker-1.log").read_text(encoding="utf-8")
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before


# ---- what cannot be joined


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1", r"connection refused"),
        ("::1", r"connection refused|cannot assign requested address|address family not supported.*"),
        ("10.255.255.1", r"timed out|network is unreachable|no route to host|connection refused"),
    ],
)
@pytest.mark.usefixtures("paired")
def test_worker_that_cannot_be_reached_is_named_with_the_reason_in_time(
    tmp_path: Path, data: list[str], host: str, reason: str
) -> None:
    """Case F15; for other machines see test_machines_apart."""
    port = free_port()
    began = time.monotonic()
    text = error_of(fail_here(tmp_path, *data, *entries((host, port)), *QUICK, "transport.connect_timeout_s=2"))
    assert time.monotonic() - began < 10
    shown = f"[{host}]" if ":" in host else host
    assert re.match(rf"stage 1 at {re.escape(shown)}:{port}: no connection within 2 s \(({reason})\)", text), text


@pytest.mark.usefixtures("paired")
@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 300])
def test_name_that_nobody_knows_is_named(tmp_path: Path, data: list[str], host: str) -> None:
    """Before the data is read: its summary would be a line of its own."""
    outcome = run_here("train", f"outputs={tmp_path}", *data, *entries((host, 9999)), *QUICK)
    rule = "hardware.workers[0].host must be a name or an address that leads to the machine"
    assert outcome.code == 2 and f"{rule}, got {host!r}, which cannot be resolved" in outcome.one_line()


def test_empty_host_is_refused_by_its_key(tmp_path: Path, data: list[str]) -> None:
    outcome = run_here("train", f"outputs={tmp_path}", *data, *entries(("", 9999)), *QUICK)
    assert outcome.code == 2 and "hardware.workers[0].host must be" in outcome.one_line()


@pytest.mark.parametrize(
    "answer",
    [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\xff" * 64],
    ids=["nothing", "closed", "http", "ssh", "ones"],
)
def test_port_of_another_program_is_told_from_a_worker(tmp_path: Path, data: list[str], answer: bytes | None) -> None:
    """One that accepts and says nothing, one that closes at once, and ones that speak something else."""
    held: list[socket.socket] = []

    def accept(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = server.accept()
                held.append(sock)
                if answer:
                    sock.sendall(answer)
                if answer == b"":
                    sock.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        address = server.getsockname()[:2]
        text = error_of(fail_here(tmp_path, *data, *entries(address), *QUICK, "transport.connect_timeout_s=2"))
    for sock in held:
        sock.close()
    assert text.startswith(f"stage 1 at 127.0.0.1:{address[1]}: ")
    if answer is None:
        assert "gave no answer within 2 s (transport.connect_timeout_s); is it a hetero worker?" in text


def test_workers_mistakes_arrive_as_one_line_with_its_stage(
    tmp_path: Path, data: list[str], workers: tuple[Worker, Worker], tiny: Callable[[str], Path]
) -> None:
    where = hardware(*workers)
    text = error_of(fail_here(tmp_path / "a", *data, *where, *QUICK, f"model.path={tiny('llama_tied')}"))
    assert re.match(r"stage [12] at 127\.0\.0\.1:\d+: worker\.models_dir .* must hold the model 'llama_tied'", text)
    for one in workers:
        one.wait_idle()
    listed = f"[{workers[0].entry('w1')}, {workers[1].entry('w2').replace('}', ', device: cuda}')}]"
    text = error_of(fail_here(tmp_path / "b", *data, where[0], f"hardware.workers={listed}", *QUICK))
    assert text == (
        f"stage 2 at 127.0.0.1:{workers[1].port}: shard_plan.stages[2].device must be auto or one of cpu "
        "on this machine, got 'cuda'"
    )
    for one in workers:
        one.wait_idle()


def test_ipv6_worker_and_one_with_other_versions(tmp_path: Path, data: list[str], alone: list[float]) -> None:
    """Cases F06 and F08: another library version is a warning, not a refusal."""
    other = tmp_path / "path" / "peft-99.0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 99.0.0\n", encoding="utf-8")
    if not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback address")
    with worker(tmp_path / "w", "worker.host=::1", env={"PYTHONPATH": str(other.parent)}) as one:
        assert one.host == "::1"
        args = [*data, *hardware(one), *QUICK, f"hydra.run.dir={tmp_path / 'run'}"]
        outcome = run_here("train", f"outputs={tmp_path}", *args)
        assert outcome.code == 0, outcome.text
        assert losses(metrics(tmp_path / "run")) == pytest.approx(alone, abs=1e-5)
        differ = r"warning: versions differ from those of stage 1 \(here / there\): peft \S+ / 99\.0\.0\n"
        assert re.search(differ, outcome.text), outcome.text


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_localhost_reaches_an_ipv4_worker(
    tmp_path: Path, data: list[str], alone: list[float], workers: tuple[Worker, Worker]
) -> None:
    records = train_here(tmp_path / "run", *data, *entries(("localhost", workers[0].port)), *QUICK)
    assert losses(records) == pytest.approx(alone, abs=1e-5)


# ---- ports


def test_port_that_is_taken_is_named(workers: tuple[Worker, Worker], tmp_path: Path) -> None:
    """Case F01."""
    outcome = run_here("worker", f"worker.port={workers[0].port}", f"outputs={tmp_path}")
    assert outcome.code == 2 and outcome.seconds < 5
    assert f"something listens on 127.0.0.1:{workers[0].port} already" in outcome.one_line()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no.such.host.invalid"])
def test_worker_listens_on_no_address_that_others_reach(tmp_path: Path, host: str) -> None:
    outcome = run_here("worker", "worker.port=0", f"worker.host={host}", f"outputs={tmp_path}")
    assert outcome.code == 2 and "worker.host must be" in outcome.one_line() and host in outcome.text


@pytest.mark.slow
def test_killed_worker_binds_its_port_again_at_once(tmp_path: Path) -> None:
    """Case F01: three times, each time with a connection open, so that the port is still known to the kernel."""
    port = 0
    for _ in range(3):
        with worker(tmp_path, port=port) as one:
            port = one.port
            with socket.create_connection(("127.0.0.1", port), timeout=END_S):
                wait_until(lambda w=one: len(w.connections()) == 1)
                one.running.send(signal.SIGKILL)
                one.running.wait(END_S)
    assert refuses_connections("127.0.0.1", port)


# ---- faults


@pytest.mark.by_hand
def test_killed_worker_ends_the_run_by_name_and_the_others_go_on(
    tmp_path: Path, data: list[str], alone: list[float], workers: tuple[Worker, Worker]
) -> None:
    """Case F03."""
    with worker(tmp_path / "mortal") as mortal:
        args = [*data, *hardware(workers[0], mortal), *FOREVER, f"outputs={tmp_path}"]
        with started("train", *args) as train:
            train.wait_for(r"step 3/")
            mortal.running.send(signal.SIGKILL)
            killed_at = time.monotonic()
            outcome = train.wait(END_S)
            assert time.monotonic() - killed_at < 5
        assert outcome.code == 1 and "Traceback" not in outcome.text
        assert re.match(rf"stage 2 at 127\.0\.0\.1:{mortal.port} in step \d+: ", error_of(outcome)), outcome.text
    assert_serves(tmp_path, data, alone, *workers)


@pytest.mark.by_hand
def test_silent_worker_is_noticed_and_serves_again_when_it_wakes(
    tmp_path: Path, data: list[str], alone: list[float], workers: tuple[Worker, Worker]
) -> None:
    """Case F04: a stopped process keeps its connections open and says nothing."""
    silent = workers[1]
    stopped_at = [0.0]

    def stop() -> None:
        silent.running.send(signal.SIGSTOP)
        stopped_at[0] = time.monotonic()

    try:
        with meanwhile(after_steps(tmp_path / "failed", 2, stop)):
            outcome = fail_here(tmp_path, *data, *hardware(*workers), *FOREVER, "transport.io_timeout_s=3")
        assert time.monotonic() - stopped_at[0] < 15
    finally:
        silent.running.send(signal.SIGCONT)
    text = error_of(outcome)
    assert re.match(rf"stage 2 at 127\.0\.0\.1:{silent.port} in step \d+: silent for 3 s", text), text
    assert_serves(tmp_path, data, alone, *workers)


@pytest.mark.slow
def test_killed_coordinator_leaves_workers_that_listen(
    tmp_path: Path, data: list[str], alone: list[float], workers: tuple[Worker, Worker]
) -> None:
    with started("train", *data, *hardware(*workers), *FOREVER, f"outputs={tmp_path}") as train:
        train.wait_for(r"step 2/")
        train.send(signal.SIGKILL)
        train.wait(END_S)
        assert_serves(tmp_path, data, alone, *workers)
    assert re.search(r"stage 0 at the coordinator.*: (closed the connection|connection lost)", workers[0].running.text)


# ---- ends by hand


@pytest.mark.by_hand
def test_busy_worker_refuses_for_now_and_ctrl_c_frees_it(
    tmp_path: Path, data: list[str], alone: list[float], workers: tuple[Worker, Worker]
) -> None:
    with started("train", *data, *hardware(*workers), *FOREVER, f"outputs={tmp_path / 'first'}") as train:
        train.wait_for(r"step 2/")
        late = ["transport.connect_timeout_s=1.5", *QUICK]
        text = error_of(fail_here(tmp_path, *data, *hardware(workers[1]), *late))
        assert re.match(rf"stage 1 at 127\.0\.0\.1:{workers[1].port}: refused: busy with another run", text), text
        steps = len(train.text.splitlines())
        wait_until(lambda: len(train.text.splitlines()) > steps, END_S)
        train.send(signal.SIGINT)
        outcome = train.wait(END_S)
        assert outcome.code == 130 and "Traceback" not in outcome.text
        assert outcome.text.endswith("interrupted\n")
        train.assert_gone()
    assert_serves(tmp_path, data, alone, *workers)


@pytest.mark.by_hand
def test_ctrl_c_twice_leaves_no_launched_worker_and_no_port(tmp_path: Path, data: list[str]) -> None:
    """Case F12."""
    with started("train", *data, *FOREVER, f"outputs={tmp_path}") as train:
        train.wait_for(r"step 2/")
        ports = train.listening()
        assert len(ports) == 1 and len(train.relatives()) == 2
        train.send(signal.SIGINT)
        train.send(signal.SIGINT)
        outcome = train.wait(END_S)
        assert outcome.code in (130, -signal.SIGINT) and "Traceback" not in outcome.text, outcome.text
        train.assert_gone()
        assert refuses_connections("127.0.0.1", ports[0])


@pytest.mark.slow
def test_launched_worker_ends_with_a_coordinator_that_is_killed_before_it_joins(
    tmp_path: Path, data: list[str]
) -> None:
    with started("train", *data, *FOREVER, f"outputs={tmp_path}") as train:
        train.wait_for(r"data: ")
        assert len(train.relatives()) == 2
        train.send(signal.SIGKILL)
        train.wait(END_S)
        train.assert_gone(START_S)


@pytest.mark.by_hand
def test_terminated_run_frees_its_workers(
    tmp_path: Path, data: list[str], alone: list[float], workers: tuple[Worker, Worker]
) -> None:
    with started("train", *data, *hardware(*workers), *FOREVER, f"outputs={tmp_path}") as train:
        train.wait_for(r"step 2/")
        train.send(signal.SIGTERM)
        outcome = train.wait(END_S)
        assert outcome.code == 143 and "Traceback" not in outcome.text
        train.assert_gone()
    assert_serves(tmp_path, data, alone, *workers)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_idle_worker_ends_by_hand(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with worker(tmp_path) as one:
        one.running.send(number)
        outcome = one.running.wait(END_S)
        assert outcome.code == code and "Traceback" not in outcome.text
        one.running.assert_gone()
        assert refuses_connections("127.0.0.1", one.port)
        assert not (tmp_path / "outputs").exists()


@pytest.mark.by_hand
def test_worker_that_is_interrupted_in_a_run_asks_the_coordinator_to_end_it(
    tmp_path: Path, data: list[str], workers: tuple[Worker, Worker], alone: list[float]
) -> None:
    run_dir = tmp_path / "stopped"
    with worker(tmp_path / "w") as one:
        with meanwhile(after_steps(run_dir, 2, lambda: one.running.send(signal.SIGINT))):
            args = [*data, *hardware(workers[0], one), "loop.steps=1000000", f"hydra.run.dir={run_dir}"]
            stopped = run_here("train", f"outputs={tmp_path}", *args)
        assert stopped.code == 0 and "(SIGINT at stage 2), with a checkpoint" in stopped.text, stopped.text
        outcome = one.running.wait(END_S)
        assert outcome.code == 0 and "Traceback" not in outcome.text, outcome.text
    assert_serves(tmp_path, data, alone, *workers)


# ---- strangers


def test_bytes_of_strangers_leave_the_worker_serving(
    tmp_path: Path, data: list[str], alone: list[float], workers: tuple[Worker, Worker]
) -> None:
    """Cases S01 and S03: nothing is executed, nothing is allocated for what is only announced."""
    one = workers[0]
    process = psutil.Process(one.running.process.pid)
    assert_serves(tmp_path, data, alone, *workers)
    before = process.memory_info().rss
    marker = tmp_path / "marker"
    hello = raw_frame(FrameType.HELLO)
    lengths = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
    sent = [
        *hostile_blobs(marker),
        *(hello[:16] + blob for blob in hostile_blobs(marker)),
        *(struct.pack(">QBBHI", length, 1, 1, 0, 2**32 - 1) for length in lengths),
        *(struct.pack(">QBBHI", length, 1, FrameType.FORWARD, 0, 2) + b"{}" for length in lengths),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        os.urandom(4096),
        hello[:7],
        b"",
    ]
    for blob in sent:
        with socket.create_connection((one.host, one.port), timeout=END_S) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(blob)
                with contextlib.suppress(OSError):  # the worker may have reset the connection already
                    stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
    wait_until(lambda: not one.connections(), END_S)
    assert not marker.exists()
    assert process.memory_info().rss - before < 50 << 20
    assert_serves(tmp_path, data, alone, *workers)


def test_strangers_in_the_middle_of_a_run_do_not_disturb_it(
    tmp_path: Path, data: list[str], alone: list[float], workers: tuple[Worker, Worker]
) -> None:
    """A well-formed HELLO of another run, and one of this shape that is no HELLO, while the worker trains."""

    def knock() -> None:
        for blob in (raw_frame(FrameType.HELLO), raw_frame(FrameType.STOP), raw_frame(FrameType.APPLY), b"junk" * 9):
            with socket.create_connection((workers[0].host, workers[0].port), timeout=END_S) as stranger:
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(blob)
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(4096):
                        pass

    steps = ["loop.steps=12", "loop.batch_size=4"]
    with meanwhile(after_steps(tmp_path / "run", 1, knock)):
        records = train_here(tmp_path / "run", *data, *hardware(*workers), *steps)
    expected = train_here(tmp_path / "one", *data, "shard_plan=single", *steps)
    assert losses(records) == pytest.approx(losses(expected), abs=1e-5)
    assert_serves(tmp_path, data, alone, *workers)

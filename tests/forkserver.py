"""A process that has imported everything and forks `train.py` and `worker.py` on command, so that a start costs little.

    test --JSON lines--> this process (one thread, no torch work) --fork--> children: own session, own log file

Forking after the import of torch is safe here because nothing has started a thread: torch starts its own at the first
work, which only children do. That is checked before every fork, where the system lists threads (Linux); elsewhere it
was not tried.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
NETWORK = "HETERO_TEST_NETWORK"  # a network namespace for the child
MACHINE = "HETERO_TEST_MACHINE"  # a host name, and files in the place of /etc/hosts and /etc/resolv.conf, as JSON
_CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWUTS = 0x40000000, 0x00020000, 0x04000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PRELOADED = (
    "encodings.idna",
    "hetero.coordinate",
    "hetero.summary",
    "hetero.resolve",
    "hetero.roles",
    "hetero.work",
    "hetero.transport.listening",
    "hetero.optim",
    "peft.tuners.lora.bnb",
    "peft.utils.transformers_weight_conversion",
    "rich._emoji_codes",
    "safetensors.torch",
    "torch.optim.adamw",
    "transformers.models.llama.modeling_llama",
    "train",
    "worker",
)


@dataclass
class Child:
    """A script that runs in a forked process, with what it prints in a file.

    Attributes:
        pid: of the process, which is not reaped before `code` is asked for.
        log: what it prints.
        command: as for a shell, for messages.
    """

    server: ForkServer
    pid: int
    log: Path
    command: str
    _code: int | None = field(default=None, init=False)

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        if self._code is None:
            self._code = self.server._ask(op="poll", pid=self.pid)["code"]
        return self._code

    def wait(self, timeout_s: float) -> int:
        """Waits until it has ended."""
        deadline = time.monotonic() + timeout_s
        while (code := self.code()) is None:
            assert time.monotonic() < deadline, f"{self.command} runs after {timeout_s:g} s:\n{self.text}"
            time.sleep(0.005)
        return code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, where it still runs."""
        if self.code() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it for certain."""
        self.send(signal.SIGKILL)
        self.wait(20.0)


class ForkServer:
    """The preloaded process, seen from the tests; use as a context manager, which leaves no child behind.

    Args:
        env: the environment that children start from.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS.parent,
            env={**env},
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._ask(op="hello")

    def start(self, script: str, *args: str, log: Path, env: Mapping[str, str] | None = None) -> Child:
        """Starts `train` or `worker` with these arguments; `env` is added to the environment."""
        answer = self._ask(op="fork", script=script, args=args, log=str(log), env={**(env or {})})
        extra = " ".join(f"{name}={value}" for name, value in (env or {}).items())
        return Child(self, answer["pid"], log, f"{extra} {script}.py {' '.join(args)}".strip())

    def close(self) -> None:
        """Kills all children and ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, **message: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, "the fork server has ended"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer
        return answer


# ---- the other side: the preloaded process itself


def _serve() -> None:
    """Forks and reaps on command until its standard input ends; then kills what is left."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    for name in _PRELOADED:
        importlib.import_module(name)
    for script in ("train", "worker"):  # parsers and patterns that are made at first use
        with contextlib.redirect_stdout(io.StringIO()):
            sys.argv = [script, "--cfg", "job"]
            importlib.import_module(script).main()
    os.environ.pop("HYDRA_FULL_ERROR", None)  # which main() has set
    gc.collect()
    gc.freeze()  # no child copies these pages for its first collection
    running: set[int] = set()
    with _killing(running):
        for line in sys.stdin:
            message = json.loads(line)
            if message["op"] == "fork":
                answer = _fork(message, running)
            elif message["op"] == "poll":
                pid, status = os.waitpid(message["pid"], os.WNOHANG)
                running.discard(pid)
                answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
            else:
                answer = {}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


@contextlib.contextmanager
def _killing(running: set[int]) -> Iterator[None]:
    try:
        yield
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(message: dict[str, Any], running: set[int]) -> dict[str, Any]:
    if threading.active_count() > 1 or num_tasks() > 1:
        return {"error": f"{num_tasks()} threads, so a fork is not safe"}
    pid = os.fork()
    if pid:
        running.add(pid)
        return {"pid": pid}
    code = 70
    try:
        code = _run(message)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # nothing of the server's own clean-up may run here


def num_tasks() -> int:
    """Threads of this process, those of C++ included, where the system lists them."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 1


def _run(message: dict[str, Any]) -> int:
    """In the child: a process as if it had been started by hand."""
    os.setsid()
    _die_with(os.getppid())
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 256)
    os.environ.update(message["env"])
    if space := message["env"].get(NETWORK):
        _enter(space)
    if machine := message["env"].get(MACHINE):
        _settle(*json.loads(machine))
    sys.argv = [str(TESTS.parent / f"{message['script']}.py"), *message["args"]]
    from hetero import failpoints

    importlib.reload(failpoints)  # reads its variable again; the functions that others imported see the new values
    code: int = importlib.import_module(message["script"]).main()
    return code


def _enter(space: str) -> None:
    """From now on this process's network is that of a namespace."""
    import ctypes

    with open(f"/run/netns/{space}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {space}")


def _settle(name: str, hosts: str, name_servers: str) -> None:
    """From now on this process has a host name and name services of its own."""
    import ctypes
    import socket

    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *args: object) -> None:
        if getattr(libc, function)(*args):
            raise OSError(ctypes.get_errno(), f"{function} {args}")

    call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
    call("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    for own, usual in ((hosts, "/etc/hosts"), (name_servers, "/etc/resolv.conf")):
        call("mount", own.encode(), usual.encode(), None, ctypes.c_ulong(_MS_BIND), None)
    socket.sethostname(name)


def _die_with(parent: int) -> None:
    """On Linux the kernel kills the child when the server dies."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(70)


if __name__ == "__main__":
    _serve()

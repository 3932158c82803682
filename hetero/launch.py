"""Local workers: processes on this machine that a coordinator starts, and that end with it.

A launched worker gets its settings as one JSON line on standard input and answers with its port as one JSON line on
standard output. When its standard input ends, the coordinator is gone and the worker goes too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from hetero.errors import ConfigError, PeerError
from hetero.spec import WorkerEntry, WorkerSpec
from hetero.transport.listening import start_listening

log = logging.getLogger(__name__)

END_S = 5.0


class LocalWorkers:
    """Worker processes of one run; a context manager that leaves none behind.

    Args:
        entries: id, host and port (0: any) of each.
        models_dir: where they find local models.
        threads: torch threads of each.
        outputs: where they keep what they keep.
        log_dir: gets `worker-<stage>.log`.
        secret: of this run's processes; goes through the pipe and nowhere else.
        allow_targets: the coordinator's additions to the allow list, which they share.
    """

    def __init__(
        self,
        entries: Sequence[WorkerEntry],
        *,
        models_dir: Path | None,
        threads: int,
        outputs: Path,
        log_dir: Path,
        secret: bytes,
        allow_targets: Sequence[str] = (),
    ) -> None:
        self._entries, self._log_dir = entries, log_dir
        self._settings = [
            {
                "worker": msgspec.to_builtins(
                    WorkerSpec(
                        host=entry.host,
                        port=entry.port,
                        device=entry.device,
                        models_dir=str(models_dir) if models_dir else None,
                        once=True,
                        threads=threads,
                    )
                ),
                "outputs": str(outputs),
                "allow_targets": list(allow_targets),
                "secret": secret.hex(),
            }
            for entry in entries
        ]
        self._processes: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []

    def __enter__(self) -> LocalWorkers:
        for number, settings in enumerate(self._settings, 1):
            self._logs.append((self._log_dir / f"worker-{number}.log").open("a", encoding="utf-8"))
            self._processes.append(self._start(settings, self._logs[-1]))
        return self

    @staticmethod
    def _start(settings: dict[str, Any], log_file: IO[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "hetero.launch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            cwd=Path(__file__).parent.parent,
            start_new_session=True,  # Ctrl-C in the terminal is the coordinator's to handle
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
        return process

    def replace_lost(self, lost: int | None) -> None:
        """Starts workers again that have ended, and the lost one, each on its port.

        Args:
            lost: the stage of a worker that gives no sign of life, though its process may still be there.

        Raises:
            PeerError: one ended at its start.
        """
        replaced = []
        for number, process in enumerate(self._processes, 1):
            if process.poll() is None and number != lost:
                continue
            process.kill()
            process.wait()
            _close_pipes(process)
            log.info("starting the local worker of stage %d again", number)
            self._processes[number - 1] = self._start(self._settings[number - 1], self._logs[number - 1])
            replaced.append(number)
        for number in replaced:
            self._announced(number)

    def has_ended(self, stage: int) -> bool:
        """Whether a worker's process is no more."""
        return self._processes[stage - 1].poll() is not None

    def check(self, stage: int) -> None:
        """Raises PeerError where a worker's process is no more."""
        entry, code = self._entries[stage - 1], self._processes[stage - 1].poll()
        if code is not None:
            raise PeerError(
                f"the local worker {_ending(code)}", stage=stage, host=entry.host, port=entry.port, lost=True
            )

    def addresses(self) -> list[WorkerEntry]:
        """The workers with their real ports, once they listen.

        Raises:
            PeerError: one ended before it did.
        """
        found = []
        for stage, entry in enumerate(self._entries, 1):
            answer = self._announced(stage)
            found.append(msgspec.structs.replace(entry, host=answer["host"], port=answer["port"]))
            self._settings[stage - 1]["worker"] |= answer  # it has the same address when it must be started again
        return found

    def _announced(self, stage: int) -> dict[str, Any]:
        """Host and port of a worker, once it listens."""
        entry, process = self._entries[stage - 1], self._processes[stage - 1]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.strip():
            code = process.wait(END_S)
            log_file = self._log_dir / f"worker-{stage}.log"
            last = log_file.read_text(encoding="utf-8").strip().splitlines()[-1:] or ["no message"]
            raise PeerError(
                f"the local worker {_ending(code)} at its start: {last[0]} (see {log_file})",
                stage=stage,
                host=entry.host,
                port=entry.port,
            )
        answer = json.loads(line)
        return {"host": answer["host"], "port": answer["port"]}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            _close_pipes(process)
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log_file in self._logs:
            log_file.close()


def _ending(code: int) -> str:
    """How a process ended, by its exit code as `subprocess` gives it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()


def _end_with_parent(stream: IO[str]) -> None:
    """Ends this process when the coordinator's pipe does, gently at first."""
    while stream.read(4096):
        pass
    for _ in range(2):  # the second one does not wait for a coordinator's answer
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait((END_S - 1.0) / 2)
    os._exit(1)


def main() -> int:
    """A launched worker's process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=(sys.stdin,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def announce(host: str, port: int) -> None:
        print(json.dumps({"host": host, "port": port}), flush=True)

    worker = msgspec.convert(settings["worker"], WorkerSpec)
    try:
        listening = start_listening(worker, bytes.fromhex(settings["secret"]))
    except ConfigError as exc:
        log.error("%s", exc)
        return 2
    import torch

    from hetero.work import serve

    if worker.threads is not None:
        torch.set_num_threads(worker.threads)
    ok = serve(
        worker,
        listening,
        outputs=Path(settings["outputs"]),
        allow_targets=settings["allow_targets"],
        announce=announce,
    )
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

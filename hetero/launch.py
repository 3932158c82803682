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
            log_file = (self._log_dir / f"worker-{number}.log").open("w", encoding="utf-8")
            self._logs.append(log_file)
            process = subprocess.Popen(
                [sys.executable, "-m", "hetero.launch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                cwd=Path(__file__).parent.parent,
                start_new_session=True,  # Ctrl-C in the terminal is the coordinator's to handle
            )
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(settings) + "\n")
            process.stdin.flush()
        return self

    def addresses(self) -> list[WorkerEntry]:
        """The workers with their real ports, once they listen.

        Raises:
            PeerError: one ended before it did.
        """
        found = []
        for stage, (entry, process) in enumerate(zip(self._entries, self._processes, strict=True), 1):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.strip():
                process.wait(END_S)
                log_file = self._log_dir / f"worker-{stage}.log"
                last = log_file.read_text(encoding="utf-8").strip().splitlines()[-1:] or ["no message"]
                raise PeerError(
                    f"the launched worker ended at its start: {last[0]} (see {log_file})",
                    stage=stage,
                    host=entry.host,
                    port=entry.port,
                )
            answer = json.loads(line)
            found.append(msgspec.structs.replace(entry, host=answer["host"], port=answer["port"]))
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log_file in self._logs:
            log_file.close()


def _end_with_parent(stream: IO[str]) -> None:
    """Ends this process when the coordinator's pipe does, gently at first."""
    while stream.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(END_S - 1.0)
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

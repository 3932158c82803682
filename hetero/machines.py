"""The machines of this user's group: how this one is called, and which workers trained with it before."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hetero.errors import ConfigError
from hetero.folders import write_text
from hetero.secret import config_dir
from hetero.spec import WorkerEntry

T = TypeVar("T")

_NAME_S = 1.0  # a name server that does not answer must not hold up a start
_MAX_MACHINES = 100


def machines_file(folder: Path | None = None) -> Path:
    """Where the machines are remembered: name, host, port and device; no secret."""
    return (folder or config_dir()) / "machines.json"


def remembered(folder: Path | None = None) -> list[WorkerEntry]:
    """The workers that trained with this machine, the latest first."""
    try:
        raw = json.loads(machines_file(folder).read_text(encoding="utf-8"))
        return [WorkerEntry(id=m["id"], host=m["host"], port=m["port"], device=m["device"]) for m in raw]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{machines_file(folder)} must be a list of machines ({exc}); delete it") from None


def remember(workers: list[WorkerEntry], folder: Path | None = None) -> None:
    """Notes workers that a run has reached; one entry for each host and port."""
    known = [w for w in remembered(folder) if (w.host, w.port) not in {(new.host, new.port) for new in workers}]
    entries = [{"id": w.id, "host": w.host, "port": w.port, "device": w.device} for w in [*workers, *known]]
    write_text(machines_file(folder), json.dumps(entries[:_MAX_MACHINES], indent=1) + "\n", private=True)


def own_id() -> str:
    """A short name for this machine in a hardware configuration."""
    short = socket.gethostname().partition(".")[0].lower()
    return re.sub(r"[^a-z0-9-]+", "-", short).strip("-") or "worker"


def name_or_address(address: str) -> str:
    """The machine's `.local` name where it leads to this address, since addresses change; otherwise the address."""
    name = f"{socket.gethostname().partition('.')[0]}.local"
    entries = looked_up(lambda: socket.getaddrinfo(name, None))
    found = {_without_card(str(entry[4][0])) for entry in entries or ()}
    return name if _without_card(address) in found else address


def _without_card(address: str) -> str:
    return address.partition("%")[0]


def looked_up(look_up: Callable[[], T]) -> T | None:
    """What a look-up of a name gives; None where it fails, or where no name server answers within a second."""
    found: list[T] = []

    def run() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.append(look_up())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_NAME_S)
    return found[0] if found else None


def unknown_hosts(hosts: Sequence[str]) -> list[str]:
    """Those of these names and addresses that lead nowhere; none where the name server does not answer in time."""

    def is_unknown(host: str) -> bool:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError):
            return True
        return False

    return looked_up(lambda: [host for host in hosts if is_unknown(host)]) or []


def hardware_line(host: str, port: int) -> str:
    """What to type on the coordinator to train with a worker on this machine."""
    shown = f"'{host}'" if ":" in host else host
    entry = f"{{id: {own_id()}, host: {shown}, port: {port}}}"
    quote = '"' if ":" in host else "'"
    return f"python train.py hardware.launch=none {quote}hardware.workers=[{entry}]{quote}"

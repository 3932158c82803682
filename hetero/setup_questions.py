"""What a set-up needs to know: from flags, and from whoever sits at the terminal where a flag is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from hetero.checked import convert
from hetero.errors import ConfigError, show_address
from hetero.setup_files import check_name
from hetero.spec import CoordinatorSpec, WorkerEntry

Ask = Callable[[str], str]

_WORKER_FORM = "ID=HOST[:PORT][,device=DEVICE][,memory_gb=NUMBER]"
_HOST = re.compile(r"(?P<host>\[[^\]]+\]|[^:,\[\]\s]+)(:(?P<port>[0-9]+))?\Z")


def worker_of(text: str) -> WorkerEntry:
    """A machine as `--worker` writes it.

    Raises:
        ConfigError: it cannot be read.
    """
    name, given, rest = text.strip().partition("=")
    if not given:
        raise ConfigError(f"--worker must be {_WORKER_FORM}, got {text!r}")
    address, *options = rest.split(",")
    raw = _address(address, "--worker", text) | _options(options, "--worker", text)
    return convert({"id": check_name(name, "--worker's ID")} | raw, WorkerEntry, root="--worker")


def coordinator_of(text: str) -> CoordinatorSpec:
    """This machine as `--coordinator` writes it.

    Raises:
        ConfigError: it cannot be read.
    """
    host, *options = text.strip().split(",")
    raw = _address(host, "--coordinator", text)
    if "port" in raw:
        raise ConfigError(f"--coordinator has no port, since only workers listen, got {text!r}")
    return convert(raw | _options(options, "--coordinator", text), CoordinatorSpec, root="--coordinator")


def _address(text: str, key: str, whole: str) -> dict[str, object]:
    found = _HOST.match(text)
    if found is None:
        raise ConfigError(
            f"{key} must have a host name or address with an optional port, IPv6 as [::1]:9999, got {whole!r}"
        )
    host = found["host"].strip("[]")
    return {"host": host} | ({"port": int(found["port"])} if found["port"] else {})


def _options(parts: Sequence[str], key: str, whole: str) -> dict[str, object]:
    raw: dict[str, object] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name == "device":
            raw["device"] = value
        elif name == "memory_gb":
            try:
                raw["memory_gb"] = float(value)
            except ValueError:
                raise ConfigError(f"{key}: memory_gb must be a number, got {whole!r}") from None
        else:
            raise ConfigError(f"{key} may have the options device= and memory_gb=, got {part!r} in {whole!r}")
    return raw


def chosen_workers(
    given: Sequence[str], use_known: bool, known: Sequence[WorkerEntry], ask: Ask | None
) -> list[WorkerEntry]:
    """The workers, in the order of the pipeline.

    Args:
        given: values of `--worker`.
        use_known: `--known`: all machines that trained with this one before.
        known: those machines.
        ask: puts a question to somebody; None where nobody is there.

    Raises:
        ConfigError: there are none.
    """
    workers = [worker_of(text) for text in given]
    workers += _renamed(known, workers) if use_known else []
    if not workers and ask is not None:
        workers = _asked_workers(known, ask)
    if not workers:
        raise ConfigError(
            f"--worker must be given, as in --worker pc=192.168.1.20 ({_WORKER_FORM}; once for each machine), or "
            "--known for those that trained with this one before; hardware=local needs no set-up"
        )
    return workers


def _renamed(known: Sequence[WorkerEntry], beside: Sequence[WorkerEntry]) -> list[WorkerEntry]:
    """Known machines that are not given already, with ids that differ."""
    found: list[WorkerEntry] = []
    for machine in known:
        so_far = [*beside, *found]
        if any((machine.host, machine.port) == (other.host, other.port) for other in so_far):
            continue
        taken, name, number = {other.id for other in so_far} | {"local"}, machine.id, 2
        while name in taken:
            name, number = f"{machine.id}-{number}", number + 1
        found.append(msgspec.structs.replace(machine, id=name))
    return found


def _asked_workers(known: Sequence[WorkerEntry], ask: Ask) -> list[WorkerEntry]:
    workers: list[WorkerEntry] = []
    for machine in _renamed(known, []):
        where = show_address(machine.host, machine.port)
        if _yes(f"use {machine.id} at {where}, which trained with this machine before? [Y/n] ", ask):
            workers.append(machine)
    wrong = ""  # a slip of the finger costs one answer, not all of them
    while text := ask(f"{wrong}{'another' if workers else 'a'} worker as {_WORKER_FORM} (empty: no more): "):
        try:
            worker, wrong = worker_of(text), ""
        except ConfigError as exc:
            wrong = f"{exc}\n"
            continue
        if worker.id in {"local", *(other.id for other in workers)}:
            wrong = f"ID must be a name of its own, and not local, which is this machine, got {worker.id}\n"
        else:
            workers.append(worker)
    return workers


def _yes(question: str, ask: Ask) -> bool:
    while (answer := ask(question).lower()) not in ("", "y", "yes", "n", "no"):
        question = f"y or n, got {answer!r}: "
    return answer in ("", "y", "yes")


def chosen(flag: str, given: str | None, ask: Ask | None, question: str, default: str = "") -> str:
    """The value of a flag, or of a question.

    Raises:
        ConfigError: it is not given and nobody answers.
    """
    if given is not None:
        return given
    answer = (ask(f"{question}{f' [{default}]' if default else ''}: ") or default) if ask is not None else ""
    if not answer:
        raise ConfigError(f"{flag} must be given where no terminal answers ({question})")
    return answer

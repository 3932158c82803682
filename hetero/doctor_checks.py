"""The doctor's checks: this machine, every worker, and the line between neighbouring stages; a finding each."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from hetero import interfaces
from hetero.answering import Answer, Who, who_answers
from hetero.errors import PeerError, printable, show_address
from hetero.interfaces import card_of, system_name
from hetero.link_test import Probe
from hetero.memory import show_bytes
from hetero.probes import BUSY, describe_device
from hetero.roles import is_here
from hetero.secret import secret_of_this_machine
from hetero.spec import HardwareSpec, WorkerEntry
from hetero.transport.addresses import HOW_TO_PAIR
from hetero.transport.identity import identity_of
from hetero.transport.tcp import TcpTransport
from hetero.versions import versions
from hetero.wire.headers import Measured

SLOW_BYTES = 12.5e6  # a second: 100 Mbit/s
FAR_S = 0.02
MUST_AGREE = ("hetero", "torch", "transformers", "peft")

State = Literal["ok", "note", "fail", "not run"]


@dataclass(frozen=True)
class Finding:
    """What a check found; a failing one has a remedy."""

    machine: str
    check: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Line:
    """A measured line between neighbours: round trip in seconds, bytes a second forward and back."""

    sender: str
    receiver: str
    latency_s: float
    forward: float
    backward: float
    kind: str


@dataclass
class Diagnosis:
    """All findings and measured lines."""

    findings: list[Finding] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        """Whether nothing failed."""
        return all(finding.state != "fail" for finding in self.findings)


def diagnose(hardware: HardwareSpec, workers: list[WorkerEntry], topology: str) -> Diagnosis:
    """Checks machines and lines.

    Args:
        hardware: as configured.
        workers: of it, in the order of the pipeline.
        topology: `chain`: neighbours talk directly; `star`: all with the coordinator.
    """
    diagnosis = Diagnosis()
    secret, paired = secret_of_this_machine()
    diagnosis.findings += _this_machine(hardware, paired)
    if hardware.launch == "local":
        diagnosis.findings.append(Finding("local", "workers", "ok", "processes of this machine, started by the run"))
        return diagnosis
    transport = TcpTransport(identity=identity_of(secret))
    with concurrent.futures.ThreadPoolExecutor(max(1, len(workers))) as pool:
        answers = list(pool.map(lambda worker: who_answers(transport, worker.host, worker.port), workers))
    probes = {worker.id: answer.probe for worker, answer in zip(workers, answers, strict=True) if answer.probe}
    try:
        for worker, answer in zip(workers, answers, strict=True):
            diagnosis.findings += _worker(worker, answer)
        diagnosis.findings += _twice_the_same(probes)
        _test_lines(diagnosis, workers, probes, topology)
    finally:
        for probe in probes.values():
            probe.close()
    return diagnosis


def _this_machine(hardware: HardwareSpec, paired: bool) -> Iterator[Finding]:
    mine = versions()
    yield Finding("local", "versions", "ok", ", ".join(f"{name} {version}" for name, version in mine.items()))
    name, text, memory = describe_device(hardware.coordinator.device)
    yield _device("local", name, text, memory, hardware.coordinator.memory_gb, "hardware.coordinator.device")
    if not paired and any(not is_here(worker.host, {"localhost"}) for worker in hardware.workers):
        yield Finding("local", "group", "fail", "this machine is not paired", f"pair it: {HOW_TO_PAIR}")
    elif hardware.workers:
        yield Finding("local", "group", "ok", "paired" if paired else "not paired, which loopback does not need")
    yield Finding("local", "system", "ok", system_name())


def _device(machine: str, name: str, text: str, memory: int, memory_gb: float | None, key: str) -> Finding:
    if not memory:
        return Finding(machine, "device", "fail", text, f"{key}=auto, or a device that the machine has")
    found = f"{name}: {printable(text)}, {show_bytes(memory)}"
    if memory_gb is not None and memory_gb * 1e9 > memory * 1.1:
        return Finding(
            machine, "device", "fail", f"{found}, but memory_gb says {memory_gb:g}", "write what it has into memory_gb"
        )
    return Finding(machine, "device", "ok", found)


def _worker(worker: WorkerEntry, answer: Answer) -> Iterator[Finding]:
    if answer.probe is None:
        yield Finding(
            worker.id, "reach", "fail", f"{answer.who.value}: {printable(answer.detail)}", printable(answer.remedy)
        )
        return
    probe, about = answer.probe, answer.probe.about
    where = show_address(worker.host, worker.port)
    state: State = "note" if about.busy else "ok"
    found = f"{Who.MEMBER.value} at {where}" + (f"; it {BUSY}" if about.busy else "")
    yield Finding(worker.id, "reach", state, found, "its line is measured when the run is over" if about.busy else "")
    yield _versions(worker.id, probe.welcome.versions)
    yield _device(
        worker.id,
        about.device,
        about.device_name,
        about.memory_bytes,
        worker.memory_gb,
        f"hardware: device of {worker.id}",
    )
    yield Finding(worker.id, "system", "ok", printable(about.system))
    yield _network(worker.id, probe)


def _versions(machine: str, theirs: dict[str, str]) -> Finding:
    mine = versions()
    other = {name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)}
    differing = [n for n in MUST_AGREE if _public(mine.get(n, "none")) != _public(theirs.get(n, "none"))]
    shown = ", ".join(f"{n} {mine.get(n, 'none')} here, {theirs.get(n, 'none')} there" for n in sorted(other))
    if not differing:
        return Finding(machine, "versions", "ok", printable(shown) or "the same as here")
    packages = [f"{n}=={_public(mine[n])}" for n in differing if n != "hetero" and n in mine]
    remedies = ["update the older checkout (git pull)"] if "hetero" in differing else []
    remedies += [f"on one of the two: pip install {' '.join(packages)}"] if packages else []
    return Finding(machine, "versions", "fail", printable(shown), "; ".join(remedies))


def _public(version: str) -> str:
    """A version without the build's own mark, as in `+cu130`: such builds compute the same things."""
    return version.partition("+")[0]


def _network(machine: str, probe: Probe) -> Finding:
    about, here = probe.about, card_of(probe.own_host)
    speed = f", {about.speed_mbit} Mbit/s" if about.speed_mbit else ""
    found = f"{here} here, {printable(about.kind)} ({printable(about.card)}{speed}) there"
    if about.behind_nat:
        return Finding(
            machine,
            "network",
            "note",
            f"{found}; the worker sits behind WSL2's NAT ({printable(about.own_host)})",
            "networkingMode=mirrored in .wslconfig lets other machines in",
        )
    if probe.own_host != about.seen_host or probe.peer_host != about.own_host:
        return Finding(
            machine,
            "network",
            "note",
            f"{found}; addresses are translated on the way (NAT): {probe.own_host} here is "
            f"{printable(about.seen_host)} there, {probe.peer_host} is {printable(about.own_host)}",
            "transport.topology=star where other workers cannot reach it",
        )
    if interfaces.WIFI in (here.kind, about.kind):
        return Finding(machine, "network", "note", found, "a cable is several times as fast and steady")
    return Finding(machine, "network", "ok", found)


def _twice_the_same(probes: dict[str, Probe]) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for machine, probe in probes.items():
        instance = probe.welcome.instance
        if instance in seen:
            remedy = "give each entry of hardware.workers a host and port of its own"
            yield Finding(machine, "reach", "fail", f"the same worker as {seen[instance]}", remedy)
        seen.setdefault(instance, machine)


def _test_lines(diagnosis: Diagnosis, workers: list[WorkerEntry], probes: dict[str, Probe], topology: str) -> None:
    before = "local"
    for worker in workers:
        sender = "local" if topology == "star" else before
        before = worker.id
        pair = f"{sender} - {worker.id}"
        missing = [name for name in (sender, worker.id) if name != "local" and name not in probes]
        busy = [name for name in (sender, worker.id) if name in probes and probes[name].about.busy]
        if missing or busy:
            why = f"{missing[0]} does not answer" if missing else f"{busy[0]} {BUSY}"
            diagnosis.findings.append(Finding(pair, "line", "not run", why))
            continue
        figures = _figures(probes, sender, worker)
        diagnosis.findings.append(_line_finding(pair, figures, worker))
        if not figures.error:
            line = Line(sender, worker.id, figures.latency_s, figures.forward, figures.backward, figures.kind)
            diagnosis.lines.append(line)


def _figures(probes: dict[str, Probe], sender: str, worker: WorkerEntry) -> Measured:
    try:
        if sender != "local":
            return probes[sender].measure(worker.host, worker.port)
        probe = probes[worker.id]
        found, card = probe.test(), card_of(probe.own_host)
        return Measured("", found.latency_s, found.forward, found.backward, card.name, card.kind)
    except PeerError as exc:
        return Measured(error=str(exc))


def _line_finding(pair: str, figures: Measured, worker: WorkerEntry) -> Finding:
    if figures.error:
        where = show_address(worker.host, worker.port)
        remedy = f"let the first reach {where} (firewall, route), or transport.topology=star"
        if BUSY in figures.error:
            return Finding(pair, "line", "not run", printable(figures.error))
        return Finding(pair, "line", "fail", printable(figures.error), remedy)
    found = (
        f"{show_rate(figures.forward)} there, {show_rate(figures.backward)} back, round trip "
        f"{figures.latency_s * 1000:.2f} ms, {printable(figures.kind)} ({printable(figures.card)})"
    )
    if min(figures.forward, figures.backward) < SLOW_BYTES or figures.latency_s > FAR_S:
        remedy = (
            "a cable (Ethernet, Thunderbolt) in place of Wi-Fi; transport.wire_dtype=bfloat16 halves float32 traffic"
        )
        return Finding(pair, "line", "note", f"slow: {found}", remedy)
    return Finding(pair, "line", "ok", found)


def show_rate(num_bytes: float) -> str:
    """A rate as networks are sold: bits a second."""
    bits = num_bytes * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"

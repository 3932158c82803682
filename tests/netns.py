"""Network namespaces as machines: each with addresses, a name and a HOME of its own; nothing is left of them.

    lan()      a 192.0.2.1 --+
               b 192.0.2.2 --+-- a switch
               c 192.0.2.3 --+

    apart()    b 192.0.2.2 ---- 192.0.2.1 a 198.51.100.1 ---- 198.51.100.2 c
               a does not forward: b and c cannot reach one another

Needs Linux, root and the packages iproute2, nftables and iptables.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from forkserver import MACHINE, NETWORK, Child, ForkServer
from processes import REPO, START_S, Outcome, Running, environment, own_process

T = TypeVar("T")

CARD = "eth0"
_CLONE_NEWNET = 0x40000000
_ETC = ("hosts", "resolv.conf")  # in the folder of all machines
# A name and name services of the machine's own, then the command in this process's place.
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && mount --bind "$2" /etc/resolv.conf && shift 2 && exec "$@"'


@cache
def why_not() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc", "nft", "iptables", "unshare") if shutil.which(name) is None]:
        return f"needs the commands {', '.join(missing)} (packages iproute2, nftables, iptables, util-linux)"
    probe = f"hetero-probe-{os.getpid()}"
    made = _call("ip", "netns", "add", probe, check=False)
    _call("ip", "netns", "del", probe, check=False)
    return None if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip()}"


@dataclass
class Forked:
    """A script in a forked process, used as `Running` is."""

    child: Child
    began: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self.child.text

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """Waits until it has printed what matches."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.text)):
            ended = self.child.code() is not None and not re.search(pattern, self.text)
            assert not ended and time.monotonic() < deadline, f"no {pattern!r} within {timeout_s} s in:\n{self.text}"
            time.sleep(0.02)
        return found

    def wait(self, timeout_s: float = START_S) -> Outcome:
        """Waits until it has ended."""
        code = self.child.wait(timeout_s)
        return Outcome(code, self.text, time.monotonic() - self.began)


@dataclass
class Machine:
    """A network namespace that stands for a machine.

    Attributes:
        name: its host name; `name.local` leads to its first address, on every machine of the network.
        space: the namespace.
        folder: its HOME and what it writes.
        addresses: on its network cards eth0, eth1, ...
        server: forks `train.py` and `worker.py`, so that they start in no time; None: they are started as usual.
    """

    name: str
    space: str
    folder: Path
    addresses: list[str] = field(default_factory=list)
    server: ForkServer | None = None
    _logs: Iterator[int] = field(default_factory=itertools.count)

    @property
    def host(self) -> str:
        """Its first address."""
        return self.addresses[0]

    @property
    def outputs(self) -> Path:
        """Where its scripts put what they make."""
        return self.folder / "outputs"

    def ip(self, *args: str) -> None:
        """Runs `ip` in it."""
        _call("ip", "-n", self.space, *args)

    def tool(self, *argv: str) -> str:
        """Runs a tool of the system in it; gives what it printed."""
        return _call("ip", "netns", "exec", self.space, *argv).stdout

    def command(self, *argv: str) -> list[str]:
        """What runs a command on it; `python` is the one of the tests."""
        words = [sys.executable if index == 0 and word == "python" else word for index, word in enumerate(argv)]
        files = [str(self.folder.parent / name) for name in _ETC]
        enter = ["ip", "netns", "exec", self.space, "unshare", "--uts", "--mount", "sh", "-c", _ENTER]
        return [*enter, self.name, *files, *words]

    @property
    def _environment(self) -> dict[str, str]:
        return {"HOME": str(self.folder)}

    def run(self, *argv: str, typed: str = "", timeout_s: float = START_S) -> Outcome:
        """Runs a command in the checkout to its end.

        Args:
            argv: the command.
            typed: what standard input holds.
            timeout_s: how long it may take.
        """
        if self._forks(argv):
            with self.started(*argv) as running:
                return running.wait(timeout_s)
        began = time.monotonic()
        done = subprocess.run(
            self.command(*argv),
            input=typed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            cwd=REPO,
            env=environment() | self._environment,
            timeout=timeout_s,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, time.monotonic() - began)

    @contextlib.contextmanager
    def started(self, *argv: str) -> Iterator[Running | Forked]:
        """Lends a command that runs in the checkout."""
        if self._forks(argv):
            forked = Forked(self._fork(argv[1].removesuffix(".py"), *argv[2:]))
            try:
                yield forked
            finally:
                forked.child.kill()
            return
        running = own_process(self.command(*argv), cwd=REPO, env=self._environment)
        try:
            yield running
        finally:
            running.end()

    def _forks(self, argv: Sequence[str]) -> bool:
        return self.server is not None and argv[0] == "python" and argv[1] in ("train.py", "worker.py")

    def _fork(self, script: str, *args: str) -> Child:
        assert self.server is not None
        files = [str(self.folder.parent / name) for name in _ETC]
        own = {NETWORK: self.space, MACHINE: json.dumps([self.name, *files])}
        log = self.folder / f"{next(self._logs)}-{script}.log"
        log.touch()  # so that it can be read at once
        return self.server.start(script, *args, log=log, env=self._environment | own)

    def inside(self, act: Callable[[], T]) -> T:
        """Does something on a thread of this process that has entered the machine's network; sockets stay there."""
        found: list[T] = []
        errors: list[BaseException] = []

        def enter_and_act() -> None:
            try:
                with open(f"/run/netns/{self.space}") as space:
                    libc = ctypes.CDLL(None, use_errno=True)
                    if libc.setns(space.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), f"setns {self.space}")
                found.append(act())
            except BaseException as exc:
                errors.append(exc)

        thread = threading.Thread(target=enter_and_act)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return found[0]

    def drop(self, rule: str) -> None:
        """Drops incoming packets that match a rule of nftables, such as `ip saddr 192.0.2.2`."""
        self.tool("nft", "add table inet apart")
        self.tool("nft", "add chain inet apart input { type filter hook input priority 0; }")
        self.tool("nft", f"add rule inet apart input {rule} drop")

    def undrop(self) -> None:
        """Lets all packets in again."""
        self.tool("nft", "delete table inet apart")

    def shape(self, rate: str) -> None:
        """Limits what leaves the machine, to `20mbit` for example."""
        _call("tc", "-n", self.space, "qdisc", "add", "dev", CARD, "root", "tbf", "rate", rate, *_TBF)


_TBF = ("burst", "128kb", "latency", "50ms")


@contextlib.contextmanager
def lan(
    folder: Path, *names: str, prefix: str = "192.0.2", local_names: bool = True, server: ForkServer | None = None
) -> Iterator[list[Machine]]:
    """Lends machines on one switch, with the addresses .1, .2, ... in the order of their names.

    Args:
        folder: where they keep their files.
        names: of the machines.
        prefix: the first three numbers of their addresses.
        local_names: `name.local` leads to each, as by mDNS.
        server: forks their scripts; None: they are started as usual.
    """
    with _machines(folder, names, server) as machines, _space("switch") as switch:
        _call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "br0", "up")
        for number, machine in enumerate(machines, 1):
            _cable(machine, switch, f"port{number}")
            _call("ip", "-n", switch, "link", "set", f"port{number}", "master", "br0", "up")
            _assign(machine, f"{prefix}.{number}")
        _write_hosts(folder, machines if local_names else [])
        yield machines


@contextlib.contextmanager
def twin(machine: Machine) -> Iterator[Machine]:
    """Lends a machine with the first address of another, on its `lan`'s switch: its replacement, or a conflict."""
    with _machines(machine.folder.parent, [f"{machine.name}-twin"]) as (other,):
        _cable(other, _space_of("switch"), "port-twin")
        _call("ip", "-n", _space_of("switch"), "link", "set", "port-twin", "master", "br0", "up")
        other.tool("sh", "-c", f"echo 1 > /proc/sys/net/ipv4/conf/{CARD}/arp_notify")  # it announces its address
        _assign(other, machine.host)
        yield other


@contextlib.contextmanager
def apart(folder: Path, server: ForkServer | None = None) -> Iterator[list[Machine]]:
    """Lends a, b and c: a has a line to each of the others, which cannot reach one another."""
    with _machines(folder, ("a", "b", "c"), server) as machines:
        a = machines[0]
        for number, (other, prefix) in enumerate(zip(machines[1:], ("192.0.2", "198.51.100"), strict=True)):
            _cable(other, a.space, f"eth{number}")
            _assign(a, f"{prefix}.1")
            _assign(other, f"{prefix}.2")
        a.tool("sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward")  # inherited, where the host forwards
        _write_hosts(folder, machines)
        yield machines


@contextlib.contextmanager
def _machines(folder: Path, names: Sequence[str], server: ForkServer | None = None) -> Iterator[list[Machine]]:
    """Machines without a network."""
    with contextlib.ExitStack() as stack:
        machines = []
        for name in names:
            machine = Machine(name, stack.enter_context(_space(name)), folder / name, server=server)
            machine.folder.mkdir(parents=True)
            machine.ip("link", "set", "lo", "up")
            machines.append(machine)
        yield machines


@contextlib.contextmanager
def _space(name: str) -> Iterator[str]:
    space = _space_of(name)
    _call("ip", "netns", "add", space)
    try:
        yield space
    finally:
        _call("ip", "netns", "del", space)


def _space_of(name: str) -> str:
    return f"hetero-{os.getpid()}-{name}"


def _cable(machine: Machine, far: str, far_card: str) -> None:
    """A cable from a machine's eth0 to a card of another namespace."""
    _call("ip", "-n", machine.space, "link", "add", CARD, "type", "veth", "peer", "name", far_card, "netns", far)


def _assign(machine: Machine, address: str) -> None:
    """Gives a machine's next network card its address."""
    card = f"eth{len(machine.addresses)}"
    machine.ip("addr", "add", f"{address}/24", "dev", card)
    machine.ip("link", "set", card, "up")
    machine.addresses.append(address)


def _write_hosts(folder: Path, machines: Sequence[Machine]) -> None:
    """Names for what a home network's name service would tell, and no other name server."""
    lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{m.host} {m.name}.local" for m in machines)]
    (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "resolv.conf").write_text("", encoding="utf-8")


def _call(*argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done

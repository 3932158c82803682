"""Lines between machines that break in the middle of a run: noticed at both ends, gone on with when they are back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import netns
import pytest
from fleet import Fleet, adapter_of
from netns import CARD, Machine

from hetero.secret import new_secret, secret_file, write_secret

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not())),
]

SILENCE_S = 3
BUSY_S = 2.0  # until a process on a busy machine has said what it noticed
SLOW = "loop._target_=own_parts.slow_train"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """A coordinator's machine and two workers' on one switch, members of one group."""
    write_secret(secret_file(), new_secret())
    with netns.lan(tmp_path_factory.mktemp("lan"), "a", "b", "c") as lent:
        yield lent
    secret_file().unlink()


@contextmanager
def dropped(machine: Machine, *rules: str) -> Iterator[None]:
    """Packets that match are dropped without a word."""
    machine.tool("nft", "add table inet apart")
    machine.tool("nft", "add chain inet apart input { type filter hook input priority 0; }")
    machine.tool("nft", "add chain inet apart output { type filter hook output priority 0; }")
    for rule in rules:
        machine.tool("nft", f"add rule inet apart {rule} drop")
    try:
        yield
    finally:
        machine.undrop()


@contextmanager
def card_down(machine: Machine) -> Iterator[None]:
    """The network card is off."""
    machine.ip("link", "set", CARD, "down")
    try:
        yield
    finally:
        machine.ip("link", "set", CARD, "up")


@contextmanager
def reset(machine: Machine) -> Iterator[None]:
    """What comes in is answered by RST, as by a machine that was switched off and on."""
    rule = ["INPUT", "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"]
    machine.tool("iptables", "-A", *rule)
    try:
        yield
    finally:
        machine.tool("iptables", "-D", *rule)


CUTS: dict[str, tuple[Callable[[Machine], object], float]] = {  # what happens to a worker's machine, and until noticed
    "both ways": (lambda m: dropped(m, "input ip protocol tcp", "output ip protocol tcp"), SILENCE_S + 2),
    "what comes in": (lambda m: dropped(m, "input ip protocol tcp"), SILENCE_S + 2),
    "what goes out": (lambda m: dropped(m, "output ip protocol tcp"), SILENCE_S + 2),
    "card": (card_down, SILENCE_S + 2),
    "reset": (reset, 2 + SILENCE_S),  # only what is sent is answered; heartbeats are, within three quarters of a second
}
QUICK = ("what goes out", "card")


@pytest.mark.parametrize("cut", [pytest.param(cut, marks=() if cut in QUICK else pytest.mark.by_hand) for cut in CUTS])
def test_line_that_breaks_is_noticed_at_both_ends_and_gone_on_with_when_it_is_back(
    ships: Fleet, undisturbed: bytes, machines: list[Machine], cut: str
) -> None:
    """G8."""
    a, b, c = machines
    cutting, noticed_s = CUTS[cut]
    ships.network = b.space
    first = ships.worker("worker.backward_done@9@SIGSTOP", args=[f"worker.host={b.host}"])
    ships.network = c.space
    last = ships.worker(args=[f"worker.host={c.host}"])
    ships.network = a.space
    train = ships.train("out", [first, last], f"transport.io_timeout_s={SILENCE_S}", SLOW)
    first.wait_stopped()  # so that the line breaks in a step
    with cutting(b):  # type: ignore[attr-defined]
        first.send(signal.SIGCONT)
        began = time.monotonic()
        train.wait_for(r"everyone goes back from step \d to step 3", noticed_s + BUSY_S)
        last.wait_for(r"run \w+(:| ended:) .*stage [01] ", noticed_s + BUSY_S)
        first.wait_for(r"run \w+(:| ended:) .*stage [02] ", noticed_s + BUSY_S)
        assert time.monotonic() - began < noticed_s + BUSY_S
    healed_at = time.monotonic()
    train.wait_for(r"step 8/")
    assert time.monotonic() - healed_at < 25
    assert train.wait() == 0, train.text
    assert adapter_of(train.outputs) == undisturbed
    for worker in (first, last):
        worker.wait_for(r"run \w+ ended: finished", 10)


@pytest.mark.by_hand
def test_machine_that_wakes_beside_another_one_with_its_address_changes_nothing(
    ships: Fleet, undisturbed: bytes, machines: list[Machine]
) -> None:
    """G20: frozen and off the network, replaced, then back: packets go to the one or the other, as ARP has it."""
    a, b, c = machines
    ships.network = b.space
    first = ships.worker(args=[f"worker.host={b.host}"])
    ships.network = c.space
    old = ships.worker("worker.backward_done@9@SIGSTOP", args=[f"worker.host={c.host}"])
    ships.network = a.space
    train = ships.train("out", [first, old], f"transport.io_timeout_s={SILENCE_S}", SLOW)
    old.wait_stopped()
    c.ip("link", "set", CARD, "down")
    with netns.twin(c) as d:
        ships.network = d.space
        new = ships.worker(port=old.port, args=[f"worker.host={d.host}"])
        mark = train.wait_for(r"everyone goes back from step 4 to step 3").end()
        train.wait_for(r"step 5/", after=mark)
        c.ip("link", "set", CARD, "up")
        old.send(signal.SIGCONT)
        old.wait_for(r"run \w+(:| ended:) ")
        assert train.wait() == 0, train.text
        assert adapter_of(train.outputs) == undisturbed
        for worker in (first, new):
            worker.wait_for(r"run \w+ ended: finished", 10)
        assert old.child.code() is None  # it listens again

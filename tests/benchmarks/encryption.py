"""What encryption costs: one-way goodput and CPU time of our TLS link beside raw sockets, between two processes.

    python tests/benchmarks/encryption.py [--rounds 9] [--sizes 262144,4194304,33554432]
    python tests/benchmarks/encryption.py --line 1gbit      # two network namespaces as two machines; needs root

`ours` is a `SocketLink` over a `TlsChannel` with FORWARD frames and the checks of a run; `plain` is the same without
TLS, which exists for this comparison only; `ssl` is a blocking `ssl` socket with the same certificate (sendall and
recv_into); `tcp` is a blocking socket. One round of a method sends N messages of one tensor each; its clock runs from
before the first byte is sent until the receiver has the last tensor and its answer is back. The methods take turns
within each round, in the same two processes, each on a core of its own. CPU time is that of both processes together.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import netns
from figures import Figure, on_core, ratio, table
from goodput import HIDDEN, SIZES, WARM_UPS, Method, Ours, Raw, accept, connect, sources

from hetero.transport.addresses import LOOPBACK
from hetero.transport.channel import Channel, TlsChannel
from hetero.transport.identity import identity_of

Results = dict[tuple[int, str], tuple[list[float], list[float]]]

ROUND_BYTES = 256 << 20
SECRET = bytes(32)
PORTS = {"ours": 7001, "plain": 7003, "ssl": 7005, "tcp": 7007, "barrier": 7009}


class Encrypted(Ours):
    """The link as runs use it."""

    def _channel(self, sock: socket.socket) -> Channel:
        return TlsChannel(sock, identity_of(SECRET), dialler=self._is_sender)


class RawSsl(Raw):
    """A blocking `ssl` socket between the same identities: sendall, and recv_into a buffer that was made before."""

    def __init__(self, is_sender: bool, port: int, host: str = LOOPBACK) -> None:
        sock = connect(port, host) if is_sender else accept(port, host)
        identity = identity_of(SECRET)
        context = identity.client if is_sender else identity.server
        self._tls = context.wrap_socket(sock, server_side=not is_sender)
        identity.check_peer(self._tls)
        self._socket, self._buffer = self._tls, torch.empty(0)

    def receive(self) -> torch.Tensor:
        room = self._buffer.view(-1).numpy().data.cast("B")
        while room.nbytes:
            count = self._tls.recv_into(room)
            if count == 0:
                raise SystemExit("the sender is gone")
            room = room[count:]
        return self._buffer

    def close(self) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            self._socket.close()


METHODS: dict[str, Callable[[bool, int, str], Method]] = {"ours": Encrypted, "ssl": RawSsl, "plain": Ours, "tcp": Raw}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds, after 2 that warm up")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a tensor, multiples of 4096")
    parser.add_argument("--methods", default=",".join(METHODS), help="some of them")
    parser.add_argument("--round-bytes", type=int, default=ROUND_BYTES, help="sent by a method in a round, about")
    parser.add_argument("--line", help="rate of a line between two namespaces, 1gbit for example; loopback without it")
    parser.add_argument("--receive", metavar="HOST", help=argparse.SUPPRESS)  # the other process
    parser.add_argument("--send", metavar="HOST", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        _receive_all(args.receive, args)
    elif args.send:
        _send_all(args.send, args)
    else:
        _both(args)
    return 0


def _both(args: argparse.Namespace) -> None:
    """Starts the two processes, on this machine or on two that a shaped line joins."""
    command = [
        sys.executable,
        __file__,
        f"--rounds={args.rounds}",
        f"--sizes={args.sizes}",
        f"--methods={args.methods}",
    ]
    command += [f"--round-bytes={args.round_bytes}", *([f"--line={args.line}"] if args.line else [])]
    with contextlib.ExitStack() as stack:
        host, places = LOOPBACK, ([], [])
        if args.line:
            if reason := netns.why_not():
                raise SystemExit(reason)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            machines = stack.enter_context(netns.lan(folder, "a", "b"))
            for machine in machines:
                machine.shape(args.line)
            host, places = machines[1].host, tuple(m.command() for m in machines)
        receiver = subprocess.Popen([*places[1], *command, f"--receive={host}"])
        try:
            subprocess.run([*places[0], *command, f"--send={host}"], check=True)
        finally:
            receiver.terminate()
            receiver.wait(30)


def _send_all(host: str, args: argparse.Namespace) -> None:
    names = args.methods.split(",")
    results: Results = {}
    with _connected(True, host, names) as (methods, barrier):
        for size, round_, name in _plan(args):
            method, count, length = methods[name], _count(size, args), size // (4 * HIDDEN)
            tensors = sources(length)
            method.begin(length, count)
            assert barrier.readline()
            started, cpu = time.perf_counter(), time.process_time()
            for i in range(count):
                method.send(i, tensors[i % len(tensors)])
            method.wait_answer()
            stream_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
            cpu_s += float(barrier.readline())
            if round_ >= WARM_UPS:
                streams, cpus = results.setdefault((size, name), ([], []))
                streams.append(stream_s)
                cpus.append(cpu_s)
    _print(names, results, args)


def _receive_all(host: str, args: argparse.Namespace) -> None:
    """The receiver's process; in the first round it also compares what comes with what was sent."""
    with _connected(False, host, args.methods.split(",")) as (methods, barrier):
        for size, round_, name in _plan(args):
            method, count, length = methods[name], _count(size, args), size // (4 * HIDDEN)
            method.begin(length, count)
            tensors = sources(length) if round_ == 0 else []
            cpu = time.process_time()
            barrier.write(b"go\n")
            barrier.flush()
            for i in range(count):
                tensor = method.receive()
                if tensors and not torch.equal(tensor, tensors[i % len(tensors)]):
                    raise SystemExit(f"{name}: message {i} is not what was sent")
                del tensor
            method.answer()
            barrier.write(f"{time.process_time() - cpu:.6f}\n".encode())
            barrier.flush()


@contextlib.contextmanager
def _connected(is_sender: bool, host: str, names: list[str]) -> Iterator[tuple[dict[str, Method], IO[bytes]]]:
    """All methods' connections and one for barriers, on a core of its own with one torch thread."""
    torch.set_num_threads(1)
    on_core(0 if is_sender else 1)
    sock = connect(PORTS["barrier"], host) if is_sender else accept(PORTS["barrier"], host)
    barrier = sock.makefile("rwb")
    methods = {name: METHODS[name](is_sender, PORTS[name], host) for name in names}
    try:
        yield methods, barrier
    finally:
        for method in methods.values():
            with contextlib.suppress(OSError):
                method.close()
        barrier.close()
        sock.close()


def _plan(args: argparse.Namespace) -> Iterator[tuple[int, int, str]]:
    sizes = [int(size) for size in args.sizes.split(",")]
    rounds, names = range(WARM_UPS + args.rounds), args.methods.split(",")
    return ((size, round_, name) for size in sizes for round_ in rounds for name in names)


def _count(size: int, args: argparse.Namespace) -> int:
    return max(2, min(256, args.round_bytes // size))


def _print(names: list[str], results: Results, args: argparse.Namespace) -> None:
    baselines = [name for name in ("ssl", "tcp") if name in names]
    rows = []
    for size in [int(size) for size in args.sizes.split(",")]:
        count = _count(size, args)
        for name in names:
            streams, cpus = results[size, name]
            speed = Figure.of([size * count / seconds / (1 << 20) for seconds in streams])
            cpu = Figure.of([seconds / (size * count) * (1 << 30) for seconds in cpus])
            each = [ratio(results[size, baseline][0], streams).shown(".2f") for baseline in baselines]
            rows.append([f"{size / (1 << 20):g} MiB x {count}", name, speed.shown(".0f"), *each, cpu.shown(".2f")])
    where = f"a line of {args.line}" if args.line else "one machine"
    print(f"medians of {args.rounds} rounds (lowest to highest); ratios are of the same round, above 1 is faster")
    heads = ["messages", "method", "MiB/s one way", *(f"/ {baseline}" for baseline in baselines), "CPU s per GiB"]
    print(table(heads, rows), f"({where})", sep="\n")


if __name__ == "__main__":
    sys.exit(main())

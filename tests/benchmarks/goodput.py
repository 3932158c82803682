"""How fast tensors go one way between two processes over TCP on 127.0.0.1: ours, a raw socket, gloo, torch.save.

    python tests/benchmarks/goodput.py [--rounds 9] [--sizes 262144,4194304,33554432]

One round of a method sends N messages of one tensor each; its clock runs from before the first byte is sent until the
receiver has the last tensor and its answer is back. Then single round trips: a tensor there, a small answer back.
The methods take turns within each round (A B C D, A B C D, ...), in the same two processes, each on a core of its own.
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from figures import Figure, on_core, ratio, table

from hetero.inbox import Inbox
from hetero.transport import tcp
from hetero.transport.addresses import LOOPBACK
from hetero.transport.channel import Channel, PlainChannel
from hetero.transport.link import Closed, Link, Received
from hetero.transport.listening import listen
from hetero.transport.socket_link import SocketLink
from hetero.transport.tcp import TcpTransport
from hetero.wire.flow import LinkFlow, pack_shapes
from hetero.wire.headers import FrameType, Hello, Ready, Step, Tensors, Welcome
from hetero.wire.tensors import pack, unpack

HIDDEN = 1024  # a message is fp32 [1, T, 1024]
SIZES = (256 << 10, 4 << 20, 32 << 20)
NUM_SOURCES = 4  # the sender cycles through so many tensors
WARM_UPS = 2
ROUND_BYTES = 256 << 20
ROUND_TRIPS = 20


class Method(Protocol):
    """A way to move tensors; the same object on both sides, made by `connect`."""

    def begin(self, length: int, count: int) -> None:
        """Untimed: `count` messages of [1, length, HIDDEN] follow."""

    def send(self, index: int, tensor: torch.Tensor) -> None:
        """Sender: message number `index` of those announced; may return before the bytes are gone."""

    def receive(self) -> torch.Tensor:
        """Receiver: the next tensor, complete."""

    def answer(self) -> None:
        """Receiver: a small answer."""

    def wait_answer(self) -> None:
        """Sender: waits for it."""

    def close(self) -> None:
        """Ends the connection."""


class Ours:
    """A `SocketLink` with FORWARD frames and the checks of a run; a READY on the control link answers.

    Not encrypted, like what it is compared with; `encryption.py` measures that.
    """

    def __init__(self, is_sender: bool, port: int, host: str = LOOPBACK) -> None:
        self._inbox, self._host = Inbox(), host
        self._transport = TcpTransport()
        self._is_sender = is_sender
        self._link = self._open("link", port)
        self._control = self._open("control", port)
        self._step = 0

    def _open(self, purpose: str, port: int) -> Link:
        sock = connect(port, self._host) if self._is_sender else accept(port, self._host)
        link = SocketLink(
            self._channel(sock),
            self._transport.connection(dialler=self._is_sender),
            deliver=self._deliver,
            name=purpose,
            silence_s=self._transport.io_timeout_s,
        )
        hello = Hello(purpose=purpose, run_id="benchmark", epoch=0, stage=1, instance="benchmark", versions={})  # type: ignore[arg-type]
        if self._is_sender:
            link.send(FrameType.HELLO, hello)
        link.start()
        self._next(FrameType.WELCOME if self._is_sender else FrameType.HELLO)
        if not self._is_sender:
            link.send(FrameType.WELCOME, Welcome(instance="benchmark", versions={}))
        return link

    def _channel(self, sock: socket.socket) -> Channel:
        return PlainChannel(sock)

    def _deliver(self, event: Received | Closed) -> None:
        if isinstance(event, Received):
            self._inbox.put(event)
        elif event.error is not None:
            self._inbox.fail(event.error)

    def _next(self, type_: FrameType) -> Received:
        event: Received = self._inbox.get(lambda e: e.frame.type is type_, timeout_s=60)
        return event

    def begin(self, length: int, count: int) -> None:
        flow = LinkFlow(hidden_size=HIDDEN, dtype="float32", max_rows=1, max_length=length)
        self._link.connection.flow = flow  # a new one, since no gradients come back that would end the step
        self._step += 1
        self._labels = torch.zeros(1, length, dtype=torch.int64)
        self._shapes = pack_shapes([(1, length)] * count)

    def send(self, index: int, tensor: torch.Tensor) -> None:
        if index == 0:  # not in `begin`, since the receiver may not have its flow then
            self._link.send(FrameType.STEP, Step(step=self._step, label_tokens=1), [memoryview(self._shapes)])
        entries, payload = pack({"hidden": tensor, "labels": self._labels})
        self._link.send(FrameType.FORWARD, Tensors(step=self._step, micro_batch=index, tensors=entries), payload)

    def receive(self) -> torch.Tensor:
        frame = self._next(FrameType.FORWARD).frame
        assert isinstance(frame.header, Tensors)
        return unpack(frame.header.tensors, frame.payload)["hidden"]

    def answer(self) -> None:
        ready = Ready(step=self._step, finite=True, loss=None, busy_s=0, wait_s=0, bytes_sent=0, memory_bytes=0)
        self._control.send(FrameType.READY, ready)

    def wait_answer(self) -> None:
        self._next(FrameType.READY)

    def close(self) -> None:
        for link in (self._link, self._control):
            link.close(flush=False)
            link.join(5)


class Raw:
    """Blocking sendall, and recv_into a buffer that was made before, with MSG_WAITALL."""

    def __init__(self, is_sender: bool, port: int, host: str = LOOPBACK) -> None:
        self._socket = connect(port, host) if is_sender else accept(port, host)
        self._buffer = torch.empty(0)

    def begin(self, length: int, count: int) -> None:
        if self._buffer.numel() != length * HIDDEN:
            self._buffer = torch.zeros(1, length, HIDDEN)

    def send(self, index: int, tensor: torch.Tensor) -> None:
        self._socket.sendall(tensor.view(-1).numpy().data)

    def receive(self) -> torch.Tensor:
        fill(self._socket, self._buffer.view(-1).numpy().data.cast("B"))
        return self._buffer

    def answer(self) -> None:
        self._socket.sendall(b"!")

    def wait_answer(self) -> None:
        assert self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()


class Gloo:
    """torch.distributed's send and recv into a tensor that was made before."""

    def __init__(self, is_sender: bool, port: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        rank = 0 if is_sender else 1
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        self._buffer, self._small = torch.empty(0), torch.zeros(1, dtype=torch.uint8)

    def begin(self, length: int, count: int) -> None:
        if self._buffer.numel() != length * HIDDEN:
            self._buffer = torch.zeros(1, length, HIDDEN)

    def send(self, index: int, tensor: torch.Tensor) -> None:
        dist.send(tensor, 1)

    def receive(self) -> torch.Tensor:
        dist.recv(self._buffer, 0)
        return self._buffer

    def answer(self) -> None:
        dist.send(self._small, 0)

    def wait_answer(self) -> None:
        dist.recv(self._small, 1)

    def close(self) -> None:
        dist.destroy_process_group()


class Pickled(Raw):
    """What many projects do: torch.save into memory, length and bytes over a socket, torch.load."""

    def begin(self, length: int, count: int) -> None:
        pass

    def send(self, index: int, tensor: torch.Tensor) -> None:
        stream = io.BytesIO()
        torch.save(tensor, stream)
        data = stream.getbuffer()
        self._socket.sendall(struct.pack(">Q", data.nbytes))
        self._socket.sendall(data)

    def receive(self) -> torch.Tensor:
        prefix = bytearray(8)
        fill(self._socket, memoryview(prefix))
        room = bytearray(struct.unpack(">Q", prefix)[0])
        fill(self._socket, memoryview(room))
        tensor: torch.Tensor = torch.load(io.BytesIO(room), weights_only=True)
        return tensor


METHODS: dict[str, Callable[[bool, int], Method]] = {"ours": Ours, "raw": Raw, "gloo": Gloo, "torch.save": Pickled}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds, after 2 that warm up")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a tensor, multiples of 4096")
    parser.add_argument("--methods", default=",".join(METHODS), help="some of them; raw is what ratios refer to")
    args = parser.parse_args()
    sizes, names = [int(size) for size in args.sizes.split(",")], args.methods.split(",")
    ports = {name: _free_port() for name in names}
    barrier_port = _free_port()
    context = mp.get_context("spawn")
    arguments = (sizes, names, ports, barrier_port, WARM_UPS + args.rounds)
    receiver = context.Process(target=_receive_all, args=arguments, daemon=True)
    receiver.start()
    results = _send_all(*arguments)
    receiver.join(30)
    _print(sizes, names, results, args.rounds)
    return 0


Results = dict[tuple[int, str], tuple[list[float], list[float]]]


def _send_all(sizes: list[int], names: list[str], ports: dict[str, int], barrier_port: int, rounds: int) -> Results:
    """The sender's process: (size, method) -> seconds of each stream, seconds of each round trip; without warm-ups."""
    results: Results = {}
    with _both_connected(True, names, ports, barrier_port) as (methods, barrier):
        for size, round_, name in _plan(sizes, names, rounds):
            method, count, length = methods[name], _count(size), size // (4 * HIDDEN)
            tensors = sources(length)
            method.begin(length, count + ROUND_TRIPS)
            assert barrier.recv(1)
            started = time.perf_counter()
            for i in range(count):
                method.send(i, tensors[i % NUM_SOURCES])
            method.wait_answer()
            stream_s, trips = time.perf_counter() - started, []
            for i in range(ROUND_TRIPS):
                started = time.perf_counter()
                method.send(count + i, tensors[i % NUM_SOURCES])
                method.wait_answer()
                trips.append(time.perf_counter() - started)
            if round_ >= WARM_UPS:
                streams, all_trips = results.setdefault((size, name), ([], []))
                streams.append(stream_s)
                all_trips.append(sorted(trips)[len(trips) // 2])
    return results


def _receive_all(sizes: list[int], names: list[str], ports: dict[str, int], barrier_port: int, rounds: int) -> None:
    """The receiver's process; while it warms up, it also compares what comes with what was sent."""
    with _both_connected(False, names, ports, barrier_port) as (methods, barrier):
        for size, round_, name in _plan(sizes, names, rounds):
            method, count, length = methods[name], _count(size), size // (4 * HIDDEN)
            method.begin(length, count + ROUND_TRIPS)
            expected = sources(length) if round_ == 0 else []
            barrier.sendall(b"!")
            for i in range(count):
                tensor = method.receive()
                if expected and not torch.equal(tensor, expected[i % NUM_SOURCES]):
                    raise SystemExit(f"{name}: message {i} is not what was sent")
                del tensor
            method.answer()
            for _ in range(ROUND_TRIPS):
                method.receive()
                method.answer()


@contextmanager
def _both_connected(
    is_sender: bool, names: list[str], ports: dict[str, int], barrier_port: int
) -> Iterator[tuple[dict[str, Method], socket.socket]]:
    """All methods' connections and one for barriers, on a core of its own with one torch thread."""
    torch.set_num_threads(1)
    on_core(0 if is_sender else 1)
    barrier = connect(barrier_port) if is_sender else accept(barrier_port)
    methods = {name: METHODS[name](is_sender, ports[name]) for name in names}
    try:
        yield methods, barrier
        if not is_sender:  # which still waits for the last answer
            barrier.recv(1)
    finally:
        barrier.close()
        for method in methods.values():
            with suppress(OSError):
                method.close()


def _plan(sizes: list[int], names: list[str], rounds: int) -> Iterator[tuple[int, int, str]]:
    return ((size, round_, name) for size in sizes for round_ in range(rounds) for name in names)


def _count(size: int) -> int:
    return max(4, min(256, ROUND_BYTES // size))


def sources(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, length, HIDDEN, generator=generator) for _ in range(NUM_SOURCES)]


def _print(sizes: list[int], names: list[str], results: Results, rounds: int) -> None:
    rows = []
    for size in sizes:
        baseline = "raw" if "raw" in names else names[0]
        for name in names:
            streams, trips = results[size, name]
            speed = Figure.of([size * _count(size) / seconds / 1e9 for seconds in streams])
            trip = Figure.of([seconds * 1e6 for seconds in trips])
            raw_streams, raw_trips = results[size, baseline]
            rows.append(
                [
                    f"{size / (1 << 20):g} MiB x {_count(size)}",
                    name,
                    speed.shown(".2f"),
                    ratio(raw_streams, streams).shown(".2f"),
                    trip.shown(".0f"),
                    ratio(raw_trips, trips).shown(".2f"),
                ]
            )
    print(f"congestion control: {_congestion_control()}")
    print(f"medians of {rounds} rounds (lowest to highest); ratios are of the same round, above 1 is faster")
    print(table(["messages", "method", "GB/s one way", f"/ {baseline}", "round trip us", f"/ {baseline}"], rows))


def _congestion_control() -> str:
    """Of a connection on 127.0.0.1."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return "unknown"
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as sock:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def connect(port: int, host: str = LOOPBACK) -> socket.socket:
    return TcpTransport().dial(host, port, stage=1)


def accept(port: int, host: str = LOOPBACK) -> socket.socket:
    with listen(host, port, paired=True) as listener:
        sock, _ = listener.accept()
    tcp.tune(sock)
    return sock


def fill(sock: socket.socket, room: memoryview) -> None:
    """Receives exactly as many bytes as there is room for; almost always one call."""
    while room.nbytes:
        count = sock.recv_into(room, room.nbytes, socket.MSG_WAITALL)
        if count == 0:
            raise SystemExit("the sender is gone")
        room = room[count:]


if __name__ == "__main__":
    sys.exit(main())

"""Fuzzes the parser: FrameReader, Connection and LinkFlow. `python tests/fuzz/frames.py [inputs]`.

Where atheris can be imported it steers by coverage (further arguments are libFuzzer's, such as -max_total_time=60);
`--mutate` or a machine without it gives a plain loop of mutations. Only a RemoteProtocolError may come out, nothing may
be run or opened for writing, and memory must not grow.
"""

from __future__ import annotations

import contextlib
import gc
import random
import struct
import sys
import time
import tracemalloc
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import psutil

try:
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    atheris = None

with contextlib.nullcontext() if atheris is None else atheris.instrument_imports(include=["hetero.wire"]):
    from peers import EXAMPLES, feed, make_flow, raw_frame
    from watched import nothing_is_run

    from hetero.errors import RemoteProtocolError
    from hetero.wire.frames import PREFIX
    from hetero.wire.headers import FrameType, Hello
    from hetero.wire.protocol import Connection

MAX_PAYLOAD_BYTES = 1 << 20
MAX_GROWTH_BYTES = 1 << 20
SETTINGS = [
    (purpose, dialler, opened)
    for purpose in ("control", "link", "relay", "probe")
    for dialler in (0, 1)
    for opened in (0, 1)
]


def connection(setting: int) -> Connection:
    """One side of a connection before or after its handshake, on a link with a step begun."""
    purpose, dialler, opened = SETTINGS[setting % len(SETTINGS)]
    made = Connection(
        dialler=bool(dialler), allocate=lambda n: memoryview(bytearray(n)), max_frame_bytes=MAX_PAYLOAD_BYTES
    )
    hello = Hello(purpose, "run-1", 0, 1, "me", {})  # type: ignore[arg-type]
    if dialler:
        made.send(FrameType.HELLO, hello)
    if not opened:
        return made
    if dialler:
        feed(made, raw_frame(FrameType.WELCOME))
    else:
        feed(made, raw_frame(FrameType.HELLO, hello, b""))
        made.send(FrameType.WELCOME, EXAMPLES[FrameType.WELCOME][0])
    if purpose in ("link", "relay"):
        made.flow = make_flow()
        if (purpose == "link") == bool(dialler):  # this side sends forward: something may come back
            header, payload = EXAMPLES[FrameType.STEP]
            made.send(FrameType.STEP, header, [memoryview(payload)])
            header, payload = EXAMPLES[FrameType.FORWARD]
            made.send(FrameType.FORWARD, header, [memoryview(payload)])
    return made


def parse(raw: bytes) -> bool:
    """Takes an input, whose first byte chooses the connection; True where all of it was accepted.

    Raises:
        AssertionError: the refusal cannot be printed.
    """
    if not raw:
        return True
    error = ""
    try:
        feed(connection(raw[0]), raw[1:])
    except RemoteProtocolError as exc:
        error = str(exc)
    assert error.isprintable()
    return not error


def seeds() -> list[bytes]:
    """Valid frames and sequences of them."""
    frames = [raw_frame(type_) for type_ in FrameType]
    step = b"".join(raw_frame(t) for t in (FrameType.STEP, FrameType.FORWARD, FrameType.HEARTBEAT, FrameType.ERROR))
    return [*frames, step, frames[0] + frames[1], *(frame + frames[FrameType.HEARTBEAT - 1] for frame in frames)]


def mutate(draw: random.Random, raw: bytes) -> bytes:
    """A changed copy: bits, JSON signs, lengths, pieces cut out, doubled and put in."""
    changed = bytearray(raw)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4, 16))):
        if not changed:
            break
        at = draw.randrange(len(changed))
        kind = draw.randrange(9)
        if kind == 0:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[at] = draw.choice(b'\x00\xff"\\{}[],:0eE-.\x7f')
        elif kind == 2:
            del changed[at : at + draw.randrange(1, 9)]
        elif kind == 3:
            changed[at:at] = draw.randbytes(draw.randrange(1, 9))
        elif kind == 4:
            other = draw.randrange(len(changed))
            changed[at:at] = changed[other : other + draw.randrange(64)]
        elif kind == 5:
            changed[:8] = struct.pack(">Q", draw.choice((0, 8, 2**20, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
        elif kind == 6:
            changed[at:at] = draw.choice((b"1e999", b"NaN", b"-1", b"9" * 30, b"null", b"[[[[", b'"\\ud800"', b"{}"))
        elif kind == 7:
            changed = _fitting(changed)
        elif len(changed) > PREFIX.size:
            header = draw.choice((b"{}", b"[]", b"null", b"0 ", b'""', b"[{}]", b'{"":{}}'))
            changed[:8], changed[12:] = struct.pack(">Q", 8 + len(header)), struct.pack(">I", len(header)) + header
    return bytes(changed)


def _fitting(raw: bytearray) -> bytearray:
    """The lengths made right for one frame, so that what is behind them is looked at too."""
    if len(raw) < PREFIX.size or (end := raw.rfind(b"}")) < PREFIX.size:
        return raw
    header_bytes = end + 1 - PREFIX.size
    raw[:8] = struct.pack(">Q", len(raw) - 8)
    raw[12:16] = struct.pack(">I", header_bytes)
    return raw


def loop(inputs: int, *, seed: int = 0) -> tuple[int, int]:
    """Parses mutated inputs; gives how many were accepted, and how many bytes more Python holds afterwards.

    Not the process's size: that follows malloc's habits, and moves by megabytes while nothing is held.

    Raises:
        AssertionError: there is a finding.
    """
    draw, valid = random.Random(seed), seeds()
    for warm in range(2_000):  # caches that fill once are no growth
        parse(bytes([warm % len(SETTINGS)]) + mutate(draw, draw.choice(valid)))
    accepted = grown = 0
    gc.collect()
    tracemalloc.start()
    try:
        with nothing_is_run():
            for _ in range(inputs):
                accepted += parse(bytes([draw.randrange(len(SETTINGS))]) + mutate(draw, draw.choice(valid)))
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < MAX_GROWTH_BYTES, f"{grown} bytes are held"
    return accepted, grown


def main() -> None:
    """The command line."""
    if atheris is not None and "--mutate" not in sys.argv:
        _with_atheris()
        return
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    inputs = numbers[0] if numbers else 1_000_000
    rss, began = psutil.Process().memory_info().rss, time.perf_counter()
    accepted, grown = loop(inputs, seed=numbers[1] if len(numbers) > 1 else 0)
    seconds = time.perf_counter() - began
    sys.stdout.write(
        f"{inputs} inputs in {seconds:.1f} s ({inputs / seconds:.0f}/s), {accepted} accepted, no finding; "
        f"{grown} bytes more are held, the process grew by {psutil.Process().memory_info().rss - rss}\n"
    )


def _with_atheris() -> None:
    def one_input(raw: bytes) -> None:
        with nothing_is_run():
            parse(raw)

    for setting in range(len(SETTINGS)):
        for seed in seeds():
            parse(bytes([setting]) + seed)  # msgspec evaluates each schema's annotations at its first use
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

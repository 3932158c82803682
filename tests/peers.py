"""What the tests of wire and transport share: example frames, events that can be waited for, hostile bytes."""

from __future__ import annotations

import io
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hetero.transport.link import Closed, Received
from hetero.wire.flow import LinkFlow, pack_shapes
from hetero.wire.frames import Frame, FrameReader, encode
from hetero.wire.generation_flow import GenerationFlow, pack_prompts
from hetero.wire.headers import (
    About,
    Apply,
    Chosen,
    Control,
    Draw,
    Echo,
    Ended,
    Fault,
    FrameType,
    Gather,
    Header,
    Heartbeat,
    Hello,
    Hidden,
    Load,
    Measure,
    Measured,
    Prompt,
    Rate,
    Ready,
    Reason,
    Reject,
    State,
    Step,
    Sync,
    Synced,
    TensorEntry,
    Tensors,
    Welcome,
)
from hetero.wire.spans import SPAN

DEADLINE_S = 20.0
HIDDEN = TensorEntry("hidden", "float32", [2, 3, 4])
LABELS = TensorEntry("labels", "int64", [2, 3])
GRAD = TensorEntry("grad", "float32", [2, 3, 4])

# A frame of every type: header and payload.
EXAMPLES: dict[FrameType, tuple[Header, bytes]] = {
    FrameType.HELLO: (Hello("link", "run-1", 0, 1, "me", {"torch": "2.13"}), b"{}"),
    FrameType.WELCOME: (Welcome("you", {"torch": "2.13"}), b""),
    FrameType.REJECT: (Reject("busy", False), b""),
    FrameType.SYNC: (Sync(0, 0, 0), b""),
    FrameType.SYNCED: (Synced(0, "cpu", "float32", 10, 1 << 30), b""),
    FrameType.STEP: (Step(1, 12), pack_shapes([(2, 3), (2, 3)])),
    FrameType.FORWARD: (Tensors(1, 0, [LABELS, HIDDEN]), bytes(48 + 96)),
    FrameType.BACKWARD: (Tensors(1, 0, [GRAD]), bytes(96)),
    FrameType.READY: (Ready(1, True, 2.5, 0.1, 0.2, 10, 20, num_spans=1, spans_left_out=2), bytes(16 + SPAN.size)),
    FrameType.APPLY: (Apply(1, 0.5), b""),
    FrameType.GATHER: (Gather(1), b""),
    FrameType.STATE: (State(0, 1, TensorEntry("w", "float32", [4]), 0), bytes(16)),
    FrameType.HEARTBEAT: (Heartbeat(7, ping=True, answers=6, came_s=1.5, went_s=2.5), b""),
    FrameType.ABORT: (Reason("the end ü 🙂"), b""),
    FrameType.STOP: (Reason("done"), b""),
    FrameType.ERROR: (Fault("it broke", step=3), b""),
    FrameType.CONTROL: (Control({"command": "ping", "deep": [{"a": [1, 2.5, None]}]}, {"step": 100}), b""),
    FrameType.PROMPT: (Prompt(0, 2, 3, 3, 0.5, 0, 1.0, 7), pack_prompts([3, 2], [0, 1])),
    FrameType.HIDDEN: (Hidden(0, 0, HIDDEN), bytes(96)),
    FrameType.ENDED: (Ended(0), b""),
    FrameType.CHOSEN: (Chosen(0, 0), bytes(16)),
    FrameType.ECHO: (Echo(3), b""),
    FrameType.LOAD: (Load(4), bytes(100)),
    FrameType.LOADED: (Load(4), b""),
    FrameType.DRAW: (Draw(1 << 20), b""),
    FrameType.RATE: (Rate(1 << 20, 0.5), b""),
    FrameType.ABOUT: (
        About(False, "cpu", "a CPU", 1 << 34, "Linux", "eth0", "Ethernet", 1000, "192.0.2.2", "192.0.2.1", False),
        b"",
    ),
    FrameType.MEASURE: (Measure("192.0.2.3", 9999), b""),
    FrameType.MEASURED: (Measured(latency_s=0.001, forward=1e8, backward=2e8), b""),
}


def make_flow() -> LinkFlow:
    """A link on which the examples are right."""
    generation = GenerationFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=6)
    return LinkFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=3, generation=generation)


def raw_frame(type_: FrameType, header: Header | None = None, payload: bytes | None = None) -> bytes:
    """The bytes of a frame; by default those of the example."""
    example_header, example_payload = EXAMPLES[type_]
    parts = encode(type_, header or example_header, [memoryview(example_payload if payload is None else payload)])
    return b"".join(parts)


class Memory:
    """Takes note of every buffer that is asked for."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, num_bytes: int) -> memoryview:
        """A buffer."""
        self.taken.append(num_bytes)
        return memoryview(bytearray(num_bytes))


def feed(reader: Any, raw: bytes, cuts: Iterable[int] = ()) -> list[Frame]:
    """Puts bytes into a FrameReader or a Connection, in the pieces that the cuts make; gives the frames."""
    connection = not isinstance(reader, FrameReader)
    frames: list[Frame] = []
    edges = [0, *sorted(cuts), len(raw)]
    for start, end in itertools.pairwise(edges):
        while start < end:
            room = reader.receive_buffer() if connection else reader.buffer()
            assert room.nbytes > 0
            count = min(room.nbytes, end - start)
            room[:count] = raw[start : start + count]
            start += count
            frame = reader.received(count) if connection else reader.advance(count)
            if frame is not None:
                frames.append(frame)
    return frames


class Events:
    """Where a link delivers; can be waited for."""

    def __init__(self) -> None:
        self.all: list[Received | Closed] = []
        self._changed = threading.Condition()

    def __call__(self, event: Received | Closed) -> None:
        with self._changed:
            self.all.append(event)
            self._changed.notify_all()

    def wait(self, match: Callable[[Received | Closed], bool], timeout_s: float = DEADLINE_S) -> Any:
        """The first event that matches."""
        with self._changed:
            found = self._changed.wait_for(lambda: [e for e in self.all if match(e)], timeout_s)
            assert found, f"nothing within {timeout_s} s; there is {self.all[:10]}"
            return found[0]

    def num_frames(self, number: int, timeout_s: float = DEADLINE_S) -> list[Frame]:
        """So many frames, once they are here and if there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.all) >= number, timeout_s)
            frames = self.frames()
        assert len(frames) == number, f"{len(frames)} frames of {number} within {timeout_s} s"
        return frames

    def frame(self, type_: FrameType, timeout_s: float = DEADLINE_S) -> Frame:
        """The first frame of a type."""
        found = self.wait(lambda e: isinstance(e, Received) and e.frame.type is type_, timeout_s)
        return found.frame  # type: ignore[no-any-return]

    def closed(self, timeout_s: float = DEADLINE_S) -> Closed:
        """The end of the connection."""
        return self.wait(lambda e: isinstance(e, Closed), timeout_s)  # type: ignore[no-any-return]

    def frames(self) -> list[Frame]:
        """All frames so far."""
        return [event.frame for event in self.all if isinstance(event, Received)]


def wait_until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    """Waits for what no event announces."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.002)


class Touch:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def hostile_blobs(marker: Path) -> Sequence[bytes]:
    """A pickle and a torch.save file that touch `marker` when they are loaded, which is tried once here."""
    saved = io.BytesIO()
    torch.save(Touch(marker), saved)
    blobs = [pickle.dumps(Touch(marker)), pickle.dumps(Touch(marker), protocol=0), saved.getvalue()]
    for load in (lambda: pickle.loads(blobs[0]), lambda: torch.load(io.BytesIO(blobs[2]), weights_only=False)):
        load()  # type: ignore[no-untyped-call]
        assert marker.exists()
        marker.unlink()
    return blobs

"""The frame types and the closed schema of each type's header."""

from __future__ import annotations

import enum
import math
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_HEADER_BYTES = 16 * 1024
MAX_TENSORS = 16
STATE_CHUNK_BYTES = 1 << 20
MAX_PROMPTS = 4096  # of a batch
LOAD_BYTES = 1 << 17
MAX_DRAW_BYTES = 1 << 27

DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

DtypeName = Literal["float64", "int64", "float32", "int32", "bfloat16", "float16", "int8", "uint8", "bool"]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Size = Annotated[int, Meta(ge=0, lt=1 << 40)]
Shape = Annotated[list[Size], Meta(max_length=6)]
Text = Annotated[str, Meta(max_length=2000)]
Key = Annotated[str, Meta(max_length=512)]
Identifier = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]


class FrameType(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REJECT = 3
    SYNC = 4
    SYNCED = 5
    STEP = 6
    FORWARD = 7
    BACKWARD = 8
    READY = 9
    APPLY = 10
    GATHER = 11
    STATE = 12
    HEARTBEAT = 13
    ABORT = 14
    STOP = 15
    ERROR = 16
    CONTROL = 17
    PROMPT = 30
    HIDDEN = 31
    ENDED = 32
    CHOSEN = 33
    ECHO = 40
    LOAD = 41
    LOADED = 42
    DRAW = 43
    RATE = 44
    ABOUT = 45
    MEASURE = 46
    MEASURED = 47


class TensorEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's place in a payload; tensors follow one another without gaps."""

    name: Key
    dtype: DtypeName
    shape: Shape

    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


Table = Annotated[list[TensorEntry], Meta(max_length=MAX_TENSORS)]


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """What every header is."""


class Hello(Header, frozen=True, forbid_unknown_fields=True):
    """First frame of whoever dialled; on a control its payload is the spec's JSON.

    A `link` comes from the stage before (or from the coordinator in its place), a `relay` from the coordinator in place
    of the stage after. A `probe` is of no run: it asks about the machine and tests the line to it.
    """

    purpose: Literal["control", "link", "relay", "probe"]
    run_id: Identifier
    epoch: Count
    stage: Count
    instance: Identifier
    versions: Annotated[dict[Key, Key], Meta(max_length=16)]


class Welcome(Header, frozen=True, forbid_unknown_fields=True):
    """The listener takes part.

    On a control, `digest` is that of the spec as the listener understood it, and the payload is JSON: the fingerprint
    of the listener's base model, part -> digest, empty where the model is not there yet.
    """

    instance: Identifier
    versions: Annotated[dict[Key, Key], Meta(max_length=16)]
    digest: Annotated[str, Meta(max_length=64)] = ""


class Reject(Header, frozen=True, forbid_unknown_fields=True):
    """The listener does not take part; `permanent` where trying again cannot help."""

    reason: Text
    permanent: bool


class Sync(Header, frozen=True, forbid_unknown_fields=True):
    """Continue after `step` finished steps, with `num_tensors` tensors of state that follow as STATE frames."""

    epoch: Count
    step: Count
    num_tensors: Count


class Synced(Header, frozen=True, forbid_unknown_fields=True):
    """The stage is built, linked to its neighbours, and holds the state.

    `adapter` is the digest of names and shapes of its trained tensors.
    """

    epoch: Count
    device: Key
    dtype: Key
    trained: Count
    memory_bytes: Count
    adapter: Annotated[str, Meta(max_length=64)] = ""


class Step(Header, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A step begins; the payload is int32 [M, 2]: rows and length of each micro-batch.

    `real_tokens`, all but padding, is there where the router loss is on. With `evaluate`, a number from 1 on after each
    step, micro-batches only go forward, with what `step` has left; a BACKWARD without tensors says that one was taken.
    """

    step: Count
    label_tokens: Count
    real_tokens: Count = 0
    evaluate: Count = 0


class Tensors(Header, frozen=True, forbid_unknown_fields=True):
    """Hidden states of a micro-batch (FORWARD) or their gradient (BACKWARD), and the small tensors that ride along."""

    step: Count
    micro_batch: Count
    tensors: Table


class Ready(Header, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stage's backward work of a step is done; the payload is float64 [n]: squared gradient norms.

    The last stage gives the `loss`, and where the router loss is on the part of it that is the routers'. After an
    evaluation, whose number `evaluate` is, the loss is the sum over its label tokens, without the routers' part. Behind
    the norms come `num_spans` spans (`hetero.wire.spans`): what the stage did when, on its own clock; `spans_left_out`
    more did not fit.
    """

    step: Count
    finite: bool
    loss: float | None
    busy_s: float
    wait_s: float
    bytes_sent: Count
    memory_bytes: Count
    router_loss: float | None = None
    evaluate: Count = 0
    num_spans: Annotated[int, Meta(ge=0, le=4096)] = 0
    spans_left_out: Count = 0


class Apply(Header, frozen=True, forbid_unknown_fields=True):
    """The one decision about a step, the same for all stages.

    `save`: send the stage's state as it is afterwards, while training goes on.
    """

    step: Count
    clip_factor: float
    save: bool = False


class Gather(Header, frozen=True, forbid_unknown_fields=True):
    """Send the stage's state as it is after `step`, the last of this session."""

    step: Count


class State(Header, frozen=True, forbid_unknown_fields=True):
    """A piece of a tensor of state: bytes from `offset` of tensor number `index` of `total`."""

    index: Count
    total: Count
    tensor: TensorEntry
    offset: Count


class Heartbeat(Header, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sign of life, independent of compute.

    `ping` asks for an answer at once. The answer holds the ping's sequence, and on the answerer's clock when it came
    and when the answer went.
    """

    sequence: Count
    ping: bool = False
    answers: Count | None = None
    came_s: float | None = None
    went_s: float | None = None


class Reason(Header, frozen=True, forbid_unknown_fields=True):
    """Why a session ends (ABORT, STOP), in one clause; `again`: the run goes on in another session.

    From a worker, STOP asks for the run's end after this step.
    """

    reason: Text
    again: bool = False


class Fault(Header, frozen=True, forbid_unknown_fields=True):
    """What went wrong on the sender's side, or with a peer of its (then that peer's stage, host and port).

    `lost`: the connection to that peer is gone, or it was silent. `stuck`: its compute thread does not come back.
    """

    reason: Text
    stage: Count | None = None
    host: Key | None = None
    port: Count | None = None
    step: Count | None = None
    lost: bool = False
    stuck: bool = False


class Prompt(Header, frozen=True, forbid_unknown_fields=True):
    """A batch of prompts begins, each padded on the left to `length` tokens.

    The payload is int32 [2, rows]: how many tokens each prompt has, and its number in the run. The rest is for the last
    stage, which chooses the tokens.
    """

    batch: Count
    rows: Count
    length: Count
    max_new_tokens: Count
    temperature: Annotated[float, Meta(ge=0)]
    top_k: Count
    top_p: Annotated[float, Meta(gt=0, le=1)]
    seed: Count


class Hidden(Header, frozen=True, forbid_unknown_fields=True):
    """Hidden states of a batch: those of the prompts at `position` 0, of the last chosen tokens from then on."""

    batch: Count
    position: Count
    tensor: TensorEntry


class Ended(Header, frozen=True, forbid_unknown_fields=True):
    """A batch is over; whatever was kept of it may go."""

    batch: Count


class Chosen(Header, frozen=True, forbid_unknown_fields=True):
    """The last stage's next token of each row of a batch; the payload is int64 [rows]."""

    batch: Count
    position: Count


class Control(Header, frozen=True, forbid_unknown_fields=True):
    """A message of the extension point."""

    payload: dict[str, Any]
    metadata: dict[str, Any]


class Echo(Header, frozen=True, forbid_unknown_fields=True):
    """A probe's question that comes back as it is."""

    sequence: Count


class Load(Header, frozen=True, forbid_unknown_fields=True):
    """A probe's load: its payload says nothing, and LOADED with the same number answers it."""

    sequence: Count


class Draw(Header, frozen=True, forbid_unknown_fields=True):
    """Send load to me now, so many bytes at most; RATE follows the last of it."""

    num_bytes: Annotated[int, Meta(ge=1, le=MAX_DRAW_BYTES)]


class Rate(Header, frozen=True, forbid_unknown_fields=True):
    """How much load got through in how long."""

    num_bytes: Count
    seconds: Annotated[float, Meta(ge=0, lt=3600)]


class About(Header, frozen=True, forbid_unknown_fields=True):
    """A machine as its worker sees it, and the line to whoever asks.

    `card` is the network card of this connection, `kind` what it is; `own_host` is the address of this end, `seen_host`
    that of the other end as seen from here: where they are not what the other side says, something between translates.
    """

    busy: bool
    device: Key
    device_name: Key
    memory_bytes: Count
    system: Key
    card: Key
    kind: Key
    speed_mbit: Count
    own_host: Key
    seen_host: Key
    behind_nat: bool


class Measure(Header, frozen=True, forbid_unknown_fields=True):
    """Test the line from you to that worker of our group."""

    host: Key
    port: Annotated[int, Meta(ge=1, le=65535)]


class Measured(Header, frozen=True, forbid_unknown_fields=True):
    """A line's figures: round trip, and bytes a second to the worker that was dialled and back; or why there are none.

    `card` and `kind` are of the dialler's end.
    """

    error: Text = ""
    latency_s: Annotated[float, Meta(ge=0, lt=3600)] = 0.0
    forward: Annotated[float, Meta(ge=0, lt=1e15)] = 0.0
    backward: Annotated[float, Meta(ge=0, lt=1e15)] = 0.0
    card: Key = ""
    kind: Key = ""


HEADERS: dict[FrameType, type[Header]] = {
    FrameType.HELLO: Hello,
    FrameType.WELCOME: Welcome,
    FrameType.REJECT: Reject,
    FrameType.SYNC: Sync,
    FrameType.SYNCED: Synced,
    FrameType.STEP: Step,
    FrameType.FORWARD: Tensors,
    FrameType.BACKWARD: Tensors,
    FrameType.READY: Ready,
    FrameType.APPLY: Apply,
    FrameType.GATHER: Gather,
    FrameType.STATE: State,
    FrameType.HEARTBEAT: Heartbeat,
    FrameType.ABORT: Reason,
    FrameType.STOP: Reason,
    FrameType.ERROR: Fault,
    FrameType.CONTROL: Control,
    FrameType.PROMPT: Prompt,
    FrameType.HIDDEN: Hidden,
    FrameType.ENDED: Ended,
    FrameType.CHOSEN: Chosen,
    FrameType.ECHO: Echo,
    FrameType.LOAD: Load,
    FrameType.LOADED: Load,
    FrameType.DRAW: Draw,
    FrameType.RATE: Rate,
    FrameType.ABOUT: About,
    FrameType.MEASURE: Measure,
    FrameType.MEASURED: Measured,
}

# Payload limits by type; tensor frames are limited by transport.max_frame_bytes and by what the plan implies.
MAX_PAYLOAD_BYTES: dict[FrameType, int] = dict.fromkeys(FrameType, 0) | {
    FrameType.HELLO: 64 * 1024,
    FrameType.WELCOME: 64 * 1024,
    FrameType.STEP: 512 * 1024,
    FrameType.READY: 1 << 20,
    FrameType.STATE: STATE_CHUNK_BYTES,
    FrameType.PROMPT: 2 * 4 * MAX_PROMPTS,
    FrameType.CHOSEN: 8 * MAX_PROMPTS,
    FrameType.LOAD: LOAD_BYTES,
}
for _tensor_frame in (FrameType.FORWARD, FrameType.BACKWARD, FrameType.HIDDEN):
    del MAX_PAYLOAD_BYTES[_tensor_frame]

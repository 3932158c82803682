"""The run's state machine for coordinator and worker, sans-IO: frames and disconnects in, actions out.

coordinator   JOIN --all WELCOME--> SYNC --all SYNCED--> RUN(step) --all READY, APPLY--> RUN(step + 1) ...
              APPLY(save): state comes in while the run goes on; GATHER: state comes in, no step follows
worker        LISTEN --HELLO--> JOINED --SYNC--> RUN ... --STOP, ABORT, a fault--> LISTEN

A fault in any phase ends the session; the run goes on in another one, with a higher epoch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from hetero.errors import LocalProtocolError, PeerError, RemoteProtocolError
from hetero.wire.frames import Frame
from hetero.wire.headers import (
    Apply,
    Chosen,
    Fault,
    FrameType,
    Gather,
    Header,
    Hello,
    Ready,
    Reason,
    Reject,
    State,
    Sync,
    Synced,
    Welcome,
)
from hetero.wire.spans import SPAN


@dataclass(frozen=True)
class Joined:
    """Every worker answered; stage -> its WELCOME and the fingerprint of its base model, JSON."""

    welcomes: dict[int, Welcome]
    models: dict[int, memoryview]


@dataclass(frozen=True)
class AllSynced:
    """Every worker is built, linked and holds the state; stage -> its SYNCED."""

    synced: dict[int, Synced]


@dataclass(frozen=True)
class StepReady:
    """Every worker finished the backward work of a step; stage -> its READY, and its norms and spans as bytes."""

    step: int
    ready: dict[int, Ready]
    norms: dict[int, memoryview]
    spans: dict[int, memoryview] = field(default_factory=dict)


@dataclass(frozen=True)
class StatePiece:
    """A piece of a worker's state."""

    stage: int
    header: State
    payload: memoryview


@dataclass(frozen=True)
class TokensChosen:
    """The last stage's next token of each row of a batch of prompts, int64."""

    header: Chosen
    payload: memoryview


@dataclass(frozen=True)
class StopAsked:
    """Somebody wants the run to end after this step, with a checkpoint."""

    reason: str


@dataclass(frozen=True)
class Send:
    """Action: send this frame to the worker of a stage."""

    stage: int
    type: FrameType
    header: Header


@dataclass(frozen=True)
class Notify:
    """Action: tell the compute thread."""

    event: Joined | AllSynced | StepReady | StatePiece | TokensChosen | StopAsked


@dataclass(frozen=True)
class Fail:
    """Action: the session is over."""

    error: PeerError


@dataclass(frozen=True)
class Retry:
    """Action: the worker is busy or not there yet; dial it again later."""

    stage: int
    reason: str


Action: TypeAlias = Send | Notify | Fail | Retry


@dataclass(frozen=True)
class Peer:
    """Where a stage runs."""

    stage: int
    host: str
    port: int

    def error(self, reason: str, step: int | None = None, *, lost: bool = False) -> PeerError:
        """A fault of this peer; `lost` where only the connection to it is gone."""
        return PeerError(reason, stage=self.stage, host=self.host, port=self.port, step=step, lost=lost)


def told_by(peer: Peer, fault: Fault, *, known: Mapping[int, Peer] | None = None, step: int | None = None) -> PeerError:
    """What a peer's ERROR says: its own fault, or one of a neighbour of its.

    Args:
        peer: that sent it.
        fault: the ERROR's header.
        known: stage -> peer, whose addresses count more than those that `peer` sees.
        step: that is under way, where the fault names none.
    """
    step = fault.step or step
    if fault.stage is None:
        return peer.error(fault.reason, step, lost=fault.lost)
    if about := (known or {}).get(fault.stage):
        return about.error(fault.reason, step, lost=fault.lost)
    return PeerError(fault.reason, stage=fault.stage, host=fault.host, port=fault.port, step=step, lost=fault.lost)


class Phase(enum.Enum):
    """Where the coordinator stands."""

    JOIN = "join"
    SYNC = "sync"
    RUN = "run"
    GATHER = "gather"
    OVER = "over"


@dataclass
class CoordinatorControl:
    """The coordinator's side of a session.

    Args:
        peers: the workers, by stage.
        epoch: number of this session within the run.
        recovers: a lost peer ends this session only, and the workers are told so.
    """

    peers: dict[int, Peer]
    epoch: int
    recovers: bool = False
    phase: Phase = Phase.JOIN
    step: int | None = None
    _welcomes: dict[int, Welcome] = field(default_factory=dict)
    _models: dict[int, memoryview] = field(default_factory=dict)
    _synced: dict[int, Synced] = field(default_factory=dict)
    _ready: dict[int, Ready] = field(default_factory=dict)
    _norms: dict[int, memoryview] = field(default_factory=dict)
    _evaluation: int = 0  # number of the one after `step` that is under way
    _spans: dict[int, memoryview] = field(default_factory=dict)
    _saving: set[int] = field(default_factory=set)  # stages whose state is on its way
    _awaited: tuple[int, int, int] | None = None  # batch, position and rows of the tokens that are to come

    def received(self, stage: int, frame: Frame) -> list[Action]:
        """A frame came from a worker; one that comes after the end means nothing."""
        if self.phase is Phase.OVER:
            return []
        try:
            return self._received(stage, frame)
        except RemoteProtocolError as exc:
            return self._fail(self.peers[stage].error(str(exc), self.step))

    def closed(self, stage: int, reason: str, *, lost: bool = False) -> list[Action]:
        """A worker's control connection ended; `lost` where nobody broke a rule."""
        if self.phase is Phase.OVER:
            return []
        if lost and self.phase is Phase.JOIN and len(self._welcomes) < len(self.peers):
            self._welcomes.pop(stage, None)
            self._models.pop(stage, None)
            return [Retry(stage, reason)]  # it may be starting, or ending a session before this one
        return self._fail(self.peers[stage].error(reason, self.step, lost=lost))

    def sync(self, step: int, num_tensors: dict[int, int]) -> list[Action]:
        """Everyone is to continue after `step` finished steps; each stage's tensors follow as STATE frames."""
        self._expect(Phase.JOIN)
        self.phase = Phase.SYNC
        return [
            Send(stage, FrameType.SYNC, Sync(epoch=self.epoch, step=step, num_tensors=num_tensors.get(stage, 0)))
            for stage in self.peers
        ]

    def begin_step(self, step: int) -> None:
        """The coordinator starts to compute a step."""
        self._expect(Phase.RUN)
        self.step = step
        self._ready, self._norms, self._spans = {}, {}, {}  # until here a READY that comes twice is known as such
        self._evaluation = 0

    def begin_evaluation(self, step: int, number: int) -> None:
        """The coordinator starts an evaluation after a step, the `number`-th after it in this session."""
        self.begin_step(step)
        self._evaluation = number

    def apply(self, clip_factor: float, *, save: bool = False) -> list[Action]:
        """The decision about the step that all are ready with; with `save` each then sends its state."""
        self._expect(Phase.RUN)
        assert self.step is not None
        assert len(self._ready) == len(self.peers)
        assert not self._evaluation
        if save:
            self._begin_saving()
        return [Send(s, FrameType.APPLY, Apply(step=self.step, clip_factor=clip_factor, save=save)) for s in self.peers]

    def gather(self, step: int) -> list[Action]:
        """Everyone is to send its state as it is after `step`; no step follows in this session.

        A worker hears of steps from its neighbour and of GATHER from here, so their order would not be known.
        """
        self._expect(Phase.RUN)
        self._begin_saving()
        self.phase = Phase.GATHER
        return [Send(stage, FrameType.GATHER, Gather(step=step)) for stage in self.peers]

    def await_tokens(self, batch: int, position: int, rows: int) -> None:
        """Hidden states of prompts are on their way, so the last stage is to choose the next token of each row."""
        if self.phase not in (Phase.RUN, Phase.GATHER):
            raise LocalProtocolError(f"generation belongs to phase run or gather, the session is in {self.phase.value}")
        self._awaited = batch, position, rows

    def state_complete(self, stage: int) -> None:
        """A stage's state is in, all of it."""
        self._saving.discard(stage)

    def is_saving(self) -> bool:
        """Whether state is still on its way."""
        return bool(self._saving)

    def _begin_saving(self) -> None:
        if self._saving:
            raise LocalProtocolError("the state of an earlier step is still on its way")
        self._saving = set(self.peers)

    def end(self, type_: FrameType, reason: str, *, again: bool = False) -> list[Action]:
        """Ends the session with STOP or ABORT; disconnects that follow are no fault."""
        if self.phase is Phase.OVER:
            return []
        self.phase = Phase.OVER
        return [Send(stage, type_, Reason(reason=reason[:2000], again=again)) for stage in self.peers]

    def _received(self, stage: int, frame: Frame) -> list[Action]:
        header = frame.header
        if isinstance(header, Fault):
            return self._fail(told_by(self.peers[stage], header, known=self.peers, step=self.step))
        if isinstance(header, Reject):
            self._expect_remote(Phase.JOIN, frame)
            if not header.permanent:
                return [Retry(stage, f"refused: {header.reason}")]
            return self._fail(self.peers[stage].error(f"refused: {header.reason}"))
        if isinstance(header, Reason) and frame.type is FrameType.STOP:
            return [Notify(StopAsked(header.reason))]
        if isinstance(header, State):
            if stage not in self._saving:
                raise RemoteProtocolError("state came that nobody asked for")
            return [Notify(StatePiece(stage, header, frame.payload))]
        if isinstance(header, Welcome):
            self._expect_remote(Phase.JOIN, frame)
            if stage in self._welcomes:
                raise RemoteProtocolError("WELCOME must come once")
            self._welcomes[stage], self._models[stage] = header, frame.payload
            return [Notify(Joined(self._welcomes, self._models))] if len(self._welcomes) == len(self.peers) else []
        if isinstance(header, Synced):
            return self._on_synced(stage, frame, header)
        if isinstance(header, Ready):
            return self._on_ready(stage, frame, header)
        if isinstance(header, Chosen):
            return self._on_chosen(stage, frame, header)
        raise RemoteProtocolError(f"{frame.type.name} has no meaning for a coordinator")

    def _on_synced(self, stage: int, frame: Frame, header: Synced) -> list[Action]:
        self._expect_remote(Phase.SYNC, frame)
        if header.epoch != self.epoch or stage in self._synced:
            raise RemoteProtocolError(f"SYNCED of epoch {self.epoch} must come once, got epoch {header.epoch}")
        self._synced[stage] = header
        if len(self._synced) < len(self.peers):
            return []
        self.phase = Phase.RUN
        return [Notify(AllSynced(self._synced))]

    def _on_ready(self, stage: int, frame: Frame, header: Ready) -> list[Action]:
        self._expect_remote(Phase.RUN, frame)
        if header.evaluate != self._evaluation:
            raise RemoteProtocolError(f"READY of evaluation {self._evaluation} must come, got {header.evaluate}")
        if header.step != self.step or stage in self._ready:
            raise RemoteProtocolError(f"READY of step {self.step} must come once, got step {header.step}")
        if frame.payload.nbytes % 8:
            raise RemoteProtocolError(f"norms are float64, got {frame.payload.nbytes} bytes")
        border = frame.payload.nbytes - header.num_spans * SPAN.size
        if border < 0:
            raise RemoteProtocolError(f"{header.num_spans} spans need more than {frame.payload.nbytes} bytes")
        self._ready[stage] = header
        self._norms[stage], self._spans[stage] = frame.payload[:border], frame.payload[border:]
        if len(self._ready) < len(self.peers):
            return []
        return [Notify(StepReady(header.step, dict(self._ready), dict(self._norms), dict(self._spans)))]

    def _on_chosen(self, stage: int, frame: Frame, header: Chosen) -> list[Action]:
        if self._awaited is None or stage != max(self.peers):
            raise RemoteProtocolError("tokens came that nobody asked for")
        batch, position, rows = self._awaited
        if (header.batch, header.position, frame.payload.nbytes) != (batch, position, 8 * rows):
            raise RemoteProtocolError(
                f"CHOSEN of batch {batch} position {position} with {8 * rows} bytes must come, got batch "
                f"{header.batch} position {header.position} with {frame.payload.nbytes}"
            )
        self._awaited = None
        return [Notify(TokensChosen(header, frame.payload))]

    def _fail(self, error: PeerError) -> list[Action]:
        """Ends the session; the other workers are told why."""
        return [*self.end(FrameType.ABORT, str(error), again=self.recovers and error.lost), Fail(error)]

    def _expect(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise LocalProtocolError(f"this belongs to phase {phase.value}, the session is in {self.phase.value}")

    def _expect_remote(self, phase: Phase, frame: Frame) -> None:
        if self.phase is not phase:
            raise RemoteProtocolError(f"{frame.type.name} belongs to phase {phase.value}, not {self.phase.value}")


@dataclass(frozen=True)
class Membership:
    """Which session a worker is in."""

    run_id: str
    epoch: int
    stage: int


def judge_hello(current: Membership | None, hello: Hello, *, link_taken: bool) -> Reject | None:
    """Whether a worker takes part in what a HELLO asks for; None means yes.

    A busy worker refuses another run for now; the same run at a higher epoch replaces its session.

    Args:
        current: the session that the worker is in.
        hello: what came.
        link_taken: the neighbour that the HELLO stands for is linked already.
    """
    if hello.purpose != "control":
        if current is None or (hello.run_id, hello.epoch, hello.stage) != (
            current.run_id,
            current.epoch,
            current.stage,
        ):
            return Reject(reason="this worker is in no such session", permanent=False)
        return Reject(reason="that neighbour is linked already", permanent=True) if link_taken else None
    if hello.stage < 1:
        return Reject(reason=f"a worker's stage is 1 or more, got {hello.stage}", permanent=True)
    if current is None or (hello.run_id == current.run_id and hello.epoch > current.epoch):
        return None
    if hello.run_id == current.run_id and hello.epoch == current.epoch and hello.stage != current.stage:
        reason = (
            f"this worker is stage {current.stage} of this run already, and cannot be stage {hello.stage} too: "
            "hardware.workers must list each worker once"
        )
        return Reject(reason=reason, permanent=True)
    if hello.run_id == current.run_id and hello.epoch == current.epoch:
        # The coordinator has lost the connection of before, and this worker has not noticed yet.
        return Reject(reason=f"this worker's session of epoch {hello.epoch} is about to end", permanent=False)
    if hello.run_id == current.run_id:
        return Reject(reason=f"epoch {hello.epoch} is over, this is epoch {current.epoch}", permanent=True)
    return Reject(reason=f"busy with another run ({current.run_id})", permanent=False)

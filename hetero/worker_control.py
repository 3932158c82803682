"""A worker's side of a session, sans-IO: what the coordinator and the stage before may say, and when.

LISTEN --HELLO (`judge_hello`)--> JOINED --SYNC--> SYNCING --its STATE, own SYNCED--> RUN --STOP, ABORT, ERROR--> OVER
RUN: STEP, own READY, APPLY of that step, again and again; GATHER between steps, and none follows
     after a step evaluations: STEP with a number, own READY with it
between steps and after GATHER: PROMPT, HIDDEN and own CHOSEN again and again, ENDED

A worker that listens is in no session and has no `WorkerControl`; each session gets its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hetero.errors import LocalProtocolError, RemoteProtocolError
from hetero.wire.frames import Frame
from hetero.wire.headers import (
    Apply,
    Chosen,
    Ended,
    Fault,
    Gather,
    Header,
    Hidden,
    Prompt,
    Ready,
    Reason,
    State,
    Step,
    Sync,
    Synced,
)


class WorkerPhase(enum.Enum):
    """Where a worker stands in its session."""

    JOINED = "joined"
    SYNCING = "syncing"
    RUN = "run"
    GATHER = "gather"
    OVER = "over"


@dataclass
class WorkerControl:
    """Judges what a worker is told, in the order in which it comes.

    Args:
        epoch: number of the session within the run.
    """

    epoch: int
    phase: WorkerPhase = WorkerPhase.JOINED
    _awaited: int = 0  # tensors of state that are to come
    _begun: int = 0  # the last step whose STEP came
    _ready: int = 0  # the last step whose READY was sent
    _decided: int = 0  # the last step whose APPLY came
    _evaluating: int = 0  # the evaluation whose STEP came and whose READY was not sent yet
    _generating: bool = False  # a batch of prompts is under way

    def received(self, frame: Frame) -> bool:
        """A frame came, on the control or from a neighbour; whether it is for compute.

        Raises:
            RemoteProtocolError: it may not come now.
        """
        header = frame.header
        if isinstance(header, Reason):
            self.phase = WorkerPhase.OVER
            return True
        if self.phase is WorkerPhase.OVER:
            return False
        if isinstance(header, Fault):
            self.phase = WorkerPhase.OVER
        elif isinstance(header, Sync):
            self._on_sync(header)
        elif isinstance(header, State):
            self._on_state(header, frame.payload.nbytes)
        elif isinstance(header, Step):
            self._on_step(header)
        elif isinstance(header, Apply):
            self._on_apply(header.step)
        elif isinstance(header, Gather):
            self._on_gather(header.step)
        elif isinstance(header, Prompt | Hidden | Ended):
            self._on_generation(header)
        return True

    def sending(self, header: Header) -> None:
        """This worker is about to send a SYNCED or a READY; all else is as it likes.

        Raises:
            LocalProtocolError: not now.
        """
        if self.phase is WorkerPhase.OVER:
            return  # nobody listens
        if isinstance(header, Synced):
            if self.phase is not WorkerPhase.SYNCING or self._awaited:
                raise LocalProtocolError(
                    f"SYNCED follows SYNC and all of its state, this is phase {self.phase.value} and "
                    f"{self._awaited} tensors are to come"
                )
            self.phase = WorkerPhase.RUN
        elif isinstance(header, Ready) and header.evaluate:
            if self.phase is not WorkerPhase.RUN or (header.evaluate, header.step) != (self._evaluating, self._begun):
                raise LocalProtocolError(f"READY of evaluation {header.evaluate} may not be sent, {self._where()}")
            self._evaluating = 0
        elif isinstance(header, Ready):
            if self.phase is not WorkerPhase.RUN or header.step != self._ready + 1 or header.step > self._begun:
                raise LocalProtocolError(f"READY of step {header.step} may not be sent, {self._where()}")
            self._ready = header.step
        elif isinstance(header, Chosen) and not self._generating:
            raise LocalProtocolError(f"CHOSEN may not be sent, {self._where()}")

    def _on_sync(self, sync: Sync) -> None:
        if self.phase is not WorkerPhase.JOINED:
            raise RemoteProtocolError(f"SYNC must come once, and first, not in phase {self.phase.value}")
        if sync.epoch != self.epoch:
            raise RemoteProtocolError(f"SYNC must be of epoch {self.epoch}, got epoch {sync.epoch}")
        self.phase, self._awaited = WorkerPhase.SYNCING, sync.num_tensors
        self._begun = self._ready = self._decided = sync.step

    def _on_state(self, piece: State, payload_bytes: int) -> None:
        if self.phase is not WorkerPhase.SYNCING or not self._awaited:
            raise RemoteProtocolError(f"STATE came in phase {self.phase.value}, none is awaited")
        if piece.offset + payload_bytes >= piece.tensor.nbytes():
            self._awaited -= 1

    def _on_step(self, header: Step) -> None:
        # The stage before may hear APPLY earlier than this one, which has sent its READY by then.
        step, next_step = header.step, self._begun if header.evaluate else self._begun + 1
        between = self._begun == self._ready and not self._evaluating and not self._generating
        if self.phase is not WorkerPhase.RUN or not between or step != next_step:
            raise RemoteProtocolError(f"STEP of step {step} may not come, {self._where()}")
        self._begun, self._evaluating = step, header.evaluate

    def _on_apply(self, step: int) -> None:
        if self.phase is not WorkerPhase.RUN or self._ready == self._decided or step != self._ready:
            raise RemoteProtocolError(f"APPLY of step {step} may not come, {self._where()}")
        self._decided = step

    def _on_gather(self, step: int) -> None:
        if self.phase is not WorkerPhase.RUN or self._evaluating or not step == self._decided == self._begun:
            raise RemoteProtocolError(f"GATHER after step {step} may not come, {self._where()}")
        self.phase = WorkerPhase.GATHER

    def _on_generation(self, header: Prompt | Hidden | Ended) -> None:
        # As with STEP, the stage before may have heard APPLY earlier than this one.
        idle = self.phase in (WorkerPhase.RUN, WorkerPhase.GATHER) and self._begun == self._ready
        idle = idle and not self._evaluating
        if not idle or self._generating == isinstance(header, Prompt):
            raise RemoteProtocolError(f"{type(header).__name__.upper()} may not come, {self._where()}")
        self._generating = not isinstance(header, Ended)

    def _where(self) -> str:
        return (
            f"this is phase {self.phase.value} with STEP of {self._begun}, READY of {self._ready} and "
            f"APPLY of {self._decided}"
            + (f", in evaluation {self._evaluating}" if self._evaluating else "")
            + (", generating" if self._generating else "")
        )

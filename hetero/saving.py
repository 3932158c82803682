"""When a checkpoint is due, and writing it beside training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from hetero.best import BEST, Best
from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.errors import CheckpointError, HeteroError, NumericError
from hetero.failpoints import hit
from hetero.gathering import Gathering
from hetero.inbox import Inbox
from hetero.member import Member
from hetero.session import CoordinatorSession
from hetero.spec import CheckpointSpec
from hetero.training_state import adapter_of

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # checkpoints in a row that could not be written
_LOOK_S = 0.02
_SAY_AFTER_S = 1.0


class Saver:
    """Saves the state of all stages, one step at a time; training goes on while it comes in and is written.

    Args:
        store: where checkpoints lie; None where none are wanted.
        spec: how often.
        about: what every checkpoint says of its run.
        safe: step that a fault before the first checkpoint goes back to.
        needs: whether a step has to be saved whatever `spec` says, since it may be the best one.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        spec: CheckpointSpec,
        about: dict[str, Any],
        safe: int = 0,
        needs: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.store, self._spec, self._about, self._safe, self._needs = store, spec, about, safe, needs
        self._best: Best | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._failures = 0
        self._begun: Gathering | None = None  # lacks this process's part
        self._is_due = False  # one is wanted and has not begun, as long as the one before is on its way
        self._last_at = time.monotonic()
        self.last_saved: int | None = None

    def wait_for_save(self, step: int, session: CoordinatorSession) -> None:
        """Before a step is taken: waits for a checkpoint on its way, where a fault would else cost over an interval.

        So never more than `every_steps` finished steps are taken again, however slow the disk is. The forward and
        backward of the step after a checkpoint run beside its saving; a save that takes no longer is never waited for.
        A step that has to be saved itself waits as well.

        Raises:
            PeerError: a worker was lost while its state was on its way.
        """
        every = self._spec.every_steps
        too_far = every is not None and step - self._safe > every
        if self.store is None or not (too_far or self._needs(step)):
            return
        began, said = time.monotonic(), False
        while session.is_saving() or self._is_writing():
            if not said and time.monotonic() - began > _SAY_AFTER_S:
                log.warning(
                    "step %d waits for the checkpoint before it; saving takes longer than a step here, and "
                    "checkpoint.every_steps bounds what a fault may cost",
                    step,
                )
                said = True
            _wait(session.inbox)

    def _by_steps(self, step: int) -> bool:
        return (self._spec.every_steps is not None and step % self._spec.every_steps == 0) or self._needs(step)

    def keep_best(self, best: Best | None) -> None:
        """Later checkpoints remember this step, and its own stays beyond `keep_last`."""
        self._best = best
        if self.store is not None:
            self.store.kept_step = best.step if best is not None and best.folder is None else None

    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def due(self, step: int, *, busy: bool = False) -> bool:
        """Whether a checkpoint is to be begun after this step; one that comes due during another follows at once.

        Args:
            step: that ends.
            busy: state of the one before is still on its way here.

        Raises:
            CheckpointError: three in a row could not be written.
        """
        if self.store is None:
            return False
        if self._failures >= MAX_FAILURES:
            raise CheckpointError(
                f"{MAX_FAILURES} checkpoints in a row could not be written, see the warnings above; "
                "free space there, or choose another checkpoint.dir"
            )
        every_minutes = self._spec.every_minutes
        by_time = every_minutes is not None and time.monotonic() - self._last_at >= 60 * every_minutes
        self._is_due = self._is_due or self._by_steps(step) or by_time
        return self._is_due and not busy and not self._is_writing()

    def begin(self, step: int, shapes: Mapping[int, Mapping[str, Sequence[int]]]) -> Gathering:
        """Where the workers' state of a step is to come; it is written when all of it is there, `own_part` too.

        Args:
            step: that is finished.
            shapes: stage -> global key -> shape.
        """
        self._last_at, self._is_due = time.monotonic(), False
        about = self._about_now()  # an evaluation after a later step may end before all of this one's state is here
        self._begun = Gathering(step, shapes, lambda step, tensors: self._all_here(step, tensors, about))
        return self._begun

    def _about_now(self) -> dict[str, Any]:
        return self._about | ({} if self._best is None else {BEST: msgspec.to_builtins(self._best)})

    def own_part(self, member: Member) -> dict[str, torch.Tensor] | None:
        """Adds this process's state to a checkpoint that has begun; after the step is logged, so no log lacks it.

        Returns:
            The state, None where no checkpoint has begun.
        """
        if self._begun is None:
            return None
        state = member.state()
        self._begun.part(member.index, state)
        self._begun = None
        hit("coordinator.state_taken")
        return state

    def _all_here(self, step: int, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        self._writing = self._writer.submit(self._write, step, tensors, about)

    def _write(self, step: int, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        assert self.store is not None
        if (bad := not_finite(tensors)) is not None:
            log.warning("step %d is not saved: %s is not finite", step, bad)
            return
        try:
            self.store.save(Snapshot(step, tensors, about))
            self._failures, self.last_saved, self._safe = 0, step, step
        except CheckpointError as exc:
            self._failures += 1
            log.warning("%s", exc)

    def settle(self) -> None:
        """Waits until what is complete is written; state that has not come in whole is given up."""
        self._is_due, self._begun = False, None
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Waits for the writer and ends it."""
        self._writer.shutdown(wait=True)

    def save_last(
        self,
        session: CoordinatorSession,
        member: Member,
        step: int,
        shapes: Mapping[int, Mapping[str, Sequence[int]]],
    ) -> dict[str, torch.Tensor]:
        """Gathers the state of all stages after the last step of a session, and writes it where it is not yet.

        Returns:
            It, by state name.

        Raises:
            PeerError: a worker was lost before its state was here.
            NumericError: what was learned is not finite, so it is neither saved nor given.
        """
        while session.is_saving():
            _wait(session.inbox)
        hit("coordinator.before_last_gather")
        here = threading.Event()
        found: dict[str, torch.Tensor] = {}

        def done(_: int, tensors: dict[str, torch.Tensor]) -> None:
            found.update(tensors)
            here.set()

        gathering = Gathering(step, shapes, done)
        session.gather(gathering)
        gathering.part(0, member.state())
        while not here.is_set():
            _wait(session.inbox)
        self.settle()
        if (bad := not_finite(found)) is not None:
            raise NumericError(f"{bad} is not finite after step {step}; a lower optimizer.lr may help")
        if self.store is not None and self.last_saved != step:
            self._write(step, found, self._about_now())
        return found


def not_finite(state: Mapping[str, torch.Tensor]) -> str | None:
    """The first trained tensor with a value that is not finite."""
    return next((key for key, tensor in sorted(adapter_of(state).items()) if not bool(tensor.isfinite().all())), None)


def _wait(inbox: Inbox) -> None:
    failure: HeteroError | None = inbox.failure()
    if failure is not None:
        raise failure
    time.sleep(_LOOK_S)

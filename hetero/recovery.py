"""Which faults a run survives, and how often."""

from __future__ import annotations

from hetero.errors import PeerError
from hetero.spec import RecoverySpec

MAX_FRUITLESS = 5  # sessions in a row that a fault ended before a new step was finished


class Recovery:
    """Judges faults.

    Args:
        spec: how long a lost machine is waited for.
    """

    def __init__(self, spec: RecoverySpec) -> None:
        self.wait_s = spec.wait_s
        self.is_on = spec.wait_s > 0
        self._furthest = -1
        self._fruitless = 0

    def goes_on(self, error: PeerError, step: int) -> bool:
        """Whether the run goes on after a fault: a machine was lost, and sessions before this one came further.

        Args:
            error: what ended the session.
            step: the last finished one.
        """
        if not self.is_on or not error.lost:
            return False
        self._fruitless = 0 if step > self._furthest else self._fruitless + 1
        self._furthest = max(self._furthest, step)
        return self._fruitless < MAX_FRUITLESS

    def last_words(self, error: PeerError) -> PeerError:
        """The error that ends the run, with what is known of the sessions before."""
        if self._fruitless < MAX_FRUITLESS:
            return error
        reason = f"{error.reason}; {MAX_FRUITLESS} sessions in a row ended before a new step was finished"
        return PeerError(reason, stage=error.stage, host=error.host, port=error.port, step=error.step, lost=error.lost)

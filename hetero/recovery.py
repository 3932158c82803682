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

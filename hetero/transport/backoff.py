"""How long to wait before a peer that did not answer is dialled again; no clock and no socket."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_S = 0.2
CAP_S = 1.0  # a worker that is started again is found this soon


class Backoff:
    """Pauses that double up to a cap, each shortened at random by up to a half: 0.1 .. 0.2 s, 0.2 .. 0.4 s, ...

    The random part keeps those who lost the same peer at the same time from dialling it at the same time ever again (M.
    Brooker, "Exponential backoff and jitter").

    Args:
        first_s: the longest that the first pause can be, seconds.
        cap_s: the longest that any can be.
        uniform: gives a number in [0, 1) for each pause.
    """

    def __init__(
        self, first_s: float = FIRST_S, cap_s: float = CAP_S, uniform: Callable[[], float] = random.random
    ) -> None:
        self._next_s, self._cap_s, self._uniform = first_s, cap_s, uniform

    def pause_s(self) -> float:
        """Seconds to wait before the next attempt."""
        longest_s = min(self._next_s, self._cap_s)
        self._next_s = 2 * longest_s
        return longest_s * (1 - self._uniform() / 2)

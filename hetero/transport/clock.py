"""What time it is at a peer, by the midpoint of pings (Cristian 1989): their clock minus this one, and how sure it is.

    here   asked ------------------------------> heard
    there          came -- went                          offset = ((came - asked) + (went - heard)) / 2

Whatever share of the round trip either way took, the offset is wrong by at most half of it. So the ping with the
least round trip counts; an old one counts less, since clocks drift.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT = 64
DRIFT = 1e-4  # seconds a second that two crystals may part; ten times what cheap ones do
_UNANSWERED = 16


@dataclass(frozen=True, slots=True)
class Offset:
    """`there - here` in seconds, and by how much it may be wrong."""

    offset_s: float
    error_s: float


class PeerClock:
    """Collects pings; written by one I/O thread, read by any. All times are of `time.perf_counter`."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=KEPT)  # offset, half the round trip, when

    def asked(self, number: int, at_s: float) -> None:
        """A ping goes out."""
        self._asked[number] = at_s
        while len(self._asked) > _UNANSWERED:
            del self._asked[min(self._asked)]

    def answered(self, number: int, came_s: float, went_s: float, heard_s: float) -> None:
        """An answer came in; one that nobody waits for any more, or that took less than no time, teaches nothing."""
        asked_s = self._asked.pop(number, None)
        if asked_s is None:
            return
        round_trip_s = (heard_s - asked_s) - (went_s - came_s)
        if came_s <= went_s and round_trip_s >= 0.0:
            self._samples.append((((came_s - asked_s) + (went_s - heard_s)) / 2, round_trip_s / 2, heard_s))

    def offset(self, now_s: float) -> Offset | None:
        """The best that is known; None before the first answer."""
        samples = [(error + DRIFT * max(0.0, now_s - at), offset) for offset, error, at in list(self._samples)]
        if not samples:
            return None
        error, offset = min(samples)
        return Offset(offset, error)

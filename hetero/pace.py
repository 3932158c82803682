"""Which stage is much slower than it usually is: a machine that got hot, swaps, or has got something else to do.

A slow stage is reported and nothing more: it computes what it should, and nobody could take its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

TIMES = 3.0  # its own median; what counts as much slower
LEAST_S = 1.0  # more than the median, at least: less is nobody's trouble
KNOWN_STEPS = 5  # before the first judgement; the first steps compile and touch the weights
WINDOW_STEPS = 100  # that the median is taken over
CALM_STEPS = 10  # at the usual pace, in a row, until the same stage may be reported again


@dataclass(frozen=True)
class Slow:
    """A stage that was much slower than usual in a step.

    Attributes:
        stage: its index.
        took_s: seconds that it computed.
        median_s: the median of the steps before.
        num_steps: how many those are.
    """

    stage: int
    took_s: float
    median_s: float
    num_steps: int


@dataclass
class _Usual:
    """What is known of a stage: seconds and seconds for each token of its last steps."""

    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    token_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    reported: bool = False
    calm: int = 0


class Pace:
    """Compares what each stage computed in a step with what it usually does.

    A step of long rows takes longer, and one of short rows takes longer for each token. So a stage is slow only where
    both its step and each token of it took more than three times the median. It is reported when it becomes slow, and
    again only after ten steps in a row at the usual pace.
    """

    def __init__(self) -> None:
        self._usual: dict[int, _Usual] = {}

    def step(self, busy_s: Mapping[int, float], num_tokens: int) -> list[Slow]:
        """Takes in a finished step; gives the stages to report now.

        Args:
            busy_s: stage -> seconds that it computed; waiting for others does not count.
            num_tokens: of the step, padding included.
        """
        found = []
        for stage, took_s in sorted(busy_s.items()):
            usual = self._usual.setdefault(stage, _Usual())
            if _is_slow(usual, took_s, took_s / max(1, num_tokens)):
                usual.calm = 0
                if not usual.reported:
                    usual.reported = True
                    found.append(Slow(stage, took_s, median(usual.step_s), len(usual.step_s)))
            else:
                usual.calm += 1
                usual.reported = usual.reported and usual.calm < CALM_STEPS
            usual.step_s.append(took_s)
            usual.token_s.append(took_s / max(1, num_tokens))
        return found


def _is_slow(usual: _Usual, step_s: float, token_s: float) -> bool:
    if len(usual.step_s) < KNOWN_STEPS:
        return False
    usual_s = median(usual.step_s)
    return step_s > max(TIMES * usual_s, usual_s + LEAST_S) and token_s > TIMES * median(usual.token_s)

"""Named places where a test signals the process, to see that nothing is lost; without the variable they do nothing."""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "HETERO_FAILPOINT"  # name@occurrence or name@occurrence@SIGINT; SIGKILL where no signal is named

NAMES = (
    "coordinator.joined",
    "coordinator.synced",
    "coordinator.step_begun",
    "coordinator.all_ready",
    "coordinator.decided",
    "coordinator.applied",
    "coordinator.state_taken",
    "coordinator.step_logged",
    "coordinator.evaluating",
    "coordinator.evaluated",
    "coordinator.before_last_gather",
    "coordinator.adapter_written",
    "checkpoint.begun",
    "checkpoint.before_manifest",
    "checkpoint.before_rename",
    "checkpoint.renamed",
    "checkpoint.pruned",
    "worker.welcomed",
    "worker.built",
    "worker.restored",
    "worker.linked",
    "worker.synced",
    "worker.step_begun",
    "worker.forward_done",
    "worker.backward_done",
    "worker.ready_sent",
    "worker.decision_here",
    "worker.applied",
    "worker.evaluating",
    "worker.state_taken",
    "worker.state_queued",
)

_wanted, _occurrence, _signal, *_ = *os.environ.get(VARIABLE, "").split("@"), "", ""
_hits: Counter[str] = Counter()


def hit(name: str) -> None:
    """The process has come to a place; it gets the signal here, where the variable says so."""
    if name != _wanted:
        return
    _hits[name] += 1
    if _hits[name] == int(_occurrence or 1):
        os.kill(os.getpid(), signal.Signals[_signal or "SIGKILL"])

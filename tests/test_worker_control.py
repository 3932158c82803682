"""What a worker may be told and when, without sockets, threads or a clock."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import EXAMPLES

from hetero.errors import LocalProtocolError, RemoteProtocolError
from hetero.wire.frames import Frame
from hetero.wire.headers import (
    Apply,
    Fault,
    FrameType,
    Gather,
    Header,
    Ready,
    Reason,
    State,
    Step,
    Sync,
    Synced,
    TensorEntry,
)
from hetero.worker_control import WorkerControl, WorkerPhase

T = FrameType
EPOCH, STEP = 3, 7  # STEP: finished ones at SYNC
SYNCED = Synced(EPOCH, "cpu", "float32", 10, 0)
TWO_PIECES = TensorEntry("w", "float32", [4])
SYNC = Sync(EPOCH, STEP, 0)


def tell(control: WorkerControl, type_: FrameType, header: Header, payload: bytes = b"") -> bool:
    return control.received(Frame(type_, header, memoryview(payload)))


def ready(step: int) -> Ready:
    return Ready(step, True, None, 0.1, 0.1, 10, 20)


def half(offset: int, index: int = 0) -> tuple[FrameType, State, bytes]:
    return T.STATE, State(index, 2, TWO_PIECES, offset), bytes(8)


def running() -> WorkerControl:
    control = WorkerControl(EPOCH)
    tell(control, T.SYNC, SYNC)
    control.sending(SYNCED)
    return control


def in_step() -> WorkerControl:
    control = running()
    tell(control, T.STEP, Step(STEP + 1, 1))
    return control


def is_ready() -> WorkerControl:
    control = in_step()
    control.sending(ready(STEP + 1))
    return control


def test_session_goes_through_its_phases() -> None:
    control = WorkerControl(EPOCH)
    assert tell(control, T.SYNC, Sync(EPOCH, STEP, 2))
    for piece in (half(0), half(8), half(0, 1)):
        assert tell(control, *piece)
        with pytest.raises(LocalProtocolError, match="SYNCED follows SYNC and all of its state"):
            control.sending(SYNCED)
    assert tell(control, *half(8, 1))
    control.sending(SYNCED)
    for step in (STEP + 1, STEP + 2):
        assert tell(control, T.STEP, Step(step, 1))
        control.sending(ready(step))
        assert tell(control, T.APPLY, Apply(step, 1.0, save=True))
    assert tell(control, T.GATHER, Gather(STEP + 2))
    assert control.phase is WorkerPhase.GATHER
    assert tell(control, T.STOP, Reason("finished"))
    assert control.phase is WorkerPhase.OVER


def test_next_step_may_come_before_the_decision_about_this_one() -> None:
    control = is_ready()
    assert tell(control, T.STEP, Step(STEP + 2, 1))
    with pytest.raises(RemoteProtocolError, match=f"STEP of step {STEP + 3} may not come"):
        tell(control, T.STEP, Step(STEP + 3, 1))
    assert tell(control, T.APPLY, Apply(STEP + 1, 1.0))
    control.sending(ready(STEP + 2))
    assert tell(control, T.APPLY, Apply(STEP + 2, 1.0))


def evaluation(number: int, step: int = STEP) -> Step:
    return Step(step, 1, evaluate=number)


def evaluated(number: int, step: int = STEP) -> Ready:
    return msgspec.structs.replace(ready(step), evaluate=number)


def test_evaluations_come_between_two_steps() -> None:
    control = running()
    for number in (1, 2):
        assert tell(control, T.STEP, evaluation(number))
        control.sending(evaluated(number))
    assert tell(control, T.STEP, Step(STEP + 1, 1))
    control.sending(ready(STEP + 1))
    assert tell(control, T.STEP, evaluation(1, STEP + 1))  # the stage before may have heard APPLY earlier
    assert tell(control, T.APPLY, Apply(STEP + 1, 1.0))
    control.sending(evaluated(1, STEP + 1))
    assert tell(control, T.GATHER, Gather(STEP + 1))


def in_evaluation() -> WorkerControl:
    control = running()
    tell(control, T.STEP, evaluation(1))
    return control


def test_state_of_any_size_is_counted_by_tensors() -> None:
    control = WorkerControl(EPOCH)
    tell(control, T.SYNC, Sync(EPOCH, STEP, 1))
    empty = TensorEntry("nothing", "float32", [0])
    assert tell(control, T.STATE, State(0, 1, empty, 0))
    with pytest.raises(RemoteProtocolError, match="STATE came in phase syncing, none is awaited"):
        tell(control, T.STATE, State(0, 1, empty, 0))


@pytest.mark.parametrize(
    ("make", "type_", "header", "message"),
    [
        (lambda: WorkerControl(EPOCH), T.SYNC, Sync(EPOCH - 1, 0, 0), "SYNC must be of epoch 3, got epoch 2"),
        (lambda: WorkerControl(EPOCH), T.STATE, EXAMPLES[T.STATE][0], "STATE came in phase joined"),
        (lambda: WorkerControl(EPOCH), T.STEP, Step(1, 1), "STEP of step 1 may not come, this is phase joined"),
        (lambda: WorkerControl(EPOCH), T.APPLY, Apply(0, 1.0), "APPLY of step 0 may not come"),
        (lambda: WorkerControl(EPOCH), T.GATHER, Gather(0), "GATHER after step 0 may not come"),
        (running, T.SYNC, SYNC, "SYNC must come once, and first, not in phase run"),
        (running, T.STATE, EXAMPLES[T.STATE][0], "STATE came in phase run, none is awaited"),
        (running, T.APPLY, Apply(STEP, 1.0), "APPLY of step 7 may not come"),
        (running, T.APPLY, Apply(STEP + 1, 1.0), "APPLY of step 8 may not come"),
        (running, T.STEP, Step(STEP, 1), "STEP of step 7 may not come"),
        (running, T.STEP, Step(STEP + 2, 1), "STEP of step 9 may not come"),
        (running, T.GATHER, Gather(STEP - 1), "GATHER after step 6 may not come"),
        (in_step, T.APPLY, Apply(STEP + 1, 1.0), "with STEP of 8, READY of 7 and APPLY of 7"),
        (in_step, T.GATHER, Gather(STEP), "GATHER after step 7 may not come"),
        (in_step, T.STEP, Step(STEP + 1, 1), "STEP of step 8 may not come"),
        (is_ready, T.APPLY, Apply(STEP + 2, 1.0), "APPLY of step 9 may not come"),
        (is_ready, T.GATHER, Gather(STEP + 1), "GATHER after step 8 may not come"),
        (running, T.STEP, evaluation(1, STEP - 1), "STEP of step 6 may not come"),
        (running, T.STEP, evaluation(1, STEP + 1), "STEP of step 8 may not come"),
        (in_step, T.STEP, evaluation(1, STEP + 1), "STEP of step 8 may not come"),
        (in_evaluation, T.STEP, evaluation(2), "and APPLY of 7, in evaluation 1"),
        (in_evaluation, T.STEP, Step(STEP + 1, 1), "STEP of step 8 may not come"),
        (in_evaluation, T.GATHER, Gather(STEP), "GATHER after step 7 may not come"),
        (in_evaluation, T.APPLY, Apply(STEP, 1.0), "APPLY of step 7 may not come"),
    ],
)
def test_frame_out_of_its_turn_is_refused(make, type_: FrameType, header: Header, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RemoteProtocolError, match=message):
        tell(make(), type_, header, bytes(16))


@pytest.mark.parametrize(
    ("type_", "header"),
    [(T.APPLY, Apply(STEP, 1.0)), (T.STEP, Step(STEP + 1, 1)), (T.GATHER, Gather(STEP)), (T.SYNC, SYNC)],
)
def test_nothing_follows_a_gather(type_: FrameType, header: Header) -> None:
    control = running()
    assert tell(control, T.GATHER, Gather(STEP))
    with pytest.raises(RemoteProtocolError):
        tell(control, type_, header)


def test_decision_comes_once() -> None:
    control = is_ready()
    assert tell(control, T.APPLY, Apply(STEP + 1, 1.0))
    with pytest.raises(RemoteProtocolError, match="APPLY of step 8 may not come"):
        tell(control, T.APPLY, Apply(STEP + 1, 1.0))


@pytest.mark.parametrize(
    ("make", "header"),
    [
        (lambda: WorkerControl(EPOCH), SYNCED),
        (running, SYNCED),
        (running, ready(STEP + 1)),
        (in_step, ready(STEP)),
        (is_ready, ready(STEP + 1)),
        (running, evaluated(1)),
        (in_step, evaluated(1, STEP + 1)),
        (in_evaluation, evaluated(2)),
        (in_evaluation, evaluated(1, STEP + 1)),
        (in_evaluation, ready(STEP)),
        (in_evaluation, ready(STEP + 1)),
    ],
)
def test_own_answer_to_nothing_is_refused(make, header: Header) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LocalProtocolError):
        make().sending(header)


@pytest.mark.parametrize("end", [(T.STOP, Reason("x")), (T.ABORT, Reason("x")), (T.ERROR, Fault("x"))])
def test_after_the_end_only_its_reason_means_something(end: tuple[FrameType, Header]) -> None:
    control = is_ready()
    assert tell(control, *end)
    for type_ in (T.SYNC, T.STATE, T.STEP, T.APPLY, T.GATHER, T.ERROR, T.FORWARD, T.BACKWARD):
        assert not tell(control, type_, *EXAMPLES[type_])
    assert tell(control, T.ABORT, Reason("why"))
    control.sending(ready(99))


@given(
    st.lists(st.tuples(st.sampled_from([T.SYNC, T.STATE, T.STEP, T.APPLY, T.GATHER]), st.integers(0, 3)), max_size=12)
)
@settings(max_examples=300, deadline=None)
def test_no_order_of_frames_lets_a_step_be_decided_that_is_not_ready(told: list[tuple[FrameType, int]]) -> None:
    control = WorkerControl(EPOCH)
    decided: list[int] = []
    for type_, number in told:
        header = {
            T.SYNC: Sync(EPOCH, number, 0),
            T.STATE: EXAMPLES[T.STATE][0],
            T.STEP: Step(number, 1),
            T.APPLY: Apply(number, 1.0),
            T.GATHER: Gather(number),
        }[type_]
        try:
            tell(control, type_, header)
        except RemoteProtocolError:
            return
        if type_ is T.SYNC:
            decided = [number]
            control.sending(SYNCED)
        elif type_ is T.STEP and number == decided[-1] + 1:
            control.sending(ready(number))
        elif type_ is T.APPLY:
            assert number == decided[-1] + 1
            decided.append(number)

"""The run's state machine, without sockets, threads or a clock."""

from __future__ import annotations

import itertools
import re
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import EXAMPLES

from hetero.control import (
    Action,
    AllSynced,
    CoordinatorControl,
    Fail,
    Joined,
    Membership,
    Notify,
    Peer,
    Phase,
    Retry,
    Send,
    StatePiece,
    StepReady,
    StopAsked,
    judge_hello,
)
from hetero.errors import LocalProtocolError
from hetero.wire.frames import Frame
from hetero.wire.headers import (
    Apply,
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
    TensorEntry,
    Welcome,
)

WELCOME = Welcome("them", {})
SYNCED = Synced(1, "cpu", "float32", 10, 0)
HELLO = Hello("control", "run", 1, 1, "me", {})
PEERS = {1: Peer(1, "a.lan", 9001), 2: Peer(2, "b.lan", 9002)}


def frame(type_: FrameType, header: Header, payload: bytes = b"") -> Frame:
    return Frame(type_, header, memoryview(payload))


def ready(step: int, payload: bytes = struct.pack("<d", 2.0)) -> Frame:
    return frame(FrameType.READY, Ready(step, True, 1.0, 0.1, 0.1, 10, 20), payload)


def piece() -> Frame:
    return frame(FrameType.STATE, State(0, 1, TensorEntry("w", "float32", [1]), 0), bytes(4))


def control(phase: Phase, step: int = 1) -> CoordinatorControl:
    """A coordinator of two workers that has come to a phase; in RUN and GATHER it computes a step."""
    made = CoordinatorControl(dict(PEERS), 1)
    if phase is Phase.JOIN:
        return made
    for stage in PEERS:
        made.received(stage, frame(FrameType.WELCOME, WELCOME))
    made.sync(0, {})
    if phase is Phase.SYNC:
        return made
    for stage in PEERS:
        made.received(stage, frame(FrameType.SYNCED, SYNCED))
    made.begin_step(step)
    if phase is Phase.GATHER:
        made.gather(step)
    if phase is Phase.OVER:
        made.end(FrameType.STOP, "finished")
    return made


def failure(actions: list[Action]) -> str:
    """The one failure among actions, which comes last and after an ABORT to every worker."""
    *sends, last = actions
    assert isinstance(last, Fail)
    assert [(a.stage, a.type) for a in sends if isinstance(a, Send)] == [(s, FrameType.ABORT) for s in PEERS]
    assert len(sends) == len(PEERS)
    return str(last.error)


def test_run_goes_through_its_phases() -> None:
    made = CoordinatorControl(dict(PEERS), 1)
    assert made.received(2, frame(FrameType.WELCOME, WELCOME)) == []
    nothing = memoryview(b"")
    joined = Joined({1: WELCOME, 2: WELCOME}, {1: nothing, 2: nothing})
    assert made.received(1, frame(FrameType.WELCOME, WELCOME)) == [Notify(joined)]
    assert made.sync(7, {2: 3}) == [
        Send(1, FrameType.SYNC, Sync(1, 7, 0)),
        Send(2, FrameType.SYNC, Sync(1, 7, 3)),
    ]
    assert made.received(1, frame(FrameType.SYNCED, SYNCED)) == []
    assert made.received(2, frame(FrameType.SYNCED, SYNCED)) == [Notify(AllSynced({1: SYNCED, 2: SYNCED}))]
    for step in (8, 9):
        made.begin_step(step)
        assert made.received(2, ready(step)) == []
        (notified,) = made.received(1, ready(step))
        assert isinstance(notified, Notify) and isinstance(notified.event, StepReady)
        assert notified.event.step == step and sorted(notified.event.ready) == sorted(notified.event.norms) == [1, 2]
        assert made.apply(0.5) == [Send(stage, FrameType.APPLY, Apply(step, 0.5)) for stage in PEERS]
    assert made.gather(9) == [Send(stage, FrameType.GATHER, Gather(9)) for stage in PEERS]
    (notified,) = made.received(2, piece())
    assert isinstance(notified, Notify) and isinstance(notified.event, StatePiece) and notified.event.stage == 2
    made.state_complete(2)
    assert made.is_saving()
    made.state_complete(1)
    assert not made.is_saving()
    assert made.end(FrameType.STOP, "finished") == [Send(stage, FrameType.STOP, Reason("finished")) for stage in PEERS]


def evaluated(step: int, number: int) -> Frame:
    header = ready(step).header
    assert isinstance(header, Ready)
    return frame(FrameType.READY, msgspec.structs.replace(header, evaluate=number))


def test_evaluations_come_between_steps() -> None:
    made = control(Phase.RUN)
    for stage in PEERS:
        made.received(stage, ready(1))
    made.apply(1.0)
    for number in (1, 2):
        made.begin_evaluation(1, number)
        assert made.received(1, evaluated(1, number)) == []
        (notified,) = made.received(2, evaluated(1, number))
        assert isinstance(notified, Notify) and isinstance(notified.event, StepReady)
    made.begin_step(2)
    assert made.received(1, ready(2)) == []


@pytest.mark.parametrize("wrong", [ready(1), evaluated(1, 1), evaluated(1, 3), evaluated(2, 2)])
def test_answer_to_another_evaluation_ends_the_session(wrong: Frame) -> None:
    made = control(Phase.RUN)
    made.begin_evaluation(1, 2)
    assert "READY of " in failure(made.received(1, wrong))


def test_evaluation_that_nobody_began_ends_the_session() -> None:
    assert "READY of evaluation 0 must come, got 1" in failure(control(Phase.RUN).received(1, evaluated(1, 1)))


def test_event_of_a_step_does_not_change_with_the_next() -> None:
    made = control(Phase.RUN)
    made.received(1, ready(1))
    (notified,) = made.received(2, ready(1))
    assert isinstance(notified, Notify) and isinstance(notified.event, StepReady)
    made.apply(1.0)
    assert sorted(notified.event.ready) == sorted(notified.event.norms) == [1, 2]


@pytest.mark.parametrize(
    ("phase", "type_"),
    [
        (phase, type_)
        for phase, type_ in itertools.product((Phase.JOIN, Phase.SYNC, Phase.RUN, Phase.GATHER), FrameType)
        if (phase, type_)
        not in {
            (Phase.JOIN, FrameType.WELCOME),
            (Phase.SYNC, FrameType.SYNCED),
            (Phase.RUN, FrameType.READY),
            (Phase.GATHER, FrameType.STATE),
        }
        and type_ not in (FrameType.REJECT, FrameType.STOP)
    ],
)
def test_frame_of_another_phase_ends_the_session_by_name(phase: Phase, type_: FrameType) -> None:
    header, payload = EXAMPLES[type_]
    actions = control(phase).received(2, frame(type_, header, payload))
    assert re.match(r"stage 2 at b\.lan:9002( in step \d+)?: ", failure(actions))


@pytest.mark.parametrize(
    ("phase", "twice"),
    [
        (Phase.JOIN, frame(FrameType.WELCOME, WELCOME)),
        (Phase.SYNC, frame(FrameType.SYNCED, SYNCED)),
        (Phase.RUN, ready(1)),
    ],
)
def test_answer_that_comes_twice_ends_the_session(phase: Phase, twice: Frame) -> None:
    made = control(phase)
    assert made.received(1, twice) == []
    assert "stage 1 at a.lan:9001" in failure(made.received(1, twice))


@pytest.mark.parametrize(
    ("phase", "wrong", "message"),
    [
        (Phase.RUN, ready(2), "READY of step 1 must come once, got step 2"),
        (Phase.RUN, ready(1, bytes(9)), "norms are float64, got 9 bytes"),
        (
            Phase.RUN,
            frame(FrameType.READY, Ready(1, True, 1.0, 0.1, 0.1, 10, 20, num_spans=2), bytes(40)),
            "2 spans need more than 40 bytes",
        ),
        (
            Phase.SYNC,
            frame(FrameType.SYNCED, msgspec.structs.replace(SYNCED, epoch=0)),
            "SYNCED of epoch 1 must come once, got epoch 0",
        ),
    ],
)
def test_answer_to_something_else_ends_the_session(phase: Phase, wrong: Frame, message: str) -> None:
    assert message in failure(control(phase).received(1, wrong))


def test_busy_worker_is_tried_again_and_may_then_join() -> None:
    made = control(Phase.JOIN)
    busy = frame(FrameType.REJECT, Reject("busy with another run (x)", permanent=False))
    assert made.received(2, busy) == [Retry(2, "refused: busy with another run (x)")]
    assert made.received(2, busy) == [Retry(2, "refused: busy with another run (x)")]
    made.received(2, frame(FrameType.WELCOME, WELCOME))
    nothing = memoryview(b"")
    joined = Joined({1: WELCOME, 2: WELCOME}, {1: nothing, 2: nothing})
    assert made.received(1, frame(FrameType.WELCOME, WELCOME)) == [Notify(joined)]


def test_worker_that_is_lost_while_others_are_waited_for_is_tried_again() -> None:
    made = control(Phase.JOIN)
    made.received(2, frame(FrameType.WELCOME, WELCOME))
    assert made.closed(2, "connection lost", lost=True) == [Retry(2, "connection lost")]
    assert made.received(1, frame(FrameType.WELCOME, WELCOME)) == []
    (notified,) = made.received(2, frame(FrameType.WELCOME, WELCOME))
    assert isinstance(notified, Notify) and isinstance(notified.event, Joined)
    assert "stage 1 at a.lan:9001" in failure(made.closed(1, "connection lost", lost=True))


def test_permanent_refusal_ends_the_session() -> None:
    reject = frame(FrameType.REJECT, Reject("another protocol", permanent=True))
    assert failure(control(Phase.JOIN).received(1, reject)) == "stage 1 at a.lan:9001: refused: another protocol"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("out of memory"), "stage 1 at a.lan:9001 in step 4: out of memory"),
        (Fault("out of memory", step=3), "stage 1 at a.lan:9001 in step 3: out of memory"),
        (
            Fault("closed the connection", stage=2, host="seen.from.there", port=5),
            "stage 2 at b.lan:9002 in step 4: closed the connection",
        ),
        (
            Fault("silent for 3 s", stage=0, host="the coordinator", port=0),
            "stage 0 at the coordinator in step 4: silent for 3 s",
        ),
    ],
)
def test_fault_that_a_worker_reports_names_the_stage_that_it_is_about(fault: Fault, message: str) -> None:
    assert failure(control(Phase.RUN, step=4).received(1, frame(FrameType.ERROR, fault))) == message


def test_others_hear_why_the_session_is_over() -> None:
    actions = control(Phase.RUN, step=4).closed(2, "connection reset by peer")
    reasons = {action.stage: action.header for action in actions if isinstance(action, Send)}
    text = "stage 2 at b.lan:9002 in step 4: connection reset by peer"
    assert reasons == {1: Reason(text), 2: Reason(text)}


@pytest.mark.parametrize("phase", [Phase.JOIN, Phase.SYNC, Phase.RUN, Phase.GATHER])
def test_connection_that_ends_is_one_failure_and_then_silence(phase: Phase) -> None:
    made = control(phase)
    assert "stage 1 at a.lan:9001" in failure(made.closed(1, "connection lost"))
    assert made.closed(2, "connection lost") == []
    assert made.end(FrameType.ABORT, "whatever") == []


def test_connections_may_end_once_the_run_is_over() -> None:
    made = control(Phase.OVER)
    assert made.closed(1, "closed the connection") == made.closed(2, "closed the connection") == []


def test_frame_after_the_end_changes_nothing() -> None:
    for type_, (header, payload) in EXAMPLES.items():
        assert control(Phase.OVER).received(1, frame(type_, header, payload)) == []


@pytest.mark.parametrize("phase", [Phase.SYNC, Phase.RUN, Phase.GATHER])
def test_refusal_after_the_welcome_ends_the_session(phase: Phase) -> None:
    busy = frame(FrameType.REJECT, Reject("busy", permanent=False))
    assert "stage 1 at a.lan:9001" in failure(control(phase).received(1, busy))


def test_ready_that_comes_again_after_the_decision_does_not_count_for_the_next_step() -> None:
    made = control(Phase.RUN)
    for stage in PEERS:
        made.received(stage, ready(1))
    made.apply(1.0)
    assert "READY of step 1 must come once, got step 1" in failure(made.received(1, ready(1)))


def test_very_long_reasons_are_cut_to_what_a_frame_may_hold() -> None:
    for action in control(Phase.RUN).closed(1, "x" * 10_000):
        if isinstance(action, Send):
            assert isinstance(action.header, Reason) and len(action.header.reason) <= 2000


@pytest.mark.parametrize("phase", list(Phase))
def test_own_calls_in_the_wrong_phase_are_refused(phase: Phase) -> None:
    calls = {
        Phase.JOIN: [lambda c: c.sync(0, {})],
        Phase.RUN: [lambda c: c.begin_step(2), lambda c: c.gather(1)],
    }
    for right, wrong in calls.items():
        for call in wrong:
            made = control(phase)
            if right is phase:
                call(made)
            else:
                with pytest.raises(LocalProtocolError, match=f"belongs to phase {right.value}"):
                    call(made)


def test_state_comes_while_the_run_goes_on() -> None:
    made = control(Phase.RUN)
    assert "nobody asked for" in failure(control(Phase.RUN).received(1, piece()))
    for stage in PEERS:
        made.received(stage, ready(1))
    assert made.apply(1.0, save=True) == [Send(stage, FrameType.APPLY, Apply(1, 1.0, save=True)) for stage in PEERS]
    made.begin_step(2)
    (notified,) = made.received(1, piece())
    assert isinstance(notified, Notify) and isinstance(notified.event, StatePiece)
    made.state_complete(1)
    for stage in PEERS:
        made.received(stage, ready(2))
    with pytest.raises(LocalProtocolError, match="still on its way"):
        made.apply(1.0, save=True)
    assert "nobody asked for" in failure(made.received(1, piece()))


@pytest.mark.parametrize("phase", [Phase.JOIN, Phase.SYNC, Phase.RUN, Phase.GATHER])
def test_worker_may_ask_for_the_end_at_any_time(phase: Phase) -> None:
    made = control(phase)
    assert made.received(1, frame(FrameType.STOP, Reason("SIGINT at stage 1"))) == [
        Notify(StopAsked("SIGINT at stage 1"))
    ]
    assert made.phase is phase


def test_lost_worker_ends_this_session_only_where_the_run_recovers() -> None:
    for recovers, lost in itertools.product([False, True], repeat=2):
        made = CoordinatorControl(dict(PEERS), 1, recovers=recovers)
        for stage in PEERS:
            made.received(stage, frame(FrameType.WELCOME, WELCOME))
        actions = made.closed(1, "closed", lost=lost)
        assert isinstance(actions[-1], Fail) and actions[-1].error.lost is lost
        told = [action.header for action in actions if isinstance(action, Send)]
        assert all(isinstance(h, Reason) and h.again is (recovers and lost) for h in told) and len(told) == 2


@given(events=st.lists(st.tuples(st.sampled_from([1, 2]), st.sampled_from([*FrameType, None])), max_size=12))
@settings(max_examples=300, deadline=None)
def test_whatever_workers_send_in_whatever_order_there_is_at_most_one_failure(
    events: list[tuple[int, FrameType | None]],
) -> None:
    made = CoordinatorControl(dict(PEERS), 1)
    failures = 0
    for stage, type_ in events:
        over = made.phase is Phase.OVER
        actions = made.closed(stage, "lost") if type_ is None else made.received(stage, frame(type_, *EXAMPLES[type_]))
        failures += sum(isinstance(action, Fail) for action in actions)
        assert not (over and actions)
    assert failures <= 1
    assert (failures == 1) == (made.phase is Phase.OVER)


def hello(**changes: object) -> Hello:
    return msgspec.structs.replace(HELLO, **changes)


IN_RUN = Membership("run", 1, 1)


def test_idle_worker_takes_part_in_any_run() -> None:
    assert judge_hello(None, hello(), link_taken=False) is None
    assert judge_hello(None, hello(epoch=0, stage=5), link_taken=False) is None


def test_busy_worker_refuses_another_run_for_now() -> None:
    refusal = judge_hello(IN_RUN, hello(run_id="other", epoch=9), link_taken=False)
    assert refusal is not None and not refusal.permanent and "busy with another run (run)" in refusal.reason


def test_same_run_at_a_higher_epoch_replaces_the_session_and_at_a_lower_one_does_not() -> None:
    assert judge_hello(IN_RUN, hello(epoch=2), link_taken=True) is None
    refusal = judge_hello(IN_RUN, hello(epoch=0), link_taken=False)
    assert refusal is not None and refusal.permanent and "this is epoch 1" in refusal.reason


def test_worker_that_has_not_noticed_the_loss_of_its_control_is_tried_again() -> None:
    refusal = judge_hello(IN_RUN, hello(epoch=1), link_taken=False)
    assert refusal is not None and not refusal.permanent and "about to end" in refusal.reason


def test_control_of_stage_0_is_refused_since_that_is_the_coordinator() -> None:
    refusal = judge_hello(None, hello(stage=0), link_taken=False)
    assert refusal is not None and refusal.permanent and "got 0" in refusal.reason


@pytest.mark.parametrize("other", [{"run_id": "other"}, {"epoch": 0}, {"epoch": 2}, {"stage": 2}])
def test_link_belongs_to_exactly_the_session_that_it_names(other: dict[str, object]) -> None:
    assert judge_hello(IN_RUN, hello(purpose="link"), link_taken=False) is None
    for current, changes in ((IN_RUN, other), (None, {})):
        refusal = judge_hello(current, hello(purpose="link", **changes), link_taken=False)
        assert refusal is not None and "no such session" in refusal.reason


def test_second_link_from_before_is_refused() -> None:
    refusal = judge_hello(IN_RUN, hello(purpose="link"), link_taken=True)
    assert refusal is not None and refusal.permanent and "linked already" in refusal.reason

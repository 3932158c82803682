import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import GRAD, HIDDEN, LABELS, make_flow

from hetero.errors import RemoteProtocolError
from hetero.wire.flow import MAX_MICRO_BATCHES, RIDERS, LinkFlow, pack_shapes
from hetero.wire.headers import FrameType, Step, TensorEntry, Tensors

POSITIONS = TensorEntry("position_ids", "int64", [2, 3])
MASK = TensorEntry("attention_mask", "bool", [2, 3])
SHAPES = [(2, 3), (1, 2)]
FORWARD, BACKWARD = FrameType.FORWARD, FrameType.BACKWARD


def in_step(step: int = 1) -> LinkFlow:
    flow = make_flow()
    flow.begin_step(Step(step, 4), pack_shapes(SHAPES))
    return flow


def forward(
    flow: LinkFlow,
    *tensors: TensorEntry,
    step: int = 1,
    micro_batch: int = 0,
    payload_bytes: int | None = None,
    type_: FrameType = FORWARD,
) -> None:
    size = sum(entry.nbytes() for entry in tensors) if payload_bytes is None else payload_bytes
    flow.admit(type_, Tensors(step, micro_batch, list(tensors)), size)


def whole_step(flow: LinkFlow, step: int) -> None:
    flow.begin_step(Step(step, 4), pack_shapes(SHAPES))
    for micro_batch, (rows, length) in enumerate(SHAPES):
        hidden = TensorEntry("hidden", "float32", [rows, length, 4])
        forward(flow, TensorEntry("labels", "int64", [rows, length]), hidden, step=step, micro_batch=micro_batch)
        flow.sent(BACKWARD)


def test_shapes_are_little_endian_pairs_of_int32() -> None:
    assert pack_shapes([(1, 2), (300, 4)]) == struct.pack("<4i", 1, 2, 300, 4)
    assert make_flow().begin_step(Step(1, 1), pack_shapes(SHAPES)) == SHAPES
    assert make_flow().begin_step(Step(1, 1), memoryview(pack_shapes(SHAPES))) == SHAPES


def test_a_step_that_goes_as_planned_is_admitted_and_the_next_follows() -> None:
    flow = make_flow()
    for step in (5, 6, 7):
        whole_step(flow, step)


@pytest.mark.parametrize("step", [0, 5, 4, 7, 2**53 - 1])
def test_steps_follow_one_another_without_gaps(step: int) -> None:
    flow = make_flow()
    whole_step(flow, 5)
    with pytest.raises(RemoteProtocolError, match=f"step 6 must follow, got step {step}"):
        flow.begin_step(Step(step, 4), pack_shapes(SHAPES))


@pytest.mark.parametrize(("forwards", "backwards"), [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)])
def test_a_step_that_begins_before_the_last_is_over_is_refused(forwards: int, backwards: int) -> None:
    flow = in_step()
    for _ in range(forwards):
        flow.sent(FORWARD)
    for _ in range(backwards):
        flow.sent(BACKWARD)
    with pytest.raises(RemoteProtocolError, match="step 2 begins before step 1 is over"):
        flow.begin_step(Step(2, 4), pack_shapes(SHAPES))


@pytest.mark.parametrize("payload", [b"", b"\0", bytes(4), bytes(12), bytes(15)])
def test_shapes_that_are_no_pairs_are_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=f"pairs of int32, got {len(payload)} bytes"):
        make_flow().begin_step(Step(1, 0), payload)


@pytest.mark.parametrize("shape", [(0, 3), (3, 3), (2, 0), (2, 4), (-1, 3), (2, -1), (2**31 - 1, 2**31 - 1)])
def test_micro_batch_that_the_plan_does_not_allow_is_refused(shape: tuple[int, int]) -> None:
    flow = make_flow()
    with pytest.raises(RemoteProtocolError, match="at most 2 rows of 3 tokens, got"):
        flow.begin_step(Step(1, 0), pack_shapes([(2, 3), shape]))
    with pytest.raises(RemoteProtocolError):  # and nothing of it holds afterwards
        forward(flow, LABELS, HIDDEN)


def test_more_label_tokens_than_tokens_are_refused() -> None:
    make_flow().begin_step(Step(1, 8), pack_shapes(SHAPES))
    with pytest.raises(RemoteProtocolError, match="fewer tokens than its 9 labels"):
        make_flow().begin_step(Step(1, 9), pack_shapes(SHAPES))


def test_a_step_frame_holds_the_shapes_of_the_most_micro_batches_that_are_allowed() -> None:
    assert len(pack_shapes([(1, 1)] * MAX_MICRO_BATCHES)) == 512 * 1024


@pytest.mark.parametrize("riders", [[LABELS], [LABELS, POSITIONS], [LABELS, POSITIONS, MASK], [LABELS, MASK]])
def test_forward_with_any_riders_is_admitted(riders: list[TensorEntry]) -> None:
    tensors = sorted([*riders, HIDDEN], key=lambda entry: {"int64": 0, "float32": 1, "bool": 2}[entry.dtype])
    forward(in_step(), *tensors)


def test_every_rider_has_a_test_here() -> None:
    assert {entry.name: entry.dtype for entry in (LABELS, POSITIONS, MASK)} == RIDERS


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param([], id="nothing"),
        pytest.param([HIDDEN], id="no labels"),
        pytest.param([LABELS], id="no hidden"),
        pytest.param([LABELS, GRAD], id="grad for hidden"),
        pytest.param([LABELS, HIDDEN, TensorEntry("other", "bool", [2, 3])], id="unknown name"),
        pytest.param([LABELS, HIDDEN, HIDDEN], id="twice"),
        pytest.param([LABELS, TensorEntry("hidden", "bfloat16", [2, 3, 4])], id="other dtype"),
        pytest.param([LABELS, TensorEntry("hidden", "int32", [2, 3, 4])], id="other dtype of the same size"),
        pytest.param([LABELS, TensorEntry("hidden", "float32", [2, 3, 5])], id="other width"),
        pytest.param([LABELS, TensorEntry("hidden", "float32", [3, 2, 4])], id="turned"),
        pytest.param([LABELS, TensorEntry("hidden", "float32", [24])], id="flat"),
        pytest.param([LABELS, TensorEntry("hidden", "float32", [2, 3, 4, 1])], id="more dimensions"),
        pytest.param([LABELS, TensorEntry("hidden", "float32", [2, 0, 4])], id="empty"),
        pytest.param([LABELS, TensorEntry("hidden", "float32", [1 << 39, 1 << 39, 4])], id="endless"),
        pytest.param([TensorEntry("labels", "int64", [2, 2]), HIDDEN], id="labels of another shape"),
        pytest.param([HIDDEN, TensorEntry("labels", "int32", [2, 3])], id="labels of another dtype"),
        pytest.param([LABELS, HIDDEN, TensorEntry("attention_mask", "bool", [2, 1, 3, 3])], id="mask of another shape"),
        pytest.param([HIDDEN, LABELS], id="narrow elements first"),
    ],
)
def test_forward_with_other_tensors_is_refused(tensors: list[TensorEntry]) -> None:
    flow = in_step()
    with pytest.raises(RemoteProtocolError) as caught:
        forward(flow, *tensors)
    assert str(caught.value).isprintable()
    forward(flow, LABELS, HIDDEN)  # the refused frame was not counted


def test_refusal_of_tensors_shows_both_sides() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        forward(in_step(), LABELS, TensorEntry("hid\nden", "bfloat16", [2, 3, 4]))
    assert "'hidden' float32 [2, 3, 4]" in str(caught.value)
    assert r"'hid\nden' bfloat16 [2, 3, 4]" in str(caught.value)


@pytest.mark.parametrize("payload_bytes", [0, 143, 145, 96, 1 << 30])
def test_payload_that_is_not_the_tensors_size_is_refused(payload_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"FORWARD carries {payload_bytes} bytes"):
        forward(in_step(), LABELS, HIDDEN, payload_bytes=payload_bytes)


@pytest.mark.parametrize(("step", "micro_batch"), [(0, 0), (2, 0), (1, 1), (1, 2), (1, 2**53 - 1)])
def test_forward_out_of_order_is_refused(step: int, micro_batch: int) -> None:
    with pytest.raises(RemoteProtocolError, match="FORWARD of step 1 micro-batch 0 of 2 must follow, got"):
        forward(in_step(), LABELS, HIDDEN, step=step, micro_batch=micro_batch)


def test_forward_twice_or_after_the_last_or_before_any_step_is_refused() -> None:
    flow = in_step()
    forward(flow, LABELS, HIDDEN)
    with pytest.raises(RemoteProtocolError, match="micro-batch 1 of 2 must follow, got step 1 micro-batch 0"):
        forward(flow, LABELS, HIDDEN)
    flow.sent(FORWARD)
    with pytest.raises(RemoteProtocolError, match="micro-batch 2 of 2 must follow"):
        forward(flow, LABELS, HIDDEN, micro_batch=2)
    with pytest.raises(RemoteProtocolError, match="of step None micro-batch 0 of 0"):
        forward(make_flow(), LABELS, HIDDEN)


def test_backward_is_admitted_in_order_once_its_forward_was_sent() -> None:
    flow = in_step()
    with pytest.raises(RemoteProtocolError, match="BACKWARD of micro-batch 0 came before its FORWARD was sent"):
        forward(flow, GRAD, type_=BACKWARD)
    flow.sent(FORWARD)
    forward(flow, GRAD, type_=BACKWARD)
    with pytest.raises(RemoteProtocolError, match="micro-batch 1 came before"):
        forward(flow, TensorEntry("grad", "float32", [1, 2, 4]), micro_batch=1, type_=BACKWARD)


@pytest.mark.parametrize(
    "tensors",
    [[], [HIDDEN], [LABELS, GRAD], [GRAD, GRAD], [TensorEntry("grad", "float16", [2, 3, 4])], [LABELS]],
)
def test_backward_with_other_tensors_is_refused(tensors: list[TensorEntry]) -> None:
    flow = in_step()
    flow.sent(FORWARD)
    with pytest.raises(RemoteProtocolError):
        forward(flow, *tensors, type_=BACKWARD)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 2**53 - 1), st.integers(0, 2**53 - 1))
def test_any_step_payload_is_admitted_within_the_plan_or_refused(payload: bytes, step: int, labels: int) -> None:
    try:
        shapes = make_flow().begin_step(Step(step, labels), payload)
    except RemoteProtocolError:
        return
    assert all(1 <= rows <= 2 and 1 <= length <= 3 for rows, length in shapes)
    assert labels <= sum(rows * length for rows, length in shapes)


# ---- evaluations


def evaluating(number: int = 1, step: int = 1, **limits: int) -> LinkFlow:
    """A flow in an evaluation of four micro-batches."""
    flow = LinkFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=3, **limits)  # type: ignore[arg-type]
    flow.begin_step(Step(step, 4, evaluate=number), pack_shapes([(2, 3)] * 4))
    return flow


def test_an_evaluation_goes_forward_alone_and_what_is_taken_is_said_without_tensors() -> None:
    flow = evaluating()
    for micro_batch in range(4):
        forward(flow, LABELS, HIDDEN, micro_batch=micro_batch)
        for tensors in ([GRAD], [HIDDEN], [LABELS]):
            with pytest.raises(RemoteProtocolError, match="BACKWARD must hold no tensors"):
                forward(flow, *tensors, micro_batch=micro_batch, type_=BACKWARD)
        forward(flow, micro_batch=micro_batch, type_=BACKWARD)
    flow.begin_step(Step(1, 4, evaluate=2), pack_shapes(SHAPES))


@pytest.mark.parametrize(("step", "number"), [(5, 1), (5, 3), (5, 0), (6, 1), (6, 2), (4, 2)])
def test_evaluations_after_a_step_are_counted(step: int, number: int) -> None:
    flow = make_flow()
    whole_step(flow, 5)
    flow.begin_step(Step(5, 4, evaluate=1), pack_shapes([(2, 3)]))
    forward(flow, LABELS, HIDDEN, step=5)
    flow.sent(BACKWARD)
    with pytest.raises(RemoteProtocolError, match=r"may follow|must follow"):
        flow.begin_step(Step(step, 4, evaluate=number), pack_shapes(SHAPES))
    whole_step(flow, 6)  # what was refused has changed nothing
    flow.begin_step(Step(6, 4, evaluate=1), pack_shapes([(2, 3)]))


def test_an_evaluation_that_is_not_over_lets_no_step_begin() -> None:
    flow = evaluating()
    with pytest.raises(RemoteProtocolError, match="before step 1 is over"):
        flow.begin_step(Step(2, 4), pack_shapes(SHAPES))


def test_an_evaluation_has_limits_of_its_own() -> None:
    flow = evaluating(max_eval_rows=5, eval_cap=2)
    for micro_batch in range(2):
        forward(flow, LABELS, HIDDEN, micro_batch=micro_batch)
    with pytest.raises(RemoteProtocolError, match="at most 2 micro-batches may be in flight"):
        forward(flow, LABELS, HIDDEN, micro_batch=2)
    flow = LinkFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=3, max_eval_rows=5)
    flow.begin_step(Step(1, 4, evaluate=1), pack_shapes([(5, 3)]))
    flow = LinkFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=3, max_eval_rows=5)
    for rows, number in ((6, 1), (3, 0)):
        with pytest.raises(RemoteProtocolError, match=f"at most {5 if number else 2} rows of 3 tokens, got {rows} of"):
            flow.begin_step(Step(1, 4, evaluate=number), pack_shapes([(rows, 3)]))


def test_an_evaluation_carries_no_sums_of_routers() -> None:
    flow = LinkFlow(hidden_size=4, dtype="float32", max_rows=2, max_length=3, num_experts=5)
    with pytest.raises(RemoteProtocolError, match="must have 0 to 0 real_tokens, got 6"):
        flow.begin_step(Step(1, 4, 6, evaluate=1), pack_shapes([(2, 3)]))
    flow.begin_step(Step(1, 4, evaluate=1), pack_shapes([(2, 3)]))
    with pytest.raises(RemoteProtocolError, match="FORWARD must hold"):
        forward(flow, LABELS, HIDDEN, TensorEntry("router_rows", "float32", [1]))
    forward(flow, LABELS, HIDDEN)
    forward(flow, type_=BACKWARD)

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import EXAMPLES, GRAD, Memory, feed, make_flow, raw_frame

from hetero.errors import LocalProtocolError, RemoteProtocolError
from hetero.wire.flow import pack_shapes
from hetero.wire.frames import PREFIX
from hetero.wire.headers import FrameType, Hello, Step, TensorEntry, Tensors
from hetero.wire.protocol import Connection, ConnectionState

T = FrameType
# The table of RELIABILITY's frame rules, written down a second time: who may say what on which connection.
DIALLER, LISTENER = True, False
ALLOWED = {
    ("control", DIALLER): {T.SYNC, T.STATE, T.APPLY, T.GATHER, T.ABORT, T.STOP, T.CONTROL, T.HEARTBEAT, T.ERROR},
    ("control", LISTENER): {T.SYNCED, T.STATE, T.READY, T.CHOSEN, T.STOP, T.CONTROL, T.HEARTBEAT, T.ERROR},
    ("link", DIALLER): {T.STEP, T.FORWARD, T.PROMPT, T.HIDDEN, T.ENDED, T.HEARTBEAT, T.ERROR},
    ("link", LISTENER): {T.BACKWARD, T.HEARTBEAT, T.ERROR},
    ("probe", DIALLER): {T.ECHO, T.LOAD, T.LOADED, T.DRAW, T.MEASURE, T.HEARTBEAT, T.ERROR},
    ("probe", LISTENER): {T.ECHO, T.LOAD, T.LOADED, T.RATE, T.ABOUT, T.MEASURED, T.HEARTBEAT, T.ERROR},
}
SIDES = list(ALLOWED)
EVERY_CASE = [(purpose, sender, type_) for purpose, sender in SIDES for type_ in FrameType]


def make(dialler: bool, memory: Memory | None = None) -> Connection:
    return Connection(dialler=dialler, allocate=(memory or Memory()).take, max_frame_bytes=1 << 20)


def hello(purpose: str) -> Hello:
    return Hello(purpose, "run-1", 0, 1, "me", {})  # type: ignore[arg-type]


def open_pair(purpose: str, *, flow: bool = True) -> dict[bool, Connection]:
    """Both sides of an open connection, ready for the examples: STEP was sent where FORWARD is to come."""
    ends = {DIALLER: make(True), LISTENER: make(False)}
    feed(ends[LISTENER], b"".join(ends[DIALLER].send(T.HELLO, hello(purpose))))
    feed(ends[DIALLER], b"".join(ends[LISTENER].send(T.WELCOME, EXAMPLES[T.WELCOME][0])))
    for end in ends.values():
        end.flow = make_flow() if flow and purpose == "link" else None
    return ends


def begin_step(ends: dict[bool, Connection]) -> None:
    header, payload = EXAMPLES[T.STEP]
    feed(ends[LISTENER], b"".join(ends[DIALLER].send(T.STEP, header, [memoryview(payload)])))


def prepare(purpose: str, type_: FrameType) -> dict[bool, Connection]:
    ends = open_pair(purpose)
    if purpose == "link" and type_ in (T.FORWARD, T.BACKWARD):
        begin_step(ends)
    if purpose == "link" and type_ in (T.HIDDEN, T.ENDED):
        header, payload = EXAMPLES[T.PROMPT]
        feed(ends[LISTENER], b"".join(ends[DIALLER].send(T.PROMPT, header, [memoryview(payload)])))
    if purpose == "link" and type_ is T.BACKWARD:
        header, payload = EXAMPLES[T.FORWARD]
        feed(ends[LISTENER], b"".join(ends[DIALLER].send(T.FORWARD, header, [memoryview(payload)])))
    return ends


def test_connection_opens_with_hello_and_welcome() -> None:
    ends = {DIALLER: make(True), LISTENER: make(False)}
    assert {end.state for end in ends.values()} == {ConnectionState.OPENING}
    frames = feed(ends[LISTENER], b"".join(ends[DIALLER].send(T.HELLO, hello("control"), [memoryview(b"{}")])))
    assert (frames[0].header, bytes(frames[0].payload)) == (hello("control"), b"{}")
    assert ends[LISTENER].purpose == "control"
    feed(ends[DIALLER], b"".join(ends[LISTENER].send(T.WELCOME, EXAMPLES[T.WELCOME][0])))
    assert {end.state for end in ends.values()} == {ConnectionState.OPEN}


def test_reject_ends_the_connection_on_both_sides() -> None:
    ends = {DIALLER: make(True), LISTENER: make(False)}
    feed(ends[LISTENER], b"".join(ends[DIALLER].send(T.HELLO, hello("link"))))
    assert feed(ends[DIALLER], b"".join(ends[LISTENER].send(T.REJECT, EXAMPLES[T.REJECT][0])))
    assert {end.state for end in ends.values()} == {ConnectionState.CLOSED}
    for end in ends.values():
        with pytest.raises(LocalProtocolError, match="may not be sent on a closed link connection"):
            end.send(T.ERROR, EXAMPLES[T.ERROR][0])
        with pytest.raises(RemoteProtocolError, match="may not come on a closed link connection"):
            feed(end, raw_frame(T.HEARTBEAT))


@pytest.mark.parametrize(("purpose", "sender", "type_"), EVERY_CASE)
def test_open_connection_carries_what_its_purpose_and_direction_allow(
    purpose: str, sender: bool, type_: FrameType
) -> None:
    ends = prepare(purpose, type_)
    header, payload = EXAMPLES[type_]
    if type_ in ALLOWED[purpose, sender]:
        raw = b"".join(ends[sender].send(type_, header, [memoryview(payload)]))
        assert [frame.type for frame in feed(ends[not sender], raw)] == [type_]
        return
    with pytest.raises(LocalProtocolError, match=f"{type_.name} may not be sent on a open {purpose} connection"):
        ends[sender].send(type_, header, [memoryview(payload)])
    with pytest.raises(RemoteProtocolError, match=f"{type_.name} may not come on a open {purpose} connection"):
        feed(ends[not sender], raw_frame(type_))


@pytest.mark.parametrize("sender", [DIALLER, LISTENER])
@pytest.mark.parametrize("type_", FrameType)
def test_nothing_but_the_handshake_passes_before_it_is_over(type_: FrameType, sender: bool) -> None:
    first = {DIALLER: {T.HELLO, T.ERROR}, LISTENER: {T.WELCOME, T.REJECT, T.ERROR}}
    if type_ in first[sender]:
        return
    memory = Memory()
    with pytest.raises(LocalProtocolError, match="may not be sent on a opening connection"):
        make(sender).send(type_, *EXAMPLES[type_][:1])
    with pytest.raises(RemoteProtocolError, match="may not come on a opening connection"):
        feed(make(not sender, memory), raw_frame(type_))
    assert memory.taken == []


def test_hello_twice_is_refused() -> None:
    listener = make(False)
    feed(listener, raw_frame(T.HELLO))
    with pytest.raises(RemoteProtocolError, match="HELLO came twice"):
        feed(listener, raw_frame(T.HELLO))
    dialler = make(True)
    dialler.send(T.HELLO, hello("link"))
    with pytest.raises(LocalProtocolError):
        dialler.send(T.HELLO, hello("link"))


def test_welcome_before_hello_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="WELCOME came before HELLO"):
        feed(make(True), raw_frame(T.WELCOME))
    with pytest.raises(LocalProtocolError):
        make(False).send(T.WELCOME, EXAMPLES[T.WELCOME][0])


def test_error_may_be_said_before_and_after_the_handshake() -> None:
    for sender in (DIALLER, LISTENER):
        assert feed(make(not sender), b"".join(make(sender).send(T.ERROR, EXAMPLES[T.ERROR][0])))


@pytest.mark.parametrize("type_", [T.STEP, T.FORWARD])
def test_tensors_before_the_link_is_set_up_are_refused(type_: FrameType) -> None:
    ends = open_pair("link", flow=False)
    with pytest.raises(RemoteProtocolError, match=f"{type_.name} came before its link was set up"):
        feed(ends[LISTENER], raw_frame(type_))


def test_tensor_frame_that_the_plan_does_not_imply_is_refused_before_allocation() -> None:
    memory = Memory()
    listener = make(False, memory)
    feed(listener, raw_frame(T.HELLO, payload=b""))
    listener.send(T.WELCOME, EXAMPLES[T.WELCOME][0])
    listener.flow = make_flow()
    feed(listener, raw_frame(T.STEP))
    taken = list(memory.taken)
    large = [EXAMPLES[T.FORWARD][0].tensors[0], TensorEntry("hidden", "float32", [2, 3, 5])]  # type: ignore[attr-defined]
    with pytest.raises(RemoteProtocolError, match="FORWARD must hold"):
        feed(listener, raw_frame(T.FORWARD, Tensors(1, 0, large), bytes(48 + 120)))
    assert memory.taken == taken == [16]


def test_frame_of_the_wrong_size_is_refused_from_its_header() -> None:
    ends = open_pair("link")
    begin_step(ends)
    raw = raw_frame(T.FORWARD, payload=bytes(1000))
    with pytest.raises(RemoteProtocolError, match="FORWARD carries 1000 bytes"):
        feed(ends[LISTENER], raw[: len(raw) - 1000])


def test_own_step_out_of_order_is_this_side_s_fault() -> None:
    ends = open_pair("link")
    begin_step(ends)
    with pytest.raises(LocalProtocolError, match="step 2 begins before step 1 is over"):
        ends[DIALLER].send(T.STEP, Step(2, 1), [memoryview(pack_shapes([(1, 1)]))])


def test_both_sides_keep_count_of_whole_steps() -> None:
    ends = open_pair("link")
    forward, forward_bytes = EXAMPLES[T.FORWARD]
    for step in (1, 2, 3):
        raw = b"".join(ends[DIALLER].send(T.STEP, Step(step, 6), [memoryview(pack_shapes([(2, 3)] * 2))]))
        for micro_batch in range(2):
            header = Tensors(step, micro_batch, forward.tensors)  # type: ignore[attr-defined]
            raw += b"".join(ends[DIALLER].send(T.FORWARD, header, [memoryview(forward_bytes)]))
        assert len(feed(ends[LISTENER], raw)) == 3
        back = b""
        for micro_batch in range(2):
            header = Tensors(step, micro_batch, [GRAD])
            back += b"".join(ends[LISTENER].send(T.BACKWARD, header, [memoryview(bytes(96))]))
        assert len(feed(ends[DIALLER], back)) == 2


def test_end_of_the_stream_is_fine_between_frames_only() -> None:
    listener = make(False)
    listener.received_eof()
    assert listener.state is ConnectionState.CLOSED
    for cut in (1, PREFIX.size, PREFIX.size + 5, len(raw_frame(T.HELLO)) - 1):
        listener = make(False)
        feed(listener, raw_frame(T.HELLO)[:cut])
        with pytest.raises(RemoteProtocolError, match="ended in the middle of a frame"):
            listener.received_eof()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SIDES), st.lists(st.sampled_from(list(FrameType)), max_size=6), st.binary(max_size=40))
def test_any_sequence_of_frames_only_raises_the_protocol_s_error(
    side: tuple[str, bool], types: list[FrameType], junk: bytes
) -> None:
    ends = open_pair(side[0])
    with contextlib.suppress(RemoteProtocolError):
        feed(ends[side[1]], b"".join(map(raw_frame, types)) + junk)

from typing import Any

import pytest
from peers import Events, feed, raw_frame

from hetero.errors import LocalProtocolError, RemoteProtocolError
from hetero.transport.link import Closed, Received
from hetero.transport.loopback import link_pair
from hetero.transport.tcp import TcpTransport
from hetero.wire import CommandTable, Message, MessageType
from hetero.wire.frames import FrameReader, decode_header
from hetero.wire.headers import MAX_HEADER_BYTES, Control, FrameType


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def message(**payload: Any) -> Message:
    return Message(type=MessageType.CONTROL, payload={"command": "x", **payload})


def over_the_wire(header: Control) -> Message:
    reader = FrameReader(lambda n: memoryview(bytearray(n)), lambda *_: None, 1 << 20)
    return Message.of(feed(reader, raw_frame(FrameType.CONTROL, header))[0].header)  # type: ignore[arg-type]


def run_commands(table: CommandTable, *messages: Message) -> tuple[Events, Events]:
    """Sends messages over a control connection and dispatches them on the other side; gives both sides' events."""
    here, there = Events(), Events()

    def deliver(event: Received | Closed) -> None:
        if isinstance(event, Received) and isinstance(event.frame.header, Control):
            table.dispatch(Message.of(event.frame.header))
        there(event)

    coordinator, worker = link_pair(TcpTransport(io_timeout_s=10), here, deliver, purpose="control")
    coordinator.start()
    worker.start()
    try:
        for sent in messages:
            coordinator.send(FrameType.CONTROL, sent.header())
        there.wait(lambda e: isinstance(e, Closed) or len(there.all) == len(messages))
    finally:
        for link in (coordinator, worker):
            link.close()
        for link in (coordinator, worker):
            link.join(10)
    return here, there


def test_example_of_the_design_reaches_the_function_on_the_other_side() -> None:
    calls: list[Message] = []
    table = CommandTable()
    table.register("checkpoint", calls.append)
    sent = Message(type=MessageType.CONTROL, payload={"command": "checkpoint"}, metadata={"step": 100})
    _, there = run_commands(table, sent)
    assert calls == [sent]
    assert there.closed().error is None


def test_messages_arrive_in_order_and_each_at_its_own_command() -> None:
    calls: list[tuple[str, Any]] = []
    table = CommandTable()
    table.register("a", lambda m: calls.append(("a", m.payload["n"])))
    table.register("b", lambda m: calls.append(("b", m.payload["n"])))
    run_commands(table, *(Message(MessageType.CONTROL, {"command": "ab"[n % 2], "n": n}) for n in range(20)))
    assert calls == [("ab"[n % 2], n) for n in range(20)]


def test_unknown_command_ends_the_connection_and_both_sides_know_why() -> None:
    table = CommandTable()
    table.register("known", lambda _: None)
    here, there = run_commands(table, Message(MessageType.CONTROL, {"command": "other"}))
    reason = "command 'other' is unknown here, known: ['known']"
    assert isinstance(there.closed().error, RemoteProtocolError)
    assert str(there.closed().error) == reason
    assert here.frame(FrameType.ERROR).header.reason == reason  # type: ignore[attr-defined]


def test_unknown_command_is_refused_by_its_name() -> None:
    with pytest.raises(RemoteProtocolError, match=r"command 'x' is unknown here, known: \[\]"):
        CommandTable().dispatch(message())


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        1.5,
        -0.0,
        "",
        "ü 🙂\n\x00",
        [],
        {},
        [1, ["a", {"b": None}]],
        nested(6),
    ],
)
def test_bounded_json_arrives_as_it_was(value: Any) -> None:
    sent = Message(MessageType.CONTROL, {"command": "x", "value": value}, {"value": value})
    assert over_the_wire(sent.header()) == sent


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (nested(7), "nested deeper than 8"),
        (float("nan"), "nan is not a number"),
        (float("inf"), "inf is not a number"),
        (b"bytes", "a bytes is not JSON"),
        ((1, 2), "a tuple is not JSON"),
        ({1: 2}, "keys must be text"),
        ({"a": {"b": object()}}, "a object is not JSON"),
        (2**63, "an integer must fit in 64 bits"),
        (10**1000, "an integer must fit in 64 bits"),
        ("\ud800", "text must be Unicode"),
        ({"\udfff": 1}, "keys must be text"),
    ],
)
def test_what_is_no_bounded_json_is_refused_where_it_is_made(value: Any, why: str) -> None:
    with pytest.raises(LocalProtocolError, match=f"a message must be JSON: {why}"):
        message(value=value)
    with pytest.raises(LocalProtocolError, match=f"a message must be JSON: {why}"):
        Message(MessageType.CONTROL, {"command": "x"}, {"value": value})


def test_a_value_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(LocalProtocolError, match="nested deeper"):
        message(value=endless)


@pytest.mark.parametrize("payload", [{}, {"command": 1}, {"command": None}, {"Command": "x"}, {"command": ["x"]}])
def test_message_without_a_command_is_refused_on_both_sides(payload: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="must name its command"):
        Message(MessageType.CONTROL, payload)
    with pytest.raises(RemoteProtocolError, match="must name its command"):
        Message.of(Control(payload, {}))


def test_deep_json_of_a_peer_is_refused() -> None:
    raw = b'{"payload":{"command":"x","a":' + b"[" * 500 + b"]" * 500 + b'},"metadata":{}}'
    header = decode_header(FrameType.CONTROL, raw)
    with pytest.raises(RemoteProtocolError, match="nested deeper than 8"):
        Message.of(header)  # type: ignore[arg-type]


def test_message_that_is_too_long_is_refused_where_it_is_sent() -> None:
    left, right = link_pair(TcpTransport(), Events(), Events(), purpose="control")
    try:
        with pytest.raises(LocalProtocolError, match=f"a header may hold {MAX_HEADER_BYTES} bytes"):
            left.send(FrameType.CONTROL, message(text="x" * MAX_HEADER_BYTES).header())
    finally:
        left.close()
        right.close()


def test_messages_are_for_control_connections_only() -> None:
    left, right = link_pair(TcpTransport(), Events(), Events(), purpose="link")
    try:
        with pytest.raises(LocalProtocolError, match="CONTROL may not be sent on a open link connection"):
            left.send(FrameType.CONTROL, message().header())
    finally:
        left.close()
        right.close()

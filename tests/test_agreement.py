"""Two machines that are about to run something else: refused by name on both sides, before the first step."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from conftest import Tiny
from hypothesis import given
from hypothesis import strategies as st
from peers import DEADLINE_S, wait_until
from pipeline import make_spec

from hetero import agreement, worker_session
from hetero.adapter_files import shapes_digest
from hetero.agreement import disagreement, read_model
from hetero.errors import PeerError
from hetero.fingerprint import fingerprint
from hetero.inbox import Inbox
from hetero.run import _check_adapters
from hetero.serve import WorkerServer
from hetero.session import CoordinatorSession
from hetero.spec import RunSpec, WorkerEntry
from hetero.transport.identity import identity_of
from hetero.transport.listening import listen
from hetero.transport.tcp import TcpTransport
from hetero.versions import differences, versions
from hetero.wire.headers import FrameType, Hello, Synced, Welcome
from hetero.worker_session import WorkerSession

IDENTITY = identity_of(bytes(32))
SPEC_DIGEST = "a" * 64


@pytest.fixture(scope="module")
def spec(tiny: Tiny) -> RunSpec:
    return RunSpec.from_json(make_spec(tiny("llama"), [3]).to_json())  # numbers as every machine has them


# --- the comparison ----------------------------------------------------------------------------------------------


def welcome(**changes: Any) -> Welcome:
    return msgspec.structs.replace(Welcome("them", versions(), SPEC_DIGEST), **changes)


MODEL = {"config": "c0", "tokenizer": "70", "layers.0": "10", "layers.1": "11", "embed": "e0"}


def test_other_machine_s_versions_cannot_write_into_the_log() -> None:
    theirs = {"torch": "2\n[31m", "pe\x1b]0;ft": "1", "same": "\a"}
    assert differences({"torch": "2", "same": "\a"}, theirs) == ["pe\\x1b]0;ft none / 1", "torch 2 / 2\\n[31m"]


@pytest.mark.parametrize("version", ["1.²", "٣.1", "", "1..", "\x1b"])
def test_version_that_is_no_number_is_another_one(version: str) -> None:
    reason = disagreement(SPEC_DIGEST, MODEL, welcome(versions={"hetero": version}), MODEL)
    assert reason is not None and "runs something else" in reason


def test_equal_machines_agree() -> None:
    assert disagreement(SPEC_DIGEST, MODEL, welcome(), MODEL) is None
    assert disagreement(SPEC_DIGEST, MODEL, welcome(), {}) is None  # its model is not there yet
    assert disagreement(SPEC_DIGEST, {}, welcome(), MODEL) is None
    assert disagreement(SPEC_DIGEST, MODEL, welcome(), {"layers.7": "17", "layers.0": "10"}) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "older"),
    [
        ("0.1.0", "0.2.0", "this"),
        ("0.2.0", "0.1.0", "that"),
        ("0.9", "0.10", "this"),
        ("1.0", "0.99.9", "that"),
        ("0.1.0", "", "that"),
        ("0.1.0", "none", "that"),
        ("0.1.0", "0.1.0.dev1", "this"),
    ],
)
def test_other_checkout_is_refused_and_the_older_machine_is_told_to_update(
    monkeypatch: pytest.MonkeyPatch, mine: str, theirs: str, older: str
) -> None:
    monkeypatch.setattr(agreement, "versions", lambda: {"hetero": mine})
    text = disagreement(SPEC_DIGEST, MODEL, welcome(versions={"hetero": theirs}), MODEL)
    assert (
        text == f"runs something else: hetero is {theirs} there and {mine} here; update the checkout on {older} machine"
    )


def test_peer_without_a_version_is_another_checkout() -> None:
    text = disagreement(SPEC_DIGEST, MODEL, welcome(versions={}), MODEL)
    assert text is not None and "hetero is none there" in text


def test_other_libraries_are_no_disagreement() -> None:
    assert disagreement(SPEC_DIGEST, MODEL, welcome(versions=versions() | {"torch": "1.0"}), MODEL) is None


@pytest.mark.parametrize("digest", ["", "b" * 64, SPEC_DIGEST[:-1]])
def test_spec_that_is_read_differently_is_refused(digest: str) -> None:
    text = disagreement(SPEC_DIGEST, MODEL, welcome(digest=digest), MODEL)
    assert text is not None and "the spec's digest is" in text and "git pull on both machines" in text


@pytest.mark.parametrize("part", MODEL)
def test_each_part_of_the_base_model_is_compared(part: str) -> None:
    text = disagreement(SPEC_DIGEST, MODEL, welcome(), MODEL | {part: "other"})
    assert text is not None
    assert f"{part} has the digest other there and {MODEL[part]} here" in text
    assert "copy the model's folder" in text and "model.revision" in text


@pytest.mark.parametrize(
    "payload",
    [b"", b"null", b"[]", b"3", b"{", b"\xff", b"[" * 60_000, b'{"a": 1}', b'{"a": {"b": "c"}}', b'"\\ud800"'],
)
def test_fingerprint_that_is_none_is_empty(payload: bytes) -> None:
    assert read_model(memoryview(payload)) == {}


def test_fingerprint_comes_back_and_long_or_countless_parts_do_not() -> None:
    assert read_model(json.dumps(MODEL).encode()) == MODEL
    assert read_model(json.dumps(MODEL | {"x": "1" * 65}).encode()) == MODEL
    assert read_model(json.dumps({str(n): "" for n in range(5000)}).encode()) == {}


@given(st.binary(max_size=200))
def test_any_bytes_are_a_fingerprint_or_none(payload: bytes) -> None:
    found = read_model(payload)
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in found.items())


def test_digest_of_shapes_sees_names_and_shapes_and_not_their_order() -> None:
    shapes = {"a": [2, 3], "b": [4]}
    assert shapes_digest(shapes) == shapes_digest({"b": (4,), "a": (2, 3)})
    others: list[dict[str, list[int]]] = [{}, {"a": [2, 3]}, {"a": [3, 2], "b": [4]}, {"a": [2, 3], "c": [4]}]
    assert len({shapes_digest(other) for other in [*others, shapes]}) == 5


# --- over a real connection --------------------------------------------------------------------------------------


@dataclass
class Served:
    """A worker in this process that answers with the model that it is given, and what became of it."""

    port: int
    specs: list[RunSpec] = field(default_factory=list)
    steps: int = 0


@contextmanager
def serving(model: dict[str, str], *, change_spec: Callable[[RunSpec], RunSpec] | None = None) -> Iterator[Served]:
    listener = listen(None, 0)
    served = Served(listener.getsockname()[1])

    def work(session: WorkerSession) -> None:
        if change_spec is not None:
            session.spec = change_spec(session.spec)
        served.specs.append(session.spec)
        session.welcome(model)
        session.wait_sync()
        served.steps += 1
        session.next_order()

    def make_transport(spec: RunSpec) -> TcpTransport:
        return TcpTransport(identity=IDENTITY, io_timeout_s=spec.transport.io_timeout_s)

    server = WorkerServer(listener, make_transport, IDENTITY)
    thread = threading.Thread(target=server.serve, args=(work,), kwargs={"once": True}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def at(spec: RunSpec, port: int, **changes: Any) -> RunSpec:
    workers = [WorkerEntry(id="w1", host="127.0.0.1", port=port)]
    return RunSpec.from_json(msgspec.structs.replace(spec, workers=workers, **changes).to_json())


def join(spec: RunSpec, model: dict[str, str]) -> None:
    """The coordinator's part up to SYNC; tells the worker how it ended."""
    session = CoordinatorSession(
        spec,
        run_id="run",
        epoch=1,
        inbox=Inbox(),
        transport=TcpTransport(identity=IDENTITY, connect_timeout_s=DEADLINE_S),
        instance="me",
    )
    try:
        session.join(model)
        session.sync(0)
    except BaseException as exc:
        session.end(stop=False, reason=str(exc))
        raise
    session.end(stop=True, reason="finished")


def refused(spec: RunSpec, served: Served, model: dict[str, str], caplog: pytest.LogCaptureFixture) -> str:
    """The refusal; it is on both sides, by stage and address, and no step was run."""
    caplog.set_level(logging.INFO)
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        join(at(spec, served.port), model)
    assert time.monotonic() - began < 10  # wanted: 1 s
    text = str(caught.value)
    assert text.startswith(f"stage 1 at 127.0.0.1:{served.port}: ")
    wait_until(lambda: any(caught.value.reason in record.getMessage() for record in caplog.records))
    assert served.steps == 0
    return text


def test_equal_machines_join(spec: RunSpec, tiny: Tiny) -> None:
    model = fingerprint(tiny("llama"))
    with serving(model) as served:
        join(at(spec, served.port), model)
    assert served.steps == 1 and served.specs == [at(spec, served.port)]


@pytest.mark.parametrize("layer", ["config", *(f"layers.{n}" for n in range(6)), "model.embed_tokens.weight"])
def test_other_base_weights_are_refused_by_name_on_both_sides(
    layer: str, spec: RunSpec, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    """Another revision of the base model on one machine."""
    model = fingerprint(tiny("llama"))
    with serving(model | {layer: "f" * 16}) as served:
        text = refused(spec, served, model, caplog)
    assert f"{layer} has the digest {'f' * 16} there and {model[layer]} here" in text and "model.revision" in text


def test_other_tokenizer_is_refused(spec: RunSpec, caplog: pytest.LogCaptureFixture) -> None:
    with serving({"tokenizer": "1"}) as served:
        text = refused(spec, served, {"tokenizer": "2"}, caplog)
    assert "tokenizer has the digest 1 there and 2 here" in text


def test_other_checkout_is_refused_on_both_sides(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_session, "versions", lambda: versions() | {"hetero": "0.0.1"})
    with serving({}) as served:
        text = refused(spec, served, {}, caplog)
    assert f"hetero is 0.0.1 there and {versions()['hetero']} here; update the checkout on that machine" in text


_OTHER: dict[str, Callable[[RunSpec], dict[str, Any]]] = {
    "seed": lambda s: {"seed": s.seed + 1},
    "model": lambda s: {"model": msgspec.structs.replace(s.model, dtype="bfloat16")},
    "adapter": lambda s: {"adapter": msgspec.structs.replace(s.adapter, r=s.adapter.r * 2)},
    "max_length": lambda s: {"max_length": s.max_length - 1},
    "wire dtype": lambda s: {"boundary_dtypes": ["bfloat16"]},
    "stages": lambda s: {
        "stages": [msgspec.structs.replace(s.stages[0], end=2), msgspec.structs.replace(s.stages[1], start=2)]
    },
    "optimizer": lambda s: {"optimizer": msgspec.structs.replace(s.optimizer, args={"lr": 0.5})},
    "loop": lambda s: {"loop": msgspec.structs.replace(s.loop, batch_size=99)},
    "total_steps": lambda s: {"total_steps": s.total_steps + 1},
}


@pytest.mark.parametrize("name", _OTHER)
def test_worker_that_understands_the_run_differently_is_refused(
    name: str, spec: RunSpec, caplog: pytest.LogCaptureFixture
) -> None:
    """As a checkout would that fills in another default: case F09."""

    def change(theirs: RunSpec) -> RunSpec:
        return msgspec.structs.replace(theirs, **_OTHER[name](theirs))

    with serving({}, change_spec=change) as served:
        text = refused(spec, served, {}, caplog)
        theirs = served.specs[0].digest()
    assert f"the spec's digest is {theirs[:16]} there and " in text and "git pull" in text


def test_worker_uses_the_coordinator_s_spec_to_the_last_field(spec: RunSpec) -> None:
    for name, change in _OTHER.items():
        with serving({}) as served:
            sent = at(spec, served.port, **change(spec))
            join(sent, {})
        assert served.specs == [sent], name


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "must be JSON"),
        (b"{}", "must be given"),
        (b"[" * 60_000, "must be"),
        (b'{"seed": "\\ud800"}', "must be"),
        (b"\x80\x04N.", "must be JSON"),
    ],
)
def test_spec_that_is_none_is_refused_for_good(raw: bytes, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Case F09; the worker goes on listening, and prints the reason as well."""
    caplog.set_level(logging.INFO)
    header = Hello("control", "run", 1, 1, "me", versions())
    listener = listen(None, 0)
    server = WorkerServer(listener, lambda _: TcpTransport(identity=IDENTITY), IDENTITY)
    thread = threading.Thread(target=server._accept, daemon=True)
    thread.start()
    events: list[Any] = []
    try:
        sock = socket.create_connection(listener.getsockname(), timeout=DEADLINE_S)
        sock.settimeout(None)
        link = TcpTransport(identity=IDENTITY).link(
            sock, dialler=True, deliver=events.append, name="worker", silence_s=DEADLINE_S
        )
        link.send(FrameType.HELLO, header, [memoryview(raw)] if raw else [])
        link.start()
        wait_until(lambda: bool(events))
        link.close()
        link.join(DEADLINE_S)
        rejection = events[0].frame.header
        assert rejection.permanent and why in rejection.reason
        assert any(rejection.reason in record.getMessage() for record in caplog.records)
    finally:
        server._stopping = True
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(DEADLINE_S)
    assert not [record for record in caplog.records if record.exc_info]


def test_worker_whose_adapter_has_other_shapes_is_refused_before_the_first_step(spec: RunSpec) -> None:
    """What libraries of another version would make of the same words; stands in for the worker's SYNCED."""
    shapes = {"base_model.model.model.layers.4.self_attn.q_proj.lora_A.weight": [4, 32]}
    prepared: Any = SimpleNamespace(adapter=SimpleNamespace(shapes=shapes))
    session = CoordinatorSession(
        at(spec, 9), run_id="run", epoch=1, inbox=Inbox(), transport=TcpTransport(identity=IDENTITY), instance="me"
    )
    right = shapes_digest(shapes)
    answer = Synced(1, "cpu", "float32", 1, 1, right)
    _check_adapters(session, prepared, {1: answer})
    with pytest.raises(PeerError) as caught:
        _check_adapters(session, prepared, {1: msgspec.structs.replace(answer, adapter="0" * 16)})
    text = str(caught.value)
    assert text.startswith("stage 1 at 127.0.0.1:9: has another adapter: ")
    assert f"{'0' * 16} there and {right} here" in text and "peft or transformers" in text

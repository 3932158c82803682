import contextlib
import json
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, Struct

from hetero.checked import convert, unknown_key
from hetero.errors import ConfigError
from hetero.spec import AdapterSpec, LoopSpec, ModelSpec, RunSpec, ShardPlanSpec, TransportSpec


class Inner(Struct, frozen=True, forbid_unknown_fields=True):
    rank: Annotated[int, Meta(ge=1)]
    kind: Literal["a", "b"] | None = None
    device: Annotated[str, Meta(pattern=r"^(auto|[a-z]+(:[0-9]+)?)$")] = "auto"


class Outer(Struct, frozen=True, forbid_unknown_fields=True):
    inner: Inner
    items: list[Inner] = []
    table: dict[str, Annotated[int, Meta(ge=1)]] = {}
    ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    name: Annotated[str, Meta(min_length=1, max_length=5)] = "x"
    target: str = msgspec.field(name="_target_", default="t")
    optional: Inner | None = None
    either: list[str] | str = "auto"


GOOD: dict[str, Any] = {"inner": {"rank": 1}}


def refusal(raw: Any, type_: type[Any] = Outer, root: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        convert(raw, type_, root=root)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 1000
    return text


def test_plain_data_and_json_become_the_same_typed_data() -> None:
    raw = {
        "inner": {"rank": 2, "kind": None, "device": "cuda:1"},
        "items": [{"rank": 3, "kind": "a"}],
        "table": {"q.proj": 4},
        "ratio": 0,
        "_target_": "x",
        "optional": {"rank": 5},
        "either": ["a"],
    }
    expected = Outer(
        inner=Inner(2, None, "cuda:1"),
        items=[Inner(3, "a")],
        table={"q.proj": 4},
        ratio=0.0,
        target="x",
        optional=Inner(5),
        either=["a"],
    )
    encoded = json.dumps(raw).encode()
    for form in (raw, encoded, bytearray(encoded), memoryview(encoded)):
        assert convert(form, Outer) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": {}}, "inner.rank must be given"),
        ({"inner": {"rank": 0}}, "inner.rank must be int >= 1, got 0"),
        ({"inner": {"rank": "8"}}, "inner.rank must be int, got '8'"),
        ({"inner": {"rank": True}}, "inner.rank must be int, got True"),
        ({"inner": {"rank": 1.0}}, "inner.rank must be int, got 1.0"),
        ({"inner": {"rank": None}}, "inner.rank must be int, got None"),
        ({"inner": {"rank": 1, "kind": "c"}}, "inner.kind must be one of a, b, null, got 'c'"),
        ({"inner": {"rank": 1, "kind": True}}, "inner.kind must be one of a, b, null, got True"),
        (
            {"inner": {"rank": 1, "device": "cuda:x"}},
            "inner.device must be auto, or a device type with an optional index such as cuda:1, got 'cuda:x'",
        ),
        ({"inner": None}, "inner must be object, got None"),
        ({"items": [{"rank": 1}, {"rank": -1}]}, "items[1].rank must be int >= 1, got -1"),
        ({"items": {"rank": 1}}, "items must be array, got {'rank': 1}"),
        ({"table": {"a": 1, "q.proj": 0}}, "table.q.proj must be int >= 1, got 0"),
        ({"table": {"a": 1, "b": "2"}}, "table.b must be int, got '2'"),
        ({"table": {3: 1}}, "table must have text for keys, got {3: 1}"),
        ({3: 1}, "the configuration must have text for keys, got {'inner': {'rank': 1}, 3: 1}"),
        ({"ratio": 1}, "ratio must be float < 1.0, got 1; for example ratio=0"),
        ({"ratio": -0.5}, "ratio must be float >= 0.0, got -0.5; for example ratio=0"),
        ({"ratio": float("nan")}, "ratio must be a finite number, got nan"),
        ({"items": [{"rank": float("inf")}]}, "items[0].rank must be a finite number, got inf"),
        ({"name": ""}, "name must be str of length >= 1, got ''"),
        ({"name": "toolong"}, "name must be str of length <= 5, got 'toolong'"),
        ({"name": "a\nb\nc\nd"}, r"name must be str of length <= 5, got 'a\nb\nc\nd'"),
        ({"_target_": 3}, "_target_ must be str, got 3"),
        ({"optional": {"rank": 0}}, "optional.rank must be int >= 1, got 0"),
        ({"either": 3}, "either must be str | array, got 3"),
        ({"either": ["a", 3]}, "either[1] must be str, got 3"),
    ],
)
def test_every_mistake_is_one_line_with_key_rule_and_value(change: dict[Any, Any], message: str) -> None:
    assert refusal({**GOOD, **change}) == message
    if not message.startswith("the configuration"):
        assert refusal({**GOOD, **change}, root="model") == f"model.{message}".replace("example ", "example model.")


def test_missing_key_at_the_top_is_named() -> None:
    assert refusal({}) == "inner must be given"
    assert refusal({}, root="shard_plan") == "shard_plan.inner must be given"


@pytest.mark.parametrize("raw", [None, 3, "text", [1]])
def test_what_is_no_mapping_is_refused(raw: Any) -> None:
    assert refusal(raw) == f"the configuration must be object, got {raw!r}"
    assert refusal(raw, root="model") == f"model must be object, got {raw!r}"


def test_unknown_key_is_answered_with_the_nearest_and_all_that_exist() -> None:
    assert refusal({"inner": {"rank": 1, "knd": "a"}}) == (
        "inner.knd is not a key; did you mean kind? keys here: device, kind, rank"
    )
    assert refusal({**GOOD, "items": [{"rank": 1, "zzz": 2}]}) == (
        "items[0].zzz is not a key; keys here: device, kind, rank"
    )
    assert "did you mean _target_?" in refusal({**GOOD, "target": "x"})
    assert refusal({**GOOD, "a\nb": 1}).startswith(r"'a\nb' is not a key; ")
    assert unknown_key("learning_rate", ["lr"], "optimizer") == "optimizer.learning_rate is not a key; keys here: lr"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"inner":',
        b"\xff\xfe",
        b'{"inner":{"rank":NaN}}',
        b'{"ratio":1e999}',
        b'{"ratio":Infinity}',
        b"[" * 9000,
        b'{"name":"\\ud800"}',
        b'{"name":"\xed\xa0\x80"}',
        b"{'inner': 1}",
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",
    ],
)
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    assert refusal(raw).startswith("the configuration must be JSON: ")
    assert refusal(raw, root="the spec").startswith("the spec must be JSON: ")


def test_numbers_beyond_float64_and_text_beyond_unicode_are_refused() -> None:
    assert refusal({**GOOD, "ratio": 10**400}).startswith("ratio must be a number that a float64 can hold, got 1000")
    assert refusal({**GOOD, "name": "a\udcff"}) == r"name must be text that UTF-8 can hold, got 'a\udcff'"
    assert "surrogates" in refusal({**GOOD, "\udcff": 1})


def test_endless_value_is_shortened_in_the_message() -> None:
    assert refusal({**GOOD, "name": "x" * 100_000}).endswith("x...")


def test_value_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "recursion" in refusal({**GOOD, "items": endless})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([f.encode_name for f in msgspec.structs.fields(Outer)]) | st.text(), _JSON))
def test_any_data_is_converted_or_refused_by_a_config_error(raw: Any) -> None:
    with contextlib.suppress(ConfigError):
        convert(raw, Outer)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes_are_refused_by_a_config_error(raw: bytes) -> None:
    with pytest.raises(ConfigError):
        RunSpec.from_json(raw)


@pytest.mark.parametrize(
    ("type_", "root", "raw", "message"),
    [
        (ModelSpec, "model", {"path": "x", "dtype": "fp16"}, "model.dtype must be one of float32, bfloat16, float16, "),
        (AdapterSpec, "adapter", {"target_module": []}, "adapter.target_module is not a key; did you mean target_mod"),
        (
            AdapterSpec,
            "adapter",
            {"rank_pattern": {"q_proj": 0}},
            "adapter.rank_pattern.q_proj must be int >= 1, got 0",
        ),
        (TransportSpec, "transport", {"io_timeout_s": 0}, "transport.io_timeout_s must be float > 0.0, got 0"),
        (LoopSpec, "loop", {"batch_size": 0}, "loop.batch_size must be int >= 1, got 0"),
        (
            ShardPlanSpec,
            "shard_plan",
            {"stages": [{"id": "a", "start": 0, "end": 1}, {"id": "b", "start": -1, "end": 2}]},
            "shard_plan.stages[1].start must be int >= 0, got -1",
        ),
    ],
)
def test_keys_of_the_configuration_are_named_as_the_user_writes_them(
    type_: type[Any], root: str, raw: dict[str, Any], message: str
) -> None:
    assert refusal(raw, type_, root).startswith(message)


def test_key_that_users_of_peft_expect_is_refused_with_the_reason() -> None:
    message = unknown_key("trainable_token_indices", ["target_modules"], "adapter")
    assert message.startswith("adapter.trainable_token_indices is not a key: single rows of the embedding")
    assert "modules_to_save" in message and "\n" not in message

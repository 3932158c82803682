"""Raw data to typed data: every mistake becomes one line that names key, rule and value."""

from __future__ import annotations

import difflib
import math
import re
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from hetero.errors import ConfigError

T = TypeVar("T")
_PATH = re.compile(r"^(?P<rule>.*?)(?: - at (?P<key>`key` in )?`(?P<path>\$.*)`)?$", re.DOTALL)
_PART = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


def convert(raw: Any, type_: type[T], *, root: str = "") -> T:
    """Makes a `type_` of plain data (or of JSON bytes), with all its checks.

    Args:
        raw: JSON bytes, or dicts, lists, strings, numbers and None.
        type_: a msgspec Struct.
        root: prefix of the keys in error messages, such as `shard_plan`.

    Raises:
        ConfigError: a key is unknown or missing, or a value breaks its rule.
    """
    try:
        if isinstance(raw, bytes | bytearray | memoryview):
            raw = msgspec.json.decode(raw)
        _refuse_unsendable(raw, root)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as exc:
        raise ConfigError(f"{root or 'the configuration'} must be JSON: {exc}") from None
    try:
        return msgspec.convert(raw, type_, strict=True)
    except msgspec.ValidationError as exc:
        raise ConfigError(_explain(str(exc), raw, type_, root)) from None
    except (RecursionError, UnicodeError) as exc:
        raise ConfigError(f"{root or 'the configuration'} must be plain data: {exc}") from None


# Keys that users of PEFT expect, and why they are none here.
_NO_KEYS = {
    "trainable_token_indices": "single rows of the embedding cannot train, since the head, on another stage, may share "
    "them; modules_to_save with the embedding's name trains it whole, where the model does not tie it to the head",
}


def unknown_key(key: str, known: list[str], where: str) -> str:
    """The message for a key that does not exist, with the nearest that does."""
    shown = key if key.isprintable() else repr(key)
    full = f"{where}.{shown}" if where else shown
    if key in _NO_KEYS:
        return f"{full} is not a key: {_NO_KEYS[key]}"
    near = difflib.get_close_matches(key, known, n=1)
    hint = f" did you mean {near[0]}?" if near else ""
    return f"{full} is not a key;{hint} keys here: {', '.join(sorted(known))}"


def _refuse_unsendable(raw: Any, where: str) -> None:
    """Refuses what Python holds and JSON cannot."""
    if isinstance(raw, str) and any("\ud800" <= letter <= "\udfff" for letter in raw):
        raise ConfigError(f"{where} must be text that UTF-8 can hold, got {raw!r}")
    if isinstance(raw, float) and not math.isfinite(raw):
        raise ConfigError(f"{where} must be a finite number, got {raw}")
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for key, value in items:
        name = f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}".lstrip(".")
        _refuse_unsendable(value, name)


def _explain(message: str, raw: Any, type_: Any, root: str) -> str:
    """Rewrites msgspec's message in the house's form: key, rule, value."""
    match = _PATH.match(message)
    assert match is not None
    rule, parts = match["rule"], _parts(match["path"] or "$")
    value, hint = raw, type_
    shown, usual = root, ""
    for part in parts:
        usual = _usual(hint, part)
        hint = _hint_of(hint, part)
        if part == "..." and isinstance(value, dict):  # msgspec does not say which
            part = next((key for key, item in value.items() if not _fits(item, hint)), part)
        value = _child(value, part)
        shown = f"{shown}[{part}]" if isinstance(part, int) else f"{shown}.{part}".lstrip(".")
    if unknown := re.match(r"Object contains unknown field `(.*)`", rule, re.DOTALL):
        return unknown_key(unknown[1], _field_names(hint), shown)
    if missing := re.match(r"Object missing required field `(.*)`", rule):
        return f"{shown}.{missing[1]} must be given".lstrip(".")
    if match["key"]:
        return f"{shown or 'the configuration'} must have text for keys, got {_shorten(value)}"
    if rule == "Number out of range":
        rule = "a number that a float64 can hold"
    is_text = re.match(r"Expected `str(?: \| null)?`", rule) is not None
    chosen_by_name = is_text and str not in _options(hint) and _literals(hint) not in ([], ["null"])
    if rule.startswith("Invalid enum value") or chosen_by_name:
        rule = f"one of {', '.join(_literals(hint))}"
    if "matching regex" in rule and "auto|" in rule:
        rule = "auto, or a device type with an optional index such as cuda:1"
    rule = re.sub(r", got `.*`$", "", rule).removeprefix("Expected ").replace("`", "")
    own = _own_remedy(hint) or (usual and f"; for example {shown}={usual}")
    return f"{shown or 'the configuration'} must be {rule}, got {_shorten(value)}{_remedy(value, hint)}{own}"


def _remedy(value: Any, hint: Any) -> str:
    """Where a text in brackets, such as an IPv6 address, was read as a list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) and str in _options(hint):
        return f"; write {value[0]} without brackets, or quote them: '[{value[0]}]'"
    return ""


def _own_remedy(hint: Any) -> str:
    """What the field itself says of how to put it right, `Meta(extra={"remedy": ...})`."""
    for option in (hint, *get_args(hint)):
        for meta in getattr(option, "__metadata__", ()):
            if remedy := (meta.extra or {}).get("remedy"):
                return f"; {remedy}"
    return ""


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _fits(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint, strict=True)
    except msgspec.ValidationError:
        return False
    return True


def _parts(path: str) -> list[str | int]:
    found: list[str | int] = []
    for match in _PART.finditer(path):
        found.append(match[1] if match[1] is not None else match[2] if match[2] == "..." else int(match[2]))
    return found


def _child(value: Any, part: str | int) -> Any:
    try:
        return value[part]
    except (KeyError, IndexError, TypeError):
        return value


def _hint_of(hint: Any, part: str | int) -> Any:
    """The annotation of a field or an item inside `hint`."""
    for option in _options(hint):
        if isinstance(part, str) and isinstance(option, type) and issubclass(option, msgspec.Struct):
            names = {field.encode_name: field.name for field in msgspec.structs.fields(option)}
            hints = get_type_hints(option, include_extras=True)
            if part in names:
                return hints[names[part]]
        if get_origin(option) in (list, dict):
            return get_args(option)[-1]
    return Any


def _usual(hint: Any, part: str | int) -> str:
    """The default of a field that is a number; empty where it has none."""
    for option in _options(hint):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            for field in msgspec.structs.fields(option):
                if field.encode_name == part and type(field.default) in (int, float):
                    return f"{field.default:g}"
    return ""


def _options(hint: Any) -> list[Any]:
    """The members of a union, `Annotated` taken off."""
    if hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    origin = get_origin(hint)
    if origin is not None and origin.__name__ in ("Union", "UnionType"):
        return [inner for option in get_args(hint) for inner in _options(option)]
    return [hint]


def _literals(hint: Any) -> list[str]:
    options = _options(hint)
    found = [
        str(value)
        for option in options
        if get_origin(option).__class__.__name__ == "_SpecialForm" or str(get_origin(option)) == "typing.Literal"
        for value in get_args(option)
    ]
    return found + ["true", "false"] * bool(found and bool in options) + ["null"] * (type(None) in options)


def _field_names(hint: Any) -> list[str]:
    for option in _options(hint):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return [field.encode_name for field in msgspec.structs.fields(option)]
    return []

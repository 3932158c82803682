"""Reading rows: a JSONL file, a data set of the hub or Python's own documentation -> checked rows with their ids.

Row ids count from 0 over all rows of the source, skipped ones too. Blank lines of a JSONL file are no rows and get no
id (as in `datasets` and pandas), but messages name the line of the file as an editor shows it, from 1.

A row has the first of these forms whose keys it holds with values that are not null; other keys are ignored:
    {"input_ids", "labels"}  {"messages"}  {"prompt", "completion"}  {"instruction", "input", "output"}  {"text"}
labels default to input_ids, input to nothing.
"""

import codecs
import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetero import hub
from hetero.errors import ConfigError
from hetero.spec import DataSpec

Form = Literal["tokens", "messages", "completion", "alpaca", "text"]

IGNORE = -100
"""A label that is not trained, as in transformers."""

ROLES = ("system", "developer", "user", "assistant", "tool")

_REQUIRED: dict[Form, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
_ANSWER: dict[Form, str] = {"completion": "completion", "alpaca": "output", "text": "text"}
_ACCEPTED = (
    '{"text"}, {"messages": [{"role", "content"}]}, {"prompt", "completion"}, '
    '{"instruction", "input", "output"} or {"input_ids", "labels"}'
)
_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Row:
    """One row that can be encoded.

    Attributes:
        id: index among the source's rows, from 0.
        where: what a message calls it, such as `rows.jsonl line 7`.
        form: which keys of `fields` count.
        fields: the row, checked: strings are strings, messages have a known role and content that is not None,
            input_ids and labels are lists of equal length.
    """

    id: int
    where: str
    form: Form
    fields: dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """What a source held.

    Attributes:
        name: the source in a message.
        rows: the rows to encode, in the source's order.
        total: number of rows, skipped ones too.
        skipped: reason -> number of rows.
        blank_lines: lines of the file that are no rows.
    """

    name: str
    rows: tuple[Row, ...]
    total: int
    skipped: dict[str, int]
    blank_lines: int = 0


def read_rows(spec: DataSpec) -> Rows:
    """Read and check every row of the configured source.

    Raises:
        ConfigError: the source is missing or unreadable, or a row has an unknown form or a value of a wrong type.
    """
    if spec.source == "pydocs":
        return _read_pydocs()
    if spec.path is None:
        what = "a JSONL file" if spec.source == "jsonl" else "an id on the hub or a local file or folder"
        raise ConfigError(f"data.path must name {what} with data={spec.source}, got null; give data.path=...")
    return _read_jsonl(spec.path) if spec.source == "jsonl" else _read_hub(spec, spec.path)


def _read_pydocs() -> Rows:
    # The text changes a little from one Python version to the next.
    try:
        from pydoc_data.topics import topics
    except ImportError as exc:
        raise ConfigError(
            "data.source=pydocs needs the module pydoc_data, which this Python lacks; give data=jsonl data.path=..."
        ) from exc
    rows = [Row(i, f"pydocs topic {name}", "text", {"text": topics[name]}) for i, name in enumerate(sorted(topics))]
    return Rows("pydocs", tuple(rows), len(rows), {})


def _read_jsonl(path: str) -> Rows:
    file = Path(os.path.expanduser(path))  # Path.expanduser() raises for an unknown user
    if file.is_dir():
        raise ConfigError(f"data.path must be a JSONL file, got the folder {path!r}")
    if not file.exists():
        raise ConfigError(f"data.path must be an existing JSONL file, got {path!r}")
    blank = 0

    def records() -> Iterator[tuple[str, Any]]:
        nonlocal blank
        with file.open("rb") as lines:  # bytes end at \n only; str.splitlines() would also cut at U+2028 in a string
            for number, raw in enumerate(lines, start=1):
                line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if line.strip():
                    yield f"{path} line {number}", _parse(line, f"{path} line {number}")
                else:
                    blank += 1

    try:
        found = _collect(path, records())
    except OSError as exc:
        raise ConfigError(f"data.path must be a readable file, got {path!r}: {exc.strerror}") from exc
    if not found.total:
        raise ConfigError(f"data.path must hold at least one row, got the empty file {path!r}")
    return Rows(found.name, found.rows, found.total, found.skipped, blank)


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{where} must be UTF-8, got byte 0x{line[exc.start]:02x} at {exc.start}") from exc
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{where} must be one JSON object: {exc.msg} at column {exc.colno}") from exc
    except (ValueError, RecursionError) as exc:  # an integer of thousands of digits; brackets nested too deep
        raise ConfigError(f"{where} must be one JSON object: {exc}") from exc


def _read_hub(spec: DataSpec, path: str) -> Rows:
    local = Path(os.path.expanduser(path))
    builder = _BUILDERS.get(local.suffix.lower())
    if not local.exists() and (builder or path.startswith(("/", "~", "."))):
        raise ConfigError(f"data.path must be an existing file or folder or an id on the hub, got {path!r}")
    if local.is_file() and not builder:
        raise ConfigError(f"data.path must end in one of {', '.join(_BUILDERS)}, got {path!r}")
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        if local.is_file():
            table = load_dataset(builder, data_files=str(local), split=spec.split)
        elif local.is_dir():
            table = load_dataset(str(local), spec.name, split=spec.split)
        else:
            with contextlib.nullcontext() if hub.has_data_set_answer(path) else hub.offline():
                table = load_dataset(path, spec.name, split=spec.split)
    # A missing data set, no network, a wrong split or configuration, a broken file: datasets raises all of these.
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError, DatasetsError) as exc:
        cause = " ".join(str(exc.__cause__ or exc).split())[:300]
        name = "" if spec.name is None else f", data.name={spec.name}"
        raise ConfigError(f"data.path {path!r} (data.split={spec.split}{name}) cannot be loaded: {cause}") from exc
    found = _collect(path, ((f"{path} row {i}", row) for i, row in enumerate(table)))
    if not found.total:
        raise ConfigError(f"data.path must hold at least one row, got {path!r} with an empty split {spec.split!r}")
    return found


def _collect(name: str, records: Iterable[tuple[str, Any]]) -> Rows:
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    total = 0
    for where, record in records:
        row = check_row(record, total, where)
        if isinstance(row, Row):
            rows.append(row)
        else:
            skipped[row] += 1
        total += 1
    return Rows(name, tuple(rows), total, dict(skipped))


def check_row(record: Any, row_id: int, where: str) -> Row | str:
    """The checked row, or the reason to skip it: nothing in it could be trained.

    Raises:
        ConfigError: the form is unknown or a value has a wrong type.
    """
    if not isinstance(record, dict):
        raise ConfigError(f"{where} must be a JSON object, got {_type_name(record)}")
    form = _form_of(record)
    if form is None:
        if not any(_has_content(value) for value in record.values()):
            return "no text"
        raise ConfigError(f"{where} must have the keys of {_ACCEPTED}, got {sorted(record)}")
    for key in _REQUIRED[form]:
        if record[key] is None:
            return f"null {key}"
    if form == "tokens":
        fields = _check_tokens(record, where)
        return Row(row_id, where, form, fields) if fields["input_ids"] else "empty input_ids"
    if form == "messages":
        messages = _check_messages(record["messages"], where)
        trains = any(_has_content(value) for m in messages for key, value in m.items() if key != "role")
        return Row(row_id, where, form, {"messages": messages}) if trains else "empty messages"
    keys = (*_REQUIRED[form], "input") if form == "alpaca" else _REQUIRED[form]
    texts = {key: _check_text(record.get(key), where, key) for key in keys}
    return Row(row_id, where, form, texts) if texts[_ANSWER[form]].strip() else f"empty {_ANSWER[form]}"


def _form_of(record: dict[str, Any]) -> Form | None:
    held = [form for form, keys in _REQUIRED.items() if all(key in record for key in keys)]
    # A table of mixed forms has every column in every row; the columns of the other forms are null.
    filled = [form for form in held if all(record[key] is not None for key in _REQUIRED[form])]
    return next(iter(filled or held), None)


def _has_content(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else isinstance(value, list | dict) and bool(value)


def _check_text(value: Any, where: str, key: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} must be a string, got {_type_name(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:  # JSON allows half of a surrogate pair, no tokenizer does
            raise ConfigError(f"{where}: {key} must be Unicode text, got half a surrogate pair at {exc.start}") from exc
    return value


def _check_messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: messages must be a list, got {_type_name(value)}")
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(value):
        key = f"messages[{i}]"
        if not isinstance(message, dict):
            raise ConfigError(f"{where}: {key} must be an object with role and content, got {_type_name(message)}")
        if message.get("role") not in ROLES:
            raise ConfigError(f"{where}: {key}.role must be one of {', '.join(ROLES)}, got {message.get('role')!r}")
        if "content" not in message and not message.get("tool_calls"):
            raise ConfigError(f"{where}: {key} must have role and content, got {sorted(message)}")
        # Templates would write a null as the word None, and take a key that is null for one that is set.
        kept = {name: item for name, item in message.items() if item is not None}
        messages.append(kept | {"content": _check_text(message.get("content"), where, f"{key}.content")})
    return messages


def _check_tokens(record: dict[str, Any], where: str) -> dict[str, Any]:
    ids, labels, mask = record["input_ids"], record.get("labels"), record.get("attention_mask")
    _check_integers(ids, where, "input_ids")
    if ids and min(ids) < 0:
        raise ConfigError(f"{where}: input_ids must be at least 0, got {min(ids)}")
    if isinstance(mask, list) and not all(mask):
        raise ConfigError(f"{where}: input_ids must not be padded, got an attention_mask with zeros; leave padding out")
    if labels is None:
        return {"input_ids": ids, "labels": ids}
    _check_integers(labels, where, "labels")
    if len(labels) != len(ids):
        raise ConfigError(f"{where}: labels must be as long as input_ids ({len(ids)}), got {len(labels)}")
    wrong = next((label for label in labels if label < 0 and label != IGNORE), None)
    if wrong is not None:
        raise ConfigError(f"{where}: labels must be {IGNORE} or a token id, got {wrong}")
    return {"input_ids": ids, "labels": labels}


def _check_integers(value: Any, where: str, key: str) -> None:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {key} must be a list of integers, got {_type_name(value)}")
    if not set(map(type, value)) <= {int}:  # bool is a subclass of int, so isinstance would let it pass
        wrong = next(i for i, item in enumerate(value) if type(item) is not int)
        raise ConfigError(f"{where}: {key}[{wrong}] must be an integer, got {value[wrong]!r}")


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"a number ({value})" if isinstance(value, int | float) else type(value).__name__)

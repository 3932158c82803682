import json

import pytest

from hetero.errors import ConfigError
from hetero.rows import check_row, read_rows
from hetero.spec import DataSpec


def write(tmp_path, *lines, name="rows.jsonl", end="\n"):
    path = tmp_path / name
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"".join(line + end.encode() for line in raw))
    return str(path)


def read(path, source="jsonl", **more):
    return read_rows(DataSpec(source=source, path=path, **more))


def refusal(*args, **more):
    with pytest.raises(ConfigError) as caught:
        read(*args, **more)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_forms_may_be_mixed_and_ids_count_skipped_rows_but_no_blank_lines(tmp_path):
    path = write(
        tmp_path,
        {"text": "a", "id": 9},
        "",
        {"text": ""},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        "   ",
        {"prompt": "p", "completion": "c"},
        {"instruction": "i", "output": "o"},
        {"input_ids": [1, 2], "labels": [-100, 2]},
        {"input_ids": [3, 4]},
    )
    found = read(path)
    assert [(row.id, row.form) for row in found.rows] == [
        (0, "text"),
        (2, "messages"),
        (3, "completion"),
        (4, "alpaca"),
        (5, "tokens"),
        (6, "tokens"),
    ]
    assert (found.total, found.blank_lines, found.skipped) == (7, 2, {"empty text": 1})
    assert found.rows[1].where == f"{path} line 4"
    assert found.rows[3].fields["input"] == ""
    assert found.rows[5].fields == {"input_ids": [3, 4], "labels": [3, 4]}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_bom_crlf_nul_emoji_and_line_separators_are_read_as_written(tmp_path, end):
    texts = ["first", "nul \x00 here", "emoji 👩‍🚀", "one\u2028line", "tab\tand\nnewline"]
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    path = write(tmp_path, b"\xef\xbb\xbf" + lines[0].encode(), *lines[1:], end=end)
    assert [row.fields["text"] for row in read(path).rows] == texts


def test_last_line_needs_no_newline(tmp_path):
    assert read(write(tmp_path, {"text": "a"}, end="")).total == 1


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": None}, "null text"),
        ({"text": ""}, "empty text"),
        ({"text": " \n\t\u00a0"}, "empty text"),
        ({}, "no text"),
        ({"id": 3, "source": None, "tags": []}, "no text"),
        ({"prompt": "p", "completion": None}, "null completion"),
        ({"prompt": None, "completion": "c"}, "null prompt"),
        ({"prompt": "p", "completion": "  "}, "empty completion"),
        ({"instruction": "i", "input": None, "output": ""}, "empty output"),
        ({"messages": None}, "null messages"),
        ({"messages": []}, "empty messages"),
        ({"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": ""}]}, "empty messages"),
        ({"input_ids": []}, "empty input_ids"),
        ({"input_ids": None, "labels": None}, "null input_ids"),
    ],
)
def test_rows_with_nothing_to_train_are_skipped_with_the_reason(record, reason):
    assert check_row(record, 0, "x line 1") == reason


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"text": "t", "prompt": "p", "completion": "c"}, "completion"),
        ({"text": "t", "instruction": "i", "input": "", "output": "o"}, "alpaca"),
        ({"text": "t", "prompt": "p", "completion": None}, "text"),
        ({"text": None, "messages": [{"role": "user", "content": "q"}], "input_ids": None, "labels": None}, "messages"),
    ],
)
def test_row_with_keys_of_two_forms_has_the_more_structured_one_that_is_filled(record, form):
    assert check_row(record, 0, "x line 1").form == form


def test_null_keys_of_a_message_are_left_out_and_null_content_is_no_word(tmp_path):
    messages = [
        {"role": "user", "content": None, "name": None},
        {"role": "assistant", "content": "a", "tool_calls": None},
    ]
    row = check_row({"messages": messages}, 0, "x line 1")
    assert row.fields["messages"] == [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]


def test_unknown_form_names_file_line_keys_and_the_forms(tmp_path):
    path = write(tmp_path, {"text": "a"}, {"question": "q", "answer": "a"})
    text = refusal(path)
    assert f"{path} line 2" in text
    assert "['answer', 'question']" in text
    assert all(form in text for form in ('{"text"}', '"messages"', '"completion"', '"instruction"', '"labels"'))


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ({"text": 5}, ["text must be a string", "5"]),
        ({"text": ["a"]}, ["text must be a string", "a list"]),
        ({"text": "bad \ud83d"}, ["text", "surrogate"]),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": "c"}, ["prompt must be a string"]),
        ({"instruction": "i", "input": 3, "output": "o"}, ["input must be a string"]),
        ({"messages": "hello"}, ["messages must be a list"]),
        ({"messages": ["hello"]}, ["messages[0] must be an object"]),
        ({"messages": [{"role": "asistant", "content": "a"}]}, ["messages[0].role", "'asistant'", "assistant"]),
        ({"messages": [{"content": "a"}]}, ["messages[0].role", "None"]),
        ({"messages": [{"role": "user"}]}, ["messages[0] must have role and content"]),
        ({"messages": [{"role": "user", "content": 4}]}, ["messages[0].content must be a string"]),
        ({"input_ids": "1 2"}, ["input_ids must be a list"]),
        ({"input_ids": [1, "2"]}, ["input_ids[1] must be an integer", "'2'"]),
        ({"input_ids": [True, 2]}, ["input_ids[0] must be an integer", "True"]),
        ({"input_ids": [1, 2.0]}, ["input_ids[1] must be an integer", "2.0"]),
        ({"input_ids": [1, None]}, ["input_ids[1] must be an integer", "None"]),
        ({"input_ids": [1, -1]}, ["input_ids must be at least 0", "-1"]),
        ({"input_ids": [1, 2], "labels": [1]}, ["labels must be as long as input_ids (2)", "1"]),
        ({"input_ids": [1, 2], "labels": [1, -1]}, ["labels must be -100 or a token id", "-1"]),
        ({"input_ids": [1, 2], "labels": [1, "x"]}, ["labels[1] must be an integer"]),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, ["attention_mask", "padding"]),
        ([1, 2], ["must be a JSON object", "a list"]),
        ("text", ["must be a JSON object", "a string"]),
        (None, ["must be a JSON object", "null"]),
    ],
)
def test_wrong_value_names_line_and_key(record, parts):
    with pytest.raises(ConfigError) as caught:
        check_row(record, 0, "rows.jsonl line 7")
    assert all(part in str(caught.value) for part in ["rows.jsonl line 7", *parts])


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": "a"', "delimiter"),
        ("{'text': 'a'}", "double quotes"),
        ('{"text": "a"} {"text": "b"}', "Extra data"),
        (b'{"text": "a\x00"}', "control character"),
        (b'{"text": "caf\xe9"}', "UTF-8"),
        ('{"input_ids": [' + "1" * 5000 + "]}", "digits"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_broken_line_seven_is_named_with_what_is_wrong(tmp_path, line, what):
    path = write(tmp_path, *[{"text": "a"}] * 5, "", line)
    text = refusal(path)
    assert f"{path} line 7" in text
    assert what in text


@pytest.mark.parametrize("source", ["jsonl", "hub"])
def test_no_path_is_refused_by_key(source):
    assert "data.path" in refusal(None, source=source)


@pytest.mark.parametrize("source", ["jsonl", "hub"])
def test_missing_file_is_refused_by_key_and_path(tmp_path, source):
    path = str(tmp_path / "none.jsonl")
    text = refusal(path, source=source)
    assert "data.path" in text and path in text


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_file_is_refused_by_key_and_path(tmp_path, content):
    path = write(tmp_path, content, end="")
    text = refusal(path)
    assert "data.path" in text and path in text and "empty" in text


def test_folder_is_no_jsonl_file(tmp_path):
    assert "folder" in refusal(str(tmp_path))


def test_unreadable_file_names_the_cause(tmp_path, monkeypatch):
    path = write(tmp_path, {"text": "a"})

    def denied(self, *args):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.open", denied)
    text = refusal(path)
    assert "data.path" in text and path in text and "Permission denied" in text


def test_pydocs_holds_pythons_topics_in_order():
    found = read(None, source="pydocs")
    assert len(found.rows) == found.total > 50
    names = [row.where for row in found.rows]
    assert names == sorted(names)
    assert sum(len(row.fields["text"]) for row in found.rows) > 300_000


@pytest.fixture
def hub(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return datasets


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_hub_reads_local_files(tmp_path, hub, kind):
    path = str(tmp_path / f"rows.{kind}")
    table = hub.Dataset.from_dict({"instruction": ["i", "j"], "input": [None, "k"], "output": ["o", None]})
    {"json": table.to_json, "jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[kind](path)
    found = read(path, source="hub")
    assert [(row.id, row.form, row.where) for row in found.rows] == [(0, "alpaca", f"{path} row 0")]
    assert found.skipped == {"null output": 1}


def test_hub_reads_a_local_folder_with_messages(tmp_path, hub):
    (tmp_path / "set").mkdir()
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    write(tmp_path / "set", {"messages": messages}, {"messages": messages[:1]}, name="test.jsonl")
    found = read(str(tmp_path / "set"), source="hub", split="test[:1]")
    assert [row.fields["messages"] for row in found.rows] == [messages]


def test_hub_says_what_is_wrong_in_one_line(tmp_path, hub):
    path = write(tmp_path, {"text": "a"})
    assert all(part in refusal(path, source="hub", split="dev") for part in ("data.path", path, "data.split=dev"))
    text = refusal("nobody/no-such-set", source="hub", name="x")
    assert "data.path 'nobody/no-such-set'" in text and "data.name=x" in text
    assert "must end in one of" in refusal(write(tmp_path, "a", name="rows.txt"), source="hub")
    broken = write(tmp_path, b"PAR1 not a table", name="rows.parquet")
    assert "data.path" in refusal(broken, source="hub")
    path = write(tmp_path, "{broken", name="broken.jsonl")
    assert f"data.path {path!r}" in refusal(path, source="hub")
    (tmp_path / "nothing").mkdir()
    assert "data.path" in refusal(str(tmp_path / "nothing"), source="hub")

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hetero.chat import encode
from hetero.errors import ConfigError
from hetero.rows import Row, check_row

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

# As SmolLM2's: a default system prompt, no {% generation %}.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Marks what is trained itself: an independent reference.
MARKED = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n'}}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama's: the template writes BOS.
WITH_BOS = "{{ bos_token }}" + CHATML
# As Qwen3's: only the last answer keeps its thoughts, or gets empty ones.
THINKING = (
    "{% for m in messages %}{% set said = m['content'].split('</think>')[-1].strip('\n') %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n' }}"
    "{% if '</think>' in m['content'] %}{{ m['content'].split('</think>')[0].split('<think>')[-1].strip() }}{% endif %}"
    "{{ '\n</think>\n\n' }}{% endif %}{{ said + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Mistral's: the system prompt goes to the last question, roles must alternate, no generation prompt.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system, turns = messages[0]['content'], messages[1:] %}"
    "{% else %}{% set system, turns = none, messages %}{% endif %}"
    "{% set last = turns | selectattr('role', 'equalto', 'user') | list | last %}{{ bos_token }}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{% if system and m is sameas last %}"
    "{{ '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# The end token only after the whole conversation; plain text between the turns.
END_ONCE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] | trim + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ eos_token }}{% endif %}"
)


def make_tokenizer(template=None, *, add_bos=False, add_eos=False, eos="<|im_end|>"):
    """A real tokenizer: bytes, one merge (two newlines), four special tokens; 261 ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *letters, "ĊĊ"])}
    built = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(SPECIALS)
    if add_bos or add_eos:
        single = " ".join(["<s>"] * add_bos + ["$A"] + ["</s>"] * add_eos)
        built.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token=eos, pad_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def one(record, tokenizer, response_only=True):
    row = check_row(record, 0, "rows.jsonl line 1")
    assert isinstance(row, Row)
    (encoded,) = encode([row], tokenizer, response_only=response_only)
    assert len(encoded.input_ids) == len(encoded.labels)
    assert all(label in (-100, token) for token, label in zip(encoded.input_ids, encoded.labels, strict=True))
    return encoded


def trained(encoded, tokenizer):
    """The trained text, one string for each unbroken run of labels."""
    runs, previous = [], -100
    for label in encoded.labels:
        if label != -100:
            runs[-1:] = [[*runs[-1], label]] if previous != -100 else [*runs[-1:], [label]]
        previous = label
    return [tokenizer.decode(run) for run in runs]


def chat(*turns, system=None):
    roles = ("user", "assistant")
    start = [] if system is None else [{"role": "system", "content": system}]
    return start + [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def reference_ids(messages, tokenizer):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


@pytest.mark.parametrize("extra", [{}, {"add_bos": True}, {"add_bos": True, "add_eos": True}])
def test_text_is_what_the_tokenizer_gives_with_every_token_a_label(extra):
    tokenizer = make_tokenizer(CHATML, **extra)
    for text in ("Hi.", "emoji 👩‍🚀\x00", " lead\n\n\nlines "):
        encoded = one({"text": text}, tokenizer)
        assert encoded.input_ids == encoded.labels == tokenizer(text)["input_ids"]


def test_completion_and_its_end_are_trained_and_the_prompt_keeps_its_own_tokens():
    tokenizer = make_tokenizer(add_bos=True, add_eos=True)
    encoded = one({"prompt": "Q\n", "completion": "\nA"}, tokenizer)
    plain = tokenizer.encode("Q\n", add_special_tokens=False)
    answer = [*tokenizer.encode("\nA", add_special_tokens=False), tokenizer.eos_token_id]
    assert encoded.input_ids == [tokenizer.bos_token_id, *plain, *answer]
    assert encoded.labels == [-100] * (1 + len(plain)) + answer
    whole = one({"prompt": "Q\n", "completion": "\nA"}, tokenizer, response_only=False)
    assert whole.input_ids == whole.labels == encoded.input_ids


def test_completion_that_ends_already_gets_no_second_end():
    tokenizer = make_tokenizer()
    assert one({"prompt": "Q", "completion": "A<|im_end|>"}, tokenizer) == one(
        {"prompt": "Q", "completion": "A"}, tokenizer
    )


def test_missing_end_token_is_said_once(caplog):
    tokenizer = make_tokenizer(eos=None)
    rows = [check_row({"prompt": "Q", "completion": "A"}, i, "x") for i in range(2000)]
    encoded = list(encode(rows, tokenizer, response_only=True))
    assert tokenizer.decode(encoded[-1].input_ids) == "QA"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("extra", ["", "5 and 7"])
def test_alpaca_is_a_conversation_with_a_template_and_its_standard_text_without(extra):
    record = {"instruction": "Add.", "input": extra, "output": "12"}
    tokenizer = make_tokenizer(CHATML)
    question = "Add.\n\n5 and 7" if extra else "Add."
    assert one(record, tokenizer) == one({"messages": chat(question, "12")}, tokenizer)
    tokenizer = make_tokenizer()
    text = tokenizer.decode(one(record, tokenizer).input_ids)
    assert text.startswith("Below is an instruction that describes a task")
    assert text.endswith("### Response:\n12<|im_end|>")
    assert ("### Input:\n5 and 7\n\n" in text) == ("paired with an input" in text) == bool(extra)
    assert "### Instruction:\nAdd.\n\n###" in text
    assert trained(one(record, tokenizer), tokenizer) == ["12<|im_end|>"]


def test_answer_and_its_end_are_the_only_labels():
    tokenizer = make_tokenizer(CHATML)
    encoded = one({"messages": chat("2+2?", "4")}, tokenizer)
    assert trained(encoded, tokenizer) == ["4<|im_end|>\n"]
    assert encoded.input_ids == reference_ids(chat("2+2?", "4"), tokenizer)
    assert trained(one({"messages": chat("2+2?", "4")}, tokenizer, response_only=False), tokenizer) == [
        tokenizer.decode(encoded.input_ids)
    ]


CONVERSATIONS = [
    chat("2+2?", "4"),
    chat("2+2?", "4", "really?", "yes", system="Be short."),
    chat("a", "b", "c", "d", "e"),
    chat("repeat: 4", "4", "4", "4"),
    chat("assistant\n", "user\n"),
    chat("q", "\n\nstarts with newlines\n\n", "\n", " x "),
    chat("emoji", "👩‍🚀é", "日本", "語"),
    [{"role": "assistant", "content": "I start."}, *chat("q", "a")],
    [*chat("q", "a"), {"role": "assistant", "content": "again"}],
    [{"role": "user", "content": "call"}, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "7!"}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_labels_equal_those_of_a_template_that_marks_them_itself(messages):
    tokenizer = make_tokenizer(MARKED)
    reference = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    encoded = one({"messages": messages}, tokenizer)
    assert encoded.input_ids == reference["input_ids"]
    # A merged token across the border is trained here; its first character is the header's newline.
    split = [
        token if keep else -100 for token, keep in zip(encoded.input_ids, reference["assistant_masks"], strict=True)
    ]
    assert encoded.labels == split


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, THINKING, END_ONCE])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_ids_are_those_of_the_template_and_each_answer_is_trained(template, messages):
    tokenizer = make_tokenizer(template, add_bos=True)
    encoded = one({"messages": messages}, tokenizer)
    assert encoded.input_ids == reference_ids(messages, tokenizer)
    text = "".join(trained(encoded, tokenizer))
    assert all(m["content"].strip() in text for m in messages if m["role"] == "assistant")
    assert "<|im_start|>" not in text


def test_begin_token_is_there_once():
    tokenizer = make_tokenizer(WITH_BOS, add_bos=True)
    for messages in (chat("q", "a"), chat("q", "a", "r", "b", system="s")):
        assert one({"messages": messages}, tokenizer).input_ids.count(tokenizer.bos_token_id) == 1


def test_thoughts_that_the_template_drops_from_earlier_turns_leave_the_right_labels():
    tokenizer = make_tokenizer(THINKING)
    messages = chat("q", "<think>\nhm\n</think>\n\none", "r", "<think>\nah\n</think>\n\ntwo")
    encoded = one({"messages": messages}, tokenizer)
    assert trained(encoded, tokenizer) == ["one<|im_end|>\n", "<think>\nah\n</think>\n\ntwo<|im_end|>\n"]
    assert trained(one({"messages": chat("q", "one", "r")}, tokenizer), tokenizer) == ["one<|im_end|>\n"]


def test_system_prompt_that_moves_to_the_last_question_leaves_the_right_labels():
    tokenizer = make_tokenizer(MISTRAL, add_bos=True, eos="</s>")
    encoded = one({"messages": chat("q", "one", "r", "two", system="Be short.")}, tokenizer)
    assert tokenizer.decode(encoded.input_ids) == "<s>[INST] q[/INST] one</s>[INST] Be short.\n\nr[/INST] two</s>"
    assert [run.strip() for run in trained(encoded, tokenizer)] == ["one</s>", "two</s>"]


def test_end_token_after_the_last_turn_only():
    tokenizer = make_tokenizer(END_ONCE, eos="</s>")
    encoded = one({"messages": chat("q", "one", "r", "two")}, tokenizer)
    assert trained(encoded, tokenizer) == ["one\n\n", "two\n\n</s>"]


def test_template_that_ignores_the_generation_prompt_does_not_train_the_header():
    tokenizer = make_tokenizer(CHATML.partition("{% if add_generation_prompt %}")[0])
    encoded = one({"messages": chat("q", "one", "r", "two")}, tokenizer)
    assert trained(encoded, tokenizer) == ["one<|im_end|>\n", "two<|im_end|>\n"]


def test_empty_answers_give_no_labels_and_no_word_none():
    tokenizer = make_tokenizer(CHATML)
    messages = [*chat("q", "one", "r"), {"role": "assistant", "content": None}]
    encoded = one({"messages": messages}, tokenizer)
    assert trained(encoded, tokenizer) == ["one<|im_end|>\n"]
    assert "None" not in tokenizer.decode(encoded.input_ids)
    assert trained(one({"messages": chat("q")}, tokenizer), tokenizer) == []


def test_answer_that_cannot_be_located_is_refused_by_row():
    shouting = CHATML.replace("message['content']", "message['content'] | upper").replace(
        "'<|im_start|>assistant\n'", "'?'"
    )
    tokenizer = make_tokenizer(shouting + "{{ messages[-1]['content'] | length }}")
    with pytest.raises(ConfigError, match=r"rows.jsonl line 1: .*messages\[1\].*response_only"):
        one({"messages": chat("q", "long answer")}, tokenizer)


def test_what_the_template_refuses_names_the_row_and_the_cause():
    with pytest.raises(ConfigError, match=r"rows.jsonl line 1: .*roles must alternate"):
        one({"messages": [*chat("q", "a"), {"role": "assistant", "content": "b"}]}, make_tokenizer(MISTRAL))


def test_messages_without_a_template_are_refused():
    with pytest.raises(ConfigError, match=r"rows.jsonl line 1 .*model.path.*chat template.*prompt and completion"):
        one({"messages": chat("q", "a")}, make_tokenizer())


def test_text_without_a_tokenizer_is_refused_and_tokens_are_not():
    assert one({"input_ids": [1, 2], "labels": [-100, 2]}, None).labels == [-100, 2]
    with pytest.raises(ConfigError, match=r"model.path .*tokenizer.*rows.jsonl line 1.*input_ids"):
        one({"text": "a"}, None)


def test_mixed_forms_keep_their_order_over_many_batches():
    tokenizer = make_tokenizer(CHATML)
    records = [
        {"text": "t"},
        {"messages": chat("q", "a")},
        {"input_ids": [5, 6]},
        {"prompt": "p", "completion": "c"},
        {"instruction": "i", "output": "o"},
    ] * 500
    rows = [check_row(record, i, f"line {i}") for i, record in enumerate(records)]
    encoded = list(encode(rows, tokenizer, response_only=True))
    assert encoded == [one(record, tokenizer) for record in records[:5]] * 500

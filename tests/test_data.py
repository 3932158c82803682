import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import CHATML, chat, make_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hetero.data import Example, indices_of_step, load, micro_batches, steps_per_epoch
from hetero.errors import ConfigError
from hetero.spec import DataSpec

torch.set_num_threads(1)

VOCAB = 261


def load_rows(tmp_path, records, tokenizer=None, *, vocab_size=VOCAB, max_length=256, **spec):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    spec = DataSpec(source="jsonl", path=str(path), **spec)
    return load(spec, tokenizer, vocab_size=vocab_size, max_length=max_length)


def refusal(*args, **more):
    with pytest.raises(ConfigError) as caught:
        load_rows(*args, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- loading


def test_summary_counts_what_was_kept_skipped_and_cut(tmp_path, caplog):
    records = [{"text": "good"}, {"text": ""}, {"text": None}, {"text": "x" * 99}, {"text": " "}, {"text": "x"}]
    data = load_rows(tmp_path, records, make_tokenizer(), max_length=10)
    assert [example.row for example in data.examples] == [0, 3]
    assert [len(example.input_ids) for example in data.examples] == [4, 10]
    assert data.summary == (
        f"{tmp_path}/rows.jsonl: kept 2 of 6 rows; "
        "skipped 2 empty text, 1 null text, 1 without a label; cut 1 to 10 tokens"
    )
    assert "None" not in "".join(make_tokenizer().decode(example.input_ids) for example in data.examples)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "1 of 6 rows" in warning.getMessage()


def test_rows_whose_answer_is_cut_off_are_left_out_with_one_warning(tmp_path, caplog):
    good = {"messages": chat("q", "a")}
    long = {"messages": chat("q" * 500, "a")}
    data = load_rows(tmp_path, [long, good, long], make_tokenizer(CHATML), max_length=60)
    assert [example.row for example in data.examples] == [1]
    (warning,) = caplog.records
    assert "2 of 3 rows" in warning.getMessage() and "data.max_length=60" in warning.getMessage()


def test_nothing_left_names_what_to_change(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    text = refusal(tmp_path, [{"prompt": "q" * 50, "completion": "a"}, {"text": "x"}], tokenizer, max_length=8)
    assert text.startswith("data.max_length") and "8" in text
    text = refusal(tmp_path, [{"text": "x"}, {"input_ids": [7]}], tokenizer)
    assert text.startswith("data.path") and "2 without a label" in text
    text = refusal(tmp_path, [{"text": ""}, {"text": None}], tokenizer)
    assert text.startswith("data.path") and "1 empty text" in text and "1 null text" in text
    assert "1 without a label" in refusal(tmp_path, [{"messages": chat("q")}], tokenizer)


def test_label_on_the_first_token_only_is_no_label(tmp_path):
    assert "without a label" in refusal(tmp_path, [{"input_ids": [5, 6], "labels": [5, -100]}])


@pytest.mark.parametrize("length", [2, 256, 1024])
def test_rows_are_cut_at_max_length(tmp_path, length):
    record = {"input_ids": [i % 60 for i in range(5000)], "labels": [i % 60 for i in range(5000)]}
    data = load_rows(tmp_path, [record], max_length=length)
    assert data.examples == (Example(0, tuple(record["input_ids"][:length]), tuple(record["labels"][:length])),)
    assert f"cut 1 to {length} tokens" in data.summary


def test_token_that_the_model_lacks_is_refused_by_row(tmp_path):
    text = refusal(tmp_path, [{"input_ids": [1, 2]}, {"input_ids": [1, 64]}], vocab_size=64)
    assert "line 2" in text and "input_ids" in text and "token id 64 >= vocab 64" in text
    text = refusal(tmp_path, [{"input_ids": [1, 2], "labels": [1, 99]}], vocab_size=64)
    assert "line 1" in text and "labels" in text and "token id 99 >= vocab 64" in text
    text = refusal(tmp_path, [{"text": "ab\n\n"}], make_tokenizer(), vocab_size=260)
    assert "line 1" in text and "token id 260 >= vocab 260" in text and "model.path" in text


def test_pydocs_is_cut_into_full_windows_of_running_text():
    tokenizer = make_tokenizer()
    data = load(DataSpec(source="pydocs"), tokenizer, vocab_size=VOCAB, max_length=128)
    assert len(data.examples) > 1000
    assert {len(example.input_ids) for example in data.examples} == {128}
    assert all(example.labels == example.input_ids for example in data.examples)
    text = tokenizer.decode([i for example in data.examples for i in example.input_ids])
    from pydoc_data.topics import topics

    assert "".join(topics[name] for name in sorted(topics)).startswith(text)
    whole = load(DataSpec(source="pydocs"), tokenizer, vocab_size=VOCAB, max_length=10**6)
    assert len(whole.examples) == 1
    with pytest.raises(ConfigError, match=r"model\.path"):
        load(DataSpec(source="pydocs"), None, vocab_size=VOCAB, max_length=256)


# ---- order


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3), st.integers(0, 2**63), st.booleans())
def test_each_epoch_holds_every_row_once(num_examples, batch_size, epoch, seed, shuffle):
    steps = steps_per_epoch(num_examples, batch_size)
    windows = [
        indices_of_step(num_examples, batch_size, epoch * steps + i + 1, seed=seed, shuffle=shuffle)
        for i in range(steps)
    ]
    assert [len(window) for window in windows[:-1]] == [batch_size] * (steps - 1)
    assert 1 <= len(windows[-1]) <= batch_size
    order = [index for window in windows for index in window]
    assert sorted(order) == list(range(num_examples))
    assert shuffle or order == list(range(num_examples))


def test_short_last_window_and_tiny_sets():
    assert steps_per_epoch(5, 4) == 2
    assert [len(indices_of_step(5, 4, step, seed=0, shuffle=True)) for step in range(1, 5)] == [4, 1, 4, 1]
    assert [indices_of_step(1, 8, step, seed=0, shuffle=True) for step in range(1, 11)] == [[0]] * 10


def test_order_differs_between_epochs_and_seeds_and_one_seeds_next_epoch_is_not_the_next_seeds_first():
    orders = {
        (seed, epoch): tuple(indices_of_step(50, 50, epoch + 1, seed=seed, shuffle=True))
        for seed in range(6)
        for epoch in range(6)
    }
    assert len(set(orders.values())) == len(orders)
    state = torch.random.get_rng_state()
    assert tuple(indices_of_step(50, 50, 4, seed=2, shuffle=True)) == orders[2, 3]
    assert torch.equal(state, torch.random.get_rng_state())


def test_order_stays_what_it_was_so_that_old_runs_resume():
    assert indices_of_step(8, 8, 1, seed=0, shuffle=True) == [7, 1, 5, 3, 4, 0, 6, 2]
    assert indices_of_step(8, 4, 4, seed=7, shuffle=True) == [3, 4, 0, 5]


# ---- micro-batches

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


def examples_of(lengths, generator):
    examples = []
    for row, length in enumerate(lengths):
        ids = torch.randint(0, 64, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < 0.6, ids, -100)
        examples.append(Example(row + 3, tuple(ids.tolist()), tuple(labels.tolist())))
    return examples


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 10), st.sampled_from(["right", "left"]), st.integers(0, 63), st.integers(0, 2**32))
def test_unpadding_gives_the_examples_back(lengths, size, side, pad_id, seed):
    examples = examples_of(lengths, torch.Generator().manual_seed(seed))
    batches = micro_batches(examples, size, padding_side=side, pad_id=pad_id)
    assert [len(batch.rows) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    back = []
    for batch in batches:
        shape = batch.input_ids.shape
        part = examples[len(back) : len(back) + len(batch.rows)]
        assert shape == batch.labels.shape == (len(part), max(len(example.input_ids) for example in part))
        assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
        mask = torch.ones(shape, dtype=torch.bool)
        if len({len(example.input_ids) for example in part}) == 1:
            assert batch.attention_mask is None and batch.position_ids is None
        else:
            mask = batch.attention_mask
            assert mask.dtype == torch.bool and batch.position_ids.dtype == torch.int64
            assert (batch.input_ids[~mask] == pad_id).all()
            assert torch.equal(mask, mask.sort(dim=1, descending=side == "right", stable=True).values)
        assert (batch.labels[~mask] == -100).all()
        assert batch.label_tokens == sum(label != -100 for example in part for label in example.labels[1:])
        for i, example in enumerate(part):
            real = mask[i]
            if batch.position_ids is not None:
                assert batch.position_ids[i][real].tolist() == list(range(len(example.input_ids)))
                assert (batch.position_ids[i] >= 0).all()
            labels = batch.labels[i][real].tolist()
            assert labels == [-100, *example.labels[1:]]
            back.append(
                Example(batch.rows[i], tuple(batch.input_ids[i][real].tolist()), (example.labels[0], *labels[1:]))
            )
    assert back == examples
    whole = micro_batches(examples, len(examples), padding_side=side, pad_id=pad_id)
    assert sum(batch.label_tokens for batch in batches) == whole[0].label_tokens


def tiny_llama(attention):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tiny_gpt2(attention):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=64, attn_implementation=attention,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_padded_loss_is_the_sum_of_the_rows_alone(build, attention):
    model = build(attention)
    examples = examples_of([9, 3, 5, 5, 2], torch.Generator().manual_seed(1))
    # Every token a label, the first ones too: those are what left padding gets wrong.
    examples = [Example(example.row, example.input_ids, example.input_ids) for example in examples]
    expected, count = 0.0, 0
    for example in examples:
        ids = torch.tensor([example.input_ids])
        expected += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    for side in ("right", "left"):
        for size in (1, 2, 3, 5):
            for pad_id in (0, 63):
                total, labels = torch.tensor(0.0), 0
                for batch in micro_batches(examples, size, padding_side=side, pad_id=pad_id):
                    extra = {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
                    # Without a cache transformers would read positions that restart as packed rows and need no mask.
                    logits = model(batch.input_ids, **extra, use_cache=True).logits  # [B, T, V]
                    total += torch.nn.functional.cross_entropy(
                        logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
                    ).detach()
                    labels += batch.label_tokens
                assert labels == count
                assert total.item() / count == pytest.approx(expected / count, abs=1e-5)

"""Generation through a whole pipeline: against generate() of one process, from a trained run and from its adapter."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny
from peft import PeftModel
from processes import END_S, Outcome, hardware, run_here, started, worker
from test_sampling import sampled_by_hand
from threads import hardware_of, worker_threads
from transformers import AutoModelForCausalLM

from hetero.folders import models_cache
from hetero.tiny import _tiny_tokenizer

PROMPTS = ["def f(x):", "a", "while True"]
IDS = [list(prompt.encode()) for prompt in PROMPTS]
NUM_NEW = 7
STAGES = ["shard_plan=split", "shard_plan.split_points=[1,4]"]
ASKED = json.dumps(PROMPTS)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """Two workers in this process."""
    with worker_threads(2, tmp_path_factory.mktemp("workers")) as found:
        yield found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Any:
    """Name -> folder of a small model in the cache of models, with a tokenizer of bytes and two end tokens."""
    made: dict[str, Path] = {}

    def make(name: str, *, ends: bool = True) -> Path:
        key = f"generates-{name}-{ends}"
        if key not in made:
            made[key] = models_cache() / key
            shutil.rmtree(made[key], ignore_errors=True)
            shutil.copytree(tiny(name), made[key])
            _tiny_tokenizer().save_pretrained(made[key])
            settings: dict[str, Any] = {"eos_token_id": [2], "pad_token_id": 0}
            (made[key] / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
            if ends:  # a token that a row comes to after some others
                rows = whole_tokens(AutoModelForCausalLM.from_pretrained(made[key], dtype=torch.float32).eval())
                settings["eos_token_id"] += [row[i] for row in rows for i in range(2, 5) if row[i] not in row[:i]][:1]
                (made[key] / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return made[key]

    yield make
    for folder in made.values():
        shutil.rmtree(folder, ignore_errors=True)


def whole_tokens(model: Any, ids: list[list[int]] | None = None, num_new: int = NUM_NEW) -> list[list[int]]:
    """New tokens of each prompt alone, by transformers; its end tokens are those of the model's own files."""
    found = []
    for row in ids or IDS:
        out = model.generate(
            torch.tensor([row]),
            attention_mask=torch.ones(1, len(row), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_new,
        )
        found.append(out[0, len(row) :].tolist())
    return found


def generated(run_dir: Path, *args: str) -> list[dict[str, Any]]:
    """The samples of a run of `train.py` that must succeed."""
    said = train(run_dir, *args)
    assert said.code == 0, said.text
    return samples_of(run_dir)


def train(run_dir: Path, *args: str) -> Outcome:
    return run_here(
        "train", f"outputs={run_dir.parent}", f"hydra.run.dir={run_dir}", f"generation.max_new_tokens={NUM_NEW}", *args
    )


def samples_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def tokens_of(samples: list[dict[str, Any]]) -> list[list[int]]:
    return [sample["output_ids"] for sample in samples]


@pytest.mark.parametrize(("name", "topology"), [("llama", "chain"), ("gemma3_text", "star"), ("gpt2", "chain")])
def test_a_trained_run_and_its_saved_adapter_say_what_one_process_says(
    models: Any, ports: list[int], tmp_path: Path, rows_file: Path, name: str, topology: str
) -> None:
    """Three stages over TCP, LoRA on; at the end of the run, then by task=generate, which reads no data."""
    model = [f"model.path={models(name)}", *STAGES, *hardware_of(ports), f"transport.topology={topology}"]
    targets = "[c_attn]" if name == "gpt2" else "[q_proj,v_proj]"
    lora = ["adapter.r=4", f"adapter.target_modules={targets}", "adapter.dropout=0.1"]
    data = ["data=jsonl", f"data.path={rows_file}", "loop.steps=3", "loop.batch_size=4", "optimizer.lr=0.05"]
    after_training = generated(tmp_path / "run", *model, *lora, *data, f"loop.sample_prompts={ASKED}")
    adapter = tmp_path / "run" / "adapter"
    base = AutoModelForCausalLM.from_pretrained(models(name), dtype=torch.float32)
    expected = whole_tokens(PeftModel.from_pretrained(base, adapter).eval())
    assert tokens_of(after_training) == expected
    given = ["task=generate", f"prompts={ASKED}", f"adapter.init_from={adapter}", "data=jsonl"]  # without data.path
    assert generated(tmp_path / "again", *model, *lora, *given) == after_training
    assert not (tmp_path / "again" / "adapter").exists() and not (tmp_path / "again" / "checkpoints").exists()
    assert [sample["prompt"] for sample in after_training] == PROMPTS


def test_without_an_adapter_it_is_the_base_model_and_ends_at_any_of_its_end_tokens(
    models: Any, ports: list[int], tmp_path: Path
) -> None:
    """An adapter that would not start from nothing is left out; a batch of two, then of one."""
    path = models("llama")
    expected = whole_tokens(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
    lengths = [len(row) for row in expected]
    assert min(lengths) < NUM_NEW == max(lengths)  # one row ends early, another goes on
    given = [f"model.path={path}", *STAGES, *hardware_of(ports), "adapter.init_lora_weights=false"]
    given += ["task=generate", f"prompts={ASKED}", "generation.batch_size=2"]
    found = generated(tmp_path / "run", *given)
    assert tokens_of(found) == expected
    assert [sample["finish"] for sample in found] == [
        "end" if length < NUM_NEW else "max_new_tokens" for length in lengths
    ]
    assert [sample["prompt_tokens"] for sample in found] == [len(ids) for ids in IDS]


def test_drawn_tokens_are_the_same_on_every_split_and_in_every_batch(
    models: Any, ports: list[int], tmp_path: Path
) -> None:
    """And those of an independent sampler over one process's logits, with the same keys."""
    path = models("llama")
    drawn = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 11}
    given = [f"model.path={path}", "task=generate", f"prompts={ASKED}"]
    given += [f"generation.{key}={value}" for key, value in drawn.items()]
    alone = tokens_of(generated(tmp_path / "alone", *given, "shard_plan=single"))
    assert tokens_of(generated(tmp_path / "split", *given, *STAGES, *hardware_of(ports))) == alone
    split = [*STAGES, *hardware_of(ports), "generation.batch_size=1"]
    assert tokens_of(generated(tmp_path / "one", *given, *split)) == alone
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ends = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    for number, ids in enumerate(IDS):
        row: list[int] = []
        while len(row) < NUM_NEW and (not row or row[-1] not in ends):
            with torch.no_grad():
                logits = whole(torch.tensor([ids + row]), use_cache=False).logits[0, -1].double().tolist()
            row.append(sampled_by_hand(logits, **drawn, prompt=number, position=len(row)))  # type: ignore[arg-type]
        assert alone[number] == row
    assert alone != tokens_of(generated(tmp_path / "other", *given, "shard_plan=single", "generation.seed=12"))


def test_text_stops_where_the_model_can_read_no_further_and_says_so(models: Any, tmp_path: Path) -> None:
    """A prompt of 254 of 256 positions beside a short one, which goes on."""
    long = "x" * 254
    given = [
        f"model.path={models('gpt2', ends=False)}",
        "shard_plan=single",
        "task=generate",
        f"prompts=[{long},{PROMPTS[1]}]",
    ]
    outcome = train(tmp_path / "run", *given)
    assert outcome.code == 0, outcome.text
    found = samples_of(tmp_path / "run")
    assert len(found[0]["output_ids"]) == 2 and found[0]["finish"] == "max_position_embeddings"
    assert len(found[1]["output_ids"]) > 2
    assert "max_position_embeddings" in outcome.text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["task=generate"], "prompts must hold at least one prompt"),
        (["prompts=[a]"], "prompts must be empty with task=train"),
        (["task=generate", "prompts=[a]", "generation.chat=true"], r"prompts\[0\] needs a chat template"),
        (["task=generate", "prompts=[[{role: user, content: a}]]"], r"prompts\[0\] needs a chat template"),
        (["task=generate", "prompts=[[{role: user}]]"], r"prompts\[0\]"),
        (["task=generate", "prompts=[a]", "generation.system=b"], "generation.system must be null"),
        (["task=generate", "prompts=['']"], r"prompts\[0\] must have at least one token"),
        (["task=generate", f"prompts=[{'x' * 512}]"], "must leave room for an answer: it has 512 tokens"),
        (["task=generate", "prompts=[a]", "checkpoint.resume=latest"], "checkpoint.resume must be null"),
        (["task=generate", "prompts=[a]", "generation.chat=maybe"], "chat must be one of auto, true, false, got"),
        (["task=generate", "prompts=[a]", "generation.top_p=0"], "generation.top_p must be"),
        (["task=generate", "prompts=[a]", "generation.max_new_tokens=0"], "generation.max_new_tokens must be"),
        (["task=generate", "prompts=Hello"], "prompts must be array, got .Hello.; a list of texts"),
        (["task=generate", "prompts=[a]", "adapter.init_from=/nowhere"], "adapter.init_from must be a folder"),
    ],
)
def test_what_cannot_be_generated_is_one_line(tmp_path: Path, args: list[str], says: str) -> None:
    outcome = train(tmp_path / "run", "shard_plan=single", *args)
    assert outcome.code == 2
    assert re.search(says, outcome.text), outcome.text
    assert "Traceback" not in outcome.text


@pytest.mark.by_hand
def test_ctrl_c_in_the_middle_ends_it_and_leaves_the_worker_for_the_next_run(tmp_path: Path) -> None:
    with worker(tmp_path / "workers") as there:
        given = ["train", "task=generate", 'prompts=["def f("]', "generation.max_new_tokens=500"]
        with started(*given, f"outputs={tmp_path}", *hardware(there)) as run:
            run.wait_for(r"stage \S+: layers \[3, 6\)")
            run.send(signal.SIGINT)
            outcome = run.wait(END_S * 3)
        assert outcome.code != 0 and "Traceback" not in outcome.text
        there.wait_idle()


# ---- a real model


@pytest.mark.by_hand
@pytest.mark.smol
@pytest.mark.slow
def test_smol_says_through_the_pipeline_what_it_says_alone(ports: list[int], tmp_path: Path) -> None:
    """Through its chat template, two stages and three."""
    from transformers import AutoTokenizer

    from hetero import store

    folder = store.fetched_folder("HuggingFaceTB/SmolLM2-135M-Instruct")
    if not (folder / "model.safetensors").is_file():
        pytest.skip("needs SmolLM2-135M: python -m hetero.models fetch smollm2_135m")
    questions = ["What is the capital of France?", "Hi"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in questions
    ]
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = whole_tokens(whole, ids, num_new=12)
    del whole
    given = ["model=smollm2_135m", "task=generate", f"prompts={json.dumps(questions)}"]
    for number, points in enumerate(("[15]", "[7,22]")):
        split = ["shard_plan=split", f"shard_plan.split_points={points}", *hardware_of(ports[: number + 1])]
        found = generated(tmp_path / str(number), *given, *split, "generation.max_new_tokens=12")
        assert tokens_of(found) == expected
        assert "Paris" in found[0]["text"]

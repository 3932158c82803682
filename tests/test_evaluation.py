"""Evaluation is what plain transformers computes in one process, on any split, and leaves training as it is (N12)."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, Tiny
from pipeline import Outcome, build_stages, lively, make_spec, run_stages, same_bits
from processes import composed, metrics, run_here, train_here, write_jsonl
from reference import whole_model
from resuming import COMMON, SINGLE, STOPS
from safetensors.torch import load_file
from threads import hardware_of, worker_threads

from hetero import adapters, data, models, store
from hetero.best import Best, best_before, ranked
from hetero.best_adapter import write_best
from hetero.checked import convert
from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.config import SHAPES_DIR
from hetero.data import Example, MicroBatch
from hetero.errors import ConfigError
from hetero.eval_rows import hold_out, load_all
from hetero.eval_rules import is_due
from hetero.evaluation import PASS_MICRO_BATCHES, Evaluation, evaluate, evaluation_shown, record_of
from hetero.evaluation import _passes as passes
from hetero.inputs import check_inputs
from hetero.resolve import resolve
from hetero.runtime import StepPlan
from hetero.spec import AdapterSpec, Config, DataSpec, LoopSpec, RouterLossSpec, RunSpec
from hetero.stopping import Stop
from hetero.summary import _evaluation_lines
from hetero.training_state import as_state
from hetero.wire.headers import Ready

LINEAR = {"llama": ["q_proj", "v_proj"], "qwen2": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


def reference_loss(
    model_dir: Path, rows: Sequence[Example], lora: dict[str, Any], adapter: dict[str, torch.Tensor] | None
) -> float:
    """The mean over all label tokens: plain transformers and peft, a row at a time, sums in float64."""
    model = whole_model(model_dir, lora, adapter).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits = model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0, :-1].double()
            targets = torch.tensor(row.labels[1:])
            total += float(F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
            count += int((targets != -100).sum())
    return total / count


def cut(rows: Sequence[Example], size: int, padding_side: Any = "right") -> list[MicroBatch]:
    return data.micro_batches(rows, size, padding_side=padding_side, pad_id=0)


def with_loop(spec: RunSpec, **changes: Any) -> RunSpec:
    return msgspec.structs.replace(spec, loop=msgspec.structs.replace(spec.loop, **changes))


# ---- one process, any split


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_loss_is_that_of_one_process_whatever_split_and_batch_size(tiny: Tiny, rows: list[Example], name: str) -> None:
    """N12: 5 rows of unequal length, eval batch 1, 2 and 5, dropout 0.1, around 2 steps; before and after training."""
    adapter = AdapterSpec(r=4, alpha=8, dropout=0.1, target_modules=LINEAR[name])
    lora = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR[name], "fan_in_fan_out": name == "gpt2"}
    steps, evaluated = [cut(rows[:4], 2), cut(rows[4:8], 2)], rows[7:12]
    initial: dict[str, torch.Tensor] | None = None
    trained: Outcome | None = None
    for cuts in ((3,), (1, 4), *([()] if name == "llama" else [])):
        spec = make_spec(tiny(name), cuts, adapter=adapter, microbatch_size=2)
        stages = build_stages(spec, tiny(name))
        initial = initial or lively({key: value for stage in stages for key, value in stage.state().items()})
        plain = run_stages(spec, stages, steps, initial=initial)
        trained = trained or plain
        found = []
        for size, side, schedule in ((1, "right", "1f1b"), (2, "left", "gpipe"), (5, "right", "1f1b")):
            evaluating = with_loop(
                msgspec.structs.replace(spec, schedule=msgspec.structs.replace(spec.schedule, name=schedule)),
                eval_batch_size=size,
            )
            draws = torch.get_rng_state()
            outcome = run_stages(evaluating, stages, steps, initial=initial, evaluated=cut(evaluated, size, side))
            assert same_bits(outcome, trained), (cuts, size)  # training is what it is without evaluation
            assert torch.equal(torch.get_rng_state(), draws)
            assert all(module.training for stage in stages for module in stage.model.modules())
            found.append(outcome.eval_losses)
        expected = [reference_loss(tiny(name), evaluated, lora, values) for values in (initial, plain.adapter)]
        for losses in found:
            assert [losses[0], losses[-1]] == pytest.approx(expected, abs=1e-5)
            assert losses == pytest.approx(found[0], abs=1e-5)


def test_more_micro_batches_than_fit_in_flight_stream_through_four_stages(tiny: Tiny, rows: list[Example]) -> None:
    spec = make_spec(tiny("llama"), (1, 2, 4), schedule="gpipe", max_in_flight=1)
    stages = build_stages(spec, tiny("llama"))
    outcome = run_stages(spec, stages, [cut(rows[:1], 1)], evaluated=cut(rows * 2, 1))
    whole = make_spec(tiny("llama"))
    alone = run_stages(whole, build_stages(whole, tiny("llama")), [cut(rows[:1], 1)], evaluated=cut(rows, 1))
    assert outcome.eval_losses == pytest.approx(alone.eval_losses, abs=1e-12)


def test_router_loss_is_no_part_of_it(tiny: Tiny, rows: list[Example]) -> None:
    router_loss = RouterLossSpec(num_experts=4, coefficient=0.3)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR["llama"]}
    for cuts in ((), (1, 4)):
        spec = make_spec(tiny("mixtral"), cuts, router_loss=router_loss, microbatch_size=2)
        stages = build_stages(spec, tiny("mixtral"))
        steps = [cut(rows[:4], 2)]
        plain = run_stages(spec, stages, steps)
        initial = plain.initial
        outcome = run_stages(spec, stages, steps, initial=initial, evaluated=cut(rows[7:12], 2))
        assert same_bits(outcome, run_stages(spec, stages, steps, initial=initial))
        expected = reference_loss(tiny("mixtral"), rows[7:12], lora, initial)
        assert outcome.eval_losses[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("recompute", ["layer", "stage"])
def test_recomputation_and_evaluation_leave_one_another_alone(tiny: Tiny, rows: list[Example], recompute: str) -> None:
    adapter = AdapterSpec(r=4, alpha=8, dropout=0.1, target_modules=LINEAR["llama"])
    spec = make_spec(tiny("llama"), (3,), adapter=adapter, recompute=recompute)
    stages = build_stages(spec, tiny("llama"))
    plain = run_stages(spec, stages, [cut(rows[:2], 1)] * 2)
    outcome = run_stages(spec, stages, [cut(rows[:2], 1)] * 2, initial=plain.initial, evaluated=cut(rows[7:9], 1))
    assert same_bits(outcome, plain)


def test_a_head_with_an_adapter_counts_without_its_dropout(tiny: Tiny, rows: list[Example]) -> None:
    adapter = AdapterSpec(r=4, alpha=8, dropout=0.5, target_modules=["q_proj", "lm_head"])
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
    spec = make_spec(tiny("llama"), (3,), adapter=adapter)
    stages = build_stages(spec, tiny("llama"))
    initial = lively({key: value for stage in stages for key, value in stage.state().items()})
    outcome = run_stages(spec, stages, [], initial=initial, evaluated=cut(rows[:3], 1))
    assert outcome.eval_losses == pytest.approx([reference_loss(tiny("llama"), rows[:3], lora, initial)], abs=1e-5)


def test_nothing_of_an_evaluation_is_kept(tiny: Tiny, rows: list[Example]) -> None:
    (stage,) = build_stages(make_spec(tiny("llama")), tiny("llama"))
    batch = cut(rows[:2], 2)[0].tensors()
    with stage.evaluating():
        assert not any(module.training for module in stage.model.modules())
        assert stage.evaluate(batch) is None
    assert math.isfinite(stage.loss()) and not stage._in_flight
    assert all(parameter.grad is None for parameter in stage.trained.values())
    frozen = next(module for module in stage.model.modules())
    frozen.training = False  # a module that its builder has put into this mode stays in it
    with stage.evaluating():
        pass
    assert not frozen.training and sum(not module.training for module in stage.model.modules()) == 1


# ---- SmolLM2


@pytest.fixture(scope="session")
def smol() -> Path:
    folder = store.fetched_folder("HuggingFaceTB/SmolLM2-135M-Instruct")
    if not (folder / "model.safetensors").is_file():
        pytest.skip("needs SmolLM2-135M: python -m hetero.models fetch smollm2_135m")
    return folder


@pytest.mark.smol
@pytest.mark.by_hand
def test_smol_loss_is_that_of_one_process(smol: Path) -> None:
    from transformers import AutoTokenizer

    texts = ["Hi.", "What is the capital of France? Paris.", "One, two, three.", "The fox is quick. " * 9, "A cat."]
    tokenizer = AutoTokenizer.from_pretrained(smol)
    rows = [Example(n, ids, ids) for n, ids in enumerate(tuple(tokenizer(text).input_ids) for text in texts)]
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    initial: dict[str, torch.Tensor] = {}
    for cuts, size in (((15,), 1), ((15,), 5), ((7, 20), 2)):
        spec = with_loop(make_spec(smol, cuts), eval_batch_size=size)
        stages = build_stages(spec, smol)
        initial = initial or lively({key: value for stage in stages for key, value in stage.state().items()})
        outcome = run_stages(spec, stages, [], initial=initial, evaluated=cut(rows, size))
        assert outcome.eval_losses == pytest.approx([reference_loss(smol, rows, lora, initial)], abs=1e-5)


# ---- passes, records, when


def evaluation_of(rows: Sequence[Example], **loop: Any) -> Evaluation:
    spec = LoopSpec(steps=3, **loop)
    return Evaluation(rows, spec, DataSpec("jsonl", "rows.jsonl"), 0, lambda _: None)


def test_passes_hold_every_row_once_and_the_longest_first(rows: list[Example]) -> None:
    many = [Example(n, row.input_ids, row.labels) for n, row in enumerate(rows * 12)]
    found = list(passes(evaluation_of(many, eval_batch_size=2)))
    assert [len(batches) for batches in found] == [PASS_MICRO_BATCHES, len(many) // 2 - PASS_MICRO_BATCHES]
    batches = [batch for one in found for batch in one]
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(many)))
    widths = [batch.input_ids.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)
    assert [len(batch.rows) for batch in next(passes(evaluation_of(rows, microbatch_size=5)))] == [5, 5, 2]


def test_record_weighs_passes_by_their_tokens() -> None:
    assert record_of(4, [6.0, 1.0], 10) == {
        "step": 4,
        "eval_loss": 0.7,
        "perplexity": math.exp(0.7),
        "tokens": 10,
    }
    assert record_of(0, [6.0, None], 10) == {"step": 0, "eval_loss": None, "perplexity": None, "tokens": 10}
    assert record_of(0, [1e5], 10)["perplexity"] is None
    assert evaluation_shown(record_of(0, [None], 3)) == "loss not finite over 3 label tokens"
    assert evaluation_shown(record_of(0, [5.0], 1000)) == "loss 0.0050, perplexity 1.01 over 1,000 label tokens"


def test_evaluations_come_before_the_first_step_after_the_last_and_every_so_many() -> None:
    every = LoopSpec(eval_every=3)
    assert [step for step in range(11) if is_due(every, step, 10)] == [0, 3, 6, 9, 10]
    assert [step for step in range(11) if is_due(LoopSpec(), step, 10)] == [0, 10]


def test_the_best_is_the_smallest_finite_loss_of_a_step_that_was_taken() -> None:
    records = [record_of(step, [loss], 1) for step, loss in ((0, 1.0), (2, 3.0), (4, 2.0), (6, 2.0), (8, None))]
    assert [best.step for best in ranked(records)] == [4, 6, 2]
    assert ranked(records, Best(1, 0.5, "/old"))[0] == Best(1, 0.5, "/old")
    assert ranked(records[:1]) == []
    assert best_before({"best": {"step": 3, "eval_loss": 2.0, "folder": None}}, "/old") == Best(3, 2.0, "/old")
    assert best_before({}, "/old") is None
    with pytest.raises(ConfigError, match=r"checkpoint\.resume must lead to"):
        best_before({"best": {"step": "three"}}, None)


class Peerless:
    """A run of one stage that computes nothing: each pass adds a loss of 1."""

    def __init__(self, stop: Stop, after: int) -> None:
        self.plans: list[StepPlan] = []
        self._stop, self._after = stop, after

    def begin_evaluation(self, step: int, number: int) -> None:
        assert number == len(self.plans) + 1

    def wait_ready(self) -> None:
        return None

    def evaluate(self, plan: StepPlan, batches: Sequence[dict[str, torch.Tensor]]) -> Ready:
        self.plans.append(plan)
        if len(self.plans) == self._after:
            self._stop.ask("SIGINT")
        return Ready(plan.step, True, 1.0, 0, 0, 0, 0, evaluate=plan.evaluation)


@pytest.mark.parametrize(("after", "passes_done"), [(1, 1), (3, 3), (9, 3)])
def test_whoever_wants_the_end_waits_for_one_pass_alone(
    rows: list[Example], caplog: pytest.LogCaptureFixture, after: int, passes_done: int
) -> None:
    found: list[dict[str, Any]] = []
    many = evaluation_of(rows * 12)  # 144 micro-batches
    words: list[str] = []
    evaluation = dataclasses.replace(many, on_record=found.append, doing=words.append)
    stop = Stop()
    peerless: Any = Peerless(stop, after)
    evaluate(evaluation, peerless, peerless, 4, stop)
    assert [plan.evaluation for plan in peerless.plans] == list(range(1, passes_done + 1))
    if after < 3:
        assert words == ["evaluating"]
        assert found == [] and "the evaluation after step 4 is left out, since the run is to end" in caplog.text
    else:
        tokens = sum(plan.label_tokens for plan in peerless.plans)
        assert found == [record_of(4, [3.0], tokens)] and words == ["evaluating", "training"]


def test_best_step_that_cannot_be_read_is_said_and_the_next_taken(
    tmp_path: Path, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    spec = AdapterSpec(r=2, alpha=4, target_modules=["q_proj"])
    resolved = adapters.resolve(models.meta_model(tiny("llama")), spec, "base")
    values = [{key: torch.full(shape, float(n)) for key, shape in resolved.shapes.items()} for n in (1, 2)]
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(Snapshot(4, as_state(values[0]), {}))
    best = [Best(2, 1.0), Best(3, 1.5, str(tmp_path / "gone")), Best(4, 2.0), Best(9, 3.0)]
    assert write_best(tmp_path / "best", best, store, resolved, (9, values[1])) == best[2]
    assert [line.split(",")[0] for line in caplog.messages] == ["step 2", "step 3"]
    found = load_file(tmp_path / "best" / "adapter_model.safetensors")
    assert all(torch.equal(found[key], value) for key, value in values[0].items())
    assert write_best(tmp_path / "last", best[3:], store, resolved, (9, values[1])) == best[3]
    assert write_best(tmp_path / "none", [], store, resolved, (9, values[1])) is None


# ---- rows


def rows_of(config: Config) -> tuple[list[int], list[int]]:
    """Ids of the rows that a configuration trains on, and of those that it evaluates on."""
    data_set, evaluated = load_all(config, None, vocab_size=VOCAB, max_length=64)
    return [row.row for row in data_set.examples], [row.row for row in evaluated]


def config_of(*overrides: str) -> Config:
    return convert(composed(*overrides), Config)


def test_each_way_to_give_rows_is_read(rows: list[Example], rows_file: Path, tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "test.jsonl", [{"input_ids": row.input_ids} for row in rows[:3]])
    shutil.copy(rows_file, tmp_path / "train.jsonl")
    every, three = list(range(12)), [0, 1, 2]
    jsonl, hub = ["data=jsonl", f"data.path={rows_file}"], ["data=hub", f"data.path={tmp_path}"]
    assert rows_of(config_of(*jsonl)) == (every, [])
    assert rows_of(config_of(*jsonl, f"data.eval_path={other}")) == (every, three)
    assert rows_of(config_of(*jsonl, f"data.eval_path={other}", "data.packing=true"))[1] == three
    assert rows_of(config_of(*hub, "data.eval_split=test")) == (every, three)
    assert rows_of(config_of(*hub, f"data.eval_path={other}")) == (every, three)
    kept, held_out = rows_of(config_of(*jsonl, "data.eval_fraction=0.25", "seed=5"))
    assert (len(kept), len(held_out)) == (9, 3) and sorted(kept + held_out) == every
    only = "task=evaluate"
    assert rows_of(config_of(only, *jsonl)) == (every, every)
    assert rows_of(config_of(only, "data=jsonl", f"data.eval_path={other}")) == (three, three)
    assert rows_of(config_of(only, *jsonl, "data.eval_fraction=0.25")) == (held_out, held_out)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.eval_split=nowhere"], r"data\.path '.*' \(data\.eval_split=nowhere\) cannot be loaded"),
        (["data.eval_path=/no/such.csv"], r"data\.eval_path must be an existing file or folder or an id on the hub"),
    ],
)
def test_a_wrong_data_set_to_evaluate_on_is_named(
    rows_file: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    shutil.copy(rows_file, tmp_path / "train.jsonl")
    with pytest.raises(ConfigError, match=message):
        rows_of(config_of("data=hub", f"data.path={tmp_path}", *overrides))


def test_held_out_rows_are_the_same_whatever_the_seed_and_never_trained_on(rows: list[Example]) -> None:
    kept, held_out = hold_out(rows, 0.25)
    assert len(held_out) == 3 and len(kept) == 9
    assert sorted([*kept, *held_out], key=lambda row: row.row) == rows
    assert [row.row for row in kept] == sorted(row.row for row in kept)
    assert hold_out(rows, 0.25) == (kept, held_out)
    assert len(hold_out(rows, 1e-9)[1]) == 1
    with pytest.raises(ConfigError, match=r"data\.eval_fraction must leave a row to train on, got 0\.99 of 12 rows"):
        hold_out(rows, 0.99)


BAD: list[tuple[list[str], str]] = [
    (["loop.eval_every=5"], r"loop\.eval_every=5 needs rows to evaluate on: data\.eval_path=FILE"),
    (["loop.eval_every=0", "data.eval_fraction=0.1"], r"loop\.eval_every must be int >= 1, got 0; null"),
    (["data.eval_fraction=1.5"], r"data\.eval_fraction must be .*got 1\.5; 0\.1 holds a tenth"),
    (["data.eval_fraction=0.1", "data.eval_path=x"], r"data\.eval_fraction must be null with data\.eval_path"),
    (["data.eval_split=test"], r"data\.eval_split must be null for data=pydocs"),
    (["data.eval_path=/no/such.jsonl"], r"data\.eval_path must be a file of JSON lines, found nothing at /no/such"),
    (["task=evaluate", "data.eval_path=/tmp"], r"data\.eval_path must be a file of JSON lines, got the folder /tmp"),
    (["task=evaluate", "checkpoint.resume=latest"], r"checkpoint\.resume must be null with task=evaluate"),
    (["task=judge"], r"task must be one of train, evaluate"),
    (["checkpoint.keep_best=true", "data.eval_fraction=0.1"], r"checkpoint\.keep_best=true needs evaluations"),
    (["checkpoint=none", "checkpoint.keep_best=true"], r"checkpoint\.keep_best=true needs checkpoints"),
    (
        ["data.eval_fraction=0.1", "loop.eval_batch_size=99999999"],
        r"transport\.max_frame_bytes must hold a micro-batch \(\d+ bytes: loop\.eval_batch_size x",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "message"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_inputs(resolve(composed(*overrides), shapes_dir=SHAPES_DIR))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["nonsense"], r"eval\.jsonl line 1 must be a JSON object"),
        ([{"colour": "red"}], r"eval\.jsonl line 1 must have the keys of"),
        ([{"input_ids": [5, 999], "labels": [5, 999]}], r"eval\.jsonl line 1: input_ids: token id 999 >= vocab"),
        ([{"input_ids": [5, 6], "labels": [-100, -100]}], r"data\.eval_path must hold a row to evaluate on"),
        ([], r"data\.eval_path must be a file of JSON lines with at least one row, got .*eval\.jsonl, which is empty"),
    ],
)
def test_bad_rows_are_refused_before_any_worker_is_asked(
    lines: list[Any], message: str, tiny: Tiny, rows_file: Path, tmp_path: Path
) -> None:
    file = write_jsonl(tmp_path / "eval.jsonl", lines)
    nobody = "hardware.workers=[{id: w1, host: 127.0.0.1, port: 9}]"  # asking would take the connect timeout
    outcome = run_here(
        "train", f"model.path={tiny('llama')}", "data=jsonl", f"data.path={rows_file}", f"data.eval_path={file}",
        "hardware.launch=none", nobody, f"outputs={tmp_path / 'out'}",
    )  # fmt: skip
    assert outcome.code == 2 and outcome.seconds < 20
    last = outcome.text.splitlines()[-1]
    assert re.search(message, last), outcome.text


# ---- whole runs


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """Two workers in threads."""
    with worker_threads(2, tmp_path_factory.mktemp("workers")) as found:
        yield found


def three_stages(ports: list[int]) -> list[str]:
    return [*hardware_of(ports), "shard_plan=split", "shard_plan.split_points=[2,4]"]


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "eval.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def eval_file(rows: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of several forms, one without a label."""
    lines: list[dict[str, Any]] = [{"input_ids": row.input_ids, "labels": row.labels} for row in rows[:5]]
    lines += [{"text": "Running text."}, {"prompt": "Two and two?", "completion": "Four."}]
    lines += [{"instruction": "Say it.", "output": "It."}, {"input_ids": [5, 6], "labels": [-100, -100]}]
    return write_jsonl(tmp_path_factory.mktemp("eval") / "eval.jsonl", lines)


@pytest.fixture(scope="module")
def base(rows_file: Path, eval_file: Path) -> list[str]:
    """Ten steps of the tiny model with an evaluation every third, and a checkpoint every fifth."""
    return [
        *COMMON,
        f"data.path={rows_file}",
        f"data.eval_path={eval_file}",
        "loop.eval_every=3",
        "checkpoint.every_steps=5",
        "checkpoint.keep_best=true",
        "optimizer.lr=0.05",  # too large: the best step is not the last
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, base: list[str], ports: list[int]) -> Path:
    """An uninterrupted run of three stages."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_here(folder, *base, *three_stages(ports))
    return folder


def test_evaluating_changes_no_step_and_no_adapter(
    whole: Path, base: list[str], ports: list[int], tmp_path: Path
) -> None:
    without = [arg for arg in base if not arg.startswith(("data.eval", "loop.eval", "checkpoint.keep_best"))]
    train_here(tmp_path / "run", *without, *three_stages(ports))
    keys = ("step", "loss", "lr", "grad_norm", "tokens", "rows")
    found, expected = ([{key: r[key] for key in keys} for r in metrics(folder)] for folder in (whole, tmp_path / "run"))
    assert found == expected
    ours, theirs = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (whole, tmp_path / "run"))
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert not (tmp_path / "run" / "eval.jsonl").exists()


@pytest.mark.parametrize(("before", "said"), [(5.5, "; before the first step it was smaller, 5.5000"), (7.0, "")])
def test_best_step_that_is_worse_than_none_is_called_so(tmp_path: Path, before: float, said: str) -> None:
    records = [
        {"step": step, "eval_loss": loss, "perplexity": None, "tokens": 9} for step, loss in ((0, before), (4, 6.5))
    ]
    result = SimpleNamespace(evaluations=records, best=Best(4, 6.5), best_dir=tmp_path)
    assert _evaluation_lines(result)[-1].endswith(f"{tmp_path}{said}")  # type: ignore[arg-type]


def test_evaluations_are_logged_and_the_best_step_is_kept(whole: Path) -> None:
    records = evaluations(whole)
    assert [record["step"] for record in records] == [0, 3, 6, 9, 10]
    assert all(record["perplexity"] == pytest.approx(math.exp(record["eval_loss"])) for record in records)
    assert len({record["tokens"] for record in records}) == 1
    best = min(records[1:], key=lambda record: record["eval_loss"])
    steps = CheckpointStore(whole / "checkpoints").steps()
    assert best["step"] < 9 and steps == [10, 9, best["step"]], records
    kept = CheckpointStore(whole / "checkpoints").load(best["step"]).tensors
    adapter = load_file(whole / "adapter-best" / "adapter_model.safetensors")
    names = {name.removeprefix("adapter:"): value for name, value in kept.items() if name.startswith("adapter:")}
    assert names.keys() == adapter.keys()
    assert all(torch.equal(value, names[key]) for key, value in adapter.items())


def test_adapter_of_the_best_step_evaluates_to_its_loss(
    whole: Path, ports: list[int], eval_file: Path, tmp_path: Path
) -> None:
    """task=evaluate over a star, with another batch size; it needs no rows to train on, and writes no adapter."""
    best = min(evaluations(whole)[1:], key=lambda record: record["eval_loss"])
    outcome = run_here(
        "train", "task=evaluate", "data=jsonl", f"data.eval_path={eval_file}", *three_stages(ports),
        "transport.topology=star", "schedule=gpipe",
        f"adapter.init_from={whole / 'adapter-best'}", "loop.eval_batch_size=5", f"hydra.run.dir={tmp_path / 'run'}",
        f"outputs={tmp_path}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.text
    (record,) = evaluations(tmp_path / "run")
    assert record == {
        "step": 0,
        "eval_loss": pytest.approx(best["eval_loss"], abs=1e-5),
        "perplexity": pytest.approx(best["perplexity"], rel=1e-5),
        "tokens": best["tokens"],
    }
    assert f"loss {best['eval_loss']:.4f}" in outcome.text.splitlines()[-1]
    assert "1 of 9 rows" in outcome.text
    assert "have no label to train" in outcome.text
    assert not (tmp_path / "run" / "adapter").exists() and not (tmp_path / "run" / "checkpoints").exists()


def test_base_model_is_evaluated_without_an_adapter_on_the_rows_of_data(
    rows: list[Example], rows_file: Path, tiny: Tiny, ports: list[int], tmp_path: Path
) -> None:
    """Even where a new adapter would begin with random values."""
    args = ["task=evaluate", f"model.path={tiny('llama')}", "data=jsonl", f"data.path={rows_file}"]
    args += ["adapter.init_lora_weights=false", "shard_plan=single"]
    train_here(tmp_path / "run", *args)
    (record,) = evaluations(tmp_path / "run")
    expected = reference_loss(tiny("llama"), rows, {"r": 1, "target_modules": ["q_proj"]}, None)
    assert record["eval_loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.by_hand)])
def test_run_that_goes_on_has_the_evaluations_and_the_best_of_one_that_never_stopped(
    whole: Path, base: list[str], ports: list[int], tmp_path: Path, in_place: bool
) -> None:
    own = [SINGLE, f"checkpoint.dir={tmp_path / 'kept'}"] if in_place else []
    train_here(tmp_path / "stopped", *base, *(own or [SINGLE]), *STOPS)
    assert [record["step"] for record in evaluations(tmp_path / "stopped")] == [0, 3]
    assert min(evaluations(whole)[1:], key=lambda record: record["eval_loss"])["step"] == 3  # the first run's
    resume = "latest" if in_place else tmp_path / "stopped"
    train_here(tmp_path / "run", *base, *(own or three_stages(ports)), f"checkpoint.resume={resume}")
    assert evaluations(tmp_path / "run") == evaluations(whole)
    assert metrics(tmp_path / "run")[-1]["loss"] == metrics(whole)[-1]["loss"]
    ours, theirs = (
        load_file(folder / "adapter-best" / "adapter_model.safetensors") for folder in (tmp_path / "run", whole)
    )
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_evaluations_on_other_rows_are_not_compared(
    whole: Path, base: list[str], rows_file: Path, tmp_path: Path
) -> None:
    """A run that is over goes on with another file of rows to evaluate on."""
    args = [arg for arg in base if not arg.startswith("data.eval_path")]
    outcome = run_here(
        "train", *args, SINGLE, f"data.eval_path={rows_file}", f"checkpoint.resume={whole}",
        f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.text
    assert "the evaluations before are left out: they were on other rows" in outcome.text
    assert [record["step"] for record in evaluations(tmp_path / "run")] == [10]

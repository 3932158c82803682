"""What must be as it was for a run to go on, what may differ, and what more or fewer steps mean."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import Tiny
from pipeline import make_spec
from processes import losses, run_here, train_here, write_jsonl
from resuming import COMMON, SINGLE, STOPS, assert_equal, state_of
from safetensors.torch import load_file
from threads import hardware_of, worker_threads

from hetero.checkpoint import Snapshot
from hetero.errors import ConfigError
from hetero.optim import learning_rate
from hetero.resume_settings import (
    about_of,
    check_model,
    check_settings,
    check_steps,
    check_tensors,
    say_what_differs,
    settings_of,
)
from hetero.spec import LrScheduleSpec, ObjectSpec, RunSpec, ScheduleSpec

FOLDER = Path("/run/checkpoints")


@pytest.fixture
def spec(tiny: Tiny) -> RunSpec:
    return make_spec(tiny("llama"), (3,), steps=10)


def check(before: RunSpec, now: RunSpec, *, data: str = "a" * 64, shuffle: bool = True) -> None:
    """Goes on after step 4 of one with the other, whose data may differ too."""
    about = about_of(before, "1", FOLDER.parent, settings_of(before, "a" * 64, True), {}, {})
    about = json.loads(json.dumps(about))  # as it comes from the disk
    snapshot = Snapshot(4, {}, about)
    check_settings(snapshot, FOLDER, settings_of(now, data, shuffle))
    check_steps(snapshot, now.total_steps)
    say_what_differs(snapshot, now)


def changed(spec: RunSpec, key: str, value: Any) -> RunSpec:
    """A spec with another value at a place such as `adapter.r`."""
    first, _, rest = key.partition(".")
    if isinstance(spec, dict):
        return spec | {key: value}
    inner = changed(getattr(spec, first), rest, value) if rest else value
    return msgspec.structs.replace(spec, **{first: inner})


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("seed", 8, "seed is 7 there and 8 here"),
        ("optimizer.args.lr", 0.002, "optimizer.lr is 0.001 there and 0.002 here"),
        ("optimizer.args.weight_decay", 0.1, "optimizer.weight_decay is None there and 0.1 here"),
        ("optimizer.target", "hetero.optim.sgd", "optimizer._target_ is 'hetero.optim.adamw' there"),
        ("adapter.r", 8, "adapter.r is 4 there and 8 here"),
        ("adapter.dropout", 0.1, "adapter.dropout is 0.0 there and 0.1 here"),
        ("adapter.target_modules", ["q_proj"], "adapter.target_modules is ['q_proj', 'v_proj'] there"),
        ("lr_schedule.warmup_steps", 3, "lr_schedule.warmup_steps is 0 there and 3 here"),
        ("lr_schedule.name", "cosine", "lr_schedule.name is 'constant' there and 'cosine' here"),
        ("loop.batch_size", 6, "loop.batch_size is 4 there and 6 here"),
        ("loop.max_grad_norm", None, "loop.max_grad_norm is 1.0 there and None here"),
        ("model.path", "other", "model.path is 'llama' there and 'other' here"),
        ("model.revision", "main", "model.revision is None there and 'main' here"),
        ("num_hidden_layers", 7, "model.num_hidden_layers is 6 there and 7 here"),
    ],
)
def test_other_setting_is_named_with_both_values_and_a_remedy(spec: RunSpec, place: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(spec, changed(spec, place, value))
    text = str(caught.value)
    assert said in text and "/run, step 4" in text and "1 in all" in text
    assert "give them as they were, or adapter.init_from=FOLDER/adapter for a new run" in text and "\n" not in text


def test_other_rows_or_order_are_named(spec: RunSpec) -> None:
    with pytest.raises(ConfigError, match=r"the rows of data have the digest a{16} there and b{16} here"):
        check(spec, spec, data="b" * 64)
    with pytest.raises(ConfigError, match=r"data\.shuffle is True there and False here"):
        check(spec, spec, shuffle=False)


@pytest.mark.parametrize(
    "place", ["schedule", "loop.recompute", "loop.target", "stages", "workers", "boundary_dtypes", "transport"]
)
def test_how_the_work_is_divided_may_differ_without_a_word(
    spec: RunSpec, tiny: Tiny, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = changed(make_spec(tiny("llama"), (1, 2), steps=10), "schedule", ScheduleSpec(name="gpipe"))
    other = changed(other, "loop.recompute", "layer")
    other = changed(changed(other, "loop.target", "own.loop"), "transport.topology", "star")
    value: Any = other
    for name in place.split("."):
        value = getattr(value, name)
    with caplog.at_level(logging.INFO):
        check(spec, changed(spec, place, value))
    assert caplog.messages == []


@pytest.mark.parametrize("cuts", [(), (1, 2)])
def test_number_of_stages_may_differ_without_a_word(
    tiny: Tiny, cuts: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    before = make_spec(tiny("llama"), (3,), steps=10, dtypes=["float32"] * 2)
    check(before, make_spec(tiny("llama"), cuts, steps=10, dtypes=["float32"] * 3))
    check(make_spec(tiny("llama"), cuts, steps=10, dtypes=["float32"] * 3), before)
    assert caplog.messages == []


@pytest.mark.parametrize("place", ["loop.microbatch_size", "dtypes"])
def test_what_changes_rounding_is_allowed_with_a_warning(
    spec: RunSpec, tiny: Tiny, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    if place == "dtypes":
        now = make_spec(tiny("llama"), (3,), steps=10, dtypes=["float32", "bfloat16"])
        before = make_spec(tiny("llama"), (3,), steps=10, dtypes=["float32", "float32"])
    else:
        before, now = spec, changed(spec, place, 2)
    check(before, now)
    what = {
        "dtypes": "numbers was float32 and is bfloat16 and float32 and float32 between stages",
        "loop.microbatch_size": f"loop.microbatch_size was {before.loop.microbatch_size} and is 2",
    }[place]
    assert caplog.messages == [f"{what}: results will not be equal to the last bit"]


@pytest.mark.parametrize("mixed", [False, True], ids=["all_stages", "other_layers"])
def test_base_in_other_bits_is_said_to_be_another_one(
    spec: RunSpec, mixed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A split alone changes nothing, but it does where stages hold their layers in different numbers."""

    def held(*stages: tuple[int, int, str]) -> RunSpec:
        made = [
            msgspec.structs.replace(spec.stages[0], start=a, end=b, dtype="float32", quantization=kind)  # type: ignore[arg-type]
            for a, b, kind in stages
        ]
        return msgspec.structs.replace(spec, stages=made)

    before = held((0, 2, "nf4"), (2, 6, "none")) if mixed else held((0, 2, "nf4"), (2, 6, "nf4"))
    now = held((0, 3, "nf4"), (3, 6, "none")) if mixed else held((0, 2, "none"), (2, 6, "none"))
    check(before, now)
    (said,) = caplog.messages
    assert "nf4" in said and ("loss may jump" in said) != mixed
    assert "numbers was float32 nf4 and is float32:" in said or "nf4 in layers 0, 1, 2:" in said
    caplog.clear()
    check(held((0, 2, "nf4"), (2, 6, "nf4")), held((0, 4, "nf4"), (4, 6, "nf4")))
    assert caplog.messages == []


def test_more_steps_are_said_with_their_rule_and_fewer_than_done_are_refused(
    spec: RunSpec, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        check(spec, changed(spec, "total_steps", 20))
    assert caplog.messages == [
        "20 steps in all instead of 10: from step 5 on the learning rate is that of a run of 20 steps, without a "
        "second warm-up"
    ]
    check(spec, changed(spec, "total_steps", 4))
    with pytest.raises(ConfigError) as caught:
        check(spec, changed(spec, "total_steps", 3))
    assert str(caught.value) == ("loop.steps must be at least 4, the step that checkpoint.resume goes on from, got 3")


def test_every_argument_of_the_optimizer_counts(spec: RunSpec) -> None:
    args = {"lr": 1e-3, "betas": [0.9, 0.999]}
    before = changed(spec, "optimizer", ObjectSpec("hetero.optim.adamw", args))
    check(before, changed(spec, "optimizer", ObjectSpec("hetero.optim.adamw", {"lr": 1e-3, "betas": (0.9, 0.999)})))
    with pytest.raises(ConfigError, match=r"optimizer\.betas is \[0\.9, 0\.999\] there and \[0\.9, 0\.99\] here"):
        check(before, changed(spec, "optimizer", ObjectSpec("hetero.optim.adamw", args | {"betas": [0.9, 0.99]})))


def test_other_weights_under_the_same_name_are_refused() -> None:
    snapshot = Snapshot(4, {}, {"model": {"config": "a", "layers.3": "b"}})
    check_model(snapshot, FOLDER, {"config": "a", "layers.3": "b", "tokenizer": "c"})
    check_model(snapshot, FOLDER, {})
    with pytest.raises(ConfigError, match=r"layers.3 has the digest b there and x here .*step 4.*model.revision"):
        check_model(snapshot, FOLDER, {"config": "a", "layers.3": "x"})


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("adapter:a", [3, 2], "has 'adapter:a' as float32 [3, 2]"),
        ("adapter:a", [1], "has 'adapter:a' as float32 [1]"),
        ("adapter:c", [2, 3], "has 'adapter:c' as float32 [2, 3]"),
        ("optimizer.exp_avg:c", [2, 3], "has 'optimizer.exp_avg:c' as float32 [2, 3]"),
        ("a", [2, 3], "has 'a' as float32 [2, 3]"),
        (None, [], "lacks 'b'"),
    ],
)
def test_tensors_of_another_model_are_refused_by_name(name: str | None, shape: list[int], said: str) -> None:
    shapes = {"a": [2, 3], "b": [4]}
    state = {f"adapter:{key}": torch.zeros(shape) for key, shape in shapes.items()}
    state["optimizer.step:a"] = torch.tensor(1.0)
    check_tensors(Snapshot(4, state, {}), FOLDER, shapes)
    if name is None:
        del state["adapter:b"]
    else:
        state[name] = torch.zeros(shape)
    with pytest.raises(ConfigError, match=re.escape(f"but /run/checkpoints, step 4, {said}: ")):
        check_tensors(Snapshot(4, state, {}), FOLDER, shapes)


# ---- whole runs


@pytest.fixture(scope="module")
def args(rows_file: Path) -> list[str]:
    return [*COMMON, f"data.path={rows_file}"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, args: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train_here(folder, *args, SINGLE, *STOPS)
    return folder


def test_mistake_ends_the_run_before_it_starts_workers(tmp_path: Path, args: list[str], stopped: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7]}] * 12)
    for other, said in {f"data.path={file}": "the rows of data", "optimizer.lr=0.1": "optimizer.lr"}.items():
        run_dir = tmp_path / said.split(".")[0]
        outcome = run_here(
            "train", *args, other, f"hydra.run.dir={run_dir}", f"outputs={tmp_path}", f"checkpoint.resume={stopped}"
        )
        errors = [line for line in outcome.text.splitlines() if "error: " in line]
        assert outcome.code == 2 and "Traceback" not in outcome.text and len(errors) == 1, outcome.text
        assert errors[0].startswith("error: checkpoint.resume must go on with the run's own settings: " + said)
        assert not run_dir.exists()  # of a refused command nothing is left


def test_more_steps_go_on_at_the_rate_of_the_longer_run(tmp_path: Path, args: list[str], stopped: Path) -> None:
    """Case C08: three stages have one rate, which the optimizer of each uses: all equal the run on one."""
    longer = [*args, "loop.steps=14", f"checkpoint.resume={stopped}"]
    one = train_here(tmp_path / "one", *longer, SINGLE)
    with worker_threads(2, tmp_path / "workers") as ports:
        three = train_here(tmp_path / "three", *longer, *hardware_of(ports))
    schedule = LrScheduleSpec(name="cosine", warmup_steps=3)
    rates = [learning_rate(step, 10 if step <= 4 else 14, 3e-3, schedule) for step in range(1, 15)]
    assert [record["lr"] for record in one] == [record["lr"] for record in three] == rates
    assert losses(one) == losses(three)
    assert_equal(state_of(tmp_path / "three", 14), state_of(tmp_path / "one", 14))


def test_run_with_nothing_left_to_do_writes_its_adapter(tmp_path: Path, args: list[str], stopped: Path) -> None:
    equal = [*args, SINGLE, "loop.steps=4", f"checkpoint.resume={stopped}"]
    records = train_here(tmp_path / "run", *equal)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    before, after = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (stopped, tmp_path / "run"))
    assert_equal(after, before)
    assert_equal(state_of(tmp_path / "run", 4), state_of(stopped, 4))

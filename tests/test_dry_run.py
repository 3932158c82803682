"""What `python train.py dry_run=true` shows, and what it does not need (cases P05, V02)."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from choosing import mostly_by_hand
from processes import REPO, composed, run_here
from rich.console import Console

from hetero import dry_run
from hetero.config import SHAPES_DIR
from hetero.device import available_types
from hetero.dry_run import advice, notes_of, table_of
from hetero.errors import ConfigError
from hetero.memory import RunMemory, memory_of
from hetero.resolve import ResolvedRun, resolve

OFFLINE = {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
# By a small process: a child's peak starts from that of the process that made it, and pytest's may be large.
MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)
sys.exit(code)
"""
SMALL_MACHINES = "hardware.workers=[{id: pc, host: pc.example, memory_gb: 4}]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "hardware", "stages"),
    mostly_by_hand(
        [("llama8b_2stage", "mac_and_pc", 2), ("llama8b_3stage", "mac_and_two_pcs", 3)],
        [("llama8b_3stage", "mac_and_two_pcs", 3)],
    ),
)
def test_known_plan_is_shown_without_weights_network_or_workers(
    tmp_path: Path, plan: str, hardware: str, stages: int
) -> None:
    """In a process of its own: 20 s of processor time at most (under 10 s on an idle machine), 1 GB of memory."""
    empty = {"HF_HOME": str(tmp_path / "hub"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "140"}
    args = [f"shard_plan={plan}", f"hardware={hardware}", f"outputs={tmp_path}", "data=jsonl"]
    child = [sys.executable, str(REPO / "train.py"), "dry_run=true", *args]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *child],
        env={**os.environ, **OFFLINE, **empty},
        capture_output=True,
        timeout=300,
    )
    text, said = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, said
    seconds, peak_kib = map(float, said.splitlines()[-1].split())
    assert seconds < 20
    assert len(re.findall(r"^│ ?\d ", text, re.MULTILINE)) == stages
    assert len(re.findall(r"^link ", text, re.MULTILINE)) == stages - 1
    for expected in ("nf4", "bf16", "logits", "in flight", "?"):
        assert expected in text
    assert peak_kib * 1024 < 1 << 30


def test_run_of_this_machine_is_compared_with_its_memory(tmp_path: Path) -> None:
    outcome = run_here("train", "dry_run=true", f"outputs={tmp_path}")
    assert outcome.code == 0 and "memory ?" not in outcome.text
    assert "stages on one machine share its memory" in outcome.text


def test_plan_that_does_not_fit_ends_with_code_2_and_one_line_that_names_the_machine(tmp_path: Path) -> None:
    args = ["shard_plan=llama8b_2stage", "hardware=mac_and_pc", SMALL_MACHINES, f"outputs={tmp_path}"]
    outcome = run_here("train", "dry_run=true", *args)
    assert outcome.code == 2
    last = outcome.text.strip().splitlines()[-1]
    assert re.search(r"shard_plan must fit the machines: pc \(stage 1\) lacks [\d.]+ [GM]iB", last)
    assert "layers on another machine" in outcome.text


@pytest.mark.by_hand
def test_advice_is_what_the_same_figures_say() -> None:
    raw = composed("shard_plan=llama8b_2stage", "hardware=mac_and_pc", "model.quantization=none", "loop.batch_size=16")
    raw["hardware"]["workers"][0]["memory_gb"] = 9.2
    resolved = resolve(raw, shapes_dir=SHAPES_DIR, for_drawing=True)
    memory = memory_of(resolved, SHAPES_DIR)
    assert set(memory.lacking()) == {"pc"}
    lines = list(advice(resolved, memory, SHAPES_DIR))
    assert any(line.strip() == "model.quantization=nf4: fits" for line in lines)
    for line in lines[1:]:
        knob, _, effect = line.strip().partition(": ")
        if knob.startswith(("loop.", "data.", "schedule.", "model.")):
            key, _, value = knob.partition("=")
            group, name = key.split(".")
            changed = raw | {group: raw[group] | {name: int(value) if value.isdigit() else value}}
            lack = (
                memory_of(resolve(changed, shapes_dir=SHAPES_DIR, for_drawing=True), SHAPES_DIR).lacking().get("pc", 0)
            )
            assert (effect == "fits") == (lack == 0)
            assert lack < memory.lacking()["pc"]


def test_advice_turns_all_knobs_together_where_none_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """With figures that only all of them make small enough."""
    knobs = ["loop.recompute=layer", "loop.microbatch_size=1", "model.quantization=nf4"]
    resolved = resolve(
        composed("shard_plan=single", "hardware.coordinator.memory_gb=0.1"), shapes_dir=SHAPES_DIR, for_drawing=True
    )
    memory = memory_of(resolved, SHAPES_DIR)
    (stage,) = memory.stages
    enough = dataclasses.replace(memory, stages=[dataclasses.replace(stage, available=1 << 40)])

    def figures(changed: ResolvedRun, _: Path) -> RunMemory:
        loop, model = changed.config.loop, changed.config.model
        return enough if (loop.recompute, loop.microbatch_size, model.quantization) == ("layer", 1, "nf4") else memory

    monkeypatch.setattr(dry_run, "memory_of", figures)
    lines = [line.strip() for line in advice(resolved, memory, SHAPES_DIR)]
    assert [line for line in lines if line.endswith(": fits")] == [f"{' '.join(knobs)}: fits"]


def test_missing_data_and_sample_hosts_are_no_fault_but_wrong_sizes_are(tmp_path: Path) -> None:
    args = ["dry_run=true", "hardware=mac_and_pc", "data=jsonl", "data.path=/no/such/file", f"outputs={tmp_path}"]
    assert run_here("train", *args).code == 0
    outcome = run_here("train", *args, "data.max_length=100000")
    assert outcome.code == 2 and "data.max_length must be at most" in outcome.one_line()


def test_notes_say_what_a_step_is() -> None:
    resolved = resolve(composed("loop.batch_size=6"), shapes_dir=SHAPES_DIR, for_drawing=True)
    notes = list(notes_of(resolved, memory_of(resolved, SHAPES_DIR)))
    assert notes[0].startswith("a step: 3 micro-batches of 2 x 128 tokens")


@pytest.mark.parametrize("plan", ["llama8b_3stage", "even"])
def test_table_fits_into_80_columns_with_every_number_whole(plan: str) -> None:
    resolved = resolve(composed(f"shard_plan={plan}", "hardware=local"), shapes_dir=SHAPES_DIR, for_drawing=True)
    memory = memory_of(resolved, SHAPES_DIR)
    console = Console(width=80, file=io.StringIO())
    console.print(table_of(resolved, memory, 80))
    assert isinstance(console.file, io.StringIO)
    shown = [[cell.strip() for cell in line.split("│")] for line in console.file.getvalue().splitlines()]
    rows = [cells[1:-1] for cells in shown if len(cells) > 2 and cells[1]]
    unit = 30 if memory.stages[0].total > 4 << 30 else 20
    assert len(rows) == len(memory.stages) and "…" not in console.file.getvalue()
    for cells, stage in zip(rows, memory.stages, strict=True):
        assert float(cells[8]) == pytest.approx(stage.total / 2**unit, rel=0.01)
        count, _, each = cells[4].partition(" x ")
        assert int(count) == stage.in_flight
        assert float(each) == pytest.approx(stage.per_micro_batch / 2**unit, rel=0.01)


def test_memory_that_is_said_of_the_coordinator_counts_for_all_stages_on_it() -> None:
    raw = composed("hardware.coordinator.memory_gb=0.3")
    memory = memory_of(resolve(raw, shapes_dir=SHAPES_DIR, for_drawing=True), SHAPES_DIR)
    assert list(memory.lacking().values()) == [sum(stage.total for stage in memory.stages) - 300_000_000]


def test_figures_say_what_is_not_in_them() -> None:
    raw = composed("task=generate", "prompts=[a]", "loop.eval_batch_size=16")
    resolved = resolve(raw, shapes_dir=SHAPES_DIR, for_drawing=True)
    notes = "\n".join(notes_of(resolved, memory_of(resolved, SHAPES_DIR)))
    assert "the figures are of task=train" in notes and "micro-batches of 16 rows" in notes


@pytest.mark.skipif(available_types() != ["cpu"], reason="this machine computes in float16")
def test_numbers_that_this_machine_cannot_compute_in_are_refused_as_in_a_run() -> None:
    resolved = resolve(composed("model.dtype=float16"), shapes_dir=SHAPES_DIR, for_drawing=True)
    with pytest.raises(ConfigError, match=r"shard_plan\.stages\[0\]\.dtype must be float32 or bfloat16 on a CPU"):
        memory_of(resolved, SHAPES_DIR)

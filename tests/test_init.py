"""Setting up machines and a split, by flags and by answers; train.py takes what is written."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from processes import REPO, environment

from hetero import init, setup_questions, setup_split
from hetero.config import CONF_DIR, SHAPES_DIR, composed
from hetero.errors import ConfigError
from hetero.facts import ModelFacts, num_parameters, read_facts
from hetero.machines import machines_file, remember
from hetero.resolve import resolve
from hetero.setup_questions import coordinator_of, worker_of
from hetero.spec import WorkerEntry
from hetero.tiny import tiny_config

TWO = ["--worker", "pc=192.0.2.7:9998,memory_gb=8", "--worker", "box=[fe80::1%eth0]:9999,device=cpu,memory_gb=4"]


def facts() -> ModelFacts:
    return read_facts(tiny_config())


def set_up(conf: Path, *args: str, name: str = "mine") -> int:
    return init.main([name, "--conf", str(conf), *args])


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0].removeprefix("error: ")


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115


@pytest.fixture
def known() -> Iterator[None]:
    machines_file().unlink(missing_ok=True)  # what other tests have left
    remember([WorkerEntry(id="pc", host="192.0.2.7"), WorkerEntry(id="pc", host="192.0.2.8")])
    yield
    machines_file().unlink()


def test_written_files_are_what_train_py_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*TWO, "--coordinator", "mac.local,memory_gb=16", "--model", "tiny", "--split", "2,5"]
    assert set_up(tmp_path, *args) == 0
    shown = capsys.readouterr().out
    assert f"--config-dir {tmp_path} hardware=mine shard_plan=mine dry_run=true" in shown
    run = resolve(composed(["hardware=mine", "shard_plan=mine"], [tmp_path]), shapes_dir=SHAPES_DIR)
    assert [(s.id, s.start, s.end) for s in run.stages] == [("local", 0, 2), ("pc", 2, 5), ("box", 5, 6)]
    assert [(w.id, w.host, w.port, w.memory_gb) for w in run.workers] == [
        ("pc", "192.0.2.7", 9998, 8),
        ("box", "fe80::1%eth0", 9999, 4),
    ]
    assert run.config.hardware.launch == "none" and run.config.hardware.coordinator.memory_gb == 16


@pytest.mark.slow
def test_train_py_prints_and_figures_a_set_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set_up(tmp_path, *TWO, "--model", "tiny", "--split", "even") == 0
    for last in ("--cfg=job", "dry_run=true"):
        command = [sys.executable, "train.py", "--config-dir", str(tmp_path), "hardware=mine", "shard_plan=mine", last]
        env = environment()
        done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 and "pc" in done.stdout, done.stderr


def test_4bit_model_brings_its_adapter_and_a_folder_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_up(tmp_path, *TWO[:2], "--model", "llama8b_4bit", "--split", "even") == 0
    run = composed(["hardware=mine", "shard_plan=mine"], [tmp_path])
    assert run["model"]["quantization"] == "nf4" and run["adapter"]["r"] == 16
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text((CONF_DIR / "shapes" / "Qwen--Qwen3-14B.json").read_text())
    assert set_up(tmp_path, *TWO[:2], "--model", str(folder), "--split", "20", name="other") == 0
    run = composed(["hardware=other", "shard_plan=other"], [tmp_path])
    assert run["model"]["path"] == str(folder) and run["shard_plan"]["stages"][1] == {
        "id": "pc",
        "start": 20,
        "end": 40,
    }


def test_files_are_replaced_by_force_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*TWO[:2], "--model", "tiny", "--split", "even"]
    assert set_up(tmp_path, *args) == 0
    before = (tmp_path / "shard_plan" / "mine.yaml").read_bytes()
    capsys.readouterr()
    assert set_up(tmp_path, *TWO[:2], "--model", "tiny", "--split", "1") == 2
    assert "--force" in error_of(capsys) and (tmp_path / "shard_plan" / "mine.yaml").read_bytes() == before
    assert set_up(tmp_path, *TWO[:2], "--model", "tiny", "--split", "1", "--force") == 0
    assert (tmp_path / "shard_plan" / "mine.yaml").read_bytes() != before
    capsys.readouterr()
    assert set_up(tmp_path, *args, name="local") == 2
    assert "would win" in error_of(capsys)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["mine", "--model", "tiny", "--split", "even"], "--worker must be given"),
        (["mine", *TWO, "--split", "even"], "--model must be given"),
        (["mine", *TWO, "--model", "tiny"], "--split must be given"),
        ([*TWO, "--model", "tiny", "--split", "even"], "NAME must be given"),
        (["a/b"], "NAME must be letters"),
        (["mine", *TWO, "--model", "nope", "--split", "even"], "--model must be one of"),
        (["mine", *TWO, "--model", "tiny", "--split", "5,2"], "--split must have 2 rising numbers from 1 to 5"),
        (["mine", *TWO, "--model", "tiny", "--split", "half"], "--split must be even, memory"),
        (["mine", "--worker", "local=h", "--model", "tiny", "--split", "even"], "not 'local'"),
        (["mine", "--worker", "pc=pc.example", "--model", "tiny", "--split", "even"], "sample name"),
        (["mine", "--worker", "pc", "--model", "tiny", "--split", "even"], "--worker must be ID=HOST"),
        (["mine", "--worker", "pc=h:99999", "--model", "tiny", "--split", "even"], "--worker.port"),
        (["mine", "--worker", "pc=h,speed=3", "--model", "tiny", "--split", "even"], "options device= and memory_gb="),
    ],
)
def test_mistake_names_its_flag_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: Sequence[str], named: str
) -> None:
    assert init.main([*args, "--conf", str(tmp_path)]) == 2
    assert named in error_of(capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("known")
def test_known_machines_are_offered_and_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set_up(tmp_path, "--known", "--model", "tiny", "--split", "even") == 0
    text = (tmp_path / "hardware" / "mine.yaml").read_text()
    assert 'id: pc, host: "192.0.2.7"' in text and 'id: pc-2, host: "192.0.2.8"' in text
    slips = ["what", "192.0.2.9", "local=192.0.2.9"]  # each costs one answer
    answers = iter(["asked", slips[0], "n", "", *slips[1:], "box=192.0.2.9", "", "tiny", "", "y"])
    questions: list[str] = []

    def answer(question: str) -> str:
        questions.append(question)
        return next(answers)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert init.main(["--conf", str(tmp_path)]) == 0
    assert "trained with this machine before" in questions[1]
    plan = composed(["hardware=asked", "shard_plan=asked"], [tmp_path])
    assert [stage["id"] for stage in plan["shard_plan"]["stages"]] == ["local", "pc-2", "box"]


def test_memory_split_fills_machines_as_evenly_as_any_other() -> None:
    memory, counts = [3.0, 1.0, 2.0], num_parameters(facts())

    def fullest(layers: Sequence[int]) -> float:
        held = [n * counts.layer for n in layers]
        held[0] += counts.embedding
        held[-1] += counts.head
        return max(have / limit for have, limit in zip(held, memory, strict=True))

    every = [p for p in itertools.product(range(1, 7), repeat=3) if sum(p) == facts().num_hidden_layers]
    assert fullest(setup_split.by_memory(facts(), memory)) == min(map(fullest, every))


def test_memory_of_a_machine_that_does_not_answer_must_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--worker", "pc=127.0.0.1:1", "--model", "tiny", "--split", "memory"]
    assert set_up(tmp_path, *args) == 2
    assert error_of(capsys).startswith("memory_gb of --worker pc must be given")


def test_addresses_are_read_as_people_write_them() -> None:
    assert worker_of("pc=[::1]:5000,device=cuda:1") == WorkerEntry(id="pc", host="::1", port=5000, device="cuda:1")
    assert worker_of("a.b=host").port == 9999
    with pytest.raises(ConfigError, match="no port"):
        coordinator_of("host:99")
    with pytest.raises(ConfigError, match="IPv6 as"):
        setup_questions.worker_of("pc=::1")

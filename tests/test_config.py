"""The command line: what composes, and every mistake as one line that names key, value and remedy."""

from __future__ import annotations

import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Running, composed, run, run_here, started, write_jsonl

from hetero import config as config_module
from hetero.checked import convert
from hetero.config import explain
from hetero.spec import Config, WorkerConfig

SPLIT = "shard_plan=split"
W = "hardware.launch=none"
POINTS = r"shard_plan\.split_points must rise between 1 and 5 \(the model has 6 layers\), got "

# Overrides of train.py -> what the one line must hold.
MISTAKES: list[tuple[list[str], str]] = [
    # a name that is not there
    (["shard_plan=llama8b_3stages"], r"shard_plan must be one of .*llama8b_3stage.*, got 'llama8b_3stages'"),
    (["model=tinny"], r"model must be one of llama70b_4bit, llama8b, .*, smollm2_135m, tiny, got 'tinny'"),
    (["logger=[jsonl,wandbb]"], r"logger must be one of csv, jsonl, none, tensorboard, wandb, got 'wandbb'"),
    (["adapter=null"], r"adapter must be one of lora, qlora, got null"),
    (["loop.lrr=1"], r"loop\.lrr is not a key; .*batch_size"),
    (["+loop.lrr=1"], r"loop\.lrr is not a key; .*batch_size"),
    (["loop.step=1"], r"loop\.step is not a key; did you mean steps\?"),
    (["adpter.r=4"], r"adpter is not a key; did you mean adapter\?"),
    (["sead=1"], r"sead is not a key; did you mean seed\?"),
    (["+sead=1"], r"sead is not a key; did you mean seed\?"),
    (["model.lora=qlora"], r"model\.lora is not a key; .*quantization"),
    (["hardware.coordinator.hots=x"], r"hardware\.coordinator\.hots is not a key; did you mean host\?"),
    (["logger.jsonl.file=x"], r"logger\.jsonl\.file is not a key"),
    (["+logger.jsonl.file=x"], r"logger must have the arguments that hetero\.loggers\.JsonlLogger takes: .*'file'"),
    (["+optimizer.momentum=1"], r"optimizer\.momentum is not a key; .*betas"),
    ([W, "hardware.workers=[{id: a, host: x, prot: 3}]"], r"hardware\.workers\[0\]\.prot is not a key; .*port\?"),
    (["~adapter"], r"adapter must be given"),
    ([W, "hardware.workers=[{id: a}]"], r"hardware\.workers\[0\]\.host must be given"),
    (["model.path=???"], r"model\.path must be given"),
    (["run_name=${nope}"], r"'nope' not found .*run_name"),
    # a value of the wrong kind or outside of its range
    (["optimizer.lr=abc"], r"optimizer\.lr must be float, got 'abc'"),
    (["optimizer.lr=-1"], r"optimizer\.lr must be float >= 0.*, got -1"),
    (["optimizer.lr=nan"], r"optimizer\.lr must be a finite number, got nan"),
    (["optimizer.lr=1e999"], r"optimizer\.lr must be a finite number, got inf"),
    (["adapter.r=0"], r"adapter\.r must be int >= 1, got 0"),
    (["adapter.r=1.5"], r"adapter\.r must be int, got 1\.5"),
    (["adapter.rank_pattern={q_proj: 0}"], r"adapter\.rank_pattern\S*q_proj\S* must be int >= 1, got 0"),
    (["adapter.dropout=1"], r"adapter\.dropout must be float < 1.*, got 1"),
    (["model.dtype=float15"], r"model\.dtype must be one of float32, bfloat16, float16, got 'float15'"),
    (["model.quantization=int3"], r"model\.quantization must be one of none, nf4, got 'int3'"),
    (["schedule.name=zigzag"], r"schedule\.name must be one of 1f1b, gpipe, got 'zigzag'"),
    (["lr_schedule.name=zigzag"], r"lr_schedule\.name must be one of cosine, constant, got 'zigzag'"),
    (["transport.topology=ring"], r"transport\.topology must be one of chain.*, got 'ring'"),
    (["transport.io_timeout_s=0"], r"transport\.io_timeout_s must be float > 0.*, got 0"),
    (["loop.microbatch_size=0"], r"loop\.microbatch_size must be int >= 1, got 0"),
    (["loop.steps=-1"], r"loop\.steps must be .*>= 0, got -1"),
    (["loop.steps=null"], r"loop must give steps or epochs"),
    (["loop.epochs=2"], r"loop must give steps or epochs .* got 150 and 2"),
    (["checkpoint.every_steps=0"], r"checkpoint\.every_steps must be int >= 1, got 0; null .*checkpoint=none"),
    (["checkpoint.every_minutes=0"], r"checkpoint\.every_minutes must be float > 0\S*, got 0; null .*checkpoint=none"),
    (["checkpoint.keep_last=1"], r"checkpoint\.keep_last must be int >= 2, got 1; 2 keeps the one before"),
    (["checkpoint.resume=-1"], r"checkpoint\.resume must be int >= 0, got -1; latest, a step number, .*null"),
    (["checkpoint.resume="], r"checkpoint\.resume must be "),
    (["recovery.wait_s=-1"], r"recovery\.wait_s must be float >= 0\S*, got -1; recovery=none"),
    (["seed=-1"], r"seed must be int >= 0, got -1"),
    (["role=chief"], r"role must be one of auto, coordinator, worker, got 'chief'"),
    (["role=worker"], r"role must be auto or coordinator where hardware\.launch is local, got 'worker'"),
    (["worker.port=70000"], r"worker\.port must be int <= 65535, got 70000"),
    (["hardware.coordinator.device=GPU 1"], r"hardware\.coordinator\.device must be auto, .*cuda:1, got 'GPU 1'"),
    (["hardware.coordinator.device=tpu"], r"hardware\.coordinator\.device must be auto or one of .*got 'tpu'"),
    # relations
    (["data.max_length=513"], r"data\.max_length must be at most 512 \(max_position_embeddings .*\), got 513"),
    (["shard_plan=single", "shard_plan.split_points=[3]"], r"shard_plan must give exactly one of"),
    ([SPLIT, "shard_plan.split_points=[2,2]"], POINTS + r"\[2, 2\]"),
    ([SPLIT, "shard_plan.split_points=[3,1]"], POINTS + r"\[3, 1\]"),
    ([SPLIT, "shard_plan.split_points=[0]"], POINTS + r"\[0\]"),
    ([SPLIT, "shard_plan.split_points=[6]"], POINTS + r"\[6\]"),
    ([SPLIT, "shard_plan.split_points=[99]"], POINTS + r"\[99\]"),
    ([SPLIT, "shard_plan.split_points=[-1]"], POINTS + r"\[-1\]"),
    ([SPLIT, "shard_plan.split_points=[a]"], r"shard_plan\.split_points\[0\] must be int, got 'a'"),
    ([SPLIT, "shard_plan.split_points=[1.5]"], r"shard_plan\.split_points\[0\] must be int, got 1\.5"),
    ([SPLIT, "shard_plan.split_points=3"], r"shard_plan\.split_points must be array.*, got 3"),
    (["shard_plan.num_stages=7"], r"shard_plan\.num_stages must be at most 6 \(the model's layers\), got 7"),
    (["shard_plan.num_stages=0"], r"shard_plan\.num_stages must be int >= 1, got 0"),
    (
        [W, "hardware.workers=[{id: a, host: a},{id: b, host: b}]", "shard_plan.num_stages=2"],
        r"one for each of the 2 hardware\.workers, got 2 stages",
    ),
    (
        ["shard_plan.stages=[{id: local, start: 0, end: 5}]", "shard_plan.num_stages=null"],
        r"shard_plan\.stages must cover all 6 layers",
    ),
    # what is not there
    (["hardware=mac_and_pc"], r"hardware\.workers\[0\]\.host is the sample name 'pc\.example': .*hardware\.workers="),
    (["hardware=mac_and_two_pcs"], r"hardware\.workers\[0\]\.host is the sample name"),
    (["data=jsonl"], r"data\.path must be given for data=jsonl: data\.path=FILE"),
    (["data=jsonl", "data.path=/no/such.jsonl"], r"data\.path must be .*/no/such\.jsonl"),
    (["data=hub"], r"data\.path must be given for data=hub"),
    (["model.path=/no/such"], r"model\.path must be .*'/no/such'"),
    (["model.path=no-such/model"], r"model\.path 'no-such/model' was not found"),
    (["adapter.init_from=/no/such"], r"adapter\.init_from must be a folder of a PEFT adapter, .*/no/such"),
    # what may not be named
    (["optimizer._target_=os.system"], r"optimizer\._target_ must be one of hetero\.optim\.adamw, .*got 'os\.system'"),
    (["transport._target_=subprocess.Popen"], r"transport\._target_ must be one of .*got 'subprocess\.Popen'"),
    (["loop._target_=os.system"], r"loop\._target_ must be one of hetero\.loop\.train .*got 'os\.system'"),
    (["stage._target_=builtins.eval"], r"stage\._target_ must be one of .*got 'builtins\.eval'"),
    (["logger.jsonl._target_=os.system"], r"logger\._target_ must be one of .*got 'os\.system'"),
    (["+data._target_=os.system"], r"data\._target_ is not a key"),
    # grammar
    (["shard_plan=single,even"], r"shard_plan=single,even.*--multirun"),
    (["loop"], r"an argument must be KEY=VALUE as in loop\.steps=20, .*, got 'loop'$"),
    (["my file.jsonl=3"], r"an argument must be KEY=VALUE .*, got 'my file\.jsonl=3'$"),
    (["loop.steps=[1"], r"loop\.steps must be a list or map with every bracket closed, .* got \[1$"),
    ([W, "hardware.workers=[{id: it's}]"], r"hardware\.workers must be a list .* got \[\{id: it's\}\]$"),
    ([W, "hardware.workers=[{id: a, host: [::1]}]"], r"workers\[0\]\.host must be str, got .*; write ::1 without"),
    (["hydra.run.dir=/proc/no"], r"must be a folder that can be written, got /proc/no"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=[" ".join(mistake) for mistake, _ in MISTAKES])
def test_mistake_is_one_line_with_key_value_and_remedy(tmp_path: Path, overrides: list[str], message: str) -> None:
    """Cases H03, H09, M12: before anything is loaded or launched."""
    outcome = run_here("train", f"outputs={tmp_path}", *overrides)
    assert outcome.code == 2
    assert re.search("^error: .*" + message, outcome.one_line()), outcome.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "args", "message"),
    [
        ("worker", ["worker.prot=1"], r"worker\.prot is not a key; did you mean port\?"),
        ("worker", ["worker.port=x"], r"worker\.port must be .*int.*, got 'x'"),
        ("worker", ["model=tiny"], r"model is not a key|Could not override 'model'"),
        ("worker", ["worker.host=[::1]"], r"worker\.host must be str .*; write ::1 without brackets, .*: '\[::1\]'$"),
        ("visualize", ["shard_plan=nope"], r"shard_plan must be one of"),
        ("visualize", ["outputt=x"], r"outputt is not a key; did you mean outputs\?"),
    ],
)
def test_mistakes_of_the_other_scripts(tmp_path: Path, script: str, args: list[str], message: str) -> None:
    outcome = run_here(script, f"outputs={tmp_path}", *args)
    assert outcome.code == 2
    assert re.search("^error: .*" + message, outcome.one_line()), outcome.text


def test_mistakes_end_a_process_within_seconds_without_a_traceback(tmp_path: Path) -> None:
    """As processes, since it is their end that counts; HYDRA_FULL_ERROR=1 shows the traceback."""
    bad = [f"outputs={tmp_path}", "shard_plan=split", "shard_plan.split_points=[99]"]
    with ExitStack() as stack:
        found = [
            stack.enter_context(started("train", *bad, cwd=tmp_path)),
            stack.enter_context(started("train", *bad, cwd=tmp_path, env={"HYDRA_FULL_ERROR": "1"})),
        ]
        plain, full = (process.wait() for process in found)
    assert plain.code == 2 and plain.one_line().startswith("error: shard_plan.split_points must rise")
    assert full.code != 0 and "Traceback" in full.text and "shard_plan.split_points must rise" in full.text


@pytest.mark.parametrize("script", ["train", "worker", "visualize"])
def test_interrupt_while_modules_are_imported_is_one_line(tmp_path: Path, script: str) -> None:
    """A Ctrl-C of the first moments: hydra's place is taken by a package that is interrupted while it is imported."""
    interrupted = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "hydra.py").write_text(interrupted, encoding="utf-8")
    outcome = run(script, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert outcome.code == 130 and outcome.one_line() == "interrupted"


def test_refused_run_leaves_no_folder_but_takes_nothing_else_away(tmp_path: Path) -> None:
    bad = [f"outputs={tmp_path / 'out'}", "loop.steps=-1"]
    for run_dir in ("out/mine", "elsewhere"):
        (tmp_path / run_dir).mkdir(parents=True)
        (tmp_path / run_dir / "notes").touch()
        assert run_here("train", *bad, f"hydra.run.dir={tmp_path / run_dir}").code == 2
    assert (tmp_path / "out" / "mine" / "notes").is_file() and (tmp_path / "elsewhere" / "train.log").is_file()
    assert run_here("train", *bad).code == run_here("visualize", *bad).code == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert run_here("train", "-m", *bad, "seed=1,2").code == 2
    logs = sorted((tmp_path / "out").glob("multirun/*/*/*/train.log"))
    assert len(logs) == 2 and all("loop.steps must be" in log.read_text(encoding="utf-8") for log in logs)


def test_overrides_may_stand_on_both_sides_of_the_option_for_a_sweep(tmp_path: Path) -> None:
    outcome = run_here("train", f"outputs={tmp_path}", "loop.steps=-1", "-m", "seed=1,2")
    assert outcome.code == 2 and outcome.text.count("error: loop.steps must be ") == 2, outcome.text


def test_known_model_plan_brings_its_model_and_adapter_and_the_command_line_wins() -> None:
    plan = composed("shard_plan=llama8b_3stage", "hardware=mac_and_two_pcs")
    config = convert(plan, Config)
    assert config.model.path == "meta-llama/Llama-3.1-8B-Instruct" and config.model.quantization == "nf4"
    assert (config.adapter.r, config.adapter.alpha) == (16, 32)
    assert config.shard_plan.stages is not None and [s.end for s in config.shard_plan.stages] == [10, 24, 32]
    other = composed("shard_plan=llama8b_3stage", "model=smollm2_135m", "adapter=lora", "model.dtype=bfloat16")
    config = convert(other, Config)
    assert config.model.path.startswith("HuggingFaceTB/") and config.model.quantization == "none"
    assert config.adapter.r == 8 and config.model.dtype == "bfloat16"
    assert config.shard_plan.stages is not None


def options() -> list[str]:
    """Every file of every group, as an override."""
    files = sorted(config_module.CONF_DIR.glob("*/*.yaml"))
    return [f"{file.parent.name}={file.stem}" for file in files if file.parent.name != "hydra"]


@pytest.mark.parametrize("option", options())
def test_every_option_of_every_group_is_typed_data(option: str) -> None:
    convert(composed(option), Config)


def test_several_loggers_are_a_list_and_none_is_none() -> None:
    assert list(composed("logger=[jsonl,wandb]")["logger"]) == ["jsonl", "wandb"]
    assert convert(composed("logger=none"), Config).logger in (None, {})


def test_worker_needs_no_run_configuration() -> None:
    raw = composed(config_name="worker")
    assert raw.keys() == {"worker", "outputs", "allow_targets"}
    assert convert(raw, WorkerConfig).worker.port is None


def test_values_of_files_overrides_and_dicts_are_the_same_plain_data(tmp_path: Path) -> None:
    """Cases H10 and P02: the adapter's configuration of a run holds lists and dicts, whatever they came from."""
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}])
    mine = tmp_path / "my" / "adapter"
    mine.mkdir(parents=True)
    lines = ["target_modules: [q_proj, v_proj]", "rank_pattern: {q_proj: 2}", "layers_to_transform: [0, 5]"]
    (mine / "mine.yaml").write_text("\n".join(["defaults: [lora, _self_]", *lines]), encoding="utf-8")
    ways = {
        "override": [f"adapter.{line.replace(': ', '=', 1)}" for line in lines],
        "file": ["--config-dir", str(tmp_path / "my"), "adapter=mine"],
    }
    saved = []
    for name, args in ways.items():
        common = ["data=jsonl", f"data.path={rows}", "shard_plan=single", "loop.steps=0"]
        outcome = run_here("train", *args, f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / name}", *common)
        assert outcome.code == 0, outcome.text
        saved.append((tmp_path / name / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert saved[0] == saved[1]
    assert '"rank_pattern": {\n    "q_proj": 2\n  }' in saved[0]


def test_own_plan_of_another_folder_is_found(tmp_path: Path) -> None:
    """Case H05."""
    (tmp_path / "shard_plan").mkdir()
    (tmp_path / "shard_plan" / "mine.yaml").write_text(
        "stages: null\nsplit_points: [1, 2]\nnum_stages: null\n", encoding="utf-8"
    )
    outcome = run_here("train", "--config-dir", str(tmp_path), "--cfg", "job", "shard_plan=mine")
    assert outcome.code in (0, None) and re.search(r"split_points:\n  - 1\n  - 2\n", outcome.text)


@pytest.mark.slow
def test_help_and_config_print_need_no_heavy_package_from_any_folder(tmp_path: Path) -> None:
    """Cases H05 and H11: without torch, bitsandbytes, wandb, resvg and gguf, started in another folder."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("torch", "transformers", "peft", "bitsandbytes", "wandb", "resvg_py", "PIL", "gguf", "datasets"):
        (stubs / f"{name}.py").write_text("raise ImportError('hidden by a test')\n", encoding="utf-8")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    prints = (["--help"], ["--cfg", "job"], ["--cfg", "job", "--resolve"], ["--info", "defaults-tree"])
    with ExitStack() as stack:
        found: dict[tuple[str, str], Running] = {}
        for script in ("train", "worker", "visualize"):
            for args in prints:
                process = started(script, *args, cwd=elsewhere, env={"PYTHONPATH": str(stubs)})
                found[script, " ".join(args)] = stack.enter_context(process)
        for (script, args), process in found.items():
            outcome = process.wait()
            assert outcome.code == 0, (script, args, outcome.text)
            assert "${" not in outcome.text if "--resolve" in args else outcome.text
    assert "shard_plan" in found["train", "--help"].text and "num_stages: auto" in found["train", "--cfg job"].text
    assert list(elsewhere.iterdir()) == []


def test_logger_of_a_package_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Case L06, as a process; nothing else of the run needs wandb."""
    (tmp_path / "wandb.py").write_text("raise ImportError('hidden by a test')\n", encoding="utf-8")
    outcome = run("train", "logger=wandb", f"outputs={tmp_path}", env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert outcome.code == 2
    assert "error: logger=wandb needs the package wandb" in outcome.one_line() and "pip install wandb" in outcome.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output", "a (1).dot"), ("data.path", "my file=2"), ("+run_name", "it's"), ("run_name", "ä"),
        ("output", "~/plans"), ("worker.host", "[::1]:99"), ("data.path", "a;b\\"),
        ("run_name", """'a' "b" $c\\' `!"""),
    ],
)  # fmt: skip
def test_value_that_hydra_cannot_read_is_shown_as_it_has_to_be_typed(key: str, value: str) -> None:
    """Round trip: the shell takes the outer quotes off, hydra the inner ones."""
    parser = OverridesParser.create()
    with pytest.raises(OverrideParseException) as caught:
        parser.parse_overrides([f"{key}={value}"])
    message = explain(caught.value)
    start = f"{key.lstrip('+')} must have quotes around a value with special signs, got {value}: write "
    assert message.startswith(start)
    (argument,) = shlex.split(message.removeprefix(start))
    (override,) = parser.parse_overrides([argument])
    assert (override.get_key_element(), override.value()) == (key, value)


@given(text=st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_unreadable_argument_becomes_one_line(text: str) -> None:
    message = explain(OverrideParseException(text, "what hydra says"))
    assert "\n" not in message and message.isprintable()


@given(text=st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_whatever_hydra_says_becomes_one_line(text: str) -> None:
    assert "\n" not in explain(ValueError(text)).strip("\n")

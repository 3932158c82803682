"""Sets up machines and a split: `python -m hetero.init`; asks, or takes flags for everything.

It writes conf/hardware/NAME.yaml and conf/shard_plan/NAME.yaml, after the checks that train.py makes.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetero import setup_files, setup_questions
from hetero.errors import ConfigError, HeteroError
from hetero.machines import remembered
from hetero.setup_files import SetUp
from hetero.setup_questions import Ask, chosen

if TYPE_CHECKING:
    from hetero.resolve import ResolvedRun
    from hetero.spec import WorkerEntry

_EPILOG = """examples:
  python -m hetero.init
  python -m hetero.init mine --worker pc=192.168.1.20 --model smollm2_135m --split even
  python -m hetero.init mine --worker pc=pc.local:9999,memory_gb=12 --coordinator mac.local,memory_gb=16 \\
      --model qwen14b_4bit --split memory
  python -m hetero.init mine --known --model ./my-model --quantization nf4 --split 10,20
Whatever is not given is asked for where a terminal answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    arguments = _parser().parse_args(argv)
    ask = _ask if sys.stdin.isatty() else None
    try:
        return _set_up(arguments, ask)
    except HeteroError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    except (KeyboardInterrupt, EOFError):
        sys.stderr.write("nothing was written\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hetero.init",
        description="Write down which machines train, and which layers of the model each one has.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of both files: hardware=NAME shard_plan=NAME")
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="ID=HOST[:PORT][,device=D][,memory_gb=N]",
        help="a machine that runs worker.py; once for each, in the order of the pipeline",
    )
    parser.add_argument("--known", action="store_true", help="all workers that trained with this machine before")
    parser.add_argument(
        "--coordinator", metavar="HOST[,device=D][,memory_gb=N]", help="this machine (by default its own host name)"
    )
    parser.add_argument("--model", help="a file of conf/model by name, a folder, or a hub id")
    parser.add_argument("--quantization", choices=["none", "nf4"], help="by default what the model's file says")
    parser.add_argument("--split", help="even, memory (filled alike), or the layers to cut before, as in 10,20")
    parser.add_argument("--conf", type=Path, help="folder to write to (by default the conf folder of this checkout)")
    parser.add_argument("--force", action="store_true", help="replace files of that name")
    return parser


def _ask(question: str) -> str:
    return input(question).strip()


def _set_up(arguments: argparse.Namespace, ask: Ask | None) -> int:
    from hetero.config import CONF_DIR

    conf: Path = arguments.conf or CONF_DIR
    name = setup_files.check_name(chosen("NAME", arguments.name, ask, "name of the set-up", "mine"), "NAME")
    setup_files.check_free(conf, CONF_DIR, name, force=arguments.force)
    workers = setup_questions.chosen_workers(arguments.worker, arguments.known, remembered(), ask)
    coordinator = setup_questions.coordinator_of(arguments.coordinator or socket.gethostname())
    names = sorted(file.stem for file in (CONF_DIR / "model").glob("*.yaml"))
    model = chosen("--model", arguments.model, ask, f"model: one of {', '.join(names)}, a folder, or a hub id")
    split = chosen("--split", arguments.split, ask, "split: even, memory, or layers to cut before as in 10,20", "even")
    setup = _with_model(SetUp(name, coordinator, workers, None, None, arguments.quantization, []), model, names)
    setup, resolved = _with_split(setup, split, ask)
    _show(setup, resolved)
    if ask is not None and ask(f"write this to {conf}? [Y/n] ").lower() not in ("", "y", "yes"):
        sys.stdout.write("nothing was written\n")
        return 1
    for file in setup_files.write(conf, setup):
        sys.stdout.write(f"wrote {file}\n")
    _say_what_next(setup, None if conf.resolve() == CONF_DIR.resolve() else conf)
    return 0


def _with_model(setup: SetUp, model: str, names: Sequence[str]) -> SetUp:
    """The set-up with its model: a file of conf/model, else a folder or a hub id."""
    if model in names:
        return replace(setup, model=model)
    if Path(model).expanduser().is_dir():
        return replace(setup, model_path=str(Path(model).expanduser().resolve()))
    if "/" not in model or model.startswith((".", "~", "/")):
        raise ConfigError(
            f"--model must be one of {', '.join(names)}, a folder with a model, or a hub id ORG/NAME, got {model!r}"
        )
    return replace(setup, model_path=model)


def _with_split(setup: SetUp, split: str, ask: Ask | None) -> tuple[SetUp, ResolvedRun]:
    """The set-up with its stages, and the run that it is; through the checks that train.py makes."""
    from hetero import store
    from hetero.config import SHAPES_DIR, composed
    from hetero.facts import read_facts
    from hetero.setup_split import cut_points

    chosen_model = [f"model={setup.model}"] if setup.model else []
    raw = composed(chosen_model)["model"]
    path = setup.model_path or raw["path"]
    facts = read_facts(store.find_config(path, revision=raw["revision"], shapes_dir=SHAPES_DIR)[0])
    if split == "memory":
        setup = _with_memory(setup, ask)
    memory_gb = [setup.coordinator.memory_gb, *(worker.memory_gb for worker in setup.workers)]
    points = cut_points(split, facts, [known or 0.0 for known in memory_gb])
    setup = replace(
        setup,
        nf4=(setup.quantization or raw["quantization"]) == "nf4",
        edges=[0, *points, facts.num_hidden_layers],
    )
    return setup, _checked(setup)


def _with_memory(setup: SetUp, ask: Ask | None) -> SetUp:
    """All machines with their memory: as given, as this machine has it, as its worker says, or as somebody answers."""
    import msgspec

    from hetero.answering import who_answers
    from hetero.probes import describe_device
    from hetero.secret import secret_of_this_machine
    from hetero.transport.identity import identity_of
    from hetero.transport.tcp import TcpTransport

    transport = TcpTransport(identity=identity_of(secret_of_this_machine()[0]))
    coordinator = setup.coordinator
    if coordinator.memory_gb is None:
        coordinator = msgspec.structs.replace(
            coordinator, memory_gb=_gigabytes(describe_device(coordinator.device)[2], "--coordinator")
        )
    found: list[WorkerEntry] = []
    for worker in setup.workers:
        if worker.memory_gb is None:
            answer = who_answers(transport, worker.host, worker.port)
            if answer.probe is not None:
                num_bytes = answer.probe.about.memory_bytes
                answer.probe.close()
            else:
                question = f"memory of {worker.id} in GB ({answer.who.value})"
                text = chosen(f"memory_gb of --worker {worker.id}", None, ask, question)
                num_bytes = _typed_bytes(text, worker.id)
            worker = msgspec.structs.replace(worker, memory_gb=_gigabytes(num_bytes, f"--worker {worker.id}"))
        found.append(worker)
    return replace(setup, coordinator=coordinator, workers=found)


def _typed_bytes(text: str, name: str) -> int:
    try:
        return int(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise ConfigError(f"memory_gb of --worker {name} must be a number, got {text!r}") from None


def _gigabytes(num_bytes: int, key: str) -> float:
    if num_bytes <= 0:
        raise ConfigError(f"{key} must have a device that the machine has; give device= or memory_gb=")
    return round(num_bytes / 1e9, 1)


def _checked(setup: SetUp) -> ResolvedRun:
    """The run of the two files, composed and checked as train.py does it."""
    from hetero.config import SHAPES_DIR, composed
    from hetero.resolve import check_hosts, resolve

    trial = replace(setup, name="hetero-init-trial")
    with tempfile.TemporaryDirectory(prefix="hetero-init-") as folder:
        setup_files.write(Path(folder), trial)
        raw = composed([f"hardware={trial.name}", f"shard_plan={trial.name}"], [Path(folder)])
    resolved = resolve(raw, shapes_dir=SHAPES_DIR, for_drawing=True)
    check_hosts(resolved.config)
    try:
        resolve(raw, shapes_dir=SHAPES_DIR)
    except ConfigError as exc:  # what is missing on this machine can come later; the files are right
        sys.stdout.write(f"note: this machine cannot train it yet: {exc}\n")
    return resolved


def _show(setup: SetUp, resolved: ResolvedRun) -> None:
    """The plan: who has what, and what memory it will take."""
    import rich
    from rich.table import Table

    from hetero.config import SHAPES_DIR
    from hetero.errors import show_address
    from hetero.memory import memory_of, show_bytes

    console, memory = rich.get_console(), memory_of(resolved, SHAPES_DIR)
    table = Table(title=f"{setup.name}: {resolved.config.model.path}", title_justify="left")
    for column in ("stage", "machine", "address", "device", "layers", "needs", "has"):
        table.add_column(column)
    places = [("local", setup.coordinator.host, setup.coordinator.device)]
    places += [(worker.id, show_address(worker.host, worker.port), worker.device) for worker in setup.workers]
    for index, ((name, where, device), stage) in enumerate(zip(places, resolved.stages, strict=True)):
        layers = f"{stage.start}-{stage.end - 1} ({stage.end - stage.start})"
        figures = memory.stages[index]
        has = "?" if figures.available is None else show_bytes(figures.available)
        table.add_row(str(index), name, where.replace("[", r"\["), device, layers, show_bytes(figures.total), has)
    console.print(table)
    for machine, lack in memory.lacking().items():
        console.print(f"{machine} lacks {show_bytes(lack)}; dry_run=true says what would help", markup=False)


def _say_what_next(setup: SetUp, conf: Path | None) -> None:
    further = "" if conf is None else f" --config-dir {conf}"
    chosen_files = f"hardware={setup.name} shard_plan={setup.name}"
    lines = ["", "next:"]
    for worker in setup.workers:
        port = "" if worker.port == 9999 else f" worker.port={worker.port}"
        lines.append(f"  on {worker.id}:   python worker.py{port}")
    lines += [
        f"  here:   python -m hetero.doctor{further} {chosen_files}",
        f"          python train.py{further} {chosen_files} dry_run=true",
        f"          python train.py{further} {chosen_files}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

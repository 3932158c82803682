"""Rules of the source that a reader could break without noticing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [ROOT / name for name in ("train.py", "worker.py", "visualize.py") if (ROOT / name).exists()]
SOURCES = sorted((ROOT / "hetero").rglob("*.py")) + SCRIPTS
# Where a deadline could be measured by a clock that jumps.
TIMED = [
    path for path in SOURCES if {"transport", "wire"} & set(path.parts) or path.stem in ("inbox", "control", "session")
]

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "shelve", "jsonpickle", "joblib"}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen", "numpy.load"}
FORBIDDEN_KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}
FORBIDDEN_ATTRIBUTES = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "scatter_object_list"}


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, local name, full name) of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}"


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`np.load` as `numpy.load`; empty where it is no plain name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (before := dotted(node.value, names)):
        return f"{before}.{node.attr}".removeprefix("builtins.")
    return ""


def unsafe(source: str) -> list[str]:
    """What in a source could run foreign bytes as code."""
    tree = ast.parse(source)
    found, names = [], {}
    for line, local, full in imports(tree):
        top = full.partition(".")[0]
        names[local] = full if local != top else top
        if top in FORBIDDEN_MODULES or full in FORBIDDEN_CALLS or full.partition("builtins.")[2] in FORBIDDEN_NAMES:
            found.append(f"line {line}: import of {full}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and dotted(node, names) in FORBIDDEN_CALLS | FORBIDDEN_NAMES:
            found.append(f"line {node.lineno}: {dotted(node, names)}")
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
            found.append(f"line {node.lineno}: {node.attr}")
        if isinstance(node, ast.Call):
            found += [
                f"line {node.lineno}: {keyword.arg}"
                for keyword in node.keywords
                if keyword.arg in FORBIDDEN_KEYWORDS
                and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
            ]
        if isinstance(node, ast.Constant) and node.value in FORBIDDEN_MODULES | {"trust_remote_code"}:
            found.append(f"line {node.lineno}: the name {node.value!r}")
    return found


def wall_clock(source: str) -> list[str]:
    """Where a source asks for the time of day."""
    tree = ast.parse(source)
    names = {local: full for _, local, full in imports(tree)}
    clocks = {"time.time", "time.time_ns", "datetime.datetime.now", "datetime.datetime.utcnow"}
    return [
        f"line {node.lineno}: {dotted(node, names)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and dotted(node, names) in clocks
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_can_run_foreign_bytes_as_code(path: Path) -> None:
    assert unsafe(path.read_text()) == []


@pytest.mark.parametrize("path", TIMED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_deadline_is_measured_by_the_wall_clock(path: Path) -> None:
    assert wall_clock(path.read_text()) == []


def test_all_sources_are_looked_at() -> None:
    stems = {path.stem for path in SOURCES}
    assert {"frames", "link", "tcp", "inbox", "session", "store"} <= stems and len(SOURCES) > 20
    assert {"frames", "link", "tcp", "inbox", "control"} <= {path.stem for path in TIMED}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import marshal",
        "import dill",
        "import shelve",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "from torch import save as keep",
        "import torch\nload = torch.load",
        "eval('1')",
        "exec('1')",
        "run = eval",
        "from builtins import eval as run",
        "import builtins\nbuiltins.eval('1')",
        "import yaml\nyaml.load(text)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "model = make(path, trust_remote_code=True)",
        "model = make(path, trust_remote_code=flag)",
        "arguments = {'trust_remote_code': True}",
        "import numpy as np\nnp.load('x')",
        "import importlib\nimportlib.import_module('pickle')",
        "socket.recv_pyobj()",
    ],
)
def test_each_unsafe_way_would_be_found(source: str) -> None:
    assert unsafe(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import json\njson.load(file)",
        "make(path, trust_remote_code=False)",
        "import re\nre.compile('x')",
        "import yaml\nyaml.safe_load(text)",
        "state.load(x)",
        "from safetensors.torch import save_file, load_file",
        "'trust_remote_code is not used'",
    ],
)
def test_safe_ways_are_left_alone(source: str) -> None:
    assert unsafe(source) == []


def test_wall_clocks_would_be_found_and_steady_ones_are_left_alone() -> None:
    assert wall_clock("import time\ntime.time()") and wall_clock("from time import time\ntime()")
    assert wall_clock("from datetime import datetime\ndatetime.now()")
    assert wall_clock("import time\ntime.monotonic(), time.perf_counter()") == []

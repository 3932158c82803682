"""What an installation needs, and what it does not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from choosing import mostly_by_hand
from processes import END_S, REPO, environment, hardware, losses, metrics, run, run_here, train_here, worker

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = ("bitsandbytes", "wandb", "tensorboard", "resvg_py", "PIL", "graphviz", "gguf")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked wheel, made from a copy of the sources without network where that can be."""
    pytest.importorskip("setuptools")
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    source.mkdir()
    for name in ("hetero", "conf"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "worker.py", "visualize.py", "pyproject.toml", "README.md", "LICENSE"):
        if (REPO / name).exists():
            shutil.copy(REPO / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(root)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    (wheel,) = root.glob("hetero-*.whl")
    target = root / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def python(*args: str, site: Path, cwd: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with the installed package alone."""
    env = environment() | {"PYTHONPATH": str(site), "HOME": str(home)}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=cwd, env=env, timeout=120)


@pytest.mark.slow
def test_installed_package_finds_its_own_configuration_and_writes_to_the_users_home(
    installed: Path, tmp_path: Path
) -> None:
    """Case H05."""
    home = tmp_path / "home"
    home.mkdir()
    printed = python("-m", "train", "--cfg", "job", "--resolve", site=installed, cwd=tmp_path, home=home)
    assert printed.returncode == 0, printed.stderr
    assert f"outputs: {home / 'hetero' / 'outputs'}\n" in printed.stdout and "path: tiny\n" in printed.stdout
    drawn = python("-m", "visualize", "shard_plan=llama8b_3stage", site=installed, cwd=tmp_path, home=home)
    assert drawn.returncode == 0, drawn.stderr
    assert str(home / "hetero" / "outputs" / "diagrams") in drawn.stdout  # the shapes are in the wheel as well
    mistake = python("-m", "worker", "worker.prot=1", site=installed, cwd=tmp_path, home=home)
    assert mistake.returncode == 2 and "worker.prot is not a key" in mistake.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


@pytest.mark.slow
def test_wheel_holds_every_module_and_configuration_file_and_no_test(installed: Path) -> None:
    here = {path.relative_to(REPO / "conf") for path in (REPO / "conf").rglob("*") if path.is_file()}
    there = {path.relative_to(installed / "hetero" / "conf") for path in (installed / "hetero" / "conf").rglob("*")}
    assert here <= there
    modules = {path.relative_to(REPO) for path in (REPO / "hetero").rglob("*.py")}
    assert modules <= {path.relative_to(installed) for path in installed.rglob("*.py")}
    assert (installed / "hetero" / "py.typed").is_file() and not (installed / "tests").exists()
    scripts = next(installed.glob("*.dist-info")) / "entry_points.txt"
    assert "hetero-train = train:main" in scripts.read_text(encoding="utf-8")


@pytest.fixture(params=["broken", "absent"])
def hidden(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """An environment whose optional packages fail when they are imported, or are not there at all."""
    folder = tmp_path / str(request.param)
    folder.mkdir()
    if request.param == "broken":
        for name in OPTIONAL:
            (folder / f"{name}.py").write_text("raise ImportError('hidden by a test')\n", encoding="utf-8")
    else:
        text = f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL}))\n"
        (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("hidden", mostly_by_hand(["broken", "absent"], ["broken"]), indirect=True)
def test_plain_lora_needs_no_optional_package(tmp_path: Path, hidden: dict[str, str], rows_file: Path) -> None:
    """Case I01; where they are broken with a launched worker, which inherits the environment."""
    plan = "even" if "broken" in hidden["PYTHONPATH"] else "single"
    args = ["data=jsonl", f"data.path={rows_file}", "loop.steps=2"]
    where = [f"outputs={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"]
    outcome = run("train", *args, *where, f"shard_plan={plan}", env=hidden)
    assert outcome.code == 0, outcome.text
    expected = train_here(tmp_path / "here", *args, "shard_plan=single")
    assert losses(metrics(tmp_path / "run")) == pytest.approx(losses(expected), abs=1e-5)


def test_4_bit_without_bitsandbytes_names_device_stage_and_package(tmp_path: Path, hidden: dict[str, str]) -> None:
    """Case P07: before anything is loaded."""
    outcome = run("train", "model.quantization=nf4", f"outputs={tmp_path}", env=hidden)
    assert outcome.code == 2
    line = outcome.one_line()
    for part in ("quantization=nf4", "stage 0 (local, device auto)", "pip install bitsandbytes"):
        assert part in line


@pytest.mark.slow
def test_worker_without_bitsandbytes_refuses_4_bits_before_it_loads(tmp_path: Path, hidden: dict[str, str]) -> None:
    """Case P07 where only the other machine lacks the package: the coordinator says which one that is."""
    with worker(tmp_path / "worker", env=hidden) as one:
        plan = "[{id: local, start: 0, end: 3}, {id: w1, start: 3, end: 6, quantization: nf4}]"
        args = [f"shard_plan.stages={plan}", "shard_plan.num_stages=null", *hardware(one)]
        outcome = run_here("train", f"outputs={tmp_path / 'out'}", *args)
        assert outcome.code != 0 and "Traceback" not in outcome.text
        (line,) = [line for line in outcome.text.splitlines() if "quantization=nf4" in line]
        for part in ("stage 1", str(one.port), "(w1), device cpu", "pip install bitsandbytes"):
            assert part in line
        assert "layers [3, 6)" not in one.running.text
        one.wait_idle()


def test_optional_packages_are_extras_and_no_requirement() -> None:
    required = {re.split(r"[=<>!~ \[]", line)[0] for line in PROJECT["dependencies"]}
    assert not required & set(OPTIONAL)
    extras = {re.split(r"[=<>!~ \[]", line)[0] for lines in PROJECT["optional-dependencies"].values() for line in lines}
    names = {"resvg_py": "resvg-py", "PIL": "pillow"}  # where a module is called otherwise than its package
    assert {names.get(module, module) for module in OPTIONAL} <= extras


def test_requirements_file_has_the_versions_that_the_package_asks_for() -> None:
    lines = (REPO / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("#")[0].strip() for line in lines} - {""}
    assert set(PROJECT["dependencies"]) <= pinned
    assert all("==" in line for line in pinned)


def test_python_that_hydra_does_not_start_on_is_refused_by_pip_and_by_the_scripts(tmp_path: Path) -> None:
    """Case I02."""
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    code = (
        "import sys, runpy\n"
        "sys.version_info = type('V', (tuple,), {'major': 3, 'minor': 14})((3, 14, 0, 'final', 0))\n"
        f"sys.path.insert(0, {str(REPO)!r})\n"
        f"runpy.run_path({str(REPO / 'train.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=tmp_path, timeout=END_S * 4
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.fullmatch(r"hetero needs Python 3\.11, 3\.12 or 3\.13: .*3\.14\n", done.stderr)

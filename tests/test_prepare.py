"""What is refused before local workers are started or data is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import Tiny
from processes import run_here, train_here

from hetero.tiny import tiny_config

FROM = "adapter.init_from="


@pytest.fixture(scope="module")
def adapters(tiny: Tiny, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs whose adapters are those of small models, new."""
    root = tmp_path_factory.mktemp("adapters")
    rows = ["data=jsonl", f"data.path={rows_file}", "shard_plan=single", "loop.steps=0"]
    train_here(root / "tiny", *rows)
    train_here(root / "llama", *rows, f"model.path={tiny('llama')}")
    train_here(root / "gpt2", *rows, f"model.path={tiny('gpt2')}", "adapter.target_modules=[c_attn,c_proj,c_fc]")
    return root


@pytest.fixture
def broken(tiny: Tiny, tmp_path: Path) -> Path:
    """A model of which one file came only in part."""
    folder = Path(shutil.copytree(tiny("llama_tied"), tmp_path / "broken"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return folder


def refusal(tmp_path: Path, *args: str) -> str:
    """The one line of a start with a local worker, which never was; a data set would have a line of its own."""
    outcome = run_here("train", f"outputs={tmp_path / 'out'}", *args)
    assert outcome.code == 2, outcome.text
    assert not list(tmp_path.rglob("worker-*"))
    return outcome.one_line()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([FROM + "{tiny}", "adapter.r=4"], "adapter.init_from must fit adapter.r=4, but base_model."),
        ([FROM + "{tiny}", "adapter.alpha=3"], "adapter.alpha must be as in adapter.init_from, got 3.0, there 16.0"),
        (
            [FROM + "{tiny}", "adapter.target_modules=[q_proj]"],
            "adapter.target_modules must be as in adapter.init_from",
        ),
        ([FROM + "{llama}"], "adapter.init_from must be of a model with hidden size 128, but base_model.model."),
        ([FROM + "{gpt2}"], "must be as in adapter.init_from, got down_proj, gate_proj, k_proj, o_proj, q_proj"),
        (["adapter.layers_to_transform=[2,6]"], "adapter.layers_to_transform must be below 6 layers, got 6"),
    ],
)
def test_adapter_that_cannot_fit_is_refused(tmp_path: Path, adapters: Path, overrides: list[str], message: str) -> None:
    names = {name: adapters / name / "adapter" for name in ("tiny", "llama", "gpt2")}
    assert message in refusal(tmp_path, *(override.format(**names) for override in overrides))


def test_adapter_of_a_model_with_more_layers_is_refused(tmp_path: Path, adapters: Path) -> None:
    """The tiny model with its last layers cut off; only its configuration is looked at before that."""
    short = tmp_path / "short"
    shutil.copytree(Path(json.loads((adapters / "llama" / "run.json").read_text())["config"]["model"]["path"]), short)
    (short / "config.json").write_text(json.dumps(tiny_config() | {"num_hidden_layers": 2}))
    text = refusal(tmp_path, f"model.path={short}", f"{FROM}{adapters / 'tiny' / 'adapter'}")
    assert "adapter.init_from must be of a model with 2 layers, got one with base_model.model.model.layers.2" in text


def test_adapter_that_fits_starts_a_run(tmp_path: Path, adapters: Path, tiny: Tiny, rows_file: Path) -> None:
    rows = ["data=jsonl", f"data.path={rows_file}", "shard_plan=single", "loop.steps=0"]
    for name, model in (("tiny", []), ("llama", [f"model.path={tiny('llama')}"])):
        train_here(tmp_path / name, *rows, *model, f"{FROM}{adapters / name / 'adapter'}")


def test_model_whose_file_was_cut_off_is_refused(tmp_path: Path, broken: Path) -> None:
    assert "holds a damaged model.safetensors (its tensors end" in refusal(tmp_path, f"model.path={broken}")

"""A stage downloads its own weight files only, from a hub on this machine, into a cache of its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import LAYERS, Tiny
from hub_server import COMMIT, Hub, hub_of
from processes import hardware, losses, metrics, run, train_here, worker

from hetero import download
from hetero.errors import ConfigError
from hetero.families import FAMILIES
from hetero.fingerprint import fingerprint
from hetero.models import load_stage
from hetero.shards import INDEX, holds, own_weight_files
from hetero.store import find_weights

MODEL = "some-org/some-model"
CUTS = (0, 2, 4, LAYERS)


@pytest.fixture
def hub(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, which this process uses, too."""
    from huggingface_hub import constants

    folder = shutil.copytree(tiny("llama"), tmp_path / "on-the-hub")
    with hub_of({MODEL: folder}) as lent:
        monkeypatch.setattr(constants, "ENDPOINT", lent.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", lent.url + template[1] + template[2])
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 250)  # of 10 MB, what a broken connection loses
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        yield lent


@dataclass
class Built:
    """What a machine has after it built its stage."""

    folder: Path
    weights: dict[str, torch.Tensor]


def stage(start: int, end: int, moved: Callable[[], object] = lambda: None) -> Built:
    """What a machine does for its stage, up to the built stage."""
    folder = find_weights(MODEL, layers=(start, end), cache=Path("nowhere"))
    download.complete(folder, MODEL, start, end, moved=moved)
    model = load_stage(folder, start, end, dtype=torch.float32, device=torch.device("cpu"))
    return Built(folder, dict(model.named_parameters()))


def refusal(start: int, end: int) -> str:
    with pytest.raises(ConfigError) as refused:
        stage(start, end)
    assert "\n" not in str(refused.value)
    return str(refused.value)


class Ended(Exception):
    """The run is over."""


def end_after(count: int) -> Callable[[], None]:
    """Ends a download when that much has arrived."""
    left = [count]

    def moved() -> None:
        left[0] -= 1
        if not left[0]:
            raise Ended

    return moved


def own_files(folder: Path, start: int, end: int) -> set[str]:
    """By the index, without the code that is tested."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    parts = [f"layers.{layer}." for layer in range(start, end)]
    parts += ["embed_tokens."] * (start == 0) + ["model.norm.", "lm_head."] * (end == LAYERS)
    return {file for key, file in weight_map.items() if any(part in key for part in parts)}


@pytest.mark.parametrize("index", range(3))
def test_stage_downloads_its_own_files_once(hub: Hub, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """M13: every byte of them, no byte of others; the next start finds them without the hub."""
    from huggingface_hub import constants

    start, end = CUTS[index], CUTS[index + 1]
    source = hub.models[MODEL]
    own = own_files(source, start, end)
    assert own == set(own_weight_files(source, start, end)) < {file.name for file in source.glob("*.safetensors")}
    first = stage(start, end)
    assert hub.weights_served() == own
    assert {name: hub.bytes_of(name) for name in own} == {name: (source / name).stat().st_size for name in own}
    expected = load_stage(source, start, end, dtype=torch.float32, device=torch.device("cpu"))
    assert all(torch.equal(value, first.weights[key]) for key, value in expected.named_parameters())
    assert first.folder.name == COMMIT and not list(first.folder.parents[1].rglob("*.incomplete"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert stage(start, end).folder == first.folder
    assert set(hub.asked.values()) == {1}


def test_cache_is_the_users_own_of_the_hub(hub: Hub) -> None:
    """What other programs downloaded is not downloaded again, and another stage adds its files to it."""
    from huggingface_hub import hf_hub_download

    stage(0, 2)
    for name in own_files(hub.models[MODEL], 2, 4):
        hf_hub_download(MODEL, name)
    stage(0, 4)
    assert hub.weights_served() == own_files(hub.models[MODEL], 0, 4)
    stage(0, LAYERS)
    assert hub.weights_served() == own_files(hub.models[MODEL], 0, LAYERS)
    assert set(hub.asked.values()) == {1}


def test_digests_of_a_part_are_those_of_the_whole(hub: Hub) -> None:
    """So that a machine that downloaded its part is compared with one that has all; no layer counts in part."""
    whole, part = fingerprint(hub.models[MODEL]), fingerprint(stage(2, 4).folder)
    assert {"layers.2", "layers.3"} <= part.keys() < whole.keys()
    assert all(whole[key] == digest for key, digest in part.items())
    file = own_files(hub.models[MODEL], 3, 4) - own_files(hub.models[MODEL], 2, 3)
    (hub.models[MODEL] / min(file)).unlink()
    assert whole.keys() - fingerprint(hub.models[MODEL]).keys() == {"layers.3"}


def test_broken_connection_goes_on_where_it_broke(hub: Hub) -> None:
    (name, *_) = sorted(own_files(hub.models[MODEL], 2, 4))
    size = (hub.models[MODEL] / name).stat().st_size
    hub.break_after = [1000]
    stage(2, 4)
    assert {first: count for (file, first), count in hub.served.items() if file == name} == {0: 1000, 1000: size - 1000}


def test_download_that_was_ended_goes_on_at_the_next_start(hub: Hub) -> None:
    """huggingface_hub itself would begin the file again."""
    (name, *_) = sorted(own_files(hub.models[MODEL], 2, 4))
    size = (hub.models[MODEL] / name).stat().st_size
    hub.break_after = [1000]
    with pytest.raises(Ended):
        stage(2, 4, end_after(4))
    assert {key: count for key, count in hub.served.items() if key[0] == name and key[1] == 0} == {(name, 0): 1000}
    hub.served.clear()
    stage(2, 4)
    assert {key: count for key, count in hub.served.items() if key[0] == name} == {(name, 750): size - 750}


def test_pieces_that_do_not_make_the_file_are_deleted_and_named(hub: Hub, tmp_path: Path) -> None:
    (name, *_) = sorted(own_files(hub.models[MODEL], 2, 4))
    hub.break_after = [1000]
    with pytest.raises(Ended):
        stage(2, 4, end_after(4))
    (partial,) = (tmp_path / "home").rglob("*.hetero.incomplete")
    partial.write_bytes(b"\0" * 1000)
    line = refusal(2, 4)
    assert name in line and "SHA-256" in line and "start the run again" in line and not partial.exists()
    stage(2, 4)


def test_file_that_the_hub_lacks_is_named_where_a_stage_needs_it(hub: Hub) -> None:
    (name, *_) = sorted(own_files(hub.models[MODEL], 2, 4))
    (hub.models[MODEL] / name).unlink()
    line = refusal(2, 4)
    assert name in line and MODEL in line and COMMIT in line
    assert not hub.weights_served()
    stage(4, 6)


def test_gated_model_is_refused_with_the_remedy_and_the_machine(hub: Hub) -> None:
    hub.gated = {MODEL}
    line = refusal(2, 4)
    assert f"model.path '{MODEL}' is gated" in line and f"`hf auth login` on {os.uname().nodename}" in line


def test_machines_of_a_run_take_one_commit_whatever_else_they_have(hub: Hub, tmp_path: Path) -> None:
    """A copy of another origin is taken only where the hub cannot be asked; both are compared at the join then."""
    other = tmp_path / "cache" / "models" / "some-org--some-model"
    shutil.copytree(hub.models[MODEL], other)
    places = {"cache": tmp_path / "cache", "layers": (2, 4), "local_paths": False}
    assert find_weights(MODEL, **places) == other  # type: ignore[arg-type]
    assert find_weights(MODEL, commit=COMMIT, **places).name == COMMIT  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "home")
    hub.gated = {MODEL}
    assert find_weights(MODEL, commit=COMMIT, **places) == other  # type: ignore[arg-type]


def test_disk_that_is_full_is_said_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
    with pytest.raises(ConfigError, match=r"must have 8\.00 GB free .* got 0\.00 GB; make room"):
        download._check_room(tmp_path, 8_000_000_000)


def test_keys_of_4_bit_statistics_belong_to_their_weight() -> None:
    family = FAMILIES["llama"]
    for extra in ("", ".absmax", ".quant_state.bitsandbytes__nf4"):
        key = f"model.layers.3.mlp.up_proj.weight{extra}"
        assert [holds(key, family, a, b, num_layers=6, tied=False) for a, b in ((0, 2), (2, 4), (4, 6))] == [
            False,
            True,
            False,
        ]


@pytest.mark.slow
def test_run_whose_machines_have_nothing_downloads_each_part_where_it_belongs(
    hub: Hub, tmp_path: Path, rows_file: Path
) -> None:
    """A coordinator and a worker with caches of their own; the losses are those of the folder itself."""
    source = hub.models[MODEL]
    args = ["data=jsonl", f"data.path={rows_file}", "loop.steps=2", "adapter.modules_to_save=null", "seed=3"]
    plan = ["shard_plan=split", "shard_plan.split_points=[2]"]
    expected = train_here(tmp_path / "here", f"model.path={source}", *args, "shard_plan=single", "checkpoint=none")
    with worker(tmp_path / "worker", env=hub.environment(tmp_path / "home-of-worker")) as one:
        where = [f"outputs={tmp_path / 'out'}", f"hydra.run.dir={tmp_path / 'out' / 'run'}"]
        outcome = run(
            "train",
            f"model.path={MODEL}",
            *args,
            *plan,
            *hardware(one),
            *where,
            env=hub.environment(tmp_path / "home"),
        )
        assert outcome.code == 0, outcome.text
    assert losses(metrics(tmp_path / "out" / "run")) == pytest.approx(losses(expected), abs=1e-5)
    for home, start, end in (("home", 0, 2), ("home-of-worker", 2, LAYERS)):
        there = {file.name for file in (tmp_path / home).glob("hub/*/snapshots/*/*.safetensors")}
        assert there == own_files(source, start, end)
    spec = json.loads((tmp_path / "out" / "run" / "run.json").read_text())["spec"]
    assert spec["commit"] == COMMIT and spec["model"]["revision"] is None

"""A run that was interrupted and goes on equals the one that was not, to the last bit, on any split."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import metrics, train_here
from resuming import COMMON, SINGLE, STOPS, Whole, assert_same_run, make_whole, state_of
from threads import hardware_of, worker_threads

SGD = ["optimizer=sgd", "optimizer.momentum=0.9"]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """Four workers in threads."""
    with worker_threads(4, tmp_path_factory.mktemp("workers")) as found:
        yield found


def split(ports: list[int], *cuts: int) -> list[str]:
    """A stage for each cut on top of the first, on workers in threads."""
    if not cuts:
        return [SINGLE]
    points = ",".join(map(str, cuts))
    return [*hardware_of(ports[: len(cuts)]), "shard_plan=split", f"shard_plan.split_points=[{points}]"]


@pytest.fixture(scope="module")
def base(rows_file: Path) -> list[str]:
    return [*COMMON, f"data.path={rows_file}"]


@pytest.fixture(scope="module")
def adamw(tmp_path_factory: pytest.TempPathFactory, base: list[str], ports: list[int]) -> Whole:
    return make_whole(tmp_path_factory.mktemp("adamw"), base, split(ports, 2, 4))


@pytest.fixture(scope="module")
def sgd(tmp_path_factory: pytest.TempPathFactory, base: list[str], ports: list[int]) -> Whole:
    return make_whole(tmp_path_factory.mktemp("sgd"), [*base, *SGD], split(ports, 2, 4))


def test_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, adamw: Whole, ports: list[int]) -> None:
    """Case C01: shuffling, accumulation, dropout, warm-up and cosine, from the middle of an epoch, on 3 stages."""
    train_here(tmp_path / "run", *adamw.args, *split(ports, 2, 4), f"checkpoint.resume={adamw.stopped}")
    assert_same_run(tmp_path / "run", adamw)


def test_checkpoint_holds_what_trains_in_full_with_its_moments(adamw: Whole) -> None:
    """Case C11: the tiny model's embedding and head train too; the runs here would differ without them."""
    for step in (4, 10):
        found = state_of(adamw.stopped if step == 4 else adamw.run, step)
        for kind in ("adapter:", "optimizer.exp_avg:", "optimizer.exp_avg_sq:"):
            names = [name for name in found if name.startswith(kind)]
            assert any("embed_tokens" in name for name in names) and any("lm_head" in name for name in names)
            assert all(found[name].isfinite().all() for name in names)
        assert {int(value) for name, value in found.items() if name.startswith("optimizer.step:")} == {step}


@pytest.mark.parametrize("cuts", [(5,), (1,), (1, 2, 3, 4), ()], ids=["5/1", "1/5", "1/1/1/1/2", "single"])
def test_run_goes_on_over_another_split(cuts: tuple[int, ...], tmp_path: Path, adamw: Whole, ports: list[int]) -> None:
    """Case C06; promise G18."""
    train_here(tmp_path / "run", *adamw.args, *split(ports, *cuts), f"checkpoint.resume={adamw.stopped}")
    assert_same_run(tmp_path / "run", adamw)


def test_run_goes_on_with_another_policy_and_recomputation(tmp_path: Path, adamw: Whole, ports: list[int]) -> None:
    other = ["schedule=gpipe", "loop.recompute=layer", *split(ports, 3)]
    train_here(tmp_path / "run", *adamw.args, *other, f"checkpoint.resume={adamw.stopped}")
    assert_same_run(tmp_path / "run", adamw)


def test_momentum_follows_its_parameters(tmp_path: Path, sgd: Whole, ports: list[int]) -> None:
    assert any(name.startswith("optimizer.momentum_buffer:") for name in state_of(sgd.stopped, 4))
    train_here(tmp_path / "run", *sgd.args, *split(ports, 1), f"checkpoint.resume={sgd.stopped}")
    assert_same_run(tmp_path / "run", sgd)


def test_run_that_was_resumed_can_be_resumed(tmp_path: Path, adamw: Whole) -> None:
    """Step 4 is taken in the first run and again in the second; no line of the log is there twice."""
    shutil.copytree(adamw.stopped, tmp_path / "first")
    shutil.rmtree(tmp_path / "first" / "checkpoints" / "step-00000004")
    args = [*adamw.args, SINGLE]
    train_here(tmp_path / "second", *args, *STOPS, f"checkpoint.resume={tmp_path / 'first'}")
    assert [record["step"] for record in metrics(tmp_path / "second")] == [1, 2, 3, 4]
    train_here(tmp_path / "run", *args, f"checkpoint.resume={tmp_path / 'second'}")
    assert_same_run(tmp_path / "run", adamw)

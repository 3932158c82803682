"""Checkpoints: what was saved comes back to the last bit, damage is never loaded, the last ones are kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import ABOUT, GPT2_KEY, KEY, contents, same, snapshot, store_of

from hetero.checkpoint import CheckpointStore, Snapshot
from hetero.errors import CheckpointError, ConfigError

# What was saved comes back.


def test_snapshot_comes_back_to_the_last_bit_from_a_file_for_each_layer(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")  # the real disk
    folder = store.save(snapshot(12))
    assert folder == tmp_path / "run" / "checkpoints" / "step-00000012"
    layers = [f"layer-{layer:05d}.safetensors" for layer in (0, 3, 11)]
    assert sorted(os.listdir(folder)) == [*layers, "manifest.json", "other.safetensors"]
    assert set(safetensors.torch.load_file(folder / layers[1])) == {
        name for name in snapshot(12).tensors if name.endswith(KEY.format(3))
    }
    assert same(store.load(12), snapshot(12))
    found, skipped = CheckpointStore(tmp_path / "run" / "checkpoints").newest()
    assert same(found, snapshot(12)) and skipped == []


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {f"adapter:{GPT2_KEY.format(5)}": torch.ones(3)},
        {"optimizer.step:a": torch.tensor(3.0)},
        {"adapter:a": torch.zeros(0, 3), "adapter:b": torch.zeros(0)},
        {"adapter:a": torch.tensor([float("nan"), float("inf"), -0.0])},
        {"adapter:a": torch.arange(12.0).view(3, 4).t(), "adapter:b": torch.arange(12.0)[::2]},
        dict.fromkeys(("adapter:a", "adapter:b"), torch.ones(2)),
        {"adapter:a": torch.ones(2, requires_grad=True)},
        {f"adapter:{index}": torch.ones(2, dtype=kind) for index, kind in enumerate((torch.float16, torch.int64))},
    ],
    ids=["nothing", "gpt2", "scalar", "empty", "not finite", "views", "shared", "grad", "dtypes"],
)
def test_every_kind_of_tensor_comes_back(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    folder = store_of(tmp_path, Snapshot(1, tensors, {})).save(Snapshot(1, tensors, {}))
    found = store_of(tmp_path).load(1).tensors
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert found[name].numpy().tobytes() == value.detach().numpy().tobytes() and not found[name].requires_grad
    if any(".h.5." in name for name in tensors):
        assert sorted(os.listdir(folder)) == ["layer-00005.safetensors", "manifest.json"]


def test_same_snapshot_gives_the_same_bytes_however_it_was_gathered(tmp_path: Path) -> None:
    one = snapshot(3)
    other = Snapshot(3, dict(reversed(one.tensors.items())), dict(reversed(one.about.items())))
    first, second = store_of(tmp_path / "a").save(one), store_of(tmp_path / "b").save(other)
    assert contents(first) == contents(second)


def test_a_checkpoint_is_safetensors_and_json_alone(tmp_path: Path) -> None:
    store_of(tmp_path, snapshot(1), snapshot(2), snapshot(3))
    for path in (tmp_path / "checkpoints").rglob("*"):
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, "pt") as opened:
                assert len(list(opened.keys())) == 4
        elif path.is_file():
            assert isinstance(json.loads(path.read_text(encoding="ascii")), dict) and path.name == "manifest.json"


def test_manifest_says_what_is_where_and_its_digests_are_those_of_the_files(tmp_path: Path) -> None:
    folder = store_of(tmp_path).save(snapshot(12))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest.keys() == {"format", "step", "files", "tensors", "about", "sha256"}
    assert (manifest["format"], manifest["step"], manifest["about"]) == (1, 12, ABOUT | {"tokens": 12000})
    for name, part in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert part == {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert set(safetensors.torch.load(data)) == {key for key, file in manifest["tensors"].items() if file == name}


@pytest.mark.parametrize("about", [{"a": torch.ones(1)}, {"a": float("nan")}, {"a": {1, 2}}], ids=["a", "b", "c"])
def test_what_is_not_json_leaves_nothing_behind(about: dict[str, Any], tmp_path: Path) -> None:
    store = store_of(tmp_path, snapshot(1))
    before = contents(tmp_path)
    with pytest.raises((TypeError, ValueError)):
        store.save(Snapshot(2, {}, about))
    assert contents(tmp_path) == before


def test_each_file_and_folder_is_synced_before_the_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = set(), os.fsync

    def noting_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting_fsync)  # the real one is called
    folder = CheckpointStore(tmp_path / "checkpoints").save(snapshot(1))
    for path in (tmp_path, folder.parent, folder, *folder.iterdir()):
        assert path.stat().st_ino in synced, path


# How many stay, and what happens to a step that is there already.


def test_last_ones_are_kept_by_step_number(tmp_path: Path) -> None:
    store = store_of(tmp_path, *(snapshot(step) for step in (1, 2, 9, 10)), keep_last=3)
    assert store.steps() == [10, 9, 2]
    store = store_of(tmp_path)
    store.save(snapshot(5))  # went back: the newest by number, and the one just written
    assert store.steps() == [10, 5]
    assert same(store.newest()[0], snapshot(10))
    with pytest.raises(ConfigError, match="keep_last must be at least 2, got 1"):
        CheckpointStore(tmp_path, keep_last=1)


def test_one_step_may_stay_beyond_the_last_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store")
    for step in range(1, 6):
        store.kept_step = 2 if step < 5 else 4
        store.save(snapshot(step))
        assert store.steps() == {3: [3, 2], 4: [4, 3, 2], 5: [5, 4]}.get(step, store.steps())


def test_damaged_step_does_not_count_among_the_kept(tmp_path: Path) -> None:
    store_of(tmp_path, snapshot(1), snapshot(8), snapshot(10))
    damaged = tmp_path / "checkpoints" / "step-00000010" / "other.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    (tmp_path / "checkpoints" / "step-00000011").mkdir()
    store = store_of(tmp_path)
    found, skipped = store.newest()
    assert same(found, snapshot(8)) and len(skipped) == 2
    store.save(snapshot(9))
    assert same(store.load(8), snapshot(8)) and same(store.newest()[0], snapshot(9))
    store.save(snapshot(10))
    assert store.steps() == [10, 9] and same(store.newest()[0], snapshot(10))
    store_of(tmp_path, snapshot(11), snapshot(12))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000011", "step-00000012"]


def test_recomputed_step_stays_as_it_is_where_it_is_the_same(tmp_path: Path) -> None:
    store = store_of(tmp_path, snapshot(1), snapshot(2))
    folder = tmp_path / "checkpoints" / "step-00000002"
    before = {path: path.stat().st_ino for path in (folder, *folder.iterdir())}
    assert store_of(tmp_path).save(snapshot(2)) == folder
    assert {path: path.stat().st_ino for path in (folder, *folder.iterdir())} == before
    assert store.steps() == [2, 1]


@pytest.mark.parametrize("damage", [False, True])
def test_recomputed_step_is_replaced_where_it_is_not_the_same(damage: bool, tmp_path: Path) -> None:
    store = store_of(tmp_path, snapshot(1), snapshot(2, seed=99))
    if damage:
        store.save(snapshot(2))
        (tmp_path / "checkpoints" / "step-00000002" / "other.safetensors").write_bytes(b"")
    store.save(snapshot(2))
    assert same(store.newest()[0], snapshot(2)) and same(store.load(1), snapshot(1))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001", "step-00000002"]


# Damage is never loaded.


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1 << int(at * 7)
    path.write_bytes(data)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"flip at {at}/14": partial(flip, at=at / 14) for at in range(15)},
    "cut by a byte": rewrite(lambda data: data[:-1]),
    "cut in half": rewrite(lambda data: data[: len(data) // 2]),
    "a byte more": rewrite(lambda data: data + b"\n"),
    "zero tail": rewrite(lambda data: data[:-5] + bytes(5)),
    "zeros": rewrite(lambda data: bytes(len(data))),
    "empty": rewrite(lambda data: b""),
    "removed": Path.unlink,
    "a folder": as_folder,
    "a pipe": as_pipe,
}
FILES = ["layer-00000", "layer-00003", "layer-00011", "other", "manifest"]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    store_of(folder, snapshot(1), snapshot(2))
    return folder / "checkpoints"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_step_is_skipped_by_name_and_the_one_before_taken(
    name: str, damage: str, two_steps: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_steps, tmp_path / "checkpoints")
    (file,) = (tmp_path / "checkpoints" / "step-00000002").glob(f"{name}.*")
    DAMAGES[damage](file)
    store = store_of(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        store.load(2)
    shown = file.parent if (name, damage) == ("manifest", "removed") else file
    assert str(caught.value).startswith(f"{shown}: ") and str(caught.value).isprintable()
    found, skipped = store.newest()
    assert same(found, snapshot(1)) and skipped == [str(caught.value)]
    store.save(snapshot(2))
    assert same(store.newest()[0], snapshot(2)) and store.steps() == [2, 1]


def test_unfinished_and_empty_folders_are_skipped_and_said(tmp_path: Path) -> None:
    store = store_of(tmp_path, snapshot(1), snapshot(2))
    folder = tmp_path / "checkpoints"
    for name in ("step-00000001.tmp", "step-00000002.tmp", "step-00000003", "step-00000004.tmp", "elsewhere"):
        (folder / name).mkdir()
    (folder / "step-00000005").touch()
    (folder / "step-6").mkdir()  # no name of a step
    found, skipped = store.newest()
    assert same(found, snapshot(2)) and store.steps() == [2, 1]
    assert [line.split(": ")[0] for line in skipped] == [
        str(folder / name) for name in ("step-00000005", "step-00000004.tmp", "step-00000003")
    ]
    store.clean()
    assert sorted(os.listdir(folder)) == [
        *("elsewhere", "step-00000001", "step-00000002", "step-00000003", "step-00000005", "step-6")
    ]
    shutil.rmtree(folder / "step-00000001")
    shutil.rmtree(folder / "step-00000002")
    found, skipped = store.newest()
    assert found is None and len(skipped) == 2  # none in silence
    store.save(snapshot(5))
    assert same(store.newest()[0], snapshot(5))


def test_empty_or_missing_folder_holds_nothing(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    for _ in range(2):
        assert store.newest() == (None, []) and store.steps() == []
        store.clean()
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="must hold a checkpoint of step 7, there is no step-00000007"):
        store.load(7)


@pytest.mark.parametrize("name", ["adapter_model.bin", "optimizer.pt", "rng.pkl", "rng.pth", "last.ckpt", "a.pickle"])
def test_pickled_file_is_refused_by_name_and_never_opened(name: str, tmp_path: Path) -> None:
    folder = store_of(tmp_path).save(snapshot(1))
    os.mkfifo(folder / name)  # opening it would not return
    with pytest.raises(CheckpointError, match=f"{name}: is pickled"):
        store_of(tmp_path).load(1)


def test_file_that_the_manifest_does_not_name_is_refused(tmp_path: Path) -> None:
    folder = store_of(tmp_path).save(snapshot(1))
    shutil.copy(folder / "other.safetensors", folder / "layer-00099.safetensors")
    with pytest.raises(CheckpointError, match=r"layer-00099\.safetensors: is not in manifest.json"):
        store_of(tmp_path).load(1)


def test_symbolic_links_are_refused_and_never_followed_by_a_deletion(tmp_path: Path) -> None:
    store = store_of(tmp_path, snapshot(1), snapshot(2), snapshot(3), keep_last=3)
    folder = tmp_path / "checkpoints"
    outside = tmp_path / "outside"
    (folder / "step-00000003").rename(outside)
    (folder / "step-00000003").symlink_to(outside)
    (tmp_path / "other").write_bytes((folder / "step-00000002" / "other.safetensors").read_bytes())
    (folder / "step-00000002" / "other.safetensors").unlink()
    (folder / "step-00000002" / "other.safetensors").symlink_to(tmp_path / "other")
    (folder / "step-00000004.tmp").symlink_to(outside)
    before = contents(outside)
    store = store_of(tmp_path)
    found, skipped = store.newest()
    assert same(found, snapshot(1)) and store.steps() == [2, 1] and len(skipped) == 3
    assert all("symbolic link" in line for line in skipped[1:])
    store.clean()
    for step in range(2, 7):
        store.save(snapshot(step))
    assert contents(outside) == before and (tmp_path / "other").exists()
    assert sorted(os.listdir(folder)) == ["step-00000005", "step-00000006"]


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest with a change in it and a digest that fits."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    change(manifest)

    def encoded(plain: dict[str, Any]) -> bytes:
        return (json.dumps(plain, indent=1, sort_keys=True) + "\n").encode()

    sealed = encoded(manifest | {"sha256": hashlib.sha256(encoded(manifest)).hexdigest()})
    (folder / "manifest.json").write_bytes(sealed)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: m.update(format=2), "must be of format 1, got 2"),
        (lambda m: m.update(step=2), "must be of step 1, got 2"),
        (lambda m: m.update(more=2), "unknown field `more`"),
        (lambda m: m.pop("about"), "missing required field `about`"),
        (lambda m: m.update(about=[]), "`\\$.about`"),
        (lambda m: m["files"].update({"../outside": m["files"]["other.safetensors"]}), "names the file '../outside'"),
        (lambda m: m["files"].update({"/etc/passwd": m["files"]["other.safetensors"]}), "names the file '/etc/passwd'"),
        (lambda m: m["files"].update({"model.bin": m["files"]["other.safetensors"]}), "names the file 'model.bin'"),
        (lambda m: m["tensors"].update(a="../outside"), "names the file '../outside'"),
        (lambda m: m["tensors"].update(a="layer-00001.safetensors"), "says of no file 'layer-00001.safetensors'"),
        (lambda m: m["tensors"].update(a="other.safetensors"), "other.safetensors: must hold the tensor 'a'"),
        (lambda m: m["tensors"].pop("adapter:" + KEY.format(3)), "layer-00003.safetensors: must not hold the tensor"),
        (lambda m: m["files"]["other.safetensors"].update(num_bytes=1), "must have 1 bytes, got"),
        (lambda m: m["files"]["other.safetensors"].update(num_bytes=1 << 40), "must have 1099511627776 bytes, got"),
        (lambda m: m["files"]["other.safetensors"].update(num_bytes=-1), "must have -1 bytes, got"),
    ],
)
def test_manifest_that_fits_its_digest_is_still_checked(
    change: Callable[[dict[str, Any]], None], fault: str, tmp_path: Path
) -> None:
    folder = store_of(tmp_path).save(snapshot(1))
    forge(folder, lambda manifest: None)
    assert same(store_of(tmp_path).load(1), snapshot(1))
    forge(folder, change)
    with pytest.raises(CheckpointError, match=fault):
        store_of(tmp_path).load(1)


@pytest.mark.parametrize(
    "raw", [b"[]", b"1", b"null", b"{", b"[" * 100_000, b'{"a":NaN}', b"\xff\xfe", b'{"a":1,"a":1}'], ids=range(8)
)
def test_manifest_that_is_no_manifest_is_refused(raw: bytes, tmp_path: Path) -> None:
    folder = store_of(tmp_path).save(snapshot(1))
    (folder / "manifest.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged: "):
        store_of(tmp_path).load(1)


def test_file_with_a_fitting_digest_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    folder = store_of(tmp_path).save(snapshot(1))
    (folder / "other.safetensors").write_bytes(b"\xff" * 100)
    part = {"num_bytes": 100, "sha256": hashlib.sha256(b"\xff" * 100).hexdigest()}
    forge(folder, lambda manifest: manifest["files"].update({"other.safetensors": part}))
    with pytest.raises(CheckpointError, match=r"other.safetensors: is not a safetensors file"):
        store_of(tmp_path).load(1)

from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.registry import ALLOWED, build, check

TARGETS = [(group, target) for group, targets in ALLOWED.items() for target in targets]


@pytest.mark.parametrize(("group", "target"), TARGETS)
def test_every_allowed_target_exists(group: str, target: str) -> None:
    check(group, target)
    built = build(group, target)
    assert f"{built.__module__}.{built.__qualname__}" == target


@pytest.mark.parametrize(("group", "target"), TARGETS)
def test_target_of_one_group_is_refused_in_another(group: str, target: str) -> None:
    for other in ALLOWED.keys() - {group}:
        with pytest.raises(ConfigError, match=f"{other}._target_ must be one of "):
            build(other, target)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "subprocess.Popen",
        "hetero.optim",
        "hetero.optim.torch.load",
        "hetero.optim.adamw ",
        "Hetero.optim.adamw",
        ".hetero.optim.adamw",
        "",
        "adamw",
    ],
)
def test_anything_else_is_refused_and_not_even_imported(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build("optimizer", target)
    assert str(caught.value) == (
        "optimizer._target_ must be one of hetero.optim.adamw, hetero.optim.sgd (or be listed in allow_targets, on "
        f"every machine that builds it), got {target!r}"
    )


def test_module_of_a_refused_target_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "sly_module.py").write_text(f"open({str(marker)!r}, 'w').close()\nthing = dict\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError):
        build("optimizer", "sly_module.thing", ["sly_module.other"])
    assert not marker.exists()
    assert build("optimizer", "sly_module.thing", ["sly_module.thing"]) is dict
    assert marker.exists()


def test_own_target_is_built_where_it_is_listed() -> None:
    assert build("optimizer", "collections.OrderedDict", ["collections.OrderedDict"])() == {}


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("no_such_module.thing", "must be importable, got 'no_such_module.thing' (No module named"),
        ("math.no_such_thing", "must be importable, got 'math.no_such_thing' ("),
        ("nodots", "must be importable, got 'nodots' ("),
        ("math.pi", "must be a class or a function, got 'math.pi'"),
    ],
)
def test_listed_target_that_cannot_be_built_is_said(target: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build("logger", target, [target])
    assert str(caught.value).startswith(f"logger._target_ {why}")

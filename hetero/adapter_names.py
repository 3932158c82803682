"""Whether every name that an adapter's options give is there in the whole model, and what there is instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hetero.errors import ConfigError
from hetero.families import Family
from hetero.spec import AdapterSpec

_MOST_SHOWN = 12


def check_saved(spec: AdapterSpec, whole: nn.Module) -> None:
    """Refuses names of modules to train in full that cannot be.

    Args:
        spec: the adapter.
        whole: the model.

    Raises:
        ConfigError: lists the names and those that there are.
    """
    asked = spec.modules_to_save if isinstance(spec.modules_to_save, list) else []
    modules = {name: module for name, module in whole.named_modules() if name}
    can = [name for name, module in modules.items() if _can_be_saved(module)]
    wrong = [name for name in asked if not _matched(name, can) or any(_ends(n, name) for n in modules if n not in can)]
    there = sorted({name.rpartition(".")[2] for name in can if not name.rpartition(".")[2].isdecimal()})
    _refuse("modules_to_save", wrong, "name modules of the model that have weights", there)


def _can_be_saved(module: nn.Module) -> bool:
    """Whether it has weights of its own and is not about all layers."""
    several = any(isinstance(part, nn.ModuleList) for part in module.modules())
    return not several and any(True for _ in module.parameters())


def _ends(name: str, asked: str) -> bool:
    return name == asked or name.endswith(f".{asked}")


def refuse_unmatched(spec: AdapterSpec, config: Any, adapter: Any, names: Sequence[str], family: Family) -> None:
    """Refuses names that match nothing in any stage; PEFT only does where nothing at all matches.

    Args:
        spec: the adapter as asked for.
        config: PEFT's configuration of it, before it met the model.
        adapter: a `ResolvedAdapter`: what was matched.
        names: of all modules of the whole model.
        family: of the model.

    Raises:
        ConfigError: lists the names without a match and those that there are.
    """
    if isinstance(config.target_modules, list | set):
        unmatched = [name for name in sorted(config.target_modules) if not _matched(name, adapter.targets)]
        _refuse("target_modules", unmatched, "each match a module of the model", (*family.linear_modules, "lm_head"))
    _refuse(
        "target_parameters",
        [name for name in spec.target_parameters or [] if not _matched(name, adapter.parameters)],
        "each match a parameter that is no part of a target module",
        (),
    )
    _check_excluded(spec, names, family)
    for key in ("rank_pattern", "alpha_pattern"):
        # Parameters have the adapter's own rank: PEFT would take theirs from here and warn that it did not.
        unmatched = [name for name in getattr(spec, key) or {} if not matched_by_pattern(name, adapter.targets)]
        there = sorted({name.rpartition(".")[2] for name in adapter.targets})
        _refuse(key, unmatched, "each match a target module", there)


def matched_by_pattern(pattern: str, names: Iterable[str]) -> bool:
    """Whether a key of PEFT's rank_pattern or alpha_pattern is about one of these modules."""
    expression = re.compile(rf"(.*\.)?({pattern})$")
    return any(expression.match(name) for name in names)


def _check_excluded(spec: AdapterSpec, names: Sequence[str], family: Family) -> None:
    asked = spec.exclude_modules
    if isinstance(asked, str):
        unmatched = [] if any(re.fullmatch(asked, name) for name in names) else [asked]
    else:
        unmatched = [name for name in asked or [] if not _matched(name, names)]
    _refuse("exclude_modules", unmatched, "each match a module of the model", family.linear_modules)


def _matched(asked: str, names: Iterable[str]) -> bool:
    return any(_ends(name, asked) for name in names)


def _refuse(key: str, unmatched: Sequence[str], rule: str, there: Sequence[str]) -> None:
    if not unmatched:
        return
    shown = f" ({', '.join(there[:_MOST_SHOWN])}{', ...' if len(there) > _MOST_SHOWN else ''})" if there else ""
    raise ConfigError(f"adapter.{key} must {rule}{shown}, got {', '.join(map(repr, unmatched))} without a match")

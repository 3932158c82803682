"""Target modules that PEFT takes for parameters of experts.

The experts' linear modules of Mixtral, DeepSeek-V3 and some Qwen models became parameters of one module in
transformers 5. PEFT turns the names of these modules, `all-linear` and regular expressions into `target_parameters`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from hetero.errors import ConfigError

ALL = "all-linear"
# What the experts' parameters were as modules.
_FORMER = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def reaches_parameters(config: Any, whole: Any) -> bool:
    """Whether PEFT takes target modules for parameters, beside those that are named as such.

    Args:
        config: PEFT's configuration.
        whole: the model.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = copy.deepcopy(config)
    convert_peft_config_for_transformers(converted, whole, None)
    return bool({*(converted.target_parameters or ())} - {*(config.target_parameters or ())})


def judge(expression: str, targets: Sequence[str], parameters: Sequence[str], linear: Sequence[str]) -> list[str]:
    """Compares what is adapted with what was asked for; gives notes on linear modules that PEFT leaves out.

    Args:
        expression: `all-linear` or a regular expression.
        targets: names of the modules that are adapted.
        parameters: names of the parameters that are adapted.
        linear: names of all linear modules of the model.

    Raises:
        ConfigError: more is adapted than the expression matches, since PEFT keeps its last names alone and forgets,
            say, the layers that it gives.
    """
    wanted = linear if expression == ALL else [name for name in linear if re.fullmatch(expression, name)]
    if expression != ALL:
        _refuse_beyond(expression, targets, parameters)
    left = [name for name in wanted if name not in targets and not name.endswith("lm_head")]
    if not left:
        return []
    return [
        f"adapter.target_modules={expression}: PEFT takes the names of linear modules beside the experts for the "
        f"experts', so {left[0]} ({len(left)} such modules in all) is not adapted"
    ]


def _refuse_beyond(expression: str, targets: Sequence[str], parameters: Sequence[str]) -> None:
    asked = re.compile(expression)
    names: dict[str, list[str]] = {name: [name] for name in targets}
    for name in parameters:
        holder = name.rpartition(".")[0]
        names[name] = [name, holder, *(f"{holder}.{former}" for former in _FORMER)]
    beyond = [name for name, ways in names.items() if not any(asked.fullmatch(way) for way in ways)]
    if beyond:
        raise ConfigError(
            "adapter.target_modules must not be an expression about some layers or places where it names experts, got "
            f"{expression!r}: PEFT keeps its last names alone and would adapt {beyond[0]} too; name modules in a list "
            "and the experts' parameters in adapter.target_parameters"
        )

"""What a `config.json` says about a mixture of experts: read without torch and without transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetero.errors import ConfigError
from hetero.spec import RouterAuxLoss, RouterLossSpec


@dataclass(frozen=True)
class Experts:
    """The experts of a model.

    Attributes:
        num_experts: that a router chooses from.
        num_router_layers: layers that have a router; the others are dense.
        coefficient: of the router's balancing loss, `router_aux_loss_coef`.
        wants_loss: the file asks for that loss, `output_router_logits`.
    """

    num_experts: int
    num_router_layers: int
    coefficient: float
    wants_loss: bool


# The keys for the number of experts, in the order in which transformers 5.24 lets them win, and its default; compared
# with the installed classes by a test.
_NUM_EXPERTS: dict[str, tuple[tuple[str, ...], int]] = {
    "gpt_oss": (("num_local_experts", "num_experts"), 128),
    "mixtral": (("num_local_experts", "num_experts"), 8),
    "qwen2_moe": (("num_experts",), 60),
    "qwen3_moe": (("num_local_experts", "num_experts"), 128),
    "qwen3_next": (("num_experts",), 512),
}
_WITH_DENSE_LAYERS = (
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)  # the others' layers all have experts, whatever the file says
_COEFFICIENT = 0.001


def read_experts(config: dict[str, Any]) -> Experts | None:
    """The experts of a model, as transformers 5.24 would build them; None where it has no router loss for them.

    Args:
        config: the parsed file, of which `facts.read_facts` has been taken.

    Raises:
        ConfigError: a value is none that it could have.
    """
    model_type = config["model_type"]
    if model_type not in _NUM_EXPERTS:
        return None
    keys, default = _NUM_EXPERTS[model_type]
    num_experts = next((_count(config, key) for key in keys if config.get(key) is not None), default)
    layers = _router_layers(config) if model_type in _WITH_DENSE_LAYERS else config["num_hidden_layers"]
    if not (num_experts and layers):
        return None
    coefficient, wants_loss = config.get("router_aux_loss_coef", _COEFFICIENT), config.get("output_router_logits")
    if type(coefficient) not in (int, float) or not 0 <= coefficient < float("inf"):
        raise ConfigError(
            f"model.path: 'router_aux_loss_coef' in config.json must be a number of at least 0, got {coefficient!r}"
        )
    if wants_loss not in (None, True, False):
        raise ConfigError(
            f"model.path: 'output_router_logits' in config.json must be true or false, got {wants_loss!r}"
        )
    return Experts(num_experts, layers, float(coefficient), bool(wants_loss))


def router_loss_of(wanted: RouterAuxLoss, experts: Experts | None) -> RouterLossSpec | None:
    """What `model.router_aux_loss` means for a model; None: the router loss is off.

    Raises:
        ConfigError: it asks for the router loss of a model that has no router.
    """
    if experts is None:
        if wanted not in ("auto", "off", False):
            raise ConfigError(
                "model.router_aux_loss must be auto or off for a model that transformers has no router loss for, got "
                f"{_shown(wanted)}"
            )
        return None
    coefficient = experts.coefficient if isinstance(wanted, str | bool) else wanted
    if (wanted == "auto" and not experts.wants_loss) or wanted in ("off", False) or coefficient == 0:
        return None
    return RouterLossSpec(num_experts=experts.num_experts, coefficient=coefficient)


def router_loss_line(wanted: RouterAuxLoss, experts: Experts, found: RouterLossSpec | None) -> str:
    """One line for the log: whether the router loss is on, and what would change that."""
    if found is not None:
        return (
            f"router loss: on, coefficient {found.coefficient:g}, over {experts.num_router_layers} layers of "
            f"{experts.num_experts} experts (model.router_aux_loss={_shown(wanted)})"
        )
    if wanted == "auto" and not experts.wants_loss:
        return (
            "router loss: off, since config.json does not ask for it (output_router_logits); "
            f"model.router_aux_loss=on adds it with coefficient {experts.coefficient:g}"
        )
    zero = "" if _shown(wanted) == "off" else ", since its coefficient is 0"
    return f"router loss: off{zero} (model.router_aux_loss={_shown(wanted)})"


def _shown(wanted: RouterAuxLoss) -> str:
    return {True: "on", False: "off"}[wanted] if isinstance(wanted, bool) else f"{wanted}"


def _router_layers(config: dict[str, Any]) -> int:
    """Qwen's rule: each `decoder_sparse_step`-th layer, counted from 1, except those of `mlp_only_layers`."""
    step = 1 if config.get("decoder_sparse_step") is None else _count(config, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if not step or not isinstance(dense, list):
        raise ConfigError(
            "model.path: 'decoder_sparse_step' in config.json must be at least 1 and 'mlp_only_layers' a list, got "
            f"{step} and {dense!r}"
        )
    return sum((index + 1) % step == 0 and index not in dense for index in range(config["num_hidden_layers"]))


def _count(config: dict[str, Any], key: str) -> int:
    value = config[key]
    if type(value) is not int or value < 0:
        raise ConfigError(f"model.path: {key!r} in config.json must be a whole number, got {value!r}")
    return value

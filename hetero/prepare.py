"""What a run needs before any worker hears of it: weights found, data read, the adapter checked against the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero import adapters, data, eval_rows, hub, models, store
from hetero import device as devices
from hetero.adapter_files import check_adapter, read_adapter
from hetero.errors import ConfigError
from hetero.experts import router_loss_line
from hetero.folders import one_line
from hetero.machines import unknown_hosts
from hetero.memory import RunMemory, memory_at_rest
from hetero.prompts import Prompt, read_prompts
from hetero.quantization import check_nf4
from hetero.resolve import ResolvedRun
from hetero.spec import WorkerEntry
from hetero.transport.addresses import bare_host

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What is known before any worker is contacted; `memory` for pictures alone, None where it cannot be known."""

    model_path: Path
    data_set: data.DataSet
    evaluated: tuple[data.Example, ...]
    pad_id: int
    adapter: adapters.ResolvedAdapter
    initial: dict[str, torch.Tensor]
    prompts: list[Prompt] = field(default_factory=list)
    tokenizer: Any | None = None
    memory: RunMemory | None = None


def prepare(resolved: ResolvedRun) -> Prepared:
    """Reads data, checks the adapter against the model, and finds the weights."""
    config = resolved.config
    model_path = store.find_weights(config.model.path, revision=config.model.revision, layers=_layers(resolved))
    tokenizer = _tokenizer(model_path, config.model.path)
    prompts = read_prompts(resolved, tokenizer, model_path)
    data_set, evaluated = _rows(resolved, tokenizer)
    spec = resolved.spec(total_steps=1)
    base_name = str(resolved.model_folder) if resolved.local_model else config.model.path
    whole = models.meta_model(model_path)
    adapter = adapters.resolve(whole, spec.adapter, base_name)
    log.info("adapter: %s", _adapter_line(resolved, adapter))
    if resolved.experts is not None:
        log.info(router_loss_line(config.model.router_aux_loss, resolved.experts, spec.router_loss))
    for note in adapter.notes:
        log.warning("%s", note)
    initial = read_adapter(Path(config.adapter.init_from).expanduser(), adapter) if config.adapter.init_from else {}
    pad_id = getattr(tokenizer, "pad_token_id", None)
    if pad_id is None or pad_id >= resolved.facts.vocab_size:  # any token will do, if it has an embedding
        pad_id = 0
    memory = _memory_at_rest(resolved, whole)
    return Prepared(model_path, data_set, evaluated, pad_id, adapter, initial, prompts, tokenizer, memory)


def _adapter_line(resolved: ResolvedRun, adapter: adapters.ResolvedAdapter) -> str:
    config = resolved.config
    if config.task == "train":
        return f"{adapter.num_trained():,} trained parameters"
    if config.adapter.init_from is None:
        return "none, the base model alone (adapter.init_from=RUN/adapter)"
    return f"{adapter.num_trained():,} parameters of {config.adapter.init_from}"


def _rows(resolved: ResolvedRun, tokenizer: Any | None) -> tuple[data.DataSet, tuple[data.Example, ...]]:
    """The rows to train on and those to evaluate on; for generation none."""
    if resolved.config.task == "generate":
        return data.DataSet((), "none"), ()
    limits = {"vocab_size": resolved.facts.vocab_size, "max_length": resolved.max_length}
    return eval_rows.load_all(resolved.config, tokenizer, **limits)


def _memory_at_rest(resolved: ResolvedRun, whole: Any) -> RunMemory | None:
    """The figures of the run's picture, which are no reason for the run to fail."""
    try:
        return memory_at_rest(resolved, whole)
    except Exception as exc:
        log.warning("the run's architecture is drawn without memory: %s: %s", type(exc).__name__, one_line(exc))
        return None


def check_quickly(resolved: ResolvedRun) -> None:
    """Checks on this machine what takes no time, before any process is started, any data read, or any worker asked.

    Raises:
        ConfigError: the device, the weights' files, the first adapter or a worker's host name cannot work.
    """
    config = resolved.config
    _check_device(resolved)
    if config.hardware.launch == "none":
        _check_hosts(config.hardware.workers)
    store.check_local_weights(config.model.path, revision=config.model.revision, layers=_layers(resolved))
    if config.adapter.init_from:
        folder = Path(config.adapter.init_from).expanduser()
        check_adapter(folder, config.adapter, resolved.facts, resolved.family)


def _check_device(resolved: ResolvedRun) -> None:
    plan, planned = resolved.stages[0], resolved.config.shard_plan.stages
    key = "shard_plan.stages[0]" if planned and planned[0].device else "hardware.coordinator"
    device = devices.resolve(plan.device or "auto", key=f"{key}.device")
    device.check_dtype(plan.dtype or resolved.config.model.dtype, key="model.dtype")
    if plan.quantization == "nf4":
        check_nf4(device.torch_device, where=f"stage 0 ({plan.id})")


def _check_hosts(workers: list[WorkerEntry]) -> None:
    unknown = unknown_hosts([bare_host(worker.host) for worker in workers])
    for index, worker in enumerate(workers):
        if bare_host(worker.host) in unknown:
            raise ConfigError(
                f"hardware.workers[{index}].host must be a name or an address that leads to the machine, got "
                f"{worker.host!r}, which cannot be resolved: is the machine on and in this network? Its address will do"
            )


def _layers(resolved: ResolvedRun) -> tuple[int, int]:
    """Of this machine's stage."""
    return resolved.stages[0].start, resolved.stages[0].end


def _tokenizer(model_path: Path, path: str) -> Any | None:
    """The model's tokenizer; None for a folder without one, which is enough for tokenised rows."""

    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    commit = hub.commit_of(model_path)
    if commit is not None and not (model_path / names[0]).exists():  # the hub may have what the cache lacks
        with hub.refusals_in_one_line(path, commit):
            has_one = hub.first_of(path, commit, names) is not None
            return _loaded(path, commit) if has_one else None
    if not any((model_path / name).exists() for name in names):
        return None
    return _loaded(model_path)


def _loaded(path: str | Path, revision: str | None = None) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except ValueError as exc:  # among them: one that comes with code of its own, which is never run
        raise ConfigError(f"the tokenizer of model.path cannot be loaded: {one_line(exc)}") from exc


def total_steps(resolved: ResolvedRun, num_examples: int) -> int:
    """Optimizer steps of the whole run; none where it only evaluates."""
    loop = resolved.config.loop
    if resolved.config.task != "train":
        return 0
    if loop.steps is not None:
        return loop.steps
    assert loop.epochs is not None
    return loop.epochs * data.steps_per_epoch(num_examples, loop.batch_size)

"""From the composed configuration to the run that it asks for: model facts, explicit plan, `RunSpec`.

Reads config.json files only: no torch, no transformers, no weights, no worker.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hetero import registry, store
from hetero.adapter_config import with_its_adapter
from hetero.adapter_rules import check_options
from hetero.checked import convert
from hetero.errors import ConfigError
from hetero.eval_rules import check_evaluation, for_task
from hetero.experts import Experts, read_experts, router_loss_of
from hetero.facts import ModelFacts, read_facts
from hetero.families import Family, check_attention, check_layers, check_target_names, family_of_config
from hetero.folders import local_name
from hetero.plan import resolve_plan
from hetero.quantization import check_stored
from hetero.schedule import policy_for
from hetero.spec import (
    OPTIMIZER_ARGS,
    AnyOptimizerArgs,
    CheckpointSpec,
    Config,
    GenerationLimits,
    ObjectSpec,
    RecoverySpec,
    RunSpec,
    ShardPlanSpec,
    StageSpec,
    WorkerEntry,
)
from hetero.tiny import TINY

DEFAULT_MAX_LENGTH = 1024

# What `optimizer.lr: auto` means: usual for LoRA on a pretrained base, and what the random tiny model learns well with.
ADAPTER_LR = 2e-4
RANDOM_MODEL_LR = 3e-3


@dataclass(frozen=True)
class ResolvedRun:
    """A checked configuration with what follows from it.

    Attributes:
        config: as composed.
        facts: of the model.
        family: of the model.
        stages: the explicit plan.
        workers: machines of stages 1.., with port 0 where they are yet to be launched.
        model_folder: the local folder that `model.path` leads to, if it is one.
        local_model: other machines look the model up by its folder's name.
        max_length: most tokens of a row.
        experts: of the model; None where it has none.
        commit: of the hub, where the coordinator has its weights from there.
        generation: its limits, once the prompts have been read.
    """

    config: Config
    facts: ModelFacts
    family: Family
    stages: list[StageSpec]
    workers: list[WorkerEntry]
    model_folder: Path | None
    local_model: bool
    max_length: int
    experts: Experts | None = None
    commit: str | None = None
    generation: GenerationLimits | None = None

    def spec(self, *, total_steps: int, workers: list[WorkerEntry] | None = None) -> RunSpec:
        """What every machine of the run agrees on.

        Args:
            total_steps: optimizer steps of the whole run.
            workers: with their real ports; as configured if None.
        """
        c = self.config
        modules = c.adapter.modules_to_save
        if modules == "auto":
            modules = [self.family.embedding, "lm_head"] if c.model.path == TINY else None
        path = local_name(self.model_folder) if self.local_model and self.model_folder else c.model.path
        return RunSpec(
            seed=c.seed,
            model=msgspec.structs.replace(c.model, path=path),
            local_model=self.local_model,
            num_hidden_layers=self.facts.num_hidden_layers,
            hidden_size=self.facts.hidden_size,
            vocab_size=self.facts.vocab_size,
            max_length=self.max_length,
            total_steps=total_steps,
            adapter=msgspec.structs.replace(c.adapter, modules_to_save=modules, init_from=None),
            stages=self.stages,
            workers=self.workers if workers is None else workers,
            boundary_dtypes=[
                stage.dtype if c.transport.wire_dtype == "auto" else c.transport.wire_dtype  # type: ignore[misc]
                for stage in self.stages[:-1]
            ],
            transport=c.transport,
            schedule=c.schedule,
            stage=_object("stage", c.stage),
            optimizer=_optimizer(c),
            lr_schedule=c.lr_schedule,
            loop=msgspec.structs.replace(c.loop, sample_prompts=[]),  # the coordinator's own
            stuck_s=c.recovery.stuck_s,
            router_loss=router_loss_of(c.model.router_aux_loss, self.experts),
            commit=self.commit,
            generation=self.generation,
        )

    def evenly_over(self, workers: list[WorkerEntry]) -> ResolvedRun:
        """The same run on other machines, each with as many layers as the others and in the numbers that it had."""
        config = msgspec.structs.replace(
            self.config,
            hardware=msgspec.structs.replace(self.config.hardware, workers=workers),
            shard_plan=ShardPlanSpec(num_stages=1 + len(workers)),
        )
        stages, _ = resolve_plan(config, self.facts.num_hidden_layers)
        before = {stage.id: stage for stage in self.stages[1:]}
        for index, stage in enumerate(stages):
            own = before.get(stage.id, stage) if index else self.stages[0]
            stages[index] = msgspec.structs.replace(
                stage, device=own.device, dtype=own.dtype, quantization=own.quantization
            )
        return dataclasses.replace(self, config=config, stages=stages, workers=workers)


def resolve(raw: dict[str, Any], *, shapes_dir: Path, for_drawing: bool = False) -> ResolvedRun:
    """Checks a composed configuration as a whole.

    Args:
        raw: plain data of the configuration files and the command line.
        shapes_dir: configurations of models whose weights are not here.
        for_drawing: only the plan and its figures are needed: sample host names and missing data are no fault.

    Raises:
        ConfigError: something cannot work.
    """
    config = with_its_adapter(_for_task(convert(raw, Config)))
    _check_objects(config)
    policy_for(config.schedule.name, 0, 1, 1, config.schedule.max_in_flight)
    raw_facts, folder = store.find_config(
        config.model.path,
        revision=config.model.revision,
        shapes_dir=shapes_dir,
    )
    family = family_of_config(raw_facts)
    facts = read_facts(raw_facts)
    experts = read_experts(raw_facts)
    stages, workers = resolve_plan(config, facts.num_hidden_layers)
    check_stored(raw_facts.get("quantization_config"), [stage.quantization for stage in stages])
    max_length = config.data.max_length or min(DEFAULT_MAX_LENGTH, facts.max_position_embeddings or DEFAULT_MAX_LENGTH)
    _check_sizes(config, facts, max_length)
    if not for_drawing:
        check_attention(config.model.attn_implementation, family)
        router_loss_of(config.model.router_aux_loss, experts)
        if isinstance(config.adapter.target_modules, list):
            check_target_names(config.adapter.target_modules, family)
        check_layers(config.adapter.layers_to_transform, facts.num_hidden_layers)
        check_options(
            config.adapter,
            family,
            tied=facts.tie_word_embeddings,
            quantizations=[stage.quantization or config.model.quantization for stage in stages],
        )
        _check_for_training(config)
        if config.data.packing and config.task != "generate":
            _check_packing(config, family, router_loss_of(config.model.router_aux_loss, experts) is not None)
        check_hosts(config)
    is_path = folder is not None and Path(config.model.path).expanduser().is_dir()
    return ResolvedRun(
        config=for_task(config),
        facts=facts,
        family=family,
        stages=stages,
        workers=workers,
        model_folder=folder,
        local_model=is_path and config.model.path != TINY,
        max_length=max_length,
        experts=experts,
    )


def _for_task(config: Config) -> Config:
    """Without what a task does not use: to generate needs no checkpoint, no metrics, and no second try.

    Raises:
        ConfigError: there is nothing to generate from, or a key means nothing for the task.
    """
    if config.task != "generate":
        if config.prompts:
            remedy = "task=generate, or loop.sample_prompts=[...]" if config.task == "train" else "task=generate"
            raise ConfigError(f"prompts must be empty with task={config.task}: {remedy}")
        return config
    if not config.prompts:
        raise ConfigError("prompts must hold at least one prompt for task=generate: 'prompts=[\"Hello\"]'")
    if config.checkpoint.resume is not None:
        raise ConfigError(
            "checkpoint.resume must be null for task=generate, which reads no checkpoint: adapter.init_from=RUN/adapter"
        )
    return msgspec.structs.replace(
        config, checkpoint=CheckpointSpec(), recovery=RecoverySpec(stuck_s=config.recovery.stuck_s), logger=None
    )


def _object(group: str, raw: dict[str, Any]) -> ObjectSpec:
    args = {key: value for key, value in raw.items() if key != "_target_"}
    if not isinstance(raw.get("_target_"), str):
        raise ConfigError(f"{group}._target_ must be given")
    return ObjectSpec(target=raw["_target_"], args=args)


def _optimizer(config: Config) -> ObjectSpec:
    """The optimizer with a number for `lr: auto`."""
    found = _object("optimizer", config.optimizer)
    if found.args.get("lr") != "auto":
        return found
    rate = RANDOM_MODEL_LR if config.model.path == TINY else ADAPTER_LR
    return ObjectSpec(found.target, found.args | {"lr": rate})


def _check_objects(config: Config) -> None:
    extra = config.allow_targets
    registry.check("transport", config.transport.target, extra)
    registry.check("loop", config.loop.target, extra)
    registry.check("stage", _object("stage", config.stage).target, extra)
    for name, logger in (config.logger or {}).items():
        registry.check("logger", _object(f"logger.{name}", logger).target, extra)
    optimizer = _optimizer(config)
    registry.check("optimizer", optimizer.target, extra)
    convert(optimizer.args, OPTIMIZER_ARGS.get(optimizer.target, AnyOptimizerArgs), root="optimizer")


def _check_sizes(config: Config, facts: ModelFacts, max_length: int) -> None:
    """What figures from the configuration alone rest on as well."""
    loop, data = config.loop, config.data
    limit = facts.max_position_embeddings
    if limit is not None and data.max_length is not None and data.max_length > limit:
        raise ConfigError(
            f"data.max_length must be at most {limit} (max_position_embeddings of the model), got {data.max_length}"
        )
    rows = max(loop.microbatch_size, loop.eval_rows)
    rows_key = "loop.microbatch_size" if rows == loop.microbatch_size else "loop.eval_batch_size"
    frames = rows * max_length * facts.hidden_size * 4
    if frames > config.transport.max_frame_bytes:
        raise ConfigError(
            f"transport.max_frame_bytes must hold a micro-batch ({frames} bytes: {rows_key} x "
            f"{max_length} tokens (data.max_length) x {facts.hidden_size} x 4), got {config.transport.max_frame_bytes}"
        )


def _check_for_training(config: Config) -> None:
    if config.task == "generate":
        return  # neither steps nor rows
    loop, data = config.loop, config.data
    if (loop.steps is None) == (loop.epochs is None):
        raise ConfigError(f"loop must give steps or epochs and null for the other, got {loop.steps} and {loop.epochs}")
    check_evaluation(config)
    reads_path = config.task == "train" or data.eval_path is None
    if data.source != "pydocs" and not data.path and reads_path:
        raise ConfigError(f"data.path must be given for data={data.source}: data.path=FILE")


def _check_packing(config: Config, family: Family, with_router_loss: bool) -> None:
    """Packed rows have no mask: documents have to be isolated by position, and padding would count as tokens."""
    if not family.isolates_documents:
        raise ConfigError(
            f"data.packing must be false for a {family.model_type} model, got true: in transformers its layers see "
            "across the documents of a row"
        )
    if with_router_loss and (config.loop.microbatch_size > 1 or config.data.bucket):
        raise ConfigError(
            "data.packing with the router loss needs loop.microbatch_size=1 and data.bucket=false, since padding of "
            f"packed rows would count in it, got {config.loop.microbatch_size} and {config.data.bucket}; or "
            "model.router_aux_loss=off"
        )


def check_hosts(config: Config) -> None:
    """Refuses the sample host names of the files in conf/hardware.

    Raises:
        ConfigError: one is left.
    """
    for index, worker in enumerate(config.hardware.workers):
        if worker.host.endswith(".example"):
            raise ConfigError(
                f"hardware.workers[{index}].host is the sample name {worker.host!r}: write your machine's name into "
                f"the file under conf/hardware, or pass hardware.workers=[{{id: {worker.id}, host: NAME, port: 9999}}]"
            )

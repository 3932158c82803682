"""What a configuration says of evaluation: on which rows, how often, and what does not go together."""

from __future__ import annotations

import msgspec

from hetero.errors import ConfigError
from hetero.spec import CheckpointSpec, Config, DataSpec, LoopSpec


def is_due(loop: LoopSpec, step: int, total_steps: int) -> bool:
    """Whether a run with rows to evaluate on does so after `step`: every so many, before the first, after the last.

    Args:
        loop: of the run.
        step: 0 is before the first.
        total_steps: of the whole run.
    """
    return step in (0, total_steps) or (loop.eval_every is not None and step % loop.eval_every == 0)


def evaluation_source(spec: DataSpec) -> DataSpec:
    """Where the rows for evaluation come from: `eval_path`, or another split of the same data set.

    `eval_path` is a JSONL file, and with data=hub whatever `path` may be.
    """
    path = spec.path if spec.eval_path is None else spec.eval_path
    is_jsonl = spec.source != "hub" or (spec.eval_path or "").endswith(".jsonl")
    return msgspec.structs.replace(
        spec,
        source="jsonl" if is_jsonl else "hub",
        path=path,
        name=spec.name if spec.eval_path is None else None,
        split=spec.eval_split or spec.split,
        packing=False,  # rows come sorted by length, so that there is little padding to save
    )


def check_evaluation(config: Config) -> None:
    """Checks the keys of an evaluation against one another, before anything is read.

    Raises:
        ConfigError: they do not go together.
    """
    data, loop = config.data, config.loop
    given = [key for key in ("eval_path", "eval_split", "eval_fraction") if getattr(data, key) is not None]
    if data.eval_fraction is not None and len(given) > 1:
        raise ConfigError(f"data.eval_fraction must be null with data.{given[0]}, got {data.eval_fraction}")
    if data.eval_split is not None and data.source != "hub":
        raise ConfigError(
            f"data.eval_split must be null for data={data.source}, which has no splits, got {data.eval_split!r}; "
            "use data.eval_path=FILE or data.eval_fraction=0.1"
        )
    if config.task == "evaluate":
        _check_evaluating(config)
    elif loop.eval_every is not None and not given:
        raise ConfigError(
            f"loop.eval_every={loop.eval_every} needs rows to evaluate on: data.eval_path=FILE, data.eval_fraction=0.1 "
            "or with data=hub data.eval_split=NAME"
        )
    if config.checkpoint.keep_best and config.task == "train":
        _check_keep_best(config)


def for_task(config: Config) -> Config:
    """The configuration as its task takes it: what only evaluates saves nothing, and without an adapter it is the base.

    A new adapter changes nothing of the base where its B is zero, which the other ways to begin do not promise.
    """
    if config.task != "evaluate":
        return config
    adapter = config.adapter
    if adapter.init_from is None:
        adapter = msgspec.structs.replace(adapter, init_lora_weights=True)
    return msgspec.structs.replace(config, checkpoint=CheckpointSpec(), adapter=adapter)


def _check_evaluating(config: Config) -> None:
    if config.checkpoint.resume is not None:
        raise ConfigError(
            f"checkpoint.resume must be null with task=evaluate, got {config.checkpoint.resume!r}; evaluate a run's "
            "adapter with adapter.init_from=RUN/adapter"
        )


def _check_keep_best(config: Config) -> None:
    if not config.checkpoint.is_on():
        raise ConfigError("checkpoint.keep_best=true needs checkpoints: checkpoint=every_50")
    if config.loop.eval_every is None:
        raise ConfigError(
            "checkpoint.keep_best=true needs evaluations to choose by: loop.eval_every=N and data.eval_path=FILE"
        )

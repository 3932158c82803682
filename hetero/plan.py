"""From the shard plan as written to explicit stages, each with its machine."""

from __future__ import annotations

import itertools

import msgspec

from hetero.errors import ConfigError
from hetero.spec import Config, HardwareSpec, ShardPlanSpec, StageSpec, WorkerEntry, check_stages

LOCAL = "local"


def resolve_plan(config: Config, num_hidden_layers: int) -> tuple[list[StageSpec], list[WorkerEntry]]:
    """The stages of a run and the machines of those after the first.

    Args:
        config: with shard plan, hardware and the model's own settings.
        num_hidden_layers: of the model.

    Raises:
        ConfigError: the plan does not cover every layer once, or does not fit the machines.
    """
    plan, hardware = config.shard_plan, config.hardware
    _check_ids(hardware)
    _check_one_way(plan)
    if plan.stages is not None:
        stages = list(plan.stages)
        check_stages(stages, num_hidden_layers)
        workers = [_worker_named(stage.id, index, hardware) for index, stage in enumerate(stages)][1:]
        if len({stage.id for stage in stages}) < len(stages):
            given = ", ".join(stage.id for stage in stages)
            raise ConfigError(f"shard_plan.stages must give each machine one stage, got the ids {given}")
    else:
        edges = [0, *_split_points(plan, hardware, num_hidden_layers), num_hidden_layers]
        workers = _workers_in_order(len(edges) - 2, hardware)
        ids = [LOCAL, *(worker.id for worker in workers)]
        stages = [StageSpec(id=i, start=a, end=b) for i, a, b in zip(ids, edges[:-1], edges[1:], strict=True)]
        check_stages(stages, num_hidden_layers)
    devices = [hardware.coordinator.device, *(worker.device for worker in workers)]
    stages = [
        msgspec.structs.replace(
            stage,
            device=stage.device or (device if device != "auto" else None),
            dtype=stage.dtype or config.model.dtype,
            quantization=stage.quantization or config.model.quantization,
            is_last=None,
        )
        for stage, device in zip(stages, devices, strict=True)
    ]
    return stages, workers


def _check_one_way(plan: ShardPlanSpec) -> None:
    """Of several ways to say where the cuts are, one would win in silence."""
    given = [name for name in ("stages", "split_points", "num_stages") if getattr(plan, name) is not None]
    if len(given) != 1:
        raise ConfigError(
            "shard_plan must give exactly one of stages, split_points and num_stages, "
            f"got {' and '.join(given) or 'none of them'}"
        )


def _split_points(plan: ShardPlanSpec, hardware: HardwareSpec, num_layers: int) -> list[int]:
    """Where stages after the first begin."""
    if plan.split_points is not None:
        points = plan.split_points
        if any(not 0 < p < num_layers for p in points) or any(a >= b for a, b in itertools.pairwise(points)):
            raise ConfigError(
                f"shard_plan.split_points must rise between 1 and {num_layers - 1} "
                f"(the model has {num_layers} layers), got {points}"
            )
        return points
    num_stages = plan.num_stages
    if num_stages == "auto":
        num_stages = 1 + (len(hardware.workers) or int(hardware.launch == "local"))
    assert isinstance(num_stages, int)
    if num_stages > num_layers:
        raise ConfigError(f"shard_plan.num_stages must be at most {num_layers} (the model's layers), got {num_stages}")
    # Layers that are left over go to the earlier stages: the last one has the head besides.
    share, extra = divmod(num_layers, num_stages)
    sizes = [share + (index < extra) for index in range(num_stages)]
    return [sum(sizes[: index + 1]) for index in range(num_stages - 1)]


def _check_ids(hardware: HardwareSpec) -> None:
    seen: set[str] = set()
    for index, worker in enumerate(hardware.workers):
        if worker.id == LOCAL or worker.id in seen:
            raise ConfigError(
                f"hardware.workers[{index}].id must be a name of its own, and not {LOCAL!r}, which is the "
                f"coordinator, got {worker.id!r}"
            )
        seen.add(worker.id)


def _worker_named(stage_id: str, index: int, hardware: HardwareSpec) -> WorkerEntry:
    where = f"shard_plan.stages[{index}].id"
    if (stage_id == LOCAL) != (index == 0):
        raise ConfigError(f"{where} must be {LOCAL!r} on exactly the first stage, the coordinator's, got {stage_id!r}")
    for worker in hardware.workers:
        if worker.id == stage_id:
            return worker
    if index == 0 or (hardware.launch == "local" and not hardware.workers):
        return WorkerEntry(id=stage_id, host="127.0.0.1", port=0)
    known = ", ".join(worker.id for worker in hardware.workers) or "none"
    raise ConfigError(f"{where} must name an entry of hardware.workers ({known}), got {stage_id!r}")


def _workers_in_order(count: int, hardware: HardwareSpec) -> list[WorkerEntry]:
    if hardware.launch == "local" and not hardware.workers:
        return [WorkerEntry(id=f"local-{number}", host="127.0.0.1", port=0) for number in range(1, count + 1)]
    if count and count != len(hardware.workers):
        raise ConfigError(
            f"shard_plan must have a stage for the coordinator and one for each of the {len(hardware.workers)} "
            f"hardware.workers, got {count + 1} stages"
        )
    return list(hardware.workers[:count])

"""The run's configuration as typed data: `Config` as composed, `RunSpec` as resolved, JSON on the wire, with a digest.

Both are frozen. `Config` is what the files and the command line say, group by group; `RunSpec` is what every
machine of the run agrees on: the shard plan is explicit in it, and nothing in it is a path of the coordinator's.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from hetero.checked import convert
from hetero.errors import ConfigError
from hetero.schedule import policy_for

AtLeast0 = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Gigabytes = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Name = Annotated[str, Meta(min_length=1, max_length=300)]
Device = Annotated[str, Meta(pattern=r"^(auto|[a-z]+(:[0-9]+)?)\Z")]
FloatType = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "nf4"]
# `on` and `off` without quotes are true and false in YAML.
RouterAuxLoss = Literal["auto", "on", "off"] | bool | Annotated[float, Meta(ge=0)]
Commit = Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")]


class ModelSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Which base model, and in which numbers it is held."""

    path: Name
    revision: str | None = None
    dtype: FloatType = "float32"
    quantization: Quantization = "none"
    attn_implementation: Literal["sdpa", "eager"] | None = None
    router_aux_loss: RouterAuxLoss = "auto"


class AdapterSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The LoRA weights that train; names as in PEFT's `LoraConfig`."""

    r: AtLeast1 = 8
    alpha: Annotated[float, Meta(gt=0)] = 16
    dropout: Fraction = 0.0
    target_modules: list[Name] | Name = "auto"
    modules_to_save: list[Name] | Literal["auto"] | None = None
    layers_to_transform: list[AtLeast0] | None = None
    rank_pattern: dict[str, AtLeast1] | None = None
    alpha_pattern: dict[str, Annotated[float, Meta(gt=0)]] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    bias: Literal["none", "lora_only", "all"] = "none"
    lora_bias: bool = False
    init_lora_weights: bool | Name = True
    exclude_modules: list[Name] | Name | None = None
    target_parameters: list[Name] | None = None
    init_from: str | None = None


_HELD_OUT = {"remedy": "0.1 holds a tenth of the rows out, null none"}


class DataSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the rows come from and how they become tokens and labels."""

    source: Literal["pydocs", "jsonl", "hub"]
    path: str | None = None
    name: str | None = None
    split: Name = "train"
    max_length: Annotated[int, Meta(ge=2)] | None = None
    response_only: bool = True
    shuffle: bool = True
    padding_side: Literal["right", "left"] = "right"
    packing: bool = False
    bucket: bool = False
    eval_path: str | None = None
    eval_split: Name | None = None
    eval_fraction: Annotated[float, Meta(gt=0, lt=1, extra=_HELD_OUT)] | None = None

    def evaluates(self) -> bool:
        """Whether rows are given, or held out, to evaluate on."""
        return (self.eval_path, self.eval_split, self.eval_fraction) != (None, None, None)


class StageSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Layers [start, end) on one device of the machine `id`; None takes the machine's or the model's setting."""

    id: Name
    start: AtLeast0
    end: AtLeast0
    device: Device | None = None
    dtype: FloatType | None = None
    quantization: Quantization | None = None
    is_last: bool | None = None

    def numbers(self, dtype: str) -> str:
        """What it computes in, and what it holds its weights in where that is something else; for people."""
        return dtype if self.quantization in (None, "none") else f"{dtype}, weights in {self.quantization}"


class ShardPlanSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A shard plan as written: explicit stages, cut points, or a number of stages; exactly one of them."""

    stages: list[StageSpec] | None = None
    split_points: list[int] | None = None
    num_stages: AtLeast1 | Literal["auto"] | None = None


class CoordinatorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The machine of stage 0; `memory_gb` is what a dry run compares with."""

    host: Name = "localhost"
    device: Device = "auto"
    memory_gb: Gigabytes | None = None


class WorkerEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine that runs `worker.py`; `memory_gb` is what a dry run compares with."""

    id: Name
    host: Name
    port: Port = 9999
    device: Device = "auto"
    memory_gb: Gigabytes | None = None


class HardwareSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The machines; `launch: local` starts the workers as processes here."""

    coordinator: CoordinatorSpec = CoordinatorSpec()
    workers: list[WorkerEntry] = []
    launch: Literal["local", "none"] = "none"


class TransportSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """How machines talk; `target` is the transport's class from the allow list."""

    target: str = msgspec.field(name="_target_", default="hetero.transport.tcp.TcpTransport")
    topology: Literal["chain", "star"] = "chain"
    connect_timeout_s: Seconds = 60.0
    io_timeout_s: Seconds = 15.0
    wire_dtype: FloatType | Literal["auto"] = "auto"
    max_frame_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 34)] = 1 << 30


class ScheduleSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Which ready work a stage does next."""

    name: Name = "1f1b"
    max_in_flight: AtLeast1 | None = None


class LrScheduleSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The learning rate as a function of the step."""

    name: Literal["cosine", "constant"] = "cosine"
    warmup_steps: AtLeast0 = 0
    min_lr_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0


_EVAL_EVERY = {"remedy": "null evaluates before the first step and after the last alone"}


class LoopSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The run: how many steps of how many rows."""

    target: str = msgspec.field(name="_target_", default="hetero.loop.train")
    steps: AtLeast0 | None = None
    epochs: AtLeast0 | None = None
    batch_size: AtLeast1 = 8
    microbatch_size: AtLeast1 = 1
    max_grad_norm: Annotated[float, Meta(ge=0)] | None = 1.0
    recompute: Literal["none", "layer", "stage"] = "none"
    trace_steps: Annotated[int, Meta(ge=0, le=1000)] = 3
    eval_every: Annotated[int, Meta(ge=1, extra=_EVAL_EVERY)] | None = None
    eval_batch_size: AtLeast1 | None = None
    sample_prompts: Annotated[list[PromptSpec], Meta(extra=_PROMPTS)] = []

    @property
    def eval_rows(self) -> int:
        """Rows of a micro-batch of an evaluation."""
        return self.eval_batch_size or self.microbatch_size


_RESUME = {"remedy": "latest, a step number, a run's folder or a step's; null starts at step 0"}
_NO_CHECKPOINTS = {"remedy": "null leaves it out, checkpoint=none switches checkpoints off"}


class CheckpointSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """How often everything that a run has learned is saved, where, and from where it goes on."""

    every_steps: Annotated[int, Meta(ge=1, extra=_NO_CHECKPOINTS)] | None = None
    every_minutes: Annotated[float, Meta(gt=0, extra=_NO_CHECKPOINTS)] | None = None
    keep_last: Annotated[int, Meta(ge=2, extra={"remedy": "2 keeps the one before until the next is whole"})] = 2
    keep_best: bool = False
    dir: str | None = None
    resume: Annotated[int, Meta(ge=0, extra=_RESUME)] | Name | None = None

    def is_on(self) -> bool:
        """Whether checkpoints are written."""
        return self.every_steps is not None or self.every_minutes is not None


class RecoverySpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of a run that loses a machine."""

    wait_s: Annotated[float, Meta(ge=0, extra={"remedy": "recovery=none lets a lost machine end the run"})] = 0.0
    replan: bool = False
    stuck_s: Seconds = 120.0


class GenerationSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """How text is generated, by `task=generate` and for `loop.sample_prompts`; names as in transformers."""

    max_new_tokens: AtLeast1 = 64
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    top_k: AtLeast0 = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: AtLeast0 = 0
    chat: Literal["auto"] | bool = "auto"
    system: str | None = None
    batch_size: Annotated[int, Meta(ge=1, le=4096)] = 8


class Turn(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a prompt that is a conversation."""

    role: Name
    content: str


_PROMPT = {"remedy": "a text in quotes, or a conversation as [{role: user, content: 'Hello'}]"}
_PROMPTS = {"remedy": 'a list of texts or conversations, as in \'["Hello", "Who are you?"]\''}
PromptSpec = Annotated[str | list[Turn], Meta(extra=_PROMPT)]


class GenerationLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """What a run's generation can grow to, which bounds frames and caches on every machine.

    Attributes:
        batch_size: most prompts at a time.
        max_length: most tokens of a prompt and what follows it.
        base_only: the adapter is left out.
    """

    batch_size: Annotated[int, Meta(ge=1, le=4096)]
    max_length: AtLeast1
    base_only: bool = False


class AdamWArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `hetero.optim.adamw`."""

    lr: Annotated[float, Meta(ge=0)]
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0


class SgdArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `hetero.optim.sgd`."""

    lr: Annotated[float, Meta(ge=0)]
    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0


class AnyOptimizerArgs(Struct, frozen=True):
    """What an optimizer of the user's own must have at least."""

    lr: Annotated[float, Meta(ge=0)]


OPTIMIZER_ARGS: dict[str, type[Struct]] = {"hetero.optim.adamw": AdamWArgs, "hetero.optim.sgd": SgdArgs}


class ObjectSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A `_target_` object: its name in the allow list and its flat arguments."""

    target: str
    args: dict[str, Any] = {}


class WorkerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker process is told on its own machine."""

    host: str | None = None
    port: Port | None = None
    device: Device = "auto"
    models_dir: str | None = None
    once: bool = False
    threads: AtLeast1 | None = None
    allow_any_address: bool = False
    allow_public_address: bool = False


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the configuration files and the command line say to `worker.py`."""

    worker: WorkerSpec
    outputs: Name
    allow_targets: list[str] = []


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the configuration files and the command line say to `train.py` and `visualize.py`."""

    model: ModelSpec
    adapter: AdapterSpec
    data: DataSpec
    shard_plan: ShardPlanSpec
    hardware: HardwareSpec
    transport: TransportSpec
    schedule: ScheduleSpec
    stage: dict[str, Any]
    optimizer: dict[str, Any]
    lr_schedule: LrScheduleSpec
    loop: LoopSpec
    checkpoint: CheckpointSpec
    recovery: RecoverySpec
    worker: WorkerSpec
    outputs: Name
    logger: dict[str, dict[str, Any]] | None = None
    prompts: Annotated[list[PromptSpec], Meta(extra=_PROMPTS)] = []
    generation: GenerationSpec = GenerationSpec()
    seed: AtLeast0 = 0
    task: Literal["train", "evaluate", "generate"] = "train"
    role: Literal["auto", "coordinator", "worker"] = "auto"
    run_name: str | None = None
    dry_run: bool = False
    allow_targets: list[str] = []


class RouterLossSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The balancing loss of a mixture of experts, where it is on."""

    num_experts: AtLeast1
    coefficient: Annotated[float, Meta(gt=0)]


class RunSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What every stage of a run must know, and nothing else; the same bytes on every machine.

    Attributes:
        model: `path` is a hub id, `tiny`, or the bare name of a local folder where `local_model` is true.
        local_model: the model is a folder that each machine has under its own `models_dir`.
        num_hidden_layers, hidden_size, vocab_size: facts of the model that sizes on the wire follow from.
        total_steps: optimizer steps of the whole run, which the learning rate depends on.
        stages: the shard plan, explicit.
        workers: the machines of stages 1.., in order.
        boundary_dtypes: for each boundary between stages s and s+1 the dtype of hidden and grad on the wire.
        stuck_s: a forward or backward that takes longer, and ten times the longest before, is taken for stuck.
        router_loss: experts and coefficient of the router's balancing loss; None where it is off.
        commit: of the model on the hub, from which the coordinator has it: what other machines download as well.
        generation: its limits; None in a run that generates nothing.
    """

    seed: AtLeast0
    model: ModelSpec
    local_model: bool
    num_hidden_layers: AtLeast1
    hidden_size: AtLeast1
    vocab_size: AtLeast1
    max_length: AtLeast1
    total_steps: AtLeast0
    adapter: AdapterSpec
    stages: list[StageSpec]
    workers: list[WorkerEntry]
    boundary_dtypes: list[FloatType]
    transport: TransportSpec
    schedule: ScheduleSpec
    stage: ObjectSpec
    optimizer: ObjectSpec
    lr_schedule: LrScheduleSpec
    loop: LoopSpec
    stuck_s: Seconds = 120.0
    router_loss: RouterLossSpec | None = None
    commit: Commit | None = None
    generation: GenerationLimits | None = None

    def to_json(self) -> bytes:
        """The canonical JSON of this spec (keys sorted)."""
        return msgspec.json.encode(self, order="sorted")

    def digest(self) -> str:
        """SHA-256 of `to_json`, in hex."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @classmethod
    def from_json(cls, raw: bytes) -> RunSpec:
        """Rebuilds a spec through the same checks that the coordinator's went through.

        Raises:
            ConfigError: it is not JSON, or a value breaks its rule.
        """
        spec = convert(raw, cls)
        check_stages(spec.stages, spec.num_hidden_layers)
        check_relations(spec)
        return spec


def check_relations(spec: RunSpec) -> None:
    """Checks what holds between parts of a spec.

    Raises:
        ConfigError: counts do not fit one another.
    """
    if len(spec.workers) != len(spec.stages) - 1 or len(spec.boundary_dtypes) != len(spec.stages) - 1:
        raise ConfigError(
            f"hardware.workers must hold one worker for each stage after the first, "
            f"got {len(spec.workers)} workers for {len(spec.stages)} stages"
        )
    convert(spec.optimizer.args, OPTIMIZER_ARGS.get(spec.optimizer.target, AnyOptimizerArgs), root="optimizer")
    policy_for(spec.schedule.name, 0, len(spec.stages), 1, spec.schedule.max_in_flight)


def check_stages(stages: list[StageSpec], num_hidden_layers: int) -> None:
    """Checks that the stages cover every layer exactly once, in order.

    Raises:
        ConfigError: a gap, an overlap, an empty stage, or layers that the model does not have.
    """
    if not stages:
        raise ConfigError("shard_plan.stages must hold at least one stage, got none")
    expected = 0
    for index, stage in enumerate(stages):
        where = f"shard_plan.stages[{index}] ({stage.id})"
        if stage.start != expected or stage.end <= stage.start:
            raise ConfigError(
                f"{where} must start at layer {expected} and hold a layer, got [{stage.start}, {stage.end})"
            )
        last = index == len(stages) - 1
        if stage.is_last is not None and stage.is_last != last:
            raise ConfigError(f"{where}.is_last must be true on exactly the last stage, got {stage.is_last}")
        expected = stage.end
    if expected != num_hidden_layers:
        raise ConfigError(
            f"shard_plan.stages must cover all {num_hidden_layers} layers of the model, got [0, {expected})"
        )

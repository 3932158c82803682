"""What a picture of a plan shows, as data: each kind of picture says the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetero.errors import show_address
from hetero.memory import LinkLoad, RunMemory, StageMemory, show_bytes
from hetero.page import drawable
from hetero.resolve import ResolvedRun


@dataclass(frozen=True)
class StageView:
    """A stage.

    Attributes:
        name: the machine's id, as it can be drawn.
        start, end: its layers, [start, end).
        has_embedding, has_head: which ends of the model are here.
        tied_copy: the head is the embedding's tensor, and the embedding is on another stage.
        memory: its figures, None where they are not wanted.
    """

    index: int
    name: str
    host: str
    device: str
    dtype: str
    quantization: str
    start: int
    end: int
    has_embedding: bool
    has_head: bool
    tied_copy: bool
    memory: StageMemory | None

    def title(self) -> str:
        """Its number and name."""
        return f"stage {self.index}: {self.name}"

    def kind(self) -> str:
        """Device and numbers."""
        return f"{self.device}, {self.dtype}" + ("" if self.quantization == "none" else f", {self.quantization}")

    def contents(self) -> str:
        """The parts of the model that are here."""
        first, last = self.start, self.end - 1
        parts = [f"layers {first}-{last}" if last > first else f"layer {first}"]
        if self.has_embedding:
            parts.insert(0, "embedding")
        if self.has_head:
            parts.append("norm, head" + (" (tied)" if self.tied_copy else ""))
        return " + ".join(parts)

    def parameters(self) -> str:
        """How many there are, and how many train."""
        assert self.memory is not None
        millions, trained = self.memory.parameters / 1e6, self.memory.trained / 1e6
        return f"{millions:,.1f} M parameters, {trained:,.2f} M trained"


@dataclass(frozen=True)
class LinkView:
    """A link between stages `index` and `index + 1`: bytes per token and way, and of a step where known."""

    index: int
    dtype: str
    bytes_per_token: int
    load: LinkLoad | None

    def text(self) -> str:
        """What goes over it, in a line."""
        size = f"{self.bytes_per_token / 1024:g} KiB/token each way"
        step = "" if self.load is None else f", {show_bytes(self.load.forward + self.load.backward)}/step in all"
        return f"{self.dtype} hidden and grad, {size}{step}"


@dataclass(frozen=True)
class PlanView:
    """A run.

    Attributes:
        tied: the head's weight is the embedding's.
        complete: memory includes what the work needs, not only what lies there all the time.
        lacking: machine -> bytes that it lacks.
        facts, step: a line about the model, and one about a step.
    """

    model: str
    num_layers: int
    tied: bool
    stages: list[StageView]
    links: list[LinkView]
    complete: bool
    lacking: dict[str, int]
    facts: str
    step: str

    def tied_link(self) -> tuple[int, int] | None:
        """The stages that hold the tensor that is tied, where they are two."""
        last = len(self.stages) - 1
        return (0, last) if self.tied and last > 0 else None

    def memory_text(self, stage: StageView) -> str:
        """What a stage needs, beside what its device has."""
        memory = stage.memory
        assert memory is not None
        needs = show_bytes(memory.total)
        when = "" if self.complete else " before activations"
        if memory.available is None:
            return f"{needs} of memory{when} (device: ?)"
        sharing = sum(memory.machine == other.memory.machine for other in self.stages if other.memory) > 1
        return f"{needs} of {show_bytes(memory.available)}{' shared' * sharing} memory{when}"

    def stage_lines(self, stage: StageView) -> Iterator[str]:
        """All that is said of a stage, for pictures that are text."""
        yield from (stage.title(), stage.host, stage.kind(), stage.contents())
        if stage.memory is not None:
            yield stage.parameters()
            yield self.memory_text(stage)


TIED = "tied: the same weights on both"


def view_of(resolved: ResolvedRun, memory: RunMemory | None = None) -> PlanView:
    """Puts together what a picture shows.

    Args:
        resolved: the run.
        memory: its figures, to be shown as well.
    """
    facts, config = resolved.facts, resolved.config
    tied = facts.tie_word_embeddings
    sizes = f"{facts.num_hidden_layers} layers, hidden size {facts.hidden_size:,}, vocabulary {facts.vocab_size:,}"
    loop, schedule = config.loop, config.schedule
    step = f"a step: {loop.batch_size} rows in micro-batches of {loop.microbatch_size}"
    step += (
        f", at most {resolved.max_length:,} tokens a row; schedule {schedule.name}, links: {config.transport.topology}"
    )
    return PlanView(
        model=drawable(config.model.path),
        num_layers=facts.num_hidden_layers,
        tied=tied,
        stages=[_stage(resolved, memory, index) for index in range(len(resolved.stages))],
        links=[_link(resolved, memory, index) for index in range(len(resolved.stages) - 1)],
        complete=memory is None or memory.complete,
        lacking={} if memory is None else memory.lacking(),
        facts=f"{facts.model_type}, {sizes}" + (", tied embedding" if tied else ""),
        step=drawable(step),
    )


def _stage(resolved: ResolvedRun, memory: RunMemory | None, index: int) -> StageView:
    stage, last = resolved.stages[index], len(resolved.stages) - 1
    worker = resolved.workers[index - 1] if index else None
    host = resolved.config.hardware.coordinator.host if worker is None else show_address(worker.host, worker.port)
    return StageView(
        index=index,
        name=drawable(stage.id),
        host=drawable(host),
        device=stage.device or "auto",
        dtype=str(stage.dtype),
        quantization=stage.quantization or "none",
        start=stage.start,
        end=stage.end,
        has_embedding=index == 0,
        has_head=index == last,
        tied_copy=resolved.facts.tie_word_embeddings and index == last,
        memory=None if memory is None else memory.stages[index],
    )


def _link(resolved: ResolvedRun, memory: RunMemory | None, index: int) -> LinkView:
    wire_dtype = resolved.config.transport.wire_dtype
    dtype = str(resolved.stages[index].dtype) if wire_dtype == "auto" else wire_dtype
    size = resolved.facts.hidden_size * (4 if dtype == "float32" else 2)
    return LinkView(index, dtype, size, None if memory is None else memory.links[index])

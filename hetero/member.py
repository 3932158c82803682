"""A process's part in a run: its stage, its optimizer and its runtime; the same for coordinator and worker."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hetero import device as devices
from hetero import download, registry
from hetero.decoding import evaluating
from hetero.generation import PromptBatch, StageGeneration
from hetero.inbox import Inbox
from hetero.optim import learning_rate
from hetero.quantization import check_nf4
from hetero.runtime import Runtime, StepPlan, StepWork
from hetero.spec import RunSpec
from hetero.stage import Stage
from hetero.training_state import part_of, put_state, take_state
from hetero.transport.link import Link
from hetero.watchdog import Phase, Progress
from hetero.wire.headers import Ready
from hetero.wire.spans import MAX_SPANS


def check_device(spec: RunSpec, index: int, device_name: str) -> devices.Device:
    """The device of stage `index` on this machine, which can hold it as the plan says; nothing is loaded.

    Args:
        spec: the run.
        index: of the stage.
        device_name: device to use where the plan names none.

    Raises:
        ConfigError: this machine does not have the device, or the device cannot.
    """
    plan, key = spec.stages[index], f"shard_plan.stages[{index}]"
    device = devices.resolve(plan.device or device_name, key=f"{key}.device")
    device.check_dtype(plan.dtype or spec.model.dtype, key=f"{key}.dtype")
    if (plan.quantization or spec.model.quantization) == "nf4":
        check_nf4(device.torch_device, where=f"stage {index} ({plan.id})")
    return device


class Member:
    """Stage `index` of a run in this process.

    Args:
        spec: the run.
        index: of the stage.
        model_path: where this machine has the model.
        device_name: device to use where the plan names none.
        allow_targets: this machine's additions to the allow list.
        progress: told what is being done.
        check: called now and then while weights are downloaded; what it raises ends that.

    Raises:
        ConfigError: the stage cannot be built on this machine.
    """

    def __init__(
        self,
        spec: RunSpec,
        index: int,
        *,
        model_path: Path,
        device_name: str,
        allow_targets: Sequence[str] = (),
        progress: Progress,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.spec, self.index = spec, index
        self.progress = progress
        self._check = check
        with self.progress.doing(Phase.LOADING, "the building of its stage"):
            self._build(model_path, device_name, allow_targets)

    def _moved(self) -> None:
        """Part of a download has arrived."""
        with self.progress.doing(Phase.LOADING, "the download of its weights"):
            self._check()

    def _build(self, model_path: Path, device_name: str, allow_targets: Sequence[str]) -> None:
        spec, index = self.spec, self.index
        device = check_device(spec, index, device_name)
        plan = spec.stages[index]
        gc.collect()  # a stage of an earlier run goes first: its modules and their hooks refer to each other
        if not spec.local_model:
            download.complete(model_path, spec.model.path, plan.start, plan.end, moved=self._moved)
        self.stage: Stage = registry.make(
            "stage", spec.stage.target, allow_targets, spec, index, model_path, device, **spec.stage.args
        )
        optimizer = spec.optimizer
        parameters = list(self.stage.trained.values())
        self._optimizer: torch.optim.Optimizer | None = (
            registry.make("optimizer", optimizer.target, allow_targets, parameters, **optimizer.args)
            if parameters
            else None
        )
        self._initial = take_state(self.stage.trained, None)
        self._runtime: Runtime | None = None
        self._links: tuple[Link, ...] = ()
        self._downstream: Link | None = None
        self._sent_before = 0

    def connect(self, inbox: Inbox, upstream: Link | None, downstream: Link | None) -> None:
        """Gives the stage the links of a session, and where they deliver."""
        dtypes = self.spec.boundary_dtypes
        self._sent_before = 0
        self._downstream = downstream
        self._links = tuple(link for link in (upstream, downstream) if link is not None)
        self._runtime = Runtime(
            self.stage,
            index=self.index,
            num_stages=len(self.spec.stages),
            schedule=self.spec.schedule,
            vocab_size=self.spec.vocab_size,
            inbox=inbox,
            progress=self.progress,
            upstream=upstream,
            downstream=downstream,
            upstream_dtype=dtypes[self.index - 1] if self.index else "float32",
            downstream_dtype=dtypes[self.index] if self.index < len(dtypes) else "float32",
        )

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Becomes what the state says, whatever it was; without any, what it was when it was built.

        Args:
            state: of the whole run or of this stage, by state name.
        """
        own = part_of(state, self.stage.trained)
        put_state(self.stage.trained, self._optimizer, own or self._initial)
        self.stage.end_step()

    def state(self) -> dict[str, torch.Tensor]:
        """A copy on the host of what this stage would need to go on, by state name."""
        with self.progress.doing(Phase.CHECKPOINT, "the copying of its state"):
            return take_state(self.stage.trained, self._optimizer)

    def run_step(
        self, plan: StepPlan, batches: Sequence[dict[str, torch.Tensor]] | None = None
    ) -> tuple[Ready, torch.Tensor, StepWork]:
        """Forward and backward of a step.

        Returns:
            READY as the coordinator wants it, the squared gradient norms float64 [n], and what was done when.
        """
        assert self._runtime is not None
        work = self._runtime.run_step(plan, batches)
        norms = self.stage.squared_norms()
        loss = self.stage.loss() if self.stage.is_last else 0.0
        finite = math.isfinite(loss) and bool(torch.isfinite(norms).all())
        sent = sum(link.bytes_sent() for link in self._links)
        ready = Ready(
            step=plan.step,
            finite=finite,
            loss=loss if self.stage.is_last and math.isfinite(loss) else None,
            busy_s=work.busy_s,
            wait_s=work.wait_s,
            bytes_sent=sent - self._sent_before,
            memory_bytes=self.stage.device.memory_bytes(),
            router_loss=self._router_loss(),
            num_spans=min(len(work.spans), MAX_SPANS),
            spans_left_out=max(0, len(work.spans) - MAX_SPANS),
        )
        self._sent_before = sent
        return ready, norms, work

    def evaluate(self, plan: StepPlan, batches: Sequence[dict[str, torch.Tensor]] | None = None) -> Ready:
        """Forwards of an evaluation; what trains, gradients and random numbers stay as they are.

        Returns:
            READY as the coordinator wants it, with the sum of the label tokens' losses on the last stage.
        """
        assert self._runtime is not None
        work = self._runtime.run_step(plan, batches)
        loss = self.stage.loss() if self.stage.is_last else 0.0
        self.stage.end_step()
        sent = sum(link.bytes_sent() for link in self._links)
        ready = Ready(
            step=plan.step,
            finite=math.isfinite(loss),
            loss=loss if self.stage.is_last and math.isfinite(loss) else None,
            busy_s=work.busy_s,
            wait_s=work.wait_s,
            bytes_sent=sent - self._sent_before,
            memory_bytes=self.stage.device.memory_bytes(),
            evaluate=plan.evaluation,
        )
        self._sent_before = sent
        return ready

    def begin_batch(self, batch: PromptBatch) -> StageGeneration:
        """This stage's part of the generation for a batch of prompts; in `evaluating` only."""
        dtypes = self.spec.boundary_dtypes
        return StageGeneration(
            self.stage,
            batch,
            downstream=self._downstream,
            dtype=dtypes[self.index] if self.index < len(dtypes) else "float32",
            progress=self.progress,
        )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The stage without dropout, and where the run says so without its adapter."""
        assert self.spec.generation is not None
        with evaluating(self.stage, base_only=self.spec.generation.base_only):
            yield

    def _router_loss(self) -> float | None:
        if self.stage.router is None or not self.stage.is_last:
            return None
        total = self.stage.router.total()
        return total if math.isfinite(total) else None

    def apply(self, step: int, clip_factor: float) -> float:
        """Takes the optimizer's step; gives the learning rate that it had."""
        with self.progress.doing(Phase.STEP, "an optimizer step"):
            return self._apply(step, clip_factor)

    def _apply(self, step: int, clip_factor: float) -> float:
        rate = learning_rate(step, self.spec.total_steps, float(self.spec.optimizer.args["lr"]), self.spec.lr_schedule)
        if self._optimizer is not None:
            self.stage.scale_gradients(clip_factor)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self.stage.end_step()
        return rate

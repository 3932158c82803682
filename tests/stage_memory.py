"""A worker's process whose anonymous memory is watched while it loads a stage and takes STEPS steps (Linux).

`python stage_memory.py MODEL_FOLDER SPEC_JSON STAGE STEPS`: prints the peak in bytes over that of the process when it
was warm, which is after all imports and a step of the tiny model in the same numbers.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from hetero import registry, tiny
from hetero.device import resolve
from hetero.schedule import policy_for
from hetero.spec import RunSpec, StageSpec
from hetero.stage import Stage, build_stage
from hetero.training_state import take_state


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


class Watch:
    """The highest value of `anonymous_bytes`, looked at all the time."""

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._done.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())

    @contextmanager
    def on(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._done.set()
            self._thread.join()


def take_steps(spec: RunSpec, index: int, stage: Stage, num_steps: int) -> None:
    """Steps of micro-batches of full length, as many in flight as the policy allows, and a checkpoint after each."""
    loop, last = spec.loop, stage.is_last
    num_micro_batches = loop.batch_size // loop.microbatch_size
    policy = policy_for(spec.schedule.name, index, len(spec.stages), num_micro_batches, spec.schedule.max_in_flight)
    size = (loop.microbatch_size, spec.max_length)
    parameters = list(stage.trained.values())
    optimizer = registry.make("optimizer", spec.optimizer.target, [], parameters, **spec.optimizer.args)
    copies = [take_state(stage.trained, None)]  # what a restart without a checkpoint begins with
    for step in range(1, num_steps + 1):
        grads: dict[int, torch.Tensor | None] = {}
        for micro_batch in range(num_micro_batches):
            batch = {"labels": torch.randint(3, spec.vocab_size, size)}
            if index:
                batch["hidden"] = torch.randn(*size, spec.hidden_size, dtype=stage.dtype)
            else:
                batch["input_ids"] = batch["labels"]
            if loop.microbatch_size > 1:
                batch["attention_mask"] = torch.ones(size, dtype=torch.bool)
                batch["attention_mask"][0, -1] = False
                batch["position_ids"] = torch.arange(size[1]).expand(size)
            hidden = stage.forward(step, micro_batch, batch, loop.batch_size * spec.max_length)
            grads[micro_batch] = None if last or hidden is None else torch.randn_like(hidden)
            del batch, hidden
            while len(grads) >= policy.in_flight_cap:
                oldest = min(grads)
                stage.backward(oldest, grads.pop(oldest))
        for micro_batch in sorted(grads):
            stage.backward(micro_batch, grads.pop(micro_batch))
        stage.squared_norms()
        optimizer.step()
        stage.end_step()
        copies[1:] = [take_state(stage.trained, optimizer)]  # on its way to the coordinator during the next step


def warm_up(spec: RunSpec) -> None:
    """A step of the tiny model, with the same numbers."""
    plan = spec.stages[-1]
    settings = tiny.tiny_config()
    num_layers = settings["num_hidden_layers"]
    stages = [StageSpec(id="a", start=0, end=1), StageSpec(id="b", start=1, end=num_layers)]
    small = msgspec.structs.replace(
        spec,
        model=msgspec.structs.replace(spec.model, path="tiny"),
        num_hidden_layers=num_layers,
        hidden_size=settings["hidden_size"],
        vocab_size=settings["vocab_size"],
        max_length=8,
        stages=[msgspec.structs.replace(s, dtype=plan.dtype, quantization=plan.quantization) for s in stages],
    )
    take_steps(small, 1, build_stage(small, 1, tiny.make_tiny(None), resolve("cpu")), 1)


def main() -> None:
    folder, spec, index = Path(sys.argv[1]), RunSpec.from_json(sys.argv[2].encode()), int(sys.argv[3])
    torch.set_num_threads(1)
    warm_up(spec)
    before, watch = anonymous_bytes(), Watch()
    with watch.on():
        stage = build_stage(spec, index, folder, resolve("cpu"))
        loaded, loading, watch.peak = anonymous_bytes(), watch.peak, 0
        take_steps(spec, index, stage, int(sys.argv[4]))
    print(json.dumps({"loading": loading - before, "loaded": loaded - before, "peak": watch.peak - before}))


if __name__ == "__main__":
    main()

"""The same Stage modules driven by torch.distributed.pipelining in two processes give the same gradients as hetero."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Tiny, make_rows
from pipeline import Outcome, build_stages, lively, make_spec, run_stages
from safetensors.torch import load_file, save_file

from hetero import data
from hetero.spec import AdapterSpec

CASES = (("llama", "1f1b"), ("qwen2", "gpipe"))

# One process of the oracle, for all cases: rank, world size, port, folder of the runs.
_ORACLE = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from safetensors.torch import load_file, save_file
from hetero import device
from hetero.spec import RunSpec
from hetero.stage import build_stage

rank, size, port, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)

class Part(torch.nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.model, self.is_first, self.is_last = stage.model, stage.is_first, stage.is_last

    def forward(self, x):
        name = "input_ids" if self.is_first else "inputs_embeds"
        hidden = self.model.base_model(**{name: x}, use_cache=False).last_hidden_state
        return self.model.get_output_embeddings()(hidden) if self.is_last else hidden

def run(schedule_class, model, folder):
    stage = build_stage(RunSpec.from_json((folder / "spec.json").read_bytes()), rank, model, device.resolve("cpu"))
    given = load_file(folder / "given.safetensors")
    with torch.no_grad():
        for key, parameter in stage.trained.items():
            parameter.copy_(given["initial." + key])
    labels, count = given["labels"], int((given["labels"][:, 1:] != -100).sum())

    def loss_of(logits, target):
        flat = logits[:, :-1].flatten(0, 1), target[:, 1:].flatten()
        return F.cross_entropy(*flat, ignore_index=-100, reduction="sum") / count

    part = PipelineStage(Part(stage), rank, size, torch.device("cpu"))
    schedule = schedule_class(part, n_microbatches=len(labels), loss_fn=loss_of, scale_grads=False)
    losses = []
    arguments = (given["input_ids"],) if stage.is_first else ()
    schedule.step(*arguments, **({"target": labels, "losses": losses} if stage.is_last else {}))
    found = {key: parameter.grad for key, parameter in stage.trained.items()}
    if losses:
        found["loss"] = torch.stack([loss.detach() for loss in losses]).double().sum()
    save_file(found, folder / f"found-{rank}.safetensors")

for name, schedule, model in json.loads((root / "cases.json").read_text()):
    run({"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule], model, root / name)
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Outcome], Path]:
    """Our outcome of one step for each model, and the folder where the oracle left its own."""
    folder = tmp_path_factory.mktemp("oracle")
    ours = {name: _prepare(tiny(name), folder / name, schedule) for name, schedule in CASES}
    cases = [(name, schedule, str(tiny(name))) for name, schedule in CASES]
    (folder / "cases.json").write_text(json.dumps(cases))
    (folder / "oracle.py").write_text(_ORACLE)
    root = Path(__file__).parent.parent
    common = ["2", str(free_port()), str(folder)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / "oracle.py"), str(rank), *common],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0].decode()[-3000:] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return ours, folder


def _prepare(model_dir: Path, folder: Path, schedule: str) -> Outcome:
    """Runs our step and writes what the oracle needs to do the same."""
    rows = make_rows((12, 12, 12, 12, 12))
    (whole,) = data.micro_batches(rows, len(rows), padding_side="right", pad_id=0)
    assert whole.attention_mask is None  # the oracle's shapes are static
    adapter = AdapterSpec(r=4, alpha=8, target_modules="all-linear")
    spec = make_spec(model_dir, (2,), adapter=adapter, schedule=schedule)
    stages = build_stages(spec, model_dir)
    initial = lively({key: value for stage in stages for key, value in stage.state().items()})
    folder.mkdir()
    (folder / "spec.json").write_bytes(spec.to_json())
    given = {f"initial.{key}": value for key, value in initial.items()}
    save_file(given | {"input_ids": whole.input_ids, "labels": whole.labels}, folder / "given.safetensors")
    steps = [data.micro_batches(rows, 1, padding_side="right", pad_id=0)]
    return run_stages(spec, stages, steps, initial=initial)


@pytest.mark.parametrize("name", [name for name, _ in CASES])
def test_gradients_equal_those_of_torch_pipelining(runs: tuple[dict[str, Outcome], Path], name: str) -> None:
    ours, folder = runs
    theirs = load_file(folder / name / "found-0.safetensors") | load_file(folder / name / "found-1.safetensors")
    assert float(theirs.pop("loss")) == pytest.approx(ours[name].losses[0], abs=1e-6)
    assert theirs.keys() == ours[name].grads[0].keys()
    for key, grad in theirs.items():
        assert float(grad.norm()) > 0
        torch.testing.assert_close(ours[name].grads[0][key], grad, rtol=1e-6, atol=1e-6)

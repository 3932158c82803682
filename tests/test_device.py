import sys
import threading
from pathlib import Path

import pytest
import torch

from hetero import device
from hetero.device import Device, available_types, resolve
from hetero.errors import ConfigError

TYPES = available_types()


@pytest.fixture(params=TYPES)
def each(request: pytest.FixtureRequest) -> Device:
    """Every device of this machine in turn."""
    return resolve(request.param)


def test_cpu_is_always_there_and_the_last_choice() -> None:
    assert TYPES[-1] == "cpu" and len(TYPES) == len(set(TYPES))


def test_auto_is_the_best_of_this_machine() -> None:
    assert resolve("auto").torch_device.type == TYPES[0]


@pytest.mark.parametrize("name", TYPES)
def test_device_is_found_by_its_name(name: str) -> None:
    assert str(resolve(name)) == name


@pytest.mark.parametrize("name", ["cpu:0", "cpu:7"])
def test_index_of_a_cpu_means_nothing(name: str) -> None:
    assert str(resolve(name)) == "cpu"


@pytest.mark.parametrize("name", [t for t in ("cuda", "cuda:0", "mps", "tpu", "") if t.partition(":")[0] not in TYPES])
def test_device_that_this_machine_lacks_is_refused_by_key_and_value(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name, key="shard_plan.stages[1].device")
    assert str(caught.value) == (
        f"shard_plan.stages[1].device must be auto or one of {', '.join(TYPES)} on this machine, got {name!r}"
    )


@pytest.mark.skipif(len(TYPES) == 1, reason="this machine has no accelerator")
def test_index_beyond_the_last_is_refused() -> None:
    count = torch.accelerator.device_count()
    with pytest.raises(ConfigError, match=f"must have an index below {count}"):
        resolve(f"{TYPES[0]}:{count}")


def test_half_precision_is_refused_on_a_cpu() -> None:
    cpu = resolve("cpu")
    with pytest.raises(ConfigError, match=r"model.dtype must be float32 or bfloat16 on a CPU, got 'float16'"):
        cpu.check_dtype("float16", key="model.dtype")
    cpu.check_dtype("float32", key="model.dtype")
    cpu.check_dtype("bfloat16", key="model.dtype")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensor_goes_to_the_device_and_back_unchanged(each: Device, dtype: torch.dtype) -> None:
    tensor = torch.arange(12).view(3, 4).to(dtype)
    there = each.from_host(tensor)
    assert there.device.type == each.torch_device.type and there.dtype is dtype
    back = each.to_host(there)
    each.synchronize()
    assert back.device.type == "cpu" and torch.equal(back, tensor)


def test_tensor_is_cast_on_its_way_to_the_device(each: Device) -> None:
    there = each.from_host(torch.tensor([1.0, 1.0 + 2**-10]), torch.bfloat16)
    assert there.dtype is torch.bfloat16 and each.to_host(there).tolist() == [1.0, 1.0]


def test_tensor_on_the_host_has_no_graph(each: Device) -> None:
    there = each.from_host(torch.ones(3)).requires_grad_() * 2
    assert not each.to_host(there).requires_grad


def test_cpu_tensor_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert resolve("cpu").to_host(tensor).data_ptr() == tensor.data_ptr() == resolve("cpu").from_host(tensor).data_ptr()


def test_memory_is_told_in_bytes(each: Device) -> None:
    kept = each.from_host(torch.ones(1 << 20))
    assert kept.nbytes <= each.memory_bytes()
    assert 1 << 28 < each.total_memory_bytes() < 1 << 50


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_cpu_is_the_peak_of_the_resident_set() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmRSS"))
    assert 0.9 * int(kibibytes) * 1024 <= resolve("cpu").memory_bytes() < 1 << 40


def test_keyed_draws_leave_the_generator_as_it_was(each: Device) -> None:
    def draw() -> list[float]:
        return each.to_host(torch.rand(4, device=each.torch_device)).tolist()

    torch.manual_seed(5)
    expected = draw() + draw()
    torch.manual_seed(5)
    first = draw()
    with each.keyed_draws() as generator:
        generator.manual_seed(9)
        keyed = draw()
    with each.keyed_draws() as generator:
        generator.manual_seed(9)
        assert draw() == keyed
    assert first + draw() == expected


def test_keyed_draws_leave_the_generator_as_it_was_after_an_error() -> None:
    cpu = resolve("cpu")
    before = torch.default_generator.get_state()

    def fail() -> None:
        with cpu.keyed_draws() as generator:
            generator.manual_seed(1)
            torch.rand(3)
            raise ValueError("oops")

    with pytest.raises(ValueError, match="oops"):
        fail()
    assert torch.equal(torch.default_generator.get_state(), before)


def test_threads_take_turns_at_keyed_draws() -> None:
    cpu = resolve("cpu")
    with cpu.keyed_draws() as generator:
        generator.manual_seed(0)
        expected = torch.rand(1000)
    found: list[torch.Tensor] = []

    def draw() -> None:
        for _ in range(20):
            with cpu.keyed_draws() as generator:
                generator.manual_seed(0)
                found.append(torch.cat([torch.rand(100) for _ in range(10)]))

    threads = [threading.Thread(target=draw, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 80 and all(torch.equal(one, expected) for one in found)


def test_keyed_draws_may_be_nested() -> None:
    cpu = resolve("cpu")
    with cpu.keyed_draws() as outer:
        outer.manual_seed(1)
        with cpu.keyed_draws() as inner:
            inner.manual_seed(2)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_squared_norm_is_taken_in_float64(each: Device) -> None:
    tensor = torch.full((1000,), 1.0 + 2**-20)
    found = each.squared_norm(each.from_host(tensor).requires_grad_())
    assert found.dtype is torch.float64 and found.device.type == "cpu" and not found.requires_grad
    assert found.item() == pytest.approx(1000 * (1.0 + 2**-20) ** 2, rel=1e-15)


def test_squared_norm_of_large_halves_does_not_overflow(each: Device) -> None:
    found = each.squared_norm(each.from_host(torch.full((10,), 60000.0), torch.float16))
    assert found.item() == 10 * float(torch.tensor(60000.0, dtype=torch.float16)) ** 2


def test_every_kind_of_device_answers_every_question() -> None:
    asked = {name for name in vars(Device) if not name.startswith("__")}
    for kind in (device.CudaDevice, device.MpsDevice):
        assert {name for name in vars(kind) if not name.startswith("__")} <= asked

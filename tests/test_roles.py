"""Which machine of a run this one is."""

from __future__ import annotations

import socket

import psutil
import pytest
from processes import composed

from hetero.checked import convert
from hetero.errors import ConfigError
from hetero.roles import is_here, own_names, worker_here
from hetero.spec import Config, WorkerSpec

A = "{id: a, host: a.lan, port: 9001, device: cpu}"
B = "{id: b, host: b.lan, port: 9002}"
HERE1 = "{id: x, host: 127.0.0.1, port: 9001}"
HERE2 = "{id: y, host: localhost, port: 9002}"


def role(*workers: str, coordinator: str = "c.lan", launch: str = "none", args: tuple[str, ...] = ()) -> Config:
    return convert(
        composed(
            f"hardware.launch={launch}",
            f"hardware.workers=[{', '.join(workers)}]",
            f"hardware.coordinator.host={coordinator}",
            *args,
        ),
        Config,
    )


def test_local_hardware_is_always_the_coordinator() -> None:
    assert worker_here(role(launch="local")) is None
    assert worker_here(role(HERE1, launch="local")) is None


def test_coordinators_entry_wins_over_a_worker_on_the_same_machine() -> None:
    assert worker_here(role(HERE1, coordinator="127.0.0.1")) is None


def test_run_without_workers_is_coordinated_here() -> None:
    assert worker_here(role()) is None


def test_machine_whose_host_is_listed_as_a_worker_becomes_that_worker() -> None:
    assert worker_here(role(A, HERE1)) == WorkerSpec(host="127.0.0.1", port=9001, device="auto")


def test_workers_own_settings_win_over_the_hardwares_entry() -> None:
    config = role(HERE1, args=("worker.port=9100", "worker.device=cpu", "worker.host=::1"))
    assert worker_here(config) == WorkerSpec(host="::1", port=9100, device="cpu")


def test_port_tells_workers_on_one_machine_apart() -> None:
    found = worker_here(role(HERE1, HERE2, args=("worker.port=9002",)))
    assert found is not None and (found.host, found.port) == ("localhost", 9002)
    with pytest.raises(ConfigError, match=r"worker\.port must tell .*: x worker\.port=9001, y worker\.port=9002"):
        worker_here(role(HERE1, HERE2))


def test_machine_that_is_none_of_the_hosts_must_give_its_role() -> None:
    with pytest.raises(ConfigError, match=r"role must be given .*c\.lan, a\.lan:9001, b\.lan:9002"):
        worker_here(role(A, B))
    assert worker_here(role(A, B, args=("role=coordinator",))) is None


def test_given_role_wins_over_the_hosts() -> None:
    assert worker_here(role(HERE1, args=("role=coordinator",))) is None
    assert worker_here(role(HERE1, coordinator="127.0.0.1", args=("role=worker",))) is not None
    with pytest.raises(ConfigError, match=r"role must be auto or coordinator where hardware\.launch is local"):
        worker_here(role(launch="local", args=("role=worker",)))


def test_own_names_hold_host_name_and_every_address() -> None:
    names = own_names()
    assert {"localhost", socket.gethostname().lower()} <= names
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                assert is_here(address.address, names)


@pytest.mark.parametrize("host", ["LOCALHOST", "127.0.0.1", "127.8.9.1", "::1", "[::1]", "Box", "box.local"])
def test_host_is_here_in_any_spelling(host: str) -> None:
    assert is_here(host, {"localhost", "box", "box.local"})


@pytest.mark.parametrize("host", ["192.0.2.7", "box.lan", "", "[2001:db8::1]", "boxes"])
def test_other_hosts_are_not_here(host: str) -> None:
    assert not is_here(host, {"localhost", "box", "box.local"})

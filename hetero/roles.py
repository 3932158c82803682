"""What this machine is in a run: coordinator, or one of the hardware's workers."""

from __future__ import annotations

import ipaddress
import socket

import msgspec
import psutil

from hetero.errors import ConfigError, show_address
from hetero.machines import looked_up
from hetero.spec import Config, WorkerEntry, WorkerSpec
from hetero.transport.addresses import bare_host


def worker_here(config: Config) -> WorkerSpec | None:
    """The worker that this machine is; None where it is the coordinator.

    With `role=auto` the hosts of the hardware are compared with this machine's names and addresses; the coordinator's
    entry wins.

    Raises:
        ConfigError: it is none of the machines, or several workers are here and worker.port does not tell which.
    """
    hardware = config.hardware
    if config.role == "coordinator" or hardware.launch == "local":
        if config.role == "worker":
            raise ConfigError("role must be auto or coordinator where hardware.launch is local, got 'worker'")
        return None
    names = own_names()
    if config.role == "auto" and (not hardware.workers or is_here(hardware.coordinator.host, names)):
        return None
    here = [worker for worker in hardware.workers if is_here(worker.host, names)]
    if config.worker.port is not None and len(here) > 1:
        here = [worker for worker in here if worker.port == config.worker.port]
    if len(here) > 1:
        listed = ", ".join(f"{worker.id} worker.port={worker.port}" for worker in here)
        raise ConfigError(f"worker.port must tell which of the workers on this machine this is: {listed}")
    if not here:
        hosts = [hardware.coordinator.host, *(show_address(w.host, w.port) for w in hardware.workers)]
        raise ConfigError(
            f"role must be given where no host of the hardware is this machine ({socket.gethostname()}): "
            f"role=coordinator or role=worker; the hosts are {', '.join(hosts)}"
        )
    return _settings(here[0], config.worker)


def _settings(entry: WorkerEntry, worker: WorkerSpec) -> WorkerSpec:
    return msgspec.structs.replace(
        worker,
        host=worker.host or entry.host,
        port=entry.port if worker.port is None else worker.port,
        device=worker.device if worker.device != "auto" else entry.device,
    )


def own_names() -> set[str]:
    """This machine's names and addresses, lower case."""
    host = socket.gethostname().lower()
    names = {"localhost", host, host.partition(".")[0], f"{host.partition('.')[0]}.local"}
    names.add((looked_up(socket.getfqdn) or host).lower())
    for addresses in psutil.net_if_addrs().values():
        names |= {
            a.address.partition("%")[0].lower() for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)
        }
    return names


def is_here(host: str, names: set[str]) -> bool:
    """Whether a host of the configuration is this machine."""
    bare = bare_host(host).partition("%")[0].lower()
    if bare in names:
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False

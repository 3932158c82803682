"""Which addresses a worker may listen on: its machine's own until paired, then a home network's, others on request."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from typing import TypeAlias

import psutil

from hetero.errors import ConfigError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

LOOPBACK = "127.0.0.1"
_TAILSCALE = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598, which overlay networks use
HOW_TO_PAIR = "python -m hetero.pair on one machine, python -m hetero.pair join on the others"
HOW_TO_PAIR_ANEW = (
    "python -m hetero.pair on one machine shows the code, python -m hetero.pair join --new on the other takes it; "
    "then start the worker again"
)


def bare_host(host: str) -> str:
    """A host without the brackets that IPv6 addresses wear in front of a port."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def parse(address: str) -> Address:
    """An address as numbers, its scope (`%eth0`) taken off."""
    return ipaddress.ip_address(address.partition("%")[0])


def is_private(address: Address) -> bool:
    """Whether an address belongs to a home network: private, unique local, link-local, or an overlay's shared range."""
    if address.version == 6 and address.sixtofour is not None:  # early Pythons 3.11 call it private, but it is routed
        return False
    return address.is_private or address.is_link_local or (address.version == 4 and address in _TAILSCALE)


def default_address() -> str:
    """The private address of this machine's default route, or of its only network; loopback where it has none.

    Raises:
        ConfigError: the default route's own address is public, or there are several networks and no default route.
    """
    found = _routed_address()
    if found is None:
        cards = dict(_private_addresses())
        if len(cards) > 1:
            raise ConfigError(
                "worker.host must be given where this machine has several networks and no default route: one of "
                + ", ".join(f"{address} ({card})" for address, card in cards.items())
            )
        return next(iter(cards), LOOPBACK)
    if not is_private(parse(found)):
        raise ConfigError(
            f"worker.host must be given: the default route of this machine has the public address {found}; choose an "
            f"address of your own network, or worker.host={found} worker.allow_public_address=true"
        )
    return found


def _routed_address() -> str | None:
    """The address from which this machine reaches the rest of the world; None where it does not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only chooses a route (RFC 5737 address)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _private_addresses() -> Iterator[tuple[str, str]]:
    """Private addresses with the network cards that have them."""
    for card, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET:
                address = parse(entry.address)
                if not address.is_loopback and is_private(address):
                    yield entry.address, card


def check_bind(host: str, address: Address, *, paired: bool, allow_any: bool, allow_public: bool) -> None:
    """Lets a worker listen on an address, or says why not.

    Args:
        host: as configured.
        address: what it resolved to.
        paired: this machine has the secret of a group.
        allow_any: `worker.allow_any_address`.
        allow_public: `worker.allow_public_address`.

    Raises:
        ConfigError: it may not.
    """
    if address.is_loopback:
        return
    if not paired:
        raise ConfigError(
            f"worker.host must be a loopback address such as 127.0.0.1 or ::1 while this machine is not paired, got "
            f"{host!r}; pair it first: {HOW_TO_PAIR}"
        )
    if address.is_unspecified:
        if not allow_any:
            raise ConfigError(
                f"worker.host must be one address of this machine, got {host!r}, which is all of them; if you "
                "mean that: worker.allow_any_address=true"
            )
    elif not is_private(address) and not allow_public:
        raise ConfigError(
            f"worker.host must be an address of your own network, got the public address {host!r}; if you mean that: "
            "worker.allow_public_address=true"
        )

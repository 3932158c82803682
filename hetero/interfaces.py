"""Which network card a connection uses, what kind of card that is, and whether this machine sits behind a NAT."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero.transport.addresses import parse

LOOPBACK, WIFI, ETHERNET, THUNDERBOLT, TUNNEL, OTHER = (
    "loopback",
    "Wi-Fi",
    "Ethernet",
    "Thunderbolt",
    "tunnel",
    "unknown",
)
_TOOL_S = 3.0
_TUNNELS = re.compile(r"(tun|tap|utun|wg|tailscale|zt|ppp|ipsec)[0-9a-z]*\Z")
_ETHERNETS = re.compile(r"(eth|en[ospx]|veth|br|docker|bond)[0-9a-z.-]*\Z")


@dataclass(frozen=True)
class Card:
    """A network card; `speed_mbit` is 0 where the system does not tell."""

    name: str
    kind: str
    speed_mbit: int = 0

    def __str__(self) -> str:
        speed = f", {self.speed_mbit} Mbit/s" if self.speed_mbit else ""
        return f"{self.kind} ({self.name}{speed})" if self.name else self.kind


def card_of(address: str) -> Card:
    """The card that has an address of this machine."""
    wanted = address.partition("%")[0].lower()
    try:
        is_loopback = parse(wanted).is_loopback
    except ValueError:
        return Card("", OTHER)
    if is_loopback:
        return Card("lo", LOOPBACK)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0].lower() == wanted for entry in entries):
            stats = psutil.net_if_stats().get(name)
            speed = stats.speed if stats is not None and 0 < stats.speed < 1 << 20 else 0
            return Card(name, _kind_of(name), speed)
    return Card("", OTHER)


def _kind_of(name: str) -> str:
    return mac_kinds(_mac_ports()).get(name, OTHER) if sys.platform == "darwin" else linux_kind(name)


def linux_kind(name: str, net: Path = Path("/sys/class/net")) -> str:
    """What a card of Linux is, by what its driver shows under `net`."""
    card = net / name
    if (card / "wireless").exists() or (card / "phy80211").exists():
        return WIFI
    driver = card / "device" / "driver"
    if name.startswith("thunderbolt") or (driver.exists() and "thunderbolt" in driver.resolve().name):
        return THUNDERBOLT
    if _TUNNELS.match(name) or (card / "tun_flags").exists():
        return TUNNEL
    if _ETHERNETS.match(name) or (card / "device").exists():
        return ETHERNET
    return OTHER


def mac_kinds(listing: str) -> Mapping[str, str]:
    """Card -> kind, from what macOS's `networksetup -listallhardwareports` prints."""
    kinds = {}
    for port, name in re.findall(r"Hardware Port: (.*)\nDevice: (\S+)", listing):
        if "Wi-Fi" in port or "AirPort" in port:
            kinds[name] = WIFI
        elif "Thunderbolt" in port and "Ethernet" not in port:
            kinds[name] = THUNDERBOLT
        elif "Ethernet" in port or "LAN" in port:
            kinds[name] = ETHERNET
    return kinds


def _mac_ports() -> str:
    tool = shutil.which("networksetup")
    if tool is None:
        return ""
    try:
        done = subprocess.run(
            [tool, "-listallhardwareports"], capture_output=True, text=True, timeout=_TOOL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def is_wsl(version: Path = Path("/proc/version")) -> bool:
    """Whether this Linux runs inside Windows."""
    try:
        return "microsoft" in version.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def behind_nat(address: str, *, wsl: bool | None = None) -> bool:
    """Whether other machines cannot reach an address of this machine: WSL2 gives its Linux one behind Windows.

    With WSL2's mirrored networking the Linux has the addresses of Windows, which are not of 172.16.0.0/12 as a rule.
    """
    inside = is_wsl() if wsl is None else wsl
    parts = address.split(".")
    return inside and len(parts) == 4 and parts[0] == "172" and 16 <= int(parts[1]) <= 31


def system_name() -> str:
    """The operating system, in a few words."""
    name = "macOS " + platform.mac_ver()[0] if sys.platform == "darwin" else f"{platform.system()} {platform.release()}"
    return f"{name} (WSL2)" if is_wsl() and "wsl" not in name.lower() else name

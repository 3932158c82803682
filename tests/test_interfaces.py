"""Kinds of network cards, from what Linux and macOS show of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.interfaces import behind_nat, card_of, is_wsl, linux_kind, mac_kinds

PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:00:00:00:02

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:00:00:00:03

Hardware Port: Thunderbolt Ethernet Slot 1
Device: en7
Ethernet Address: 00:00:00:00:00:04
"""


def test_macos_ports_are_told_apart() -> None:
    assert mac_kinds(PORTS) == {"en0": "Ethernet", "en1": "Wi-Fi", "bridge0": "Thunderbolt", "en7": "Ethernet"}


def test_linux_cards_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "wlp2s0" / "wireless").mkdir(parents=True)
    (tmp_path / "odd0" / "device").mkdir(parents=True)
    (tmp_path / "drivers" / "thunderbolt-net").mkdir(parents=True)
    (tmp_path / "tb" / "device").mkdir(parents=True)
    (tmp_path / "tb" / "device" / "driver").symlink_to(tmp_path / "drivers" / "thunderbolt-net")
    (tmp_path / "what").mkdir()
    names = ("wlp2s0", "odd0", "tb", "thunderbolt0", "eth0", "enp3s0", "tailscale0", "wg0", "what")
    assert [linux_kind(name, tmp_path) for name in names] == [
        *("Wi-Fi", "Ethernet", "Thunderbolt", "Thunderbolt", "Ethernet", "Ethernet", "tunnel", "tunnel", "unknown")
    ]


def test_loopback_and_foreign_addresses() -> None:
    assert card_of("127.0.0.1").kind == "loopback" and card_of("::1").kind == "loopback"
    assert card_of("192.0.2.77").kind == "unknown" and card_of("").kind == "unknown"


@pytest.mark.parametrize(("address", "nat"), [("172.20.1.5", True), ("172.32.0.1", False), ("192.168.1.5", False)])
def test_wsl2_s_own_network_is_recognised(tmp_path: Path, address: str, nat: bool) -> None:
    version = tmp_path / "version"
    version.write_text("Linux version 5.15.90.1-microsoft-standard-WSL2")
    assert is_wsl(version) and not is_wsl(tmp_path / "none")
    assert behind_nat(address, wsl=True) is nat and not behind_nat(address, wsl=False)

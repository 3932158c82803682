"""How this machine is called, and which workers trained with it."""

from __future__ import annotations

import json
import shlex
import socket
import stat
import time
from pathlib import Path

import pytest
from processes import composed

from hetero import machines
from hetero.errors import ConfigError
from hetero.machines import hardware_line, machines_file, name_or_address, own_id, remember, remembered
from hetero.secret import secret_of_this_machine
from hetero.spec import WorkerEntry

MAC = WorkerEntry("mac", "mac.local", 9999, "mps")
PC = WorkerEntry("pc", "192.168.1.5", 9998)


def test_latest_comes_first_and_each_host_and_port_stands_once(tmp_path: Path) -> None:
    assert remembered(tmp_path) == []
    remember([MAC], tmp_path)
    remember([PC], tmp_path)
    assert remembered(tmp_path) == [PC, MAC]
    renamed = WorkerEntry("laptop", MAC.host, MAC.port, "cpu")
    remember([renamed], tmp_path)
    assert remembered(tmp_path) == [renamed, PC]
    other_port = WorkerEntry("second", MAC.host, 9997)
    remember([other_port, MAC], tmp_path)
    assert remembered(tmp_path) == [other_port, MAC, PC]


def test_file_holds_name_host_port_and_device_and_no_secret(tmp_path: Path) -> None:
    secret, _ = secret_of_this_machine(tmp_path)
    remember([MAC], tmp_path)
    text = machines_file(tmp_path).read_text(encoding="utf-8")
    assert json.loads(text) == [{"id": "mac", "host": "mac.local", "port": 9999, "device": "mps"}]
    assert secret.hex() not in text
    assert stat.S_IMODE(machines_file(tmp_path).stat().st_mode) & 0o077 == 0


def test_no_more_are_kept_than_anyone_has(tmp_path: Path) -> None:
    for number in range(15):
        remember([WorkerEntry(f"w{number}-{i}", f"h{number}", 1000 + i) for i in range(10)], tmp_path)
    assert len(remembered(tmp_path)) == 100 and remembered(tmp_path)[0].id == "w14-0"


@pytest.mark.parametrize(
    "content", ["", "{", "3", "null", "[1]", '[{"id": "x"}]', '{"id": "x"}', "\ud800", "[[]]", '["text"]']
)
def test_damaged_file_is_named_with_the_remedy(tmp_path: Path, content: str) -> None:
    machines_file(tmp_path).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"machines\.json must be a list of machines .*; delete it"):
        remembered(tmp_path)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("MacBook.local", "macbook"),
        ("Peters PC", "peters-pc"),
        ("box_7.lan", "box-7"),
        ("---", "worker"),
        ("", "worker"),
        ("été", "t"),
        ("a'};rm", "a-rm"),
    ],
)
def test_own_name_is_plain(monkeypatch: pytest.MonkeyPatch, host: str, expected: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert own_id() == expected


@pytest.mark.parametrize("host", ["mac.local", "192.168.1.5", "fd00::7", "fe80::1%en0", "127.0.0.1"])
def test_printed_line_is_a_command_that_trains_with_this_worker(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.local")
    program, script, *overrides = shlex.split(hardware_line(host, 9998))
    assert (program, script) == ("python", "train.py")
    hardware = composed(*overrides)["hardware"]
    assert hardware["launch"] == "none"
    (entry,) = hardware["workers"]
    assert (entry["id"], entry["host"], entry["port"]) == ("box", host, 9998)


def test_local_name_is_preferred_only_where_it_leads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver is replaced, since names of the test's machine are not known."""
    monkeypatch.setattr(socket, "gethostname", lambda: "box.lan")

    def look_up(name: str, _: object) -> list[tuple[object, ...]]:
        assert name == "box.local"
        found = [("192.168.1.5", 0), ("fe80::1", 0, 0, 2)]
        return [(socket.AF_UNSPEC, socket.SOCK_STREAM, 6, "", address) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert name_or_address("192.168.1.5") == name_or_address("fe80::1%eth0") == "box.local"
    assert name_or_address("10.0.0.9") == "10.0.0.9" and name_or_address("fe80::2%eth0") == "fe80::2%eth0"


def test_name_that_nobody_knows_leaves_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object) -> None:
        raise socket.gaierror(8, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert name_or_address("10.0.0.9") == "10.0.0.9"


def test_name_server_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_NAME_S", 0.1)

    def look_up(*_: object) -> list[object]:
        time.sleep(5)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    began = time.monotonic()
    assert name_or_address("10.0.0.9") == "10.0.0.9"
    assert time.monotonic() - began < 4

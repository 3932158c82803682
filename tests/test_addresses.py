"""Where a worker may listen, and starts that are refused because they are not safe."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import END_S, run_here, started, worker

from hetero.errors import ConfigError
from hetero.secret import secret_file, write_secret
from hetero.transport import addresses
from hetero.transport.addresses import bare_host, check_bind, default_address, is_private, parse
from hetero.transport.listening import bound_address, listen

PRIVATE = [
    "10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.1.5", "169.254.7.7", "100.64.0.1",
    "100.127.255.255", "fd00::7", "fc00::1", "fe80::1", "fe80::1%en0", "fe80::1%bridge0",
]  # fmt: skip
PUBLIC = [
    "8.8.8.8", "172.15.255.255", "172.32.0.1", "192.167.255.255", "192.169.0.1", "100.63.255.255", "100.128.0.0",
    "11.0.0.1", "2606:4700::1111", "2a00::1", "fec0::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1",
    "224.0.0.1", "ff02::1",
]  # fmt: skip
LOOPBACK = ["127.0.0.1", "127.8.9.1", "::1"]
WILDCARD = ["0.0.0.0", "::"]


def may(host: str, *, paired: bool, allow_any: bool = False, allow_public: bool = False) -> str | None:
    """The refusal, if there is one."""
    try:
        check_bind(host, parse(host), paired=paired, allow_any=allow_any, allow_public=allow_public)
    except ConfigError as exc:
        return str(exc)
    return None


@pytest.mark.parametrize("host", LOOPBACK)
@pytest.mark.parametrize("paired", [False, True])
def test_loopback_is_always_allowed(host: str, paired: bool) -> None:
    assert may(host, paired=paired) is None


@pytest.mark.parametrize("host", [*PRIVATE, *PUBLIC, *WILDCARD])
def test_unpaired_machine_is_told_to_pair_whatever_keys_are_set(host: str) -> None:
    for allow in (False, True):
        text = may(host, paired=False, allow_any=allow, allow_public=allow)
        assert text is not None and repr(host) in text and "python -m hetero.pair" in text


@pytest.mark.parametrize("host", PRIVATE)
def test_paired_machine_listens_in_its_home_network(host: str) -> None:
    assert is_private(parse(host)) and may(host, paired=True) is None


@pytest.mark.parametrize("host", PUBLIC)
def test_public_address_needs_its_key(host: str) -> None:
    text = may(host, paired=True, allow_any=True)
    assert text is not None and repr(host) in text and "worker.allow_public_address=true" in text
    assert may(host, paired=True, allow_public=True) is None


@pytest.mark.parametrize("host", WILDCARD)
def test_all_addresses_need_their_key(host: str) -> None:
    text = may(host, paired=True, allow_public=True)
    assert text is not None and repr(host) in text and "worker.allow_any_address=true" in text
    assert may(host, paired=True, allow_any=True) is None


@pytest.mark.parametrize(
    ("host", "bare"), [("[::1]", "::1"), ("[fe80::1%en0]", "fe80::1%en0"), ("mac.local", "mac.local"), ("[", "[")]
)
def test_brackets_are_taken_off(host: str, bare: str) -> None:
    assert bare_host(host) == bare


class _Route:
    """A datagram socket whose route leads through an address, or through none."""

    def __init__(self, own: str | None) -> None:
        self.own = own

    def __call__(self, *_: object) -> _Route:
        return self

    def __enter__(self) -> _Route:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def connect(self, _: object) -> None:
        if self.own is None:
            raise OSError("network is unreachable")

    def getsockname(self) -> tuple[str | None, int]:
        return self.own, 1


def test_default_is_the_private_address_of_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", _Route("192.168.1.5"))
    assert default_address() == "192.168.1.5"


def test_default_route_to_the_internet_itself_needs_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", _Route("8.8.8.8"))
    with pytest.raises(ConfigError, match=r"worker\.host=8\.8\.8\.8 worker\.allow_public_address=true"):
        default_address()


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ({"lo": "127.0.0.1", "wan": "8.8.8.8", "lan": "192.168.1.5"}, "192.168.1.5"),
        ({"lo": "127.0.0.1", "wan": "8.8.8.8"}, "127.0.0.1"),
        ({"lo": "127.0.0.1", "vpn": "100.64.0.9"}, "100.64.0.9"),
        ({}, "127.0.0.1"),
    ],
)
def test_machine_without_a_route_uses_its_only_private_network_or_loopback(
    monkeypatch: pytest.MonkeyPatch, cards: dict[str, str], expected: str
) -> None:
    with_cards(monkeypatch, cards)
    assert default_address() == expected


def test_machine_with_several_networks_and_no_route_must_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, {"bridge0": "169.254.1.1", "en0": "10.0.0.5"})
    with pytest.raises(
        ConfigError, match=r"worker\.host must be given .*169\.254\.1\.1 \(bridge0\), 10\.0\.0\.5 \(en0\)"
    ):
        default_address()


def with_cards(monkeypatch: pytest.MonkeyPatch, cards: dict[str, str]) -> None:
    """No default route, and these network cards."""
    entries = {card: [SimpleNamespace(family=socket.AF_INET, address=address)] for card, address in cards.items()}
    monkeypatch.setattr(socket, "socket", _Route(None))
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: entries)


def test_paired_machine_without_a_host_listens_on_its_default_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.transport.listening.default_address", lambda: "127.0.0.1")
    with listen(None, 0, paired=True) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


# --- starts ------------------------------------------------------------------------------------------------------


def refuse(*args: str, home: Path) -> str:
    """What a start of `worker.py` says that must fail; one line."""
    outcome = run_here("worker", f"outputs={home / 'outputs'}", *args)
    assert outcome.code == 2 and outcome.seconds < 20  # wanted: 1 s
    assert not (home / "outputs").exists()
    return outcome.one_line()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that is not paired."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("args", "paired", "remedy"),
    [
        (["worker.host=0.0.0.0"], False, "python -m hetero.pair"),
        (["worker.host=::", "worker.allow_any_address=true"], False, "python -m hetero.pair"),
        (["worker.host=0.0.0.0"], True, "worker.allow_any_address=true"),
        (["worker.host=::"], True, "worker.allow_any_address=true"),
        (["worker.host=192.168.1.5"], False, "python -m hetero.pair"),
        (["worker.host=8.8.8.8"], True, "worker.allow_public_address=true"),
        (["worker.host=8.8.8.8", "worker.allow_public_address=true"], False, "python -m hetero.pair"),
        (["worker.host=no.such.host.invalid"], True, "worker.host must be an address of this machine"),
        (["worker.host=127.0.0.1", "worker.port=70000"], True, "worker.port must be"),
        (["+worker.secret=0123456789abcdef"], True, "worker.secret is not a key"),
        (["+secret=0123456789abcdef"], True, "secret is not a key"),
        (["worker.secret=0123456789abcdef"], True, "worker.secret is not a key"),
    ],
    ids=str,
)
def test_unsafe_start_is_refused_with_the_remedy(home: Path, args: list[str], paired: bool, remedy: str) -> None:
    if paired:
        write_secret(secret_file(), bytes(32))
    ports = [] if any("worker.port" in arg for arg in args) else ["worker.port=0"]
    line = refuse(*ports, *args, home=home)
    assert remedy in line, line


def test_start_with_a_secret_that_others_can_read_is_refused(home: Path) -> None:
    write_secret(secret_file(), bytes(32))
    secret_file().chmod(0o644)
    line = refuse("worker.port=0", home=home)
    assert f"chmod 600 {secret_file()}" in line and "0644" in line


@pytest.mark.parametrize("content", [b"", b"password", b"0" * 31, b"0" * 64])
def test_start_with_a_secret_of_the_user_s_own_making_is_refused(home: Path, content: bytes) -> None:
    write_secret(secret_file(), content)
    line = refuse("worker.port=0", home=home)
    assert "must hold 32 bytes" in line and "pair anew" in line


def test_start_on_a_port_that_is_taken_names_it(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"something listens on 127.0.0.1:{port} already" in refuse(f"worker.port={port}", home=home)


def listening_sockets(pid: int) -> set[tuple[str, int]]:
    """What the kernel says in /proc/net/tcp and tcp6 of a process's listening sockets."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = entry.readlink() if entry.is_symlink() else Path()
        if str(target).startswith("socket:["):
            inodes.add(str(target)[8:-1])
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw, port = fields[1].split(":")
                words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("args", [[], ["worker.host=127.0.0.3"]], ids=str)
def test_worker_listens_on_the_asked_address_alone_and_takes_no_secret_from_the_environment(
    home: Path, args: list[str]
) -> None:
    """Case S06; a secret in the environment would be in /proc, in crash reports, and in every child."""
    names = ("HETERO_SECRET", "HETERO_KEY", "HETERO_PAIRING_CODE", "SECRET")
    with worker(home / "out", *args, env={"HOME": str(home), **dict.fromkeys(names, "ff" * 32)}) as one:
        assert {(one.host, one.port)} == listening_sockets(one.running.process.pid)
        assert one.host == ("127.0.0.3" if args else "127.0.0.1")
        one.running.wait_for("only this machine can connect; to let others: python -m hetero.pair")
        (own,) = home.rglob("secret-of-this-machine")
        assert own.read_bytes() != bytes.fromhex("ff" * 32)


def test_paired_worker_prints_the_line_for_the_coordinator(home: Path) -> None:
    write_secret(secret_file(), bytes(range(32)))
    with started("worker", "worker.port=0", "worker.host=127.0.0.1", f"outputs={home}", env={"HOME": str(home)}) as one:
        line = one.wait_for(r"on the coordinator: (python train\.py hardware\.launch=none .*)")
        port = one.wait_for(r"listening on 127\.0\.0\.1:(\d+)")[1]
        assert f"port: {port}" in line[1] and "127.0.0.1" in line[1]
        assert "only this machine can connect; to let others: worker.host=ADDRESS" in one.text
        one.end()
        one.assert_gone(END_S)


def test_bound_address_keeps_the_card_of_an_address_of_one_link() -> None:
    bound = SimpleNamespace(getsockname=lambda: ("fe80::1", 9998, 0, 1))  # what a socket says, the card as a number
    assert bound_address(bound) == (f"fe80::1%{socket.if_indextoname(1)}", 9998)  # type: ignore[arg-type]
    with listen("127.0.0.1", 0) as sock:
        assert bound_address(sock) == sock.getsockname()

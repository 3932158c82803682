"""Where a worker listens; light to import, so that an unsafe start is refused at once."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import ConfigError, show_address
from hetero.secret import secret_of_this_machine
from hetero.spec import WorkerSpec
from hetero.transport.addresses import LOOPBACK, bare_host, check_bind, default_address, parse

DEFAULT_PORT = 9999
_BACKLOG = 1024  # a flood that fills it would let the kernel drop a member's SYN, which comes again after 1 s


@dataclass(frozen=True)
class Listening:
    """A bound socket, and the secret that whoever connects must have; `paired` where it is a group's."""

    sock: socket.socket
    secret: bytes
    paired: bool


def start_listening(worker: WorkerSpec, secret: bytes | None = None) -> Listening:
    """Binds the address that a worker's configuration says.

    Args:
        worker: what this machine's configuration says.
        secret: of the processes that may connect; this machine's own, or that of its paired group, if None.

    Raises:
        ConfigError: it must not or cannot listen there.
    """
    if worker.models_dir is not None and not Path(worker.models_dir).expanduser().is_dir():
        raise ConfigError(f"worker.models_dir must be a folder with a folder for each model, got {worker.models_dir!r}")
    secret, paired = secret_of_this_machine() if secret is None else (secret, False)
    sock = listen(
        worker.host,
        DEFAULT_PORT if worker.port is None else worker.port,
        paired=paired,
        allow_any=worker.allow_any_address,
        allow_public=worker.allow_public_address,
    )
    return Listening(sock, secret, paired)


def listen(
    host: str | None, port: int, *, paired: bool = False, allow_any: bool = False, allow_public: bool = False
) -> socket.socket:
    """A listening socket, on an address that a worker may listen on.

    Args:
        host: the address or name to bind; None is 127.0.0.1, and once paired the address of the default route.
        port: 0 lets the system choose.
        paired: this machine has the secret of a group.
        allow_any: `worker.allow_any_address`.
        allow_public: `worker.allow_public_address`.

    Raises:
        ConfigError: the address must not be listened on, or the port is taken.
    """
    asked = bare_host(host or (default_address() if paired else LOOPBACK))
    try:
        family, _, _, _, address = socket.getaddrinfo(asked, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as exc:
        raise ConfigError(f"worker.host must be an address of this machine, got {host!r} ({exc})") from None
    check_bind(host or asked, parse(str(address[0])), paired=paired, allow_any=allow_any, allow_public=allow_public)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        if exc.errno != errno.EADDRINUSE:
            raise ConfigError(
                f"worker.host and worker.port must be free to bind, got {show_address(asked, port)} ({exc.strerror})"
            ) from None
        raise ConfigError(
            f"worker.port must be free, but something listens on {show_address(asked, port)} already: end it or "
            "choose another with worker.port=N (0 lets the system choose)"
        ) from None
    return sock


def bound_address(sock: socket.socket) -> tuple[str, int]:
    """Host and port of a bound socket; an address of one link keeps its network card, as in `fe80::1%eth0`."""
    host, port = socket.getnameinfo(sock.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    return host, int(port)

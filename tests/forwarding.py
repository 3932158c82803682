"""An address whose connections are led on to a port that may change: one machine's name, and whoever bears it now."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

_PIECE_BYTES = 1 << 16


@dataclass
class Address:
    """A port of this machine that leads to another one.

    Attributes:
        leads_to: where connections are led from now on; those that are open stay where they are.
    """

    leads_to: int
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _open: list[socket.socket] = field(default_factory=list)

    @property
    def port(self) -> int:
        """The port."""
        return int(self._listener.getsockname()[1])

    def serve(self) -> None:
        """Leads connections on until the end."""
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)
                try:
                    far = socket.create_connection(("127.0.0.1", self.leads_to))
                except OSError:
                    near.close()
                    continue
                self._open.append(far)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=ends, daemon=True).start()

    def end(self) -> None:
        """Ends all connections."""
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def forwarded(port: int) -> Iterator[Address]:
    """Lends an address that leads to a port."""
    address = Address(port)
    thread = threading.Thread(target=address.serve, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        address.end()
        thread.join(10)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Passes on what comes until one side has ended; then both have."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            sink.sendall(piece)
    for sock in (source, sink):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

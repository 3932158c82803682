"""A worker's side of probes: what it says about its machine, and the load that it bears while it has no run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from hetero import device as devices
from hetero.errors import ConfigError, RemoteProtocolError
from hetero.interfaces import behind_nat, card_of, system_name
from hetero.link_test import MAX_BYTES, Push, measured
from hetero.transport.identity import Identity
from hetero.transport.link import Closed, Link, Received
from hetero.transport.tcp import TcpTransport
from hetero.versions import versions
from hetero.wire.headers import (
    About,
    Draw,
    Echo,
    Fault,
    FrameType,
    Header,
    Load,
    Measure,
    Measured,
    Rate,
    Reject,
    Welcome,
)

MAX_PROBES = 8  # at a time
SILENCE_S = 15.0
BUSY = "is busy with a run"
_OTHER = "bears the load of another test just now; try again"


@dataclass
class _State:
    """What a probe has had so far."""

    loaded: int = 0
    draws: int = 0
    measuring: bool = False
    push: Push | None = None


class Probes:
    """The probes that are connected to a worker; called on I/O threads, under the server's lock.

    Args:
        identity: of this process.
        instance: of this process.
        device: that this worker lends, as configured.
        is_busy: whether it has a run; then it says what it is, and bears no load.
    """

    def __init__(self, identity: Identity, instance: str, device: str, is_busy: Callable[[], bool]) -> None:
        self._identity, self._instance, self._device, self._is_busy = identity, instance, device, is_busy
        self._states: dict[Link, _State] = {}
        self._loaded_by: Link | None = None  # one test at a time, since two would share the line
        self._lock = threading.RLock()

    def admit(self, link: Link) -> None:
        """Welcomes a probe, and tells it about this machine."""
        with self._lock:
            if len(self._states) >= MAX_PROBES:
                link.send(FrameType.REJECT, Reject(f"has {MAX_PROBES} probes already; try again", permanent=False))
                link.close()
                return
            self._states[link] = _State()
        link.set_silence(SILENCE_S)
        link.send(FrameType.WELCOME, Welcome(instance=self._instance, versions=versions()))
        # A card may take a second to be asked for the first time, which is too long for an I/O thread.
        threading.Thread(target=self._tell_about, args=(link,), name="about", daemon=True).start()

    def takes(self, event: Received | Closed) -> bool:
        """Handles what comes from a probe; False for other connections."""
        with self._lock:
            if event.link not in self._states:
                return False
            if isinstance(event, Closed):
                self._forget(event.link)
                return True
            try:
                self._received(event.link, event.frame.type, event.frame.header, event.frame.payload.nbytes)
            except RemoteProtocolError as exc:
                self._refuse(event.link, str(exc))
        return True

    def end(self, reason: str) -> None:
        """Ends all probes, since the line is needed for a run."""
        with self._lock:
            for link in [*self._states]:
                self._refuse(link, reason)

    def _received(self, link: Link, type_: FrameType, header: Header, num_bytes: int) -> None:
        state = self._states[link]
        if isinstance(header, Echo):
            link.send(FrameType.ECHO, header)
        elif type_ is FrameType.LOADED and isinstance(header, Load):
            if state.push is None:
                raise RemoteProtocolError("LOADED came before any load")
            state.push.loaded(header)
        elif type_ is FrameType.LOAD and isinstance(header, Load):
            state.loaded += num_bytes
            if state.loaded > MAX_BYTES:
                raise RemoteProtocolError(f"a probe may send {MAX_BYTES} bytes of load")
            if self._may_load(link):
                link.send(FrameType.LOADED, header)
        elif isinstance(header, Draw):
            state.draws += 1
            if state.draws > 1:
                raise RemoteProtocolError("a probe may draw once")
            if self._may_load(link):
                state.push = Push(link, lambda count, seconds: self._drawn(link, count, seconds), header.num_bytes)
                state.push.start()
        elif isinstance(header, Measure):
            self._measure(link, header)

    def _drawn(self, link: Link, num_bytes: int, seconds: float) -> None:
        link.send(FrameType.RATE, Rate(num_bytes, seconds))
        if self._loaded_by is link:
            self._loaded_by = None

    def _may_load(self, link: Link) -> bool:
        """Whether this probe may have the line now; it is told and ended if not."""
        why = self._why_not(link)
        if why:
            self._refuse(link, why)
        else:
            self._loaded_by = link
        return not why

    def _why_not(self, link: Link) -> str:
        if self._is_busy():
            return BUSY
        return _OTHER if self._loaded_by not in (None, link) else ""

    def _measure(self, link: Link, wanted: Measure) -> None:
        if why := self._why_not(link):
            link.send(FrameType.MEASURED, Measured(error=why))
            return
        if self._states[link].measuring:
            raise RemoteProtocolError("MEASURE came before the answer to the last one")
        self._states[link].measuring = True
        self._loaded_by = link

        def run() -> None:
            answer = measured(TcpTransport(identity=self._identity), wanted.host, wanted.port)
            with self._lock:
                if link in self._states:
                    self._states[link].measuring = False
                if self._loaded_by is link:
                    self._loaded_by = None
            link.send(FrameType.MEASURED, answer)

        threading.Thread(target=run, name="measure", daemon=True).start()

    def _refuse(self, link: Link, reason: str) -> None:
        link.send_last(FrameType.ERROR, Fault(reason=reason[:2000]))
        link.close()
        self._forget(link)

    def _forget(self, link: Link) -> None:
        self._states.pop(link, None)
        if self._loaded_by is link:
            self._loaded_by = None

    def _tell_about(self, link: Link) -> None:
        own_host, seen_host = link.ends()
        card = card_of(own_host)
        name, text, memory = describe_device(self._device)
        about = About(
            busy=self._is_busy(),
            device=name,
            device_name=text,
            memory_bytes=memory,
            system=system_name()[:500],
            card=card.name[:500],
            kind=card.kind,
            speed_mbit=card.speed_mbit,
            own_host=own_host,
            seen_host=seen_host,
            behind_nat=behind_nat(own_host),
        )
        link.send(FrameType.ABOUT, about)


def describe_device(name: str) -> tuple[str, str, int]:
    """A device's name, what it is, and its memory; where this machine lacks it, why stands for what it is."""
    try:
        found = devices.resolve(name)
    except ConfigError as exc:
        return name, str(exc)[:500], 0
    return str(found), found.description()[:500], found.total_memory_bytes()

"""Simulated processes and the connections between them: order, delay, what a fault takes away, silence."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from hetero.control import (
    Peer,
)
from hetero.errors import PeerError
from hetero.wire.frames import Frame
from hetero.wire.headers import (
    Fault,
    FrameType,
    Hello,
    Reason,
    Reject,
    Welcome,
)

if TYPE_CHECKING:
    from simulation import Simulation

T = FrameType
CONNECT_S, IO_S, WAIT_S = 60.0, 15.0, 600.0  # transport.connect_timeout_s, transport.io_timeout_s, recovery.wait_s
DIAL_NEXT_S, RETRY_S = 10.0, 0.5
NOTHING = memoryview(b"")

Wait = Generator[Any, Any, Any]


class Inbox:
    """As `hetero.inbox.Inbox`."""

    def __init__(self, owner: Process) -> None:
        self.owner = owner
        self.events: list[Any] = []
        self.failure: PeerError | None = None

    def put(self, event: Any) -> None:
        self.events.append(event)
        self.owner.poke()

    def fail(self, error: PeerError) -> None:
        if self.failure is None:
            self.failure = error
        self.owner.poke()


class Get:
    """A wait for an event in an inbox; a Sleep is one that nothing but its time ends."""

    __slots__ = ("despite_failure", "inbox", "match", "timeout_s")

    def __init__(
        self,
        inbox: Inbox | None,
        match: Callable[[Any], bool],
        timeout_s: float | None = None,
        *,
        despite_failure: bool = False,
    ) -> None:
        self.inbox, self.match, self.timeout_s, self.despite_failure = inbox, match, timeout_s, despite_failure


def sleep(seconds: float) -> Get:
    return Get(None, bool, seconds)


class Process:
    """Runs a generator, gets what connections bring; may be killed, frozen and woken."""

    def __init__(self, sim: Simulation, name: str, stage: int) -> None:
        self.sim, self.name, self.stage = sim, name, stage
        self.alive, self.frozen = True, False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.ends: dict[End, None] = {}
        self._program: Wait | None = None
        self._waits: Get | None = None
        self._round = 0
        self._poked = False

    def start(self, program: Wait) -> None:
        self._program = program
        self._advance(program.send, None)

    def poke(self) -> None:
        """Something may have come for whom this process waits."""
        wait = self._waits
        if self._poked or wait is None or wait.inbox is None:
            return
        if not wait.inbox.events and (wait.inbox.failure is None or wait.despite_failure):
            return
        self._poked = True
        self.sim.after(self.sim.moment(), self, self._look)

    def _look(self) -> None:
        self._poked = False
        wait = self._waits
        if wait is None or wait.inbox is None:
            return
        inbox = wait.inbox
        for position, event in enumerate(inbox.events):
            if wait.match(event):
                del inbox.events[position]
                self._resume(event)
                return
        if inbox.failure is not None and not wait.despite_failure:
            self._resume(inbox.failure)

    def _late(self, round_: int) -> None:
        wait = self._waits
        if wait is None or round_ != self._round:
            return
        if wait.inbox is None:
            self._resume(None)
            return
        self._look()
        if self._waits is wait:
            self._resume(TimeoutError())

    def _resume(self, what: Any) -> None:
        program = self._program
        assert program is not None
        self._waits = None
        self._advance(program.throw if isinstance(what, BaseException) else program.send, what)

    def _advance(self, go: Callable[[Any], Get], what: Any) -> None:
        self._round += 1
        try:
            self._waits = go(what)
        except StopIteration:
            self.gone(quiet=False)
            return
        if not self.alive:
            return
        if self._waits.timeout_s is not None:
            self.sim.after(self._waits.timeout_s, self, self._late, self._round)
        self.poke()

    def gone(self, *, quiet: bool) -> None:
        """Ends at once; `quiet` where nobody is told by a kernel, as when the power fails."""
        self.alive = False
        self._waits, self._program = None, None
        for end in [*self.ends]:
            end.cut(quiet)

    def on_frame(self, end: End, frame: Frame) -> None:
        raise NotImplementedError

    def on_closed(self, end: End, reason: str) -> None:
        raise NotImplementedError

    def awaits_state(self, end: End) -> bool:
        raise NotImplementedError


CLOSING = object()
REPLAYED = (T.SYNC, T.SYNCED, T.STATE, T.READY, T.APPLY, T.GATHER, T.STEP)


class End:
    """One side of a connection."""

    def __init__(self, owner: Process, epoch: tuple[str, int]) -> None:
        self.owner, self.epoch = owner, epoch
        self.other: End
        self.is_open = True
        self.welcomed = False  # HELLO is answered
        self.deaf = False  # nothing arrives here any more
        self.about: Any = None  # the stage, or the session, that it belongs to
        self.session: Any = None
        self.queue: deque[Any] = deque()  # on the way to here
        self.said: deque[Frame] = deque()  # what was lately said to here, on this connection or one before it
        self._last_at = 0.0
        owner.ends[self] = None

    def send(self, type_: FrameType, header: Any, payload: memoryview = NOTHING) -> None:
        if self.is_open:
            self._put(Frame(type_, header, payload))

    def send_last(self, type_: FrameType, header: Any) -> None:
        """Its frames that have not left yet are dropped."""
        if self.is_open:
            self.other.lose_some()
            self._put(Frame(type_, header, NOTHING))

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            del self.owner.ends[self]
            self._put(CLOSING)

    def cut(self, quiet: bool) -> None:
        """This side's process has died."""
        self.is_open = False
        del self.owner.ends[self]
        self.other.lose_some()
        if quiet:
            self.other.become_deaf()
        else:
            self._put(CLOSING)

    def reset(self) -> None:
        """The connection breaks here."""
        if self.is_open:
            self.lose_some()
            self.owner.sim.after(self.owner.sim.delay(), self.owner, self._over, "connection reset by peer")

    def become_deaf(self) -> None:
        """From now on nothing arrives, and nobody says so."""
        self.deaf = True
        self.queue.clear()
        self.watch()

    def watch(self) -> None:
        """Silence begins; whoever is to say WELCOME may be silent, and only the kernel notices after a while."""
        sim = self.owner.sim
        limit_s = IO_S if self.welcomed else 2 * IO_S
        sim.after(limit_s + 2 * sim.rng.random(), self.owner, self._silent)

    def _silent(self) -> None:
        if self.is_open and (self.deaf or (self.other.owner.frozen and self.welcomed)):
            self._over(f"silent for {IO_S:g} s")

    def lose_some(self) -> None:
        """The last frames on their way to here do not arrive."""
        for _ in range(self.owner.sim.rng.randrange(len(self.queue) + 1)):
            self.queue.pop()

    def _put(self, what: Any) -> None:
        other, sim = self.other, self.owner.sim
        if other.deaf or not other.owner.alive:
            return
        late = []
        if what is not CLOSING:
            if what.type in REPLAYED:
                other.said.append(what)
            if what.type is not T.STATE:  # decisions about steps pass it
                while other.queue and other.queue[-1] is not CLOSING and other.queue[-1].type is T.STATE:
                    late.append(other.queue.pop())
        other.queue.append(what)
        other.queue.extend(reversed(late))
        other._last_at = max(other._last_at, sim.now + sim.delay())
        sim.at(other._last_at, other.owner, other.deliver)

    def deliver(self) -> None:
        """The next frame arrives."""
        if not self.queue or not self.is_open:
            return
        what = self.queue.popleft()
        if what is CLOSING:
            self._over("closed the connection")
            return
        if what.type is T.WELCOME:
            self.welcomed = self.other.welcomed = True
            sim = self.owner.sim
            for end in (self, self.other):
                end.said = sim.said.setdefault(
                    (end.owner.stage, end.other.owner.stage, end.about == "link"), deque(maxlen=6)
                )
        self.owner.on_frame(self, what)

    def deliver_again(self, frame: Frame) -> None:
        """A frame of before comes once more; a piece of state only where none is asked for, since it has no name."""
        if self.is_open and not (frame.type is T.STATE and self.owner.awaits_state(self)):
            self.owner.on_frame(self, frame)

    def _over(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self.owner.on_closed(self, reason)


# --- links between neighbours ------------------------------------------------------------------------------------


def connect(process: Process, stage: int, epoch: tuple[str, int], give_up_at: float) -> Wait:
    """Dials again and again while nobody listens there; None when it is too late."""
    sim = process.sim
    while (end := sim.connect(process, stage, epoch)) is None:
        if sim.now + RETRY_S >= give_up_at:
            return None
        yield sleep(RETRY_S)
    return end


def open_link(process: Process, inbox: Inbox, peer: Peer, run_id: str, epoch: int) -> Wait:
    """As `neighbours.open_link`."""
    end = yield from connect(process, peer.stage, (run_id, epoch), process.sim.now + DIAL_NEXT_S)
    if end is None:
        raise peer.error("no connection", lost=True)
    end.about, end.session = "link", (inbox, peer)
    answers = Inbox(process)
    end.answers = answers
    end.send(T.HELLO, Hello("link", run_id, epoch, peer.stage, "c", {}))
    try:
        answer = yield Get(answers, lambda _: True, CONNECT_S)
    except TimeoutError:
        answer = None
    if inbox.failure is not None:
        end.close()
        raise inbox.failure
    if answer is None or isinstance(answer, Reject | str):
        end.close()
        if isinstance(answer, Reject):
            raise peer.error(f"refused the link: {answer.reason}", lost=not answer.permanent)
        raise peer.error("gave no answer to the link's HELLO", lost=True)
    return end


def link_frame(end: End, frame: Frame) -> None:
    """A frame on a link that this side dialled."""
    inbox, peer = end.session
    if isinstance(frame.header, Reject | Welcome):
        end.answers.put(frame.header)
    else:
        pass_on(frame, inbox, peer)


def link_closed(end: End, reason: str) -> None:
    inbox, peer = end.session
    inbox.fail(peer.error(reason, lost=True))
    end.answers.put("closed")


def pass_on(frame: Frame, inbox: Inbox, peer: Peer) -> None:
    """As `neighbours.pass_on`."""
    header: Any = frame.header
    if not isinstance(header, Fault):
        inbox.put(frame)
    elif header.stage is None:
        inbox.fail(peer.error(header.reason, header.step, lost=header.lost))
    else:
        inbox.fail(PeerError(header.reason, stage=header.stage, step=header.step, lost=header.lost))


def is_frame(event: Any, type_: FrameType, step: int) -> bool:
    return isinstance(event, Frame) and event.type is type_ and event.header.step == step  # type: ignore[attr-defined]


def is_end(event: Any) -> bool:
    return isinstance(event, Frame) and isinstance(event.header, Reason)

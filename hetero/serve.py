"""A worker's listening side: judges every HELLO, and lends the session that results to the compute thread."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable

from hetero.control import Membership, Peer, judge_hello
from hetero.errors import ConfigError, HeteroError, PeerError
from hetero.inbox import Inbox
from hetero.neighbours import flow_at_boundary, named
from hetero.probes import Probes
from hetero.spec import RunSpec
from hetero.stopping import signals_ask
from hetero.transport.identity import Identity
from hetero.transport.link import Closed, Link, Received
from hetero.transport.tcp import TcpTransport, tune
from hetero.wire.headers import (
    Fault,
    FrameType,
    Hello,
    Reject,
    Welcome,
)
from hetero.wire.messages import CommandTable, Message
from hetero.worker_session import SessionOver, WorkerSession

log = logging.getLogger(__name__)

HELLO_S = 5.0
MAX_WAITING = 32  # connections that have not said HELLO yet
MAX_WAITING_AN_ADDRESS = 8
SAY_AGAIN_S = 10.0
ACCEPT_AGAIN_S = 0.1


Work = Callable[[WorkerSession], None]


class WorkerServer:
    """Listens, judges HELLOs on the I/O side, and runs one session at a time on the calling thread.

    Args:
        listener: bound and listening; this object owns it.
        make_transport: the transport of a run, from its spec.
        identity: of this process; whoever has another gets no further than the handshake.
        commands: functions for messages that coordinators send.
        device: what a probe is told of; see `Probes`.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_transport: Callable[[RunSpec], TcpTransport],
        identity: Identity,
        commands: CommandTable | None = None,
        device: str = "auto",
    ) -> None:
        self._listener, self._make_transport = listener, make_transport
        self._commands = commands or CommandTable()
        self._instance = uuid.uuid4().hex
        self._sessions = Inbox()
        self._lock = threading.RLock()
        self._current: WorkerSession | None = None
        self._waiting: set[Link] = set()
        self._default = TcpTransport(identity=identity)
        self._probes = Probes(identity, self._instance, device, lambda: self._current is not None)
        self._stopping = self._asked_stop = False
        self._strangers = 0
        self._said_at = -math.inf

    def serve(self, work: Work, ended: Callable[[bool], None] = lambda _: None, *, once: bool = False) -> bool:
        """Runs session after session until interrupted; with `once` ends after the first run.

        Args:
            work: what a session is about.
            ended: called after each session, with whether its run is over, as far as this worker knows.
            once: for one run.

        A signal during a session asks the coordinator to end the run, and this worker ends with it.

        Returns:
            Whether the last session ended without a fault.
        """
        thread = threading.Thread(target=self._accept, name="accept", daemon=True)
        thread.start()
        try:
            while True:
                session = self._sessions.get(lambda e: isinstance(e, WorkerSession))
                with signals_ask(functools.partial(self._ask_stop, session)):
                    over, ok = self._run(session, work)
                ended(over)
                if self._asked_stop or (once and over):
                    return ok
        finally:
            self._stopping = True
            with contextlib.suppress(OSError):  # not connected, as macOS says; Linux wakes the accept
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            with self._lock:
                leftover, session = [*self._waiting], self._current
            self._probes.end("this worker was ended")
            for link in leftover:
                link.close(flush=False)
            if session is not None:
                session.end(Fault(reason="this worker was ended"))

    def _ask_stop(self, session: WorkerSession, signal_name: str) -> bool:
        self._asked_stop = session.ask_stop(f"{signal_name} at stage {session.member.stage}")
        if self._asked_stop:
            log.info("%s: asking the coordinator to end the run after this step", signal_name)
        return self._asked_stop

    def _run(self, session: WorkerSession, work: Work) -> tuple[bool, bool]:
        """One session; whatever happens in it, the worker listens again afterwards.

        Returns:
            Whether the run is over, as far as this worker knows, and whether there was no fault.
        """
        member = session.member
        log.info("run %s: this worker is stage %d of %d", member.run_id, member.stage, len(session.spec.stages))
        over, fault = self._work(session, work)
        session.end(fault)
        with self._lock:
            self._current = None
        return over, fault is None

    @staticmethod
    def _work(session: WorkerSession, work: Work) -> tuple[bool, Fault | None]:
        run_id = session.member.run_id
        try:
            work(session)
        except SessionOver as over:
            log.info("run %s ended: %s", run_id, over)
            return not over.again, None
        except PeerError as exc:
            # A neighbour may close its link before the coordinator's word that the run is over arrives here.
            if (end := session.end_announced()) is not None:
                log.info("run %s ended: %s", run_id, end.reason)
                return not end.again, None
            log.error("run %s: %s", run_id, exc)
            fault = Fault(
                reason=exc.reason[:2000], stage=exc.stage, host=exc.host, port=exc.port, step=exc.step, lost=exc.lost
            )
            return not exc.lost, fault
        except HeteroError as exc:
            log.error("run %s: %s", run_id, exc)
            return True, Fault(reason=str(exc)[:2000])
        except Exception as exc:
            log.exception("run %s: a defect of this program", run_id)
            return True, Fault(reason=" ".join(f"{type(exc).__name__}: {exc}".split())[:2000])
        return True, None

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError as exc:
                if self._stopping or self._listener.fileno() < 0:
                    return
                log.warning("a connection could not be accepted: %s", exc.strerror)
                time.sleep(ACCEPT_AGAIN_S)  # out of file descriptors, most likely
                continue
            with self._lock:
                from_there = sum(link.name == str(address[0]) for link in self._waiting)
                if len(self._waiting) >= MAX_WAITING or from_there >= MAX_WAITING_AN_ADDRESS or self._stopping:
                    sock.close()
                    continue
                transport = self._current.transport if self._current is not None else self._default
                try:
                    tune(sock)
                    link = transport.link(
                        sock, dialler=False, deliver=self._on_first_event, name=str(address[0]), silence_s=HELLO_S
                    )
                except OSError:  # the peer has reset the connection already
                    sock.close()
                    continue
                self._waiting.add(link)
            link.start()

    def _on_first_event(self, event: Received | Closed) -> None:
        """Everything that comes before a connection has a place in a session."""
        with self._lock:
            link = event.link
            if self._probes.takes(event):
                return
            if isinstance(event, Closed):
                if link in self._waiting:
                    self._waiting.discard(link)
                    self._tell_of_stranger(link.name, event.error)
                    return
                self._on_session_event(event)
                return
            if link not in self._waiting:
                self._on_session_event(event)
                return
            self._waiting.discard(link)
            hello = event.frame.header
            if not isinstance(hello, Hello):
                self._tell_of_stranger(link.name, PeerError(f"sent {event.frame.type.name} first"))
                link.close(flush=False)
                return
            if hello.purpose == "probe":
                self._probes.admit(link)
                return
            try:
                rejection = self._admit(link, hello, event.frame.payload)
            except ConfigError as exc:
                rejection = Reject(reason=str(exc)[:2000], permanent=True)
            if rejection is not None:
                log.warning("refused %s from %s: %s", hello.purpose, link.name, rejection.reason)
                link.send(FrameType.REJECT, rejection)
                link.close()

    def _tell_of_stranger(self, name: str, error: HeteroError | None) -> None:
        """Says that a connection ended before HELLO; of many, now and then one with their number."""
        self._strangers += 1
        now = time.monotonic()
        if now - self._said_at >= SAY_AGAIN_S:
            log.warning("a connection from %s (of %d lately) ended before HELLO: %s", name, self._strangers, error)
            self._said_at, self._strangers = now, 0

    def _admit(self, link: Link, hello: Hello, payload: memoryview) -> Reject | None:
        """Gives a connection its place; the reason if it gets none."""
        current = self._current
        taken = current is not None and current.is_linked(hello.purpose)
        rejection = judge_hello(current.member if current else None, hello, link_taken=taken)
        if rejection is not None:
            return rejection
        if hello.purpose != "control":
            assert current is not None
            boundary = hello.stage - 1 if hello.purpose == "link" else hello.stage
            if boundary >= len(current.spec.boundary_dtypes):
                return Reject(reason="the last stage has no stage after it", permanent=True)
            link.connection.flow = flow_at_boundary(current.spec, boundary)
            link.set_silence(current.transport.io_timeout_s)
            link.send(FrameType.WELCOME, Welcome(instance=self._instance, versions={}))
            current.adopt(link, hello.purpose)
            return None
        spec = RunSpec.from_json(bytes(payload))
        if hello.stage >= len(spec.stages):
            return Reject(reason=f"the plan has {len(spec.stages)} stages, got stage {hello.stage}", permanent=True)
        if current is not None:  # the same run at a higher epoch: the old session is over
            current.inbox.fail(PeerError(f"epoch {hello.epoch} began", stage=0, lost=True))
            return Reject(reason="ending the epoch before", permanent=False)
        session = WorkerSession(
            spec,
            Membership(hello.run_id, hello.epoch, hello.stage),
            Inbox(),
            self._make_transport(spec),
            link,
            self._instance,
        )
        link.set_silence(session.transport.io_timeout_s)
        self._current = session
        self._probes.end("a run began on this worker")
        self._sessions.put(session)
        return None

    def _on_session_event(self, event: Received | Closed) -> None:
        session = self._current
        if session is None or event.link not in (session.control, session.upstream, session.downstream):
            return
        if event.link is session.control:
            who = Peer(0, "the coordinator", 0)
        else:
            who = self._stage(session, session.member.stage + (1 if event.link is session.downstream else -1))
        if isinstance(event, Closed):
            if event.error is not None:
                session.inbox.fail(named(event.error, who))
        elif event.frame.type is FrameType.CONTROL:
            try:
                self._commands.dispatch(Message.of(event.frame.header))  # type: ignore[arg-type]
            except HeteroError as exc:
                session.inbox.fail(who.error(str(exc)))
        else:
            session.received(event, who)

    @staticmethod
    def _stage(session: WorkerSession, stage: int) -> Peer:
        if stage == 0:
            return Peer(0, "the coordinator", 0)
        entry = session.spec.workers[stage - 1]
        return Peer(stage, entry.host, entry.port)

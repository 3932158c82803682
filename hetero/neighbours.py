"""Links between neighbouring stages: how one is dialled, what it may carry, and whose fault its end is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hetero.control import Peer, told_by
from hetero.errors import HeteroError, PeerError
from hetero.inbox import Inbox
from hetero.schedule import evaluation_policy, policy_for
from hetero.spec import RunSpec
from hetero.transport.link import Closed, Link, Received
from hetero.transport.tcp import ADVICE, TcpTransport
from hetero.wire.flow import LinkFlow
from hetero.wire.generation_flow import GenerationFlow
from hetero.wire.headers import Fault, FrameType, Hello, Reason, Reject


def flow_at_boundary(spec: RunSpec, boundary: int) -> LinkFlow:
    """What the link between stages `boundary` and `boundary + 1` may carry."""
    return LinkFlow(
        hidden_size=spec.hidden_size,
        dtype=spec.boundary_dtypes[boundary],
        max_rows=spec.loop.microbatch_size,
        max_length=spec.max_length,
        in_flight_cap=lambda num_microbatches: (
            policy_for(
                spec.schedule.name, boundary, len(spec.stages), num_microbatches, spec.schedule.max_in_flight
            ).in_flight_cap
        ),
        num_experts=spec.router_loss.num_experts if spec.router_loss is not None else 0,
        max_eval_rows=spec.loop.eval_rows,
        eval_cap=evaluation_policy(spec.schedule.max_in_flight).in_flight_cap,
        generation=generation_flow_at_boundary(spec, boundary),
    )


def generation_flow_at_boundary(spec: RunSpec, boundary: int) -> GenerationFlow | None:
    """What that link may carry of generation; None in a run that generates nothing."""
    if spec.generation is None:
        return None
    return GenerationFlow(
        hidden_size=spec.hidden_size,
        dtype=spec.boundary_dtypes[boundary],
        max_rows=spec.generation.batch_size,
        max_length=spec.generation.max_length,
    )


def open_link(
    transport: TcpTransport,
    peer: Peer,
    hello: Hello,
    flow: LinkFlow,
    inbox: Inbox,
    on_frame: Callable[[Received], None] | None = None,
    *,
    give_up_at: float | None = None,
    advice: str = ADVICE,
) -> Link:
    """Dials the link to the next stage and waits for its WELCOME.

    Its frames go to `on_frame`, or else to the inbox; its end, unless this side closed it, is the inbox's failure.

    Raises:
        PeerError: it cannot be reached, refuses, or gives no answer.
    """
    opened = threading.Event()
    refusal: list[Reject] = []

    def deliver(event: Received | Closed) -> None:
        if isinstance(event, Closed):
            if event.error is not None:
                inbox.fail(named(event.error, peer))
            opened.set()
        elif isinstance(event.frame.header, Reject):
            refusal.append(event.frame.header)
            opened.set()
        elif event.frame.type is FrameType.WELCOME:
            opened.set()
        elif on_frame is not None:
            on_frame(event)
        else:
            pass_on(event, inbox, peer)

    sock = transport.dial(peer.host, peer.port, stage=peer.stage, give_up_at=give_up_at, advice=advice)
    link = transport.link(
        sock, dialler=True, deliver=deliver, name=f"stage {peer.stage}", silence_s=transport.io_timeout_s
    )
    link.connection.flow = flow
    link.send(FrameType.HELLO, hello)
    link.start()
    answered = opened.wait(transport.connect_timeout_s)
    if failure := inbox.failure():
        link.close()
        raise failure
    if refusal or not answered:
        link.close()
        if refusal:
            # A worker that is in no session any more has lost its coordinator, or is another process by now.
            raise peer.error(f"refused the link: {refusal[0].reason}", lost=not refusal[0].permanent)
        raise peer.error("gave no answer to the link's HELLO", lost=True)
    return link


def pass_on(event: Received, inbox: Inbox, peer: Peer) -> None:
    """A neighbour's frame: an ERROR is the session's failure, all else is for compute."""
    if isinstance(event.frame.header, Fault):
        inbox.fail(told_by(peer, event.frame.header))
    else:
        inbox.put(event)


def named(error: HeteroError, peer: Peer) -> PeerError:
    """A connection's error with the peer's name on it."""
    if isinstance(error, PeerError):
        return peer.error(error.reason, lost=error.lost)
    return peer.error(str(error))


def is_end(event: Any) -> bool:
    """True for a coordinator's STOP or ABORT."""
    return isinstance(event, Received) and isinstance(event.frame.header, Reason)

"""A worker's part of a run: build, link up, then do what the coordinator decides until it says stop."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hetero import registry, store
from hetero.adapter_files import PART_FOLDER, part_of_stage, save_adapter, shapes_digest
from hetero.awake import kept_awake
from hetero.errors import PeerError, show_address
from hetero.failpoints import hit
from hetero.fingerprint import fingerprint
from hetero.folders import models_cache
from hetero.generation import batch_of, serve_batch
from hetero.machines import hardware_line, name_or_address
from hetero.member import Member, check_device
from hetero.runtime import StepPlan, step_plan_of
from hetero.serve import WorkerServer
from hetero.spec import RunSpec, WorkerSpec
from hetero.training_state import adapter_of
from hetero.transport.addresses import HOW_TO_PAIR, parse
from hetero.transport.identity import Identity, identity_of
from hetero.transport.link import Received
from hetero.transport.listening import Listening, bound_address
from hetero.transport.tcp import TcpTransport
from hetero.watchdog import Progress, Watchdog
from hetero.wire.headers import FrameType, Gather, Prompt, Synced
from hetero.wire.spans import pack_spans
from hetero.wire.tensors import NAMES, as_bytes
from hetero.worker_session import WorkerSession

log = logging.getLogger(__name__)


def serve(
    worker: WorkerSpec,
    listening: Listening,
    *,
    outputs: Path,
    allow_targets: Sequence[str] = (),
    announce: Callable[[str, int], None] | None = None,
) -> bool:
    """Serves run after run until interrupted.

    Args:
        worker: what this machine's configuration says.
        listening: where it listens, and for whom.
        outputs: where the worker keeps its latest part of an adapter.
        allow_targets: this machine's additions to the allow list.
        announce: called with the bound host and port; None prints how to reach this worker instead.
    """
    identity = identity_of(listening.secret)
    host, port = bound_address(listening.sock)

    def make_transport(spec: RunSpec) -> TcpTransport:
        return make_transport_of(spec, allow_targets, identity)

    builder = StageBuilder(worker, allow_targets)

    def work(session: WorkerSession) -> None:
        work_on(session, builder, outputs / f"worker-{port}")

    server = WorkerServer(listening.sock, make_transport, identity, device=worker.device)
    log.info("listening on %s (Ctrl-C ends)", show_address(host, port))
    if announce is None:
        _say_how_to_reach(host, port, listening.paired)
    else:
        announce(host, port)
    return server.serve(work, lambda over: builder.ended(over=over), once=worker.once)


def _say_how_to_reach(host: str, port: int, paired: bool) -> None:
    address = parse(host)
    if address.is_loopback:
        remedy = "worker.host=ADDRESS, this machine's in your network" if paired else HOW_TO_PAIR
        log.info("only this machine can connect; to let others: %s", remedy)
    elif address.is_unspecified:
        host = "ADDRESS"  # any of this machine's
    else:
        host = name_or_address(host)
    log.info("on the coordinator: %s", hardware_line(host, port))


def make_transport_of(spec: RunSpec, allow_targets: Sequence[str], identity: Identity) -> TcpTransport:
    """The transport object of a spec."""
    t = spec.transport
    build = registry.build("transport", t.target, allow_targets)
    return build(  # type: ignore[no-any-return]
        topology=t.topology,
        connect_timeout_s=t.connect_timeout_s,
        io_timeout_s=t.io_timeout_s,
        wire_dtype=t.wire_dtype,
        max_frame_bytes=t.max_frame_bytes,
        identity=identity,
    )


def locate_model(spec: RunSpec, index: int, models_dir: str | None) -> Path:
    """Where this machine has what stage `index` needs of a run's model, or is to have it when it comes from the hub.

    Names from a peer are looked up, never opened as paths.

    Raises:
        ConfigError: it is not here.
    """
    layers = spec.stages[index].start, spec.stages[index].end
    folder = Path(models_dir).expanduser() if models_dir else models_cache()
    if spec.local_model:
        return store.find_by_name(spec.model.path, folder, layers)
    return store.find_weights(
        spec.model.path, revision=spec.model.revision, commit=spec.commit, layers=layers, local_paths=False
    )


class StageBuilder:
    """Builds this worker's stage, and keeps it for the same run's next session, which a fault may make necessary.

    Args:
        worker: what this machine's configuration says.
        allow_targets: this machine's additions to the allow list.
    """

    def __init__(self, worker: WorkerSpec, allow_targets: Sequence[str]) -> None:
        self.worker, self._allow_targets = worker, allow_targets
        self._kept: tuple[tuple[str, str, int], Member] | None = None

    def build(self, session: WorkerSession, model_path: Path, progress: Progress) -> Member:
        """The stage that a session needs, new or as the last session left it; `progress` is told what it does."""
        spec, index = session.spec, session.member.stage
        key = (session.member.run_id, spec.digest(), index)
        if self._kept is not None and self._kept[0] == key:
            self._kept[1].progress = progress
            return self._kept[1]
        self._kept = None  # before another one is built: two may not fit
        member = Member(
            spec,
            index,
            model_path=model_path,
            device_name=self.device_name(session),
            allow_targets=self._allow_targets,
            progress=progress,
            check=session.raise_if_over,
        )
        self._kept = key, member
        return member

    def device_name(self, session: WorkerSession) -> str:
        """The device where the plan names none: this machine's own word, else the coordinator's about it."""
        own = self.worker.device
        return own if own != "auto" else session.spec.workers[session.member.stage - 1].device

    def ended(self, *, over: bool) -> None:
        """A session has ended: with its run over, the stage goes, and its memory back to the system."""
        if not over or self._kept is None:
            return
        device = self._kept[1].stage.device
        self._kept = None
        gc.collect()  # modules and their hooks refer to each other
        device.give_back()


def work_on(session: WorkerSession, builder: StageBuilder, folder: Path) -> None:
    """One session from SYNC to its end.

    Raises:
        SessionOver: the coordinator ended it.
        HeteroError: a fault.
    """
    progress = Progress(step_s=session.spec.stuck_s)
    with kept_awake(), Watchdog(progress, session.tell_stuck, _end_process):
        _work_on(session, builder, folder, progress)


def _end_process() -> None:
    """The last resort, since a thread cannot be ended: whoever started this worker may start it again."""
    log.error("ending this worker; start it again")
    os._exit(1)


def _work_on(session: WorkerSession, builder: StageBuilder, folder: Path, progress: Progress) -> None:
    spec, index = session.spec, session.member.stage
    check_device(spec, index, builder.device_name(session))
    model_path = locate_model(spec, index, builder.worker.models_dir)
    model = fingerprint(model_path)
    session.welcome(model)
    hit("worker.welcomed")
    sync = session.wait_sync()
    member = builder.build(session, model_path, progress)
    hit("worker.built")
    model = fingerprint(model_path) | model  # by now all of it is here; what was compared stays as it was
    shapes = {key: list(parameter.shape) for key, parameter in member.stage.trained.items()}
    member.restore(session.wait_state(sync, shapes))
    hit("worker.restored")
    session.connect()
    hit("worker.linked")
    member.connect(session.inbox, session.upstream, session.downstream)
    stage = member.stage
    log.info("layers [%d, %d) on %s", spec.stages[index].start, spec.stages[index].end, stage.device)
    synced = Synced(
        epoch=sync.epoch,
        device=str(stage.device),
        dtype=NAMES[stage.dtype],
        trained=sum(p.numel() for p in stage.trained.values()),
        memory_bytes=stage.device.memory_bytes(),
        adapter=shapes_digest(shapes),
    )
    session.send(FrameType.SYNCED, synced)
    hit("worker.synced")
    keep = folder, model
    while True:
        order = session.next_order()
        if isinstance(order.frame.header, Gather):
            _give_state(session, member, keep, order.frame.header.step)
        elif isinstance(order.frame.header, Prompt):
            _generate(session, member, order)
        else:
            _do_step(session, member, order, keep)


def _do_step(session: WorkerSession, member: Member, order: Received, keep: tuple[Path, dict[str, str]]) -> None:
    plan = step_plan_of(order)
    if plan.evaluation:
        _evaluate(session, member, plan)
        return
    hit("worker.step_begun")
    try:
        ready, norms, work = member.run_step(plan)
        spans = memoryview(pack_spans(work.spans[: ready.num_spans]))
        session.send(FrameType.READY, ready, (as_bytes(norms), spans) if norms.numel() else (spans,))
        hit("worker.ready_sent")
        apply = session.wait_apply()
    except PeerError as exc:
        raise exc.in_step(plan.step) from exc
    hit("worker.decision_here")
    member.apply(apply.step, apply.clip_factor)
    hit("worker.applied")
    if apply.save:
        _give_state(session, member, keep, apply.step)


def _evaluate(session: WorkerSession, member: Member, plan: StepPlan) -> None:
    try:
        session.send(FrameType.READY, member.evaluate(plan))
    except PeerError as exc:
        raise exc.in_step(plan.step) from exc


def _generate(session: WorkerSession, member: Member, order: Received) -> None:
    with member.evaluating():
        serve_batch(
            batch_of(order),
            member.begin_batch,
            session.next_piece,
            lambda header, tokens: session.send(FrameType.CHOSEN, header, (tokens,)),
        )


def _give_state(session: WorkerSession, member: Member, keep: tuple[Path, dict[str, str]], step: int) -> None:
    """Sends a copy of the stage's state, in its own time, and keeps the adapter's part on this machine.

    Args:
        session: the session.
        member: the stage.
        keep: the folder to keep the part in, and the fingerprint of the base model here.
        step: that this is the state after.
    """
    state = member.state()
    hit("worker.state_taken")
    session.send_state(state)
    hit("worker.state_queued")
    if member.stage.adapter is not None:  # without a tensor as well: what lies there may be of another run
        folder, model = keep
        part = part_of_stage(session.spec, session.member.stage, session.member.run_id, step, model)
        save_adapter(folder / PART_FOLDER, member.stage.adapter, adapter_of(state), part)

"""A worker's part of a run: build, link up, then do what the coordinator decides until it says stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hetero import registry, store
from hetero.adapter_files import save_adapter
from hetero.agreement import shapes_digest
from hetero.errors import PeerError, show_address
from hetero.fingerprint import fingerprint
from hetero.folders import models_cache
from hetero.machines import hardware_line, name_or_address
from hetero.member import Member
from hetero.runtime import step_plan_of
from hetero.serve import WorkerServer
from hetero.spec import RunSpec, WorkerSpec
from hetero.transport.addresses import HOW_TO_PAIR, parse
from hetero.transport.identity import Identity, identity_of
from hetero.transport.link import Received
from hetero.transport.listening import Listening, bound_address
from hetero.transport.tcp import TcpTransport
from hetero.wire.headers import FrameType, Gather, Synced
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

    def work(session: WorkerSession) -> None:
        work_on(session, worker, outputs / f"worker-{port}", allow_targets)

    server = WorkerServer(listening.sock, make_transport, identity)
    log.info("listening on %s (Ctrl-C ends)", show_address(host, port))
    if announce is None:
        _say_how_to_reach(host, port, listening.paired)
    else:
        announce(host, port)
    return server.serve(work, once=worker.once)


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


def locate_model(spec: RunSpec, models_dir: str | None) -> str | Path:
    """Where this machine has the model of a run: names from a peer are looked up, never opened as paths.

    Raises:
        ConfigError: it is not here.
    """
    folder = Path(models_dir).expanduser() if models_dir else models_cache()
    if spec.local_model:
        return store.find_by_name(spec.model.path, folder)
    return store.find_weights(spec.model.path, revision=spec.model.revision, local_paths=False)


def work_on(session: WorkerSession, worker: WorkerSpec, folder: Path, allow_targets: Sequence[str]) -> None:
    """One session from SYNC to its end.

    Raises:
        SessionOver: the coordinator ended it.
        HeteroError: a fault.
    """
    spec, index = session.spec, session.member.stage
    model_path = locate_model(spec, worker.models_dir)
    session.welcome(fingerprint(model_path) if isinstance(model_path, Path) else {})
    sync = session.wait_sync()
    member = Member(
        spec,
        index,
        model_path=model_path,
        device_name=_device_of(spec, index, worker),
        allow_targets=allow_targets,
        inbox=session.inbox,
    )
    shapes = {key: list(parameter.shape) for key, parameter in member.stage.trained.items()}
    if tensors := session.wait_state(sync, shapes):
        member.load_state(tensors)
    session.connect()
    member.connect(session.upstream, session.downstream)
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
    while True:
        order = session.next_order()
        if isinstance(order.frame.header, Gather):
            _give_state(session, member, folder)
        else:
            _do_step(session, member, order)


def _device_of(spec: RunSpec, index: int, worker: WorkerSpec) -> str:
    """The worker's own setting wins over the coordinator's list of machines."""
    return worker.device if worker.device != "auto" else spec.workers[index - 1].device


def _do_step(session: WorkerSession, member: Member, order: Received) -> None:
    plan = step_plan_of(order)
    try:
        ready, norms, _ = member.run_step(plan)
        session.send(FrameType.READY, ready, (as_bytes(norms),) if norms.numel() else ())
        apply = session.wait_apply()
    except PeerError as exc:
        if exc.step is None:
            raise PeerError(exc.reason, stage=exc.stage, host=exc.host, port=exc.port, step=plan.step) from exc
        raise
    member.apply(apply.step, apply.clip_factor)


def _give_state(session: WorkerSession, member: Member, folder: Path) -> None:
    """Sends the stage's trained tensors and keeps a copy on this machine."""
    tensors: dict[str, torch.Tensor] = member.stage.state()
    session.send_state(tensors)
    if tensors and member.stage.adapter is not None:
        save_adapter(folder / "adapter-stage", member.stage.adapter, tensors)

"""A run on simulated machines: seeded, single-threaded, thousands of faults a second.

Real: `CoordinatorControl`, `WorkerControl`, `judge_hello`, `Recovery`, and the headers of all frames.

Modelled, each as thinly as it lets itself be said again, in generators that wait where the real code's threads block:
    Coordinator     run.Run.through_all_sessions, session.CoordinatorSession, loop.train, saving.Saver, gathering
    Worker          serve.WorkerServer, work.work_on, worker_session.WorkerSession, neighbours.open_link (chain only)
    Store           checkpoint.CheckpointStore, its commit in one go, and metrics.jsonl
    Wire            transport.SocketLink: order, delay, what is lost with a connection, the deadline for silence
    User            starts again, with resume, what has died
Weights and moments are a hash chain over everything that must decide them: the stage's own, the step, what came
forward and backward from all other stages, and the clip factor; so one wrong weight anywhere shows everywhere.

    python tests/simulation.py --seeds 100000       by hand
    python tests/simulation.py --first 4711         one seed, with what happens in it
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from simulated_coordinator import Coordinator
from simulated_training import Member, Store, Violation, require, uninterrupted
from simulated_wire import End, Process
from simulated_worker import Worker

from hetero.wire.frames import Frame
from hetero.wire.headers import (
    FrameType,
    Reason,
)

T = FrameType
MAX_EVENTS, MAX_SECONDS = 60_000, 40_000.0


class Simulation:
    """One run with its faults, all drawn from one seed."""

    def __init__(self, seed: int, *, max_faults: int = 8, talks: bool = False) -> None:
        self.seed, self.talks = seed, talks
        self.rng = random.Random(seed)
        self.now, self.events = 0.0, 0
        self.faults: Counter[str] = Counter()
        self._queue: list[Any] = []
        self._count = itertools.count()
        self.num_stages = self.rng.choice((3, 3, 4, 5))
        self.num_steps = self.rng.randint(2, 9)
        self.every_steps = self.rng.randint(1, 4)
        self.eval_every = self.rng.randint(1, 5)
        self.slow = self.rng.random() < 0.3  # messages are late now and then
        self.reference = uninterrupted(self.num_stages, self.num_steps)
        self.store = Store()
        self.said: dict[tuple[int, int, bool], deque[Frame]] = {}  # receiver, sender, on a link between neighbours
        self.replayed: set[tuple[str, int]] = set()  # sessions in which a frame came twice
        self.run_numbers = itertools.count(1)
        self.over = False
        self.sessions = self.max_lost = 0
        self._left = self.rng.randint(0, max_faults)
        self._next_fault = 0
        self._draw_next_fault()
        self.processes: list[Process] = []
        self.at_address: dict[int, Worker | None] = {}
        self.coordinator: Coordinator | None = None

    # --- time

    def at(self, when: float, process: Process | None, go: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._queue, (when, next(self._count), process, go, args))

    def after(self, seconds: float, process: Process | None, go: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, process, go, *args)

    def delay(self) -> float:
        """How long a message is on its way."""
        seconds = self.rng.random() * 0.01
        if self.slow and self.rng.random() < 0.03:
            seconds += self.rng.random() * 6
        return seconds

    def moment(self) -> float:
        """How long a thread takes to notice."""
        return self.rng.random() * 0.005

    def say(self, text: str, *about: Any) -> None:
        if self.talks:
            print(f"{self.now:10.3f} #{self.events} {text % about if about else text}")

    def run(self) -> None:
        """To the end, and until everything is quiet.

        Raises:
            Violation: a promise was broken.
        """
        for stage in range(1, self.num_stages):
            self.start_worker(stage)
        self.start_coordinator()
        queue = self._queue
        while queue:
            if self.events == self._next_fault:
                self._fault()
            self.now, _, process, go, args = heapq.heappop(queue)
            self.events += 1
            if process is not None:
                if not process.alive:
                    continue
                if process.frozen:
                    process.backlog.append((go, args))
                    continue
            go(*args)
            require(self.events < MAX_EVENTS and self.now < MAX_SECONDS, "the run does not come to its end")
        self._check_end()

    def _check_end(self) -> None:
        require(self.over, "nothing happens any more, and the run is not over")
        require(self.store.records == [*range(1, self.num_steps + 1)], "records are %s", self.store.records)
        due = [step for step in range(self.num_steps) if step % self.eval_every == 0] + [self.num_steps]
        stopped = self.faults["stop"] and self.store.evaluations == due[:-1]  # in the last step
        require(stopped or self.store.evaluations == due, "evaluations are %s", self.store.evaluations)
        require(self.store.adapter == self.reference[-1], "the adapter is not that of an uninterrupted run")
        for process in self.processes:
            if process.alive and isinstance(process, Worker):
                require(process.current is None and not process.ends, "%s does not listen again", process.name)

    def check_applied(self, member: Member) -> None:
        """A stage has taken a step."""
        require(
            member.state() == self.reference[member.at][member.stage],
            "stage %d has other weights after step %d than in an uninterrupted run",
            member.stage,
            member.at,
        )

    # --- who there is

    def start_worker(self, stage: int) -> None:
        worker = Worker(self, stage)
        self.processes.append(worker)
        self.at_address[stage] = worker
        worker.start(worker.main())

    def start_coordinator(self) -> None:
        if self.over:
            return
        self.coordinator = Coordinator(self)
        self.processes.append(self.coordinator)
        self.coordinator.start(self.coordinator.main())

    def connect(self, dialler: Process, stage: int, epoch: tuple[str, int]) -> End | None:
        """A connection to whoever has a stage's address; None where nobody listens."""
        worker = self.at_address[stage]
        if worker is None or not worker.alive:
            return None
        mine, theirs = End(dialler, epoch), End(worker, epoch)
        mine.other, theirs.other = theirs, mine
        return mine

    # --- faults

    def _draw_next_fault(self) -> None:
        self._next_fault = -1
        if self._left:
            self._left -= 1
            self._next_fault = self.events + 1 + int(self.rng.expovariate(1 / 110))

    def _fault(self) -> None:
        self._draw_next_fault()
        if self.over:
            return
        (kind,) = self.rng.choices(
            ("crash", "crash_coordinator", "reset", "half_open", "freeze", "replace", "replay", "stop"),
            (4, 2, 3, 3, 2, 2, 3, 0.5),
        )
        if getattr(self, f"_{kind}")():
            self.faults[kind] += 1

    def _workers(self) -> list[Worker]:
        return [w for w in self.at_address.values() if w is not None and w.alive and not w.frozen]

    def _connections(self) -> list[End]:
        return [end for process in self.processes if process.alive for end in process.ends]

    def _crash(self) -> bool:
        """A worker dies, in plain sight or not, and is started again: soon, or before anybody has noticed."""
        if not (workers := self._workers()):
            return False
        worker = self.rng.choice(workers)
        quiet = self.rng.random() < 0.4
        back_s = self.rng.choice((0.001, 0.05, 1.0, 10.0, 60.0)) * (0.5 + self.rng.random())
        self.say("%s dies%s, back in %.2f s", worker.name, " without a word" * quiet, back_s)
        worker.gone(quiet=quiet)
        self.at_address[worker.stage] = None
        self.after(back_s, None, self.start_worker, worker.stage)
        return True

    def _crash_coordinator(self) -> bool:
        coordinator = self.coordinator
        if coordinator is None or not coordinator.alive or coordinator.frozen:
            return False
        quiet = self.rng.random() < 0.3
        self.say("the coordinator dies%s", " without a word" * quiet)
        coordinator.gone(quiet=quiet)
        self.after(self.rng.choice((0.01, 1.0, 40.0)) * (0.5 + self.rng.random()), None, self.start_coordinator)
        return True

    def _reset(self) -> bool:
        if not (ends := self._connections()):
            return False
        end = self.rng.choice(ends)
        self.say("connection of %s and %s is reset", end.owner.name, end.other.owner.name)
        end.reset()
        end.other.reset()
        return True

    def _half_open(self) -> bool:
        """What is sent one way, or both ways, arrives no more."""
        if not (ends := self._connections()):
            return False
        end = self.rng.choice(ends)
        both = self.rng.random() < 0.5
        self.say("connection of %s and %s is half open%s", end.owner.name, end.other.owner.name, ", both ways" * both)
        for side in (end, end.other)[: 1 + both]:
            if side.is_open and not side.deaf:
                side.become_deaf()
        return True

    def _freeze(self, process: Process | None = None) -> bool:
        """A process stands still for a while."""
        if process is None:
            there: list[Process] = [*self._workers()]
            if self.coordinator is not None and self.coordinator.alive and not self.coordinator.frozen:
                there.append(self.coordinator)
            if not there:
                return False
            process = self.rng.choice(there)
        seconds = self.rng.choice((1.0, 10.0, 20.0, 60.0)) * (0.5 + self.rng.random())
        self.say("%s is frozen for %.1f s", process.name, seconds)
        process.frozen = True
        for end in process.ends:
            end.other.watch()
        self.after(seconds, None, self._wake, process)
        return True

    def _wake(self, process: Process) -> None:
        if not process.alive:
            return
        self.say("%s wakes", process.name)
        process.frozen = False
        backlog, process.backlog = process.backlog, []
        for go, args in backlog:
            self.after(0.0, process, go, *args)

    def _replace(self) -> bool:
        """Another process takes a worker's address, while the first one lives on, frozen for a while or not."""
        if not (workers := self._workers()):
            return False
        worker = self.rng.choice(workers)
        self.say("%s is replaced and lives on", worker.name)
        for end in worker.ends:
            if not end.welcomed and not end.other.deaf:
                end.other.become_deaf()  # its host has no such address any more
        if self.rng.random() < 0.6:
            self._freeze(worker)
        self.start_worker(worker.stage)
        return True

    def _replay(self) -> bool:
        """A frame comes that was sent before, on the same connection or on a later one between the same two."""
        ends = [e for e in self._connections() if e.said and e.welcomed and not e.deaf]
        if not ends:
            return False
        end = self.rng.choice(ends)
        frame = self.rng.choice(end.said)
        self.say("%s gets %s again from %s", end.owner.name, frame.header, end.other.owner.name)
        self.replayed.add(end.epoch)
        self.after(self.delay(), end.owner, end.deliver_again, frame)
        return True

    def _stop(self) -> bool:
        """Somebody presses Ctrl-C at a worker or at the coordinator."""
        coordinator = self.coordinator
        if coordinator is None or not coordinator.alive:
            return False
        worker = self.rng.choice(self._workers() or [None])
        if worker is None or self.rng.random() < 0.5:
            coordinator.stopping = True
        elif worker.current is not None and worker.current.control.welcomed:
            worker.current.control.send(T.STOP, Reason("SIGINT"))
        return True


# --- by hand -----------------------------------------------------------------------------------------------------


def simulate(seed: int, *, talks: bool = False) -> Simulation:
    """One seed from start to end.

    Raises:
        Violation: names the seed.
    """
    sim = Simulation(seed, talks=talks)
    try:
        sim.run()
    except Exception as exc:
        raise Violation(
            f"seed {seed}, at event {sim.events}: {exc if isinstance(exc, Violation) else repr(exc)}"
        ) from exc
    return sim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    faults: Counter[str] = Counter()
    events = sessions = most_lost = 0
    began = time.perf_counter()
    gc.disable()  # processes and connections refer to one another; many seeds' worth is collected at a time
    for number, seed in enumerate(range(arguments.first, arguments.first + arguments.seeds), 1):
        sim = simulate(seed, talks=arguments.seeds == 1)
        faults += sim.faults
        events, sessions, most_lost = events + sim.events, sessions + sim.sessions, max(most_lost, sim.max_lost)
        if number % 50 == 0:
            gc.collect()
        if number % 10_000 == 0:
            print(f"{number} seeds, {events} events, {faults.total()} faults", flush=True)
    took_s = time.perf_counter() - began
    print(
        f"{arguments.seeds} seeds in {took_s:.1f} s ({arguments.seeds / took_s:.0f} a second), {events} events, "
        f"{sessions} sessions, at most {most_lost} steps lost, faults: {dict(faults)}"
    )


if __name__ == "__main__":
    main()

import io
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero.watchdog import Phase, Progress, Watchdog

WAIT_S = 30.0


class HandClock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A progress and its watchdog on a clock that is moved by hand, and what was called."""

    def __init__(self, tmp_path: Path, **limits: float) -> None:
        self.clock = HandClock()
        self.progress = Progress(clock=self.clock, **limits)
        self.dump = tmp_path / "stacks"
        self.reasons: list[str] = []
        self.num_hopeless = 0
        self.file = self.dump.open("w")
        self.dog = Watchdog(self.progress, self.reasons.append, self._hopeless, dump_to=self.file)

    def pass_s(self, seconds: int) -> None:
        """Lets seconds pass, with a look at each."""
        for _ in range(seconds):
            self.clock.now += 1
            self.dog.check()

    def sleep_s(self, seconds: float) -> None:
        """Lets seconds pass in which the watchdog stands still too."""
        self.clock.now += seconds
        self.dog.check()

    def step(self, seconds: int, what: str = "a forward") -> None:
        """One STEP operation that ends."""
        with self.progress.doing(Phase.STEP, what):
            self.pass_s(seconds)

    def num_dumps(self) -> int:
        return self.dump.read_text().count("Current thread ")

    def _hopeless(self) -> None:
        self.num_hopeless += 1


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.file.close()


@contextmanager
def stuck(progress: Progress, phase: Phase = Phase.STEP) -> Iterator[None]:
    """A thread that is in an operation as long as the block lasts."""
    begun, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=stuck_in_this_function, args=(progress, phase, begun, release), daemon=True)
    thread.start()
    assert begun.wait(WAIT_S)
    try:
        yield
    finally:
        release.set()
        thread.join(WAIT_S)
    assert not thread.is_alive()


def stuck_in_this_function(progress: Progress, phase: Phase, begun: threading.Event, release: threading.Event) -> None:
    with progress.doing(phase, "a forward"):
        begun.set()
        release.wait(WAIT_S)


def quick(**limits: float) -> Progress:
    return Progress(step_s=0.05, loading_s=0.05, checkpoint_s=0.05, **limits)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_stuck_thread_is_reported_with_the_stack_of_where_it_is(tmp_path: Path, phase: Phase) -> None:
    progress, reasons, reported = quick(), [], threading.Event()

    def on_stuck(reason: str) -> None:
        reasons.append(reason)
        reported.set()

    with (tmp_path / "stacks").open("w") as file, stuck(progress, phase):
        with Watchdog(progress, on_stuck, dump_to=file, check_s=0.01):
            assert reported.wait(WAIT_S)
    assert len(reasons) == 1 and reasons[0].startswith("has been in a forward for 0 s (")
    assert "stuck_in_this_function" in (tmp_path / "stacks").read_text()


def test_a_process_can_end_itself_when_its_stuck_thread_does_not_move() -> None:
    script = """
import os, threading
from hetero.watchdog import Phase, Progress, Watchdog

def held_by_a_driver():
    threading.Event().wait()

progress = Progress(loading_s=0.05)
with Watchdog(progress, lambda reason: print(reason, flush=True), lambda: os._exit(70), grace_s=0.05, check_s=0.01):
    with progress.doing(Phase.STEP, "a backward"):
        held_by_a_driver()
"""
    root = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, cwd=root)
    assert ended.returncode == 70, ended.stderr
    assert ended.stdout.splitlines() == ["has been in a backward for 0 s (the limit of the first one is 0 s)"]
    assert ended.stderr.count("in held_by_a_driver") == 1


@pytest.mark.parametrize("replacement", [io.StringIO(), None], ids=["no_descriptor", "no_stderr"])
def test_stacks_go_to_the_real_stderr_where_the_other_has_no_descriptor(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], replacement: Any
) -> None:
    monkeypatch.setattr(sys, "stderr", replacement)
    dog = Watchdog(watched.progress, watched.reasons.append)
    with watched.progress.doing(Phase.LOADING, "the weights"):
        for _ in range(1801):
            watched.clock.now += 1
            dog.check()
    assert len(watched.reasons) == 1
    assert "in test_stacks_go_to_the_real_stderr" in capfd.readouterr().err


def test_the_thread_ends_with_the_block() -> None:
    before = set(threading.enumerate())
    with Watchdog(Progress(), print, check_s=0.01):
        assert [thread.daemon for thread in threading.enumerate() if thread not in before] == [True]
    assert set(threading.enumerate()) <= before


def test_a_report_may_end_the_block_from_the_thread_of_the_watchdog(tmp_path: Path) -> None:
    progress, ended = quick(), threading.Event()
    with (tmp_path / "stacks").open("w") as file:

        def on_stuck(_: str) -> None:
            dog.__exit__()
            ended.set()

        dog = Watchdog(progress, on_stuck, dump_to=file, check_s=0.01)
        with stuck(progress), dog:
            assert ended.wait(WAIT_S)


def test_time_outside_of_operations_is_never_reported(watched: Watched) -> None:
    watched.pass_s(3000)
    watched.step(5)
    watched.pass_s(3000)
    watched.step(5)
    watched.step(119)
    assert watched.reasons == [] and watched.num_dumps() == 0


def test_an_operation_below_ten_times_the_longest_is_slow_and_not_stuck(watched: Watched) -> None:
    watched.step(20)
    watched.step(7)
    with watched.progress.doing(Phase.STEP, "a forward"):
        watched.pass_s(200)
        assert watched.reasons == []
        watched.pass_s(1)
        assert watched.reasons == ["has been in a forward for 201 s (10 x the longest before)"]


def test_short_operations_leave_the_limit_at_its_least(watched: Watched) -> None:
    watched.step(2)
    with watched.progress.doing(Phase.STEP, "a forward"):
        watched.pass_s(120)
        assert watched.reasons == []
        watched.pass_s(1)
        assert watched.reasons == ["has been in a forward for 121 s (the limit is 120 s)"]


def test_the_first_step_operation_has_the_limit_of_loading(watched: Watched) -> None:
    with watched.progress.doing(Phase.STEP, "a forward"):
        watched.pass_s(1800)
        assert watched.reasons == []
        watched.pass_s(1)
    assert watched.reasons == ["has been in a forward for 1801 s (the limit of the first one is 1800 s)"]


def test_only_a_step_operation_that_finished_ends_the_time_of_the_first(watched: Watched) -> None:
    for phase in (Phase.LOADING, Phase.CHECKPOINT):
        with watched.progress.doing(phase, "something else"):
            watched.pass_s(2)
    with pytest.raises(ValueError), watched.progress.doing(Phase.STEP, "a forward"):
        raise ValueError
    assert watched.progress.limit_s(Phase.STEP) == 1800
    watched.step(1)
    assert watched.progress.limit_s(Phase.STEP) == 120


@pytest.mark.parametrize(("phase", "limit_s"), [(Phase.LOADING, 1800), (Phase.CHECKPOINT, 600)])
def test_loading_and_checkpoints_have_limits_of_their_own(watched: Watched, phase: Phase, limit_s: int) -> None:
    for _ in range(2):  # however long one took, the next has the same limit
        with watched.progress.doing(phase, "this"):
            watched.pass_s(limit_s)
    assert watched.reasons == []
    with watched.progress.doing(phase, "this"):
        watched.pass_s(limit_s + 1)
    assert watched.reasons == [f"has been in this for {limit_s + 1} s (the limit is {limit_s} s)"]


def test_limits_are_arguments() -> None:
    clock = HandClock()
    progress = Progress(step_s=7, step_times_longest=3, loading_s=50, checkpoint_s=60, clock=clock)
    assert [progress.limit_s(phase) for phase in (Phase.LOADING, Phase.STEP, Phase.CHECKPOINT)] == [50, 50, 60]
    for took_s, limit_s in ((1, 7), (5, 15), (2, 15)):
        with progress.doing(Phase.STEP, "a forward"):
            clock.now += took_s
        assert progress.limit_s(Phase.STEP) == limit_s


def test_a_stuck_operation_is_reported_once_and_the_next_one_again(watched: Watched) -> None:
    watched.step(1)
    watched.step(500)
    assert len(watched.reasons) == watched.num_dumps() == 1
    watched.step(2000, "a backward")
    assert len(watched.reasons) == watched.num_dumps() == 2
    assert watched.reasons[1].startswith("has been in a backward for ")


def test_a_report_is_one_line_in_the_log(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.step(1)
    with caplog.at_level(logging.INFO, "hetero.watchdog"), watched.progress.doing(Phase.STEP, "a forward"):
        watched.pass_s(125)
    assert [record.getMessage() for record in caplog.records] == [
        "the compute thread has been in a forward for 121 s (the limit is 120 s); the stacks of all threads were dumped"
    ]


def test_hopeless_comes_once_when_the_operation_goes_on(watched: Watched) -> None:
    watched.step(1)
    with watched.progress.doing(Phase.STEP, "a forward"):
        watched.pass_s(121 + 9)
        assert (len(watched.reasons), watched.num_hopeless) == (1, 0)
        watched.pass_s(1)
        assert (len(watched.reasons), watched.num_hopeless) == (1, 1)
        watched.pass_s(500)
    assert (len(watched.reasons), watched.num_hopeless) == (1, 1)


def test_an_operation_that_ends_after_the_report_is_not_hopeless(watched: Watched) -> None:
    watched.step(1)
    watched.step(121 + 9)
    watched.pass_s(100)
    watched.step(100)
    assert (len(watched.reasons), watched.num_hopeless) == (1, 0)


def test_a_report_that_fails_is_logged_and_hopeless_still_comes(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []

    def fail(what: str) -> Callable[..., None]:
        def failing(*_: object) -> None:
            called.append(what)
            raise OSError(f"{what} failed")

        return failing

    watched.dog = Watchdog(watched.progress, fail("stuck"), fail("hopeless"), dump_to=watched.file)
    watched.step(1)
    watched.step(300)
    assert called == ["stuck", "hopeless"]
    assert "stuck failed" in caplog.text and "hopeless failed" in caplog.text


def test_without_hopeless_the_log_says_that_the_thread_is_still_stuck(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.dog = Watchdog(watched.progress, watched.reasons.append, dump_to=watched.file)
    watched.step(1)
    watched.step(300)
    assert [record.getMessage() for record in caplog.records][1:] == [
        "the compute thread is still in a forward and cannot be ended from outside"
    ]


def test_a_machine_that_slept_gives_the_operation_a_new_full_deadline(watched: Watched) -> None:
    watched.step(1)
    with watched.progress.doing(Phase.STEP, "a forward"):
        watched.pass_s(100)
        watched.sleep_s(8 * 3600)
        watched.pass_s(120)
        assert watched.reasons == []
        watched.pass_s(1)
        assert watched.reasons == ["has been in a forward for 121 s (the limit is 120 s)"]
        watched.pass_s(9)
        watched.sleep_s(8 * 3600)
        watched.pass_s(9)
        assert watched.num_hopeless == 0
        watched.pass_s(1)
    assert (len(watched.reasons), watched.num_hopeless) == (1, 1)


def test_a_look_that_is_a_little_late_judges_as_always(watched: Watched) -> None:
    watched.step(1)
    with watched.progress.doing(Phase.STEP, "a forward"):
        watched.pass_s(115)
        watched.sleep_s(6)
        assert len(watched.reasons) == 1


def test_a_report_that_takes_long_is_not_taken_for_sleep(watched: Watched) -> None:
    def slow(reason: str) -> None:
        watched.reasons.append(reason)
        watched.clock.now += 60

    watched.dog = Watchdog(watched.progress, slow, watched._hopeless, dump_to=watched.file)
    watched.step(1)
    with watched.progress.doing(Phase.STEP, "a forward"):
        watched.pass_s(121)
        assert len(watched.reasons) == 1
        watched.pass_s(9)
        assert watched.num_hopeless == 0
        watched.pass_s(1)
        assert watched.num_hopeless == 1


@pytest.mark.parametrize("dog_wakes_first", [True, False])
def test_hours_of_sleep_do_not_become_the_measure(watched: Watched, dog_wakes_first: bool) -> None:
    watched.step(1)
    with watched.progress.doing(Phase.STEP, "a forward"):
        watched.pass_s(3)
        watched.clock.now += 8 * 3600
        if dog_wakes_first:
            watched.dog.check()
    watched.dog.check()
    longest_s = watched.progress.longest_s(Phase.STEP)
    assert longest_s == (1 if dog_wakes_first else 120)


def test_the_innermost_operation_is_the_one_that_is_judged(watched: Watched) -> None:
    watched.step(1)
    with watched.progress.doing(Phase.STEP, "a step"):
        watched.pass_s(100)
        with watched.progress.doing(Phase.CHECKPOINT, "a snapshot"):
            watched.pass_s(600)
        watched.pass_s(120)
        assert watched.reasons == []
        watched.pass_s(1)
    assert watched.reasons == ["has been in a step for 121 s (the limit is 120 s)"]


def test_an_outer_operation_is_measured_without_its_inner_ones(watched: Watched) -> None:
    with watched.progress.doing(Phase.STEP, "a step"):
        for phase, seconds in ((Phase.LOADING, 9), (Phase.CHECKPOINT, 8)):
            watched.pass_s(3)
            with watched.progress.doing(phase, "within"):
                watched.pass_s(seconds)
        watched.pass_s(4)
    assert [watched.progress.longest_s(phase) for phase in Phase] == [9, 4, 8]
    assert watched.progress.num_operations == 3
    assert watched.progress.current() is None


def test_an_outer_operation_that_gets_stuck_after_its_inner_one_is_another_report(watched: Watched) -> None:
    watched.step(1)
    with watched.progress.doing(Phase.STEP, "a step"):
        with watched.progress.doing(Phase.STEP, "a forward"):
            watched.pass_s(125)
        watched.pass_s(9)
        assert (len(watched.reasons), watched.num_hopeless) == (1, 0)
        watched.pass_s(2000)
    assert [reason.split(" for ")[0] for reason in watched.reasons] == ["has been in a forward", "has been in a step"]
    assert watched.num_hopeless == 1


def test_an_exception_ends_the_operation_and_is_no_measure(watched: Watched) -> None:
    def fail_after(seconds: int, error: type[BaseException]) -> None:
        with watched.progress.doing(Phase.STEP, "a forward"):
            watched.pass_s(seconds)
            raise error

    watched.step(1)
    with watched.progress.doing(Phase.STEP, "a step"):
        for error in (ValueError, KeyboardInterrupt):
            with pytest.raises(error):
                fail_after(50, error)
            current = watched.progress.current()
            assert current is not None and current.what == "a step"
    assert watched.progress.current() is None
    assert watched.progress.longest_s(Phase.STEP) == 1
    watched.pass_s(3000)
    assert watched.reasons == []


def test_what_the_thread_is_in_can_be_read_at_any_time(watched: Watched) -> None:
    assert watched.progress.current() is None and watched.progress.longest_s(Phase.STEP) is None
    with watched.progress.doing(Phase.LOADING, "the weights"):
        watched.pass_s(5)
        current = watched.progress.current()
        assert current is not None
        assert (current.phase, current.what) == (Phase.LOADING, "the weights")
        assert watched.clock.now - current.since == 5
        assert watched.progress.num_operations == 1


def test_another_thread_cannot_begin_in_the_midst_of_an_operation() -> None:
    progress = Progress()
    with stuck(progress):
        with pytest.raises(AssertionError, match="one thread"), progress.doing(Phase.STEP, "a forward"):
            pass
    with progress.doing(Phase.STEP, "a forward"):  # one after the other is no mistake
        pass
    assert progress.num_operations == 2


def test_readers_see_whole_operations_while_a_thread_works() -> None:
    progress, stop, wrong = Progress(), threading.Event(), []
    names = {Phase.STEP: "a forward", Phase.CHECKPOINT: "a snapshot"}

    def read() -> None:
        last = 0
        while not stop.is_set():
            current = progress.current()
            if current is None:
                continue
            if names[current.phase] != current.what or current.move < last:
                wrong.append(current)
            last = current.move

    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(3000):
        with progress.doing(Phase.STEP, names[Phase.STEP]):
            with progress.doing(Phase.CHECKPOINT, names[Phase.CHECKPOINT]):
                pass
    stop.set()
    for reader in readers:
        reader.join(WAIT_S)
        assert not reader.is_alive()
    assert wrong == [] and progress.num_operations == 6000

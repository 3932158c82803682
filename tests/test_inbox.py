import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetero.errors import HeteroError, PeerError
from hetero.inbox import Inbox


def filled(*events: Any) -> Inbox:
    inbox = Inbox()
    for event in events:
        inbox.put(event)
    return inbox


def anything(_: Any) -> bool:
    return True


def is_even(event: Any) -> bool:
    return isinstance(event, int) and event % 2 == 0


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Starts work that waits; its result, or the error that it raised, is put into the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as exc:
            outcome.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def ended(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


def test_events_come_in_the_order_of_their_arrival() -> None:
    inbox = filled(*range(5))
    assert [inbox.get(anything, 0) for _ in range(5)] == [0, 1, 2, 3, 4]


def test_the_first_match_is_taken_and_the_others_stay_in_order() -> None:
    inbox = filled(1, 2, 3, 4, 5)
    assert inbox.get(is_even, 0) == 2
    assert inbox.get(is_even, 0) == 4
    assert inbox.take(anything) == [1, 3, 5]


def test_take_gives_all_matches_and_leaves_the_rest() -> None:
    inbox = filled(1, 2, 3, 4, 5)
    assert inbox.take(is_even) == [2, 4]
    assert inbox.take(is_even) == []
    assert inbox.take(anything) == [1, 3, 5]
    assert Inbox().take(anything) == []


def test_equal_events_are_two_events() -> None:
    one, two = {"a": 1}, {"a": 1}
    inbox = filled(one, two)
    assert inbox.take(lambda e: e is two) == [two]
    assert inbox.get(anything, 0) is one
    inbox = filled(one, two)
    assert inbox.get(lambda e: e is two, 0) is two
    assert inbox.get(anything, 0) is one


def test_events_need_not_be_comparable() -> None:
    events = [torch.zeros(3), torch.ones(3), "last"]
    inbox = filled(*events)
    assert inbox.get(lambda e: isinstance(e, str), 0) == "last"
    assert inbox.get(lambda e: e is events[1], 0) is events[1]
    assert inbox.take(anything)[0] is events[0]


def test_waiting_ends_when_the_event_comes() -> None:
    inbox = filled(1)
    thread, outcome = in_thread(lambda: inbox.get(is_even))
    for event in (3, 5, 6, 8):
        inbox.put(event)
    assert ended(thread) and outcome == [6]
    assert inbox.take(anything) == [1, 3, 5, 8]


def test_several_waits_each_get_their_own_event() -> None:
    inbox = Inbox()
    waits = [in_thread(lambda n=n: inbox.get(lambda e, n=n: e == n)) for n in range(4)]  # type: ignore[misc]
    for event in (2, 0, 3, 1):
        inbox.put(event)
    assert all(ended(thread) for thread, _ in waits)
    assert [outcome for _, outcome in waits] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("timeout_s", [0, 0.05])
def test_wait_ends_at_its_deadline_though_other_events_come(timeout_s: float) -> None:
    inbox = filled(1)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        inbox.get(is_even, timeout_s)
    assert timeout_s <= time.monotonic() - started < 5
    assert inbox.take(anything) == [1]


def test_failure_ends_every_wait_now_and_later() -> None:
    inbox = Inbox()
    waits = [in_thread(lambda: inbox.get(is_even)) for _ in range(3)]
    error = PeerError("gone", stage=1)
    inbox.fail(error)
    assert all(ended(thread) for thread, _ in waits)
    assert all(outcome == [error] for _, outcome in waits)
    for call in (lambda: inbox.get(anything), lambda: inbox.get(anything, 0), lambda: inbox.take(anything)):
        with pytest.raises(PeerError, match="stage 1: gone"):
            call()
    assert inbox.failure() is error


def test_the_first_failure_is_the_one_that_counts() -> None:
    inbox = Inbox()
    assert inbox.failure() is None
    inbox.fail(HeteroError("first"))
    inbox.fail(HeteroError("second"))
    with pytest.raises(HeteroError, match="first"):
        inbox.get(anything, 0)


def test_events_that_are_there_are_given_before_the_failure() -> None:
    inbox = filled(1, 2)
    inbox.fail(HeteroError("gone"))
    assert inbox.get(is_even, 0) == 2
    with pytest.raises(HeteroError, match="gone"):
        inbox.get(is_even, 0)
    assert inbox.take(anything) == [1]
    with pytest.raises(HeteroError, match="gone"):
        inbox.take(anything)


def test_wait_may_go_on_after_a_failure() -> None:
    inbox = Inbox()
    inbox.fail(HeteroError("gone"))
    thread, outcome = in_thread(lambda: inbox.get(is_even, 10, despite_failure=True))
    inbox.put(1)
    inbox.put(2)
    assert ended(thread) and outcome == [2]
    with pytest.raises(TimeoutError):
        inbox.get(is_even, 0.01, despite_failure=True)


def test_a_match_that_fails_leaves_the_inbox_as_it_was() -> None:
    def broken(_: Any) -> bool:
        raise ValueError("oops")

    inbox = filled(1, 2)
    with pytest.raises(ValueError, match="oops"):
        inbox.get(broken, 0)
    with pytest.raises(ValueError, match="oops"):
        inbox.take(broken)
    assert inbox.take(anything) == [1, 2]


def test_nothing_is_lost_between_many_threads() -> None:
    inbox, per_thread = Inbox(), 300

    def put_all(k: int) -> None:
        for n in range(per_thread):
            inbox.put((k, n))

    producers = [in_thread(lambda k=k: put_all(k))[0] for k in range(3)]  # type: ignore[misc]
    consumers = [
        in_thread(lambda k=k: [inbox.get(lambda e, k=k: e[0] == k, 10) for _ in range(per_thread)])  # type: ignore[misc]
        for k in range(3)
    ]
    assert all(ended(thread) for thread in producers)
    for k, (thread, outcome) in enumerate(consumers):
        assert ended(thread) and outcome == [[(k, n) for n in range(per_thread)]]
    assert inbox.take(anything) == []

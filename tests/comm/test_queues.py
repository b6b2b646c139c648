"""The queue of a process: what is issued runs once and in order, by its thread or by whoever waits."""

import random
import threading
from functools import partial
from typing import Any

import pytest

from tritondt import identity
from tritondt.comm import work
from tritondt.comm.work import ThreadQueue
from tritondt.errors import WorldError


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads are the rank that issues, as in a process."""
    monkeypatch.setattr(identity, "current", lambda: None)


def test_who_waits_runs_what_no_thread_has_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "start_daemon", lambda run, name: threading.Thread())  # one that never starts
    queue, ran = ThreadQueue(), list[Any]()

    def run(number: int) -> None:
        assert queue.is_own_thread()
        ran.append((number, threading.get_ident()))

    issued = [queue.submit(partial(run, number), f"{number}", sources_ready=True) for number in range(4)]
    issued[2].run()
    assert ran == [(number, threading.get_ident()) for number in range(3)]
    assert not queue.is_own_thread()
    assert [each.is_completed() for each in issued] == [True, True, True, False]
    issued[1].run()  # again: nothing
    issued[3].run()
    assert [number for number, _ in ran] == [0, 1, 2, 3]


def test_an_error_is_that_of_its_work_whoever_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "start_daemon", lambda run, name: threading.Thread())
    queue = ThreadQueue()

    def fail() -> None:
        raise ValueError("the first")

    first, second = (queue.submit(run, "work", sources_ready=True) for run in (fail, lambda: None))
    second.run()
    assert first.is_completed()
    assert second.exception() is None
    with pytest.raises(ValueError, match="the first"):
        first.wait()


@pytest.mark.parametrize("wait", [work.Work.run, work.Work.wait, work.Work.settle])
def test_what_runs_may_wait_for_what_was_issued_later_but_not_for_itself(wait: Any) -> None:
    queue, ran, may_begin = ThreadQueue(), list[Any](), threading.Event()

    def run_first() -> None:
        may_begin.wait()
        wait(issued[2])
        ran.append("first")
        assert queue.is_own_thread()
        wait(issued[0])

    runs: list[work.Run] = [run_first, *(partial(ran.append, number) for number in (1, 2, 3))]
    issued = [queue.submit(run, f"work {place}", sources_ready=True) for place, run in enumerate(runs)]
    may_begin.set()
    issued[3].run()
    assert ran == [1, 2, "first", 3]
    assert not queue.is_own_thread()
    with pytest.raises(WorldError, match="work 0 is waited for by what it runs itself, and cannot end before that"):
        issued[0].wait()
    queue.close()


def test_ctrl_c_in_what_a_waiter_runs_ends_the_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "start_daemon", lambda run, name: threading.Thread())
    queue = ThreadQueue()

    def interrupted() -> None:
        raise KeyboardInterrupt

    first, second = (queue.submit(run, "work", sources_ready=True) for run in (interrupted, lambda: None))
    with pytest.raises(KeyboardInterrupt):
        second.run()
    assert [first.is_completed(), second.is_completed()] == [True, False]
    second.run()
    queue.raise_unseen()  # it was seen


@pytest.mark.parametrize("seed", range(5))
def test_in_order_and_once_whoever_comes_first(seed: int) -> None:
    draws, queue, ran = random.Random(seed), ThreadQueue(), list[int]()
    issued = [queue.submit(partial(ran.append, number), f"{number}", sources_ready=True) for number in range(200)]
    waits = [draws.sample(issued, 50) for _ in range(4)]
    threads = [threading.Thread(target=lambda each=each: [work.run() for work in each]) for each in waits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    queue.drain()
    queue.close()
    assert ran == list(range(200))

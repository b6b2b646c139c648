"""Starting ranks: which one failed, and how, when several end because of it."""

import multiprocessing
import os
import signal
import sys
import time
from functools import partial
from multiprocessing.process import BaseProcess

import pytest
import torch.distributed as dist

from tritondt.cli.launch import RankFailedError, run_on_ranks


def fail_on_rank_1(send, how):
    dist.barrier()
    if dist.get_rank() == 1:
        how()
    dist.barrier()  # never completed: the others wait here until the launcher ends them


def raise_an_error():
    raise ValueError("the cause")


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (raise_an_error, r"(?s)rank 1 of 3 failed:\nTraceback.*raise_an_error.*ValueError: the cause"),
        (kill_this_process, "rank 1 of 3 was ended by SIGKILL before it was done"),
        (partial(sys.exit, 7), "rank 1 of 3 exited with 7 before it was done"),
    ],
)
def test_the_rank_that_failed_is_named(how, message):
    with pytest.raises(RankFailedError, match=message):
        run_on_ranks(3, fail_on_rank_1, how, on_message=print)


def sleep(send, num_messages, seconds):
    for number in range(num_messages):
        send(number)
    time.sleep(seconds)


@pytest.fixture
def takes_interrupts():
    """A shell that starts a program in the background has SIGINT ignored, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptsWhenItDies:
    """An object in whose destructor Ctrl-C strikes: Python prints what that raises, and goes on."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_destructor_swallows_ends_the_run(takes_interrupts):
    def take(_):
        InterruptsWhenItDies()

    with pytest.raises(KeyboardInterrupt):
        run_on_ranks(1, sleep, 1, 20, on_message=take)
    assert multiprocessing.active_children() == []


def test_interrupts_while_ranks_end_leave_none_behind(takes_interrupts, monkeypatch):
    """Python would wait at its exit for those that are left, and they for it."""
    kill, told = BaseProcess.kill, []

    def interrupted(process):
        told.append(process.pid)
        os.kill(os.getpid(), signal.SIGINT)
        kill(process)

    monkeypatch.setattr(BaseProcess, "kill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_on_ranks(2, sleep, 0, 0, on_message=print)
    assert len(told) == 2
    assert multiprocessing.active_children() == []


def test_an_interrupt_between_the_start_of_a_rank_and_of_the_next_leaves_none_behind(takes_interrupts, monkeypatch):
    start = BaseProcess.start

    def interrupted(process):
        start(process)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_on_ranks(2, sleep, 0, 600, on_message=print)
    assert multiprocessing.active_children() == []

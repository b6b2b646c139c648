"""Starting ranks: which one failed, and how, when several end because of it."""

import os
import signal
import sys
from functools import partial

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

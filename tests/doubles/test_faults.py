"""Failures that a test asks for, disagreement, and the ways out of both."""

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.doubles.fake_nccl.abi import FLOAT32, SUM, Awaited, Config
from tests.doubles.fake_nccl.library import FakeNccl, FakeNcclError, Gate
from tests.doubles.fake_nccl.survivor import comes_back_to, possessions
from tests.doubles.fake_nccl.tensors import RankOfTensors, assert_same, ranks_of_process


def all_reduce(rank: RankOfTensors, tensor: torch.Tensor) -> None:
    rank("ncclAllReduce", tensor, tensor, tensor.numel(), SUM)


def wait_for_error(nccl: FakeNccl, communicator: int) -> str:
    deadline = time.monotonic() + 60
    while nccl.state(communicator) == "ncclSuccess" and time.monotonic() < deadline:
        time.sleep(0.001)
    return nccl.state(communicator)


def check_abort_ends(nccl: FakeNccl, rank: RankOfTensors) -> None:
    """What hangs in a stream goes on hanging until another thread aborts."""
    time.sleep(0.05)
    assert not rank.stream.is_idle()
    aborting = threading.Timer(0.05, nccl, ("ncclCommAbort", rank.communicator))
    aborting.start()
    rank.stream.synchronize()
    aborting.join()


def test_a_call_fails_the_time_it_is_told_to(nccl: FakeNccl) -> None:
    nccl.set(FAKE_NCCL_FAIL="ncclAllReduce:3,ncclAllReduce:4:2,ncclGetUniqueId:2")
    with ranks_of_process(nccl, 1) as (rank,):
        tensor = torch.ones(1)
        place = (tensor.data_ptr(), tensor.data_ptr(), 1, FLOAT32, SUM, rank.communicator, rank.stream.handle)
        results = [nccl.result("ncclAllReduce", *place) for _ in range(5)]
        assert results == ["ncclSuccess", "ncclSuccess", "ncclInternalError", "ncclSystemError", "ncclSuccess"]
        assert nccl.last_error() == "fake NCCL: ncclAllReduce: injected failure"
        with pytest.raises(FakeNcclError, match="ncclGetUniqueId: injected failure"):
            nccl.unique_id()


@pytest.mark.parametrize("fault", ["ncclAllreduce:3", "ncclAllReduce", "ncclAllReduce:0", "ncclAllReduce:1:99", "3"])
def test_a_fault_that_nobody_can_meet_is_refused(nccl: FakeNccl, fault: str) -> None:
    with pytest.raises(FakeNcclError, match=f"FAKE_NCCL_STALL={fault} is not understood"):
        nccl.set(FAKE_NCCL_STALL=fault)


def test_a_failed_group_starts_nothing(nccl: FakeNccl) -> None:
    nccl.set(FAKE_NCCL_FAIL="ncclGroupEnd:2:6")  # the first one makes the communicator
    with ranks_of_process(nccl, 2) as ranks:
        nccl("ncclGroupStart")
        all_reduce(ranks[0], torch.ones(1))
        assert nccl.result("ncclGroupEnd") == "ncclRemoteError"
        ranks[0].stream.synchronize()


def test_a_stalled_operation_hangs_until_an_abort(nccl: FakeNccl) -> None:
    nccl.set(FAKE_NCCL_STALL="ncclAllReduce:2")
    with ranks_of_process(nccl, 2) as ranks:
        tensors = [torch.ones(100) for _ in ranks]
        for rank in ranks:
            all_reduce(rank, tensors[rank.rank])
        for rank in ranks:
            check_abort_ends(nccl, rank)
        assert all((tensor == 1).all() for tensor in tensors)


def test_an_asynchronous_error_is_told_and_hangs_until_an_abort(nccl: FakeNccl) -> None:
    nccl.set(FAKE_NCCL_ASYNC_ERROR="ncclSend:1:2")
    with ranks_of_process(nccl, 2) as ranks:
        tensor = torch.ones(1)
        ranks[0].send(tensor, 1)
        ranks[1].receive(torch.zeros(1), 0)
        assert wait_for_error(nccl, ranks[0].communicator) == "ncclSystemError"
        assert nccl.state(ranks[1].communicator) == "ncclSuccess"
        with pytest.raises(FakeNcclError) as raised:  # and so does every further call
            ranks[0].send(tensor, 1)
        assert raised.value.result == "ncclSystemError"
        for rank in ranks:
            check_abort_ends(nccl, rank)


def test_what_runs_in_the_background_fails_there(nccl: FakeNccl) -> None:
    nccl.set(FAKE_NCCL_ASYNC_ERROR="ncclCommInitRankConfig:1")
    communicator = nccl.init(1, nccl.unique_id(), 0, Config(blocking=0))
    while nccl.state(communicator) == "ncclInProgress":
        time.sleep(0.001)
    assert nccl.state(communicator) == "ncclRemoteError"
    nccl("ncclCommAbort", communicator)
    nccl.set(FAKE_NCCL_STALL="ncclCommInitRankConfig:1")
    communicator = nccl.init(1, nccl.unique_id(), 0, Config(blocking=0))
    time.sleep(0.05)
    assert nccl.state(communicator) == "ncclInProgress"
    nccl("ncclCommAbort", communicator)


DISAGREEMENTS = {
    "rank 1 expects from rank 0 all_reduce of 4 bytes, dtype 7, op 0, root 0, which sends all_reduce of 8 bytes": (
        lambda rank: all_reduce(rank, torch.ones(2 - rank.rank))
    ),
    "rank 1 expects from rank 0 message of 4 bytes, dtype 2, op 0, root 0, which sends message of 4 bytes, dtype 7": (
        lambda rank: (
            rank.send(torch.ones(1), 1) if rank.rank == 0 else rank.receive(torch.zeros(1, dtype=torch.int32), 0)
        )
    ),
    "expects from rank 0 message of 4 bytes, dtype 7, op 0, root 0, which sends broadcast of 4 bytes": (
        lambda rank: (
            rank("ncclBroadcast", torch.ones(1), torch.ones(1), 1, 0)
            if rank.rank == 0
            else rank.receive(torch.zeros(1), 0)
        )
    ),
}


@pytest.mark.parametrize("text", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_where_that_is_asked_for(nccl: FakeNccl, text: str) -> None:
    nccl.set(FAKE_NCCL_MISMATCH="error")
    with ranks_of_process(nccl, 2) as ranks:
        for rank in ranks:
            DISAGREEMENTS[text](rank)
        assert wait_for_error(nccl, ranks[1].communicator) == "ncclInvalidUsage"
        for rank in ranks:
            check_abort_ends(nccl, rank)


def test_ranks_that_disagree_wait_for_each_other(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        tensors = [torch.ones(3), torch.ones(5)]
        for rank in ranks:
            all_reduce(rank, tensors[rank.rank])
        for rank in ranks:
            assert nccl.state(rank.communicator) == "ncclSuccess"
            check_abort_ends(nccl, rank)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_rank_that_aborts_leaves_the_others_waiting(nccl: FakeNccl, is_told: bool) -> None:
    nccl.set(FAKE_NCCL_PEER_LOSS="error" if is_told else "wait")
    with ranks_of_process(nccl, 3) as ranks:
        tensors = [torch.ones(100) for _ in ranks]
        for rank in ranks:
            all_reduce(rank, tensors[rank.rank])
            rank.stream.launch(lambda: None)
        for rank in ranks:
            rank.stream.synchronize()
        for rank in ranks[:2]:
            all_reduce(rank, tensors[rank.rank])
        nccl("ncclCommAbort", ranks[2].communicator)
        if is_told:
            assert [wait_for_error(nccl, rank.communicator) for rank in ranks[:2]] == ["ncclRemoteError"] * 2
        for rank in ranks[:2]:
            check_abort_ends(nccl, rank)


def test_who_waits_for_a_rank_that_waits_for_a_lost_one_is_told_of_that_one(nccl: FakeNccl) -> None:
    nccl.set(FAKE_NCCL_PEER_LOSS="error")
    with ranks_of_process(nccl, 3) as ranks:
        gate = Gate(ranks[0].stream)
        sent, received = torch.ones(100_000), torch.zeros(100_000)  # more than there is room for
        ranks[0].receive(received, 1)
        with ranks[1].group():
            ranks[1].send(sent, 0)
            ranks[1].receive(torch.zeros(1), 2)
        nccl("ncclCommAbort", ranks[2].communicator)
        assert wait_for_error(nccl, ranks[1].communicator) == "ncclRemoteError"
        gate.open()
        assert wait_for_error(nccl, ranks[0].communicator) == "ncclRemoteError"
        assert nccl.last_error() == "fake NCCL: rank 2 has left, or its process has ended"
        for rank in ranks[:2]:
            check_abort_ends(nccl, rank)


def test_who_waits_for_a_signal_of_a_lost_rank_is_told(nccl: FakeNccl) -> None:
    nccl.set(FAKE_NCCL_PEER_LOSS="error")
    with ranks_of_process(nccl, 2) as ranks:
        awaited = Awaited(1, 1, 0, 0)
        nccl("ncclWaitSignal", 1, ctypes.byref(awaited), ranks[0].communicator, ranks[0].stream.handle)
        nccl("ncclCommAbort", ranks[1].communicator)
        assert wait_for_error(nccl, ranks[0].communicator) == "ncclRemoteError"
        check_abort_ends(nccl, ranks[0])


def test_ranks_that_split_hear_of_a_lost_one_and_shrink(nccl: FakeNccl) -> None:
    """Whatever the split has left between them is not in the way of the shrink."""
    nccl.set(FAKE_NCCL_PEER_LOSS="error")
    with ranks_of_process(nccl, 3, Config(blocking=0)) as ranks:
        for rank in ranks:
            while nccl.state(rank.communicator) == "ncclInProgress":
                time.sleep(0.001)
        children = [ctypes.c_void_p() for _ in ranks]
        for rank in ranks[:2]:
            nccl.result("ncclCommSplit", rank.communicator, 0, 0, ctypes.byref(children[rank.rank]), None)
        nccl("ncclCommAbort", ranks[2].communicator)
        for rank in ranks[:2]:
            while nccl.state(rank.communicator) == "ncclInProgress":
                time.sleep(0.001)
            assert nccl.state(rank.communicator) == "ncclRemoteError"
        smaller = [ctypes.c_void_p() for _ in ranks]
        for rank in ranks[:2]:
            place = (rank.communicator, (ctypes.c_int * 1)(2), 1)
            nccl.result("ncclCommShrink", *place, ctypes.byref(smaller[rank.rank]), None, 1)
        deadline = time.monotonic() + 60
        while not all(each.value for each in smaller[:2]) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert nccl.number("ncclCommCount", smaller[0]) == 2
        for each in smaller[:2]:
            nccl("ncclCommAbort", each)


def test_abort_leaves_alone_what_it_was_too_late_for(nccl: FakeNccl) -> None:
    """Operations behind the one that hangs do nothing; memory may go as soon as abort has returned."""
    with ranks_of_process(nccl, 2) as ranks:
        order: list[str] = []
        tensor = torch.ones(100)
        all_reduce(ranks[0], tensor)
        all_reduce(ranks[0], tensor)
        ranks[0].stream.launch(lambda: order.append("behind"))
        nccl("ncclCommAbort", ranks[0].communicator)
        ranks[0].stream.synchronize()
        assert order == ["behind"]
        assert_same(tensor, torch.ones(100), "untouched")


def test_destroy_waits_for_an_operation_that_hangs(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        tensor = torch.ones(1)
        all_reduce(ranks[0], tensor)
        destroying = threading.Thread(target=nccl, args=("ncclCommDestroy", ranks[0].communicator))
        destroying.start()
        destroying.join(0.1)
        assert destroying.is_alive()
        nccl("ncclCommAbort", ranks[0].communicator)
        destroying.join(10)
        assert not destroying.is_alive()


def test_a_revoked_communicator_can_be_shrunk_and_no_more(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        tensor = torch.ones(1)
        all_reduce(ranks[0], tensor)
        nccl("ncclCommRevoke", ranks[0].communicator, 0)
        ranks[0].stream.synchronize()
        with pytest.raises(FakeNcclError, match="ncclAllReduce: the communicator is revoked"):
            all_reduce(ranks[0], tensor)
        with pytest.raises(FakeNcclError, match="ncclCommFinalize: the communicator is revoked"):
            nccl("ncclCommFinalize", ranks[0].communicator)
        alone = nccl.pointer("ncclCommShrink", ranks[0].communicator, (ctypes.c_int * 1)(1), 1, None, 0, at=3)
        assert nccl.number("ncclCommCount", alone) == 1
        nccl("ncclCommDestroy", alone)
        nccl("ncclCommDestroy", ranks[0].communicator)


def test_nothing_is_left_behind(nccl: FakeNccl) -> None:
    def live(num_working: int) -> None:
        with ranks_of_process(nccl, 3) as ranks:
            tensor = torch.ones(1)
            for rank in ranks[:num_working]:
                all_reduce(rank, tensor)
            nccl("ncclMemFree", nccl.pointer("ncclMemAlloc", 4096, at=0))

    nccl("fakeStreamSynchronize", None)  # the default stream's thread stays
    nccl("ncclCommDestroy", nccl.init(1, nccl.unique_id(), 0))
    before = possessions()
    for number in range(20):
        live(number % 4)
    unused = [nccl.unique_id() for _ in range(3)]
    for unique_id in unused:
        nccl("ncclCommAbort", nccl.init(2, unique_id, 0, Config(blocking=0)))
    assert comes_back_to(before), (before, possessions())


FORKS = """
import os, sys
from pathlib import Path
from tests.doubles.fake_nccl.library import FakeNccl

library = FakeNccl(Path(sys.argv[1]))
communicator = library.init(1, library.unique_id(), 0)
if (child := os.fork()) == 0:
    print(library.result("ncclCommAbort", communicator), library.last_error(), flush=True)
    library("ncclCommDestroy", library.init(1, library.unique_id(), 0))  # it may make its own
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
library("ncclCommDestroy", communicator)
"""


def test_a_forked_child_does_not_have_its_parents_communicators(double: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(double)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("ncclInvalidArgument fake NCCL: there is no such communicator in this process")

"""How communicators of the double are made, used wrongly, and ended."""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.doubles.fake_nccl.abi import (
    FLOAT32,
    INT8,
    MAX,
    SUM,
    UNDEFINED,
    CallConfig,
    Config,
    Simulation,
    UniqueId,
)
from tests.doubles.fake_nccl.library import FakeNccl, FakeNcclError, Gate, load
from tests.doubles.fake_nccl.tensors import DTYPES, RankOfTensors, assert_same, joined, ranks_of_process
from tests.harness.gloo_ranks import GlooRanks

SIZE = 4


def check_sum(here: RankOfTensors, communicator: int, expected: float) -> None:
    """Adds up this rank's number in the first communicator."""
    tensor = torch.tensor([2.0**here.rank])
    library, address = here.library, tensor.data_ptr()
    library("ncclAllReduce", address, address, 1, DTYPES[tensor.dtype], SUM, communicator, here.stream.handle)
    here.stream.synchronize()
    assert tensor.item() == expected


def place(library: FakeNccl, communicator: int) -> tuple[int, int]:
    return library.number("ncclCommUserRank", communicator), library.number("ncclCommCount", communicator)


def split(rank: int, path: Path, unique_id: bytes) -> None:
    if rank >= SIZE:
        return
    with joined(path, unique_id, rank, SIZE) as here:
        halves = here.library.pointer("ncclCommSplit", here.communicator, rank % 2, -rank, None, at=3)
        assert place(here.library, halves) == (1 - rank // 2, 2)
        check_sum(here, halves, 5.0 if rank % 2 == 0 else 10.0)
        most = here.library.pointer("ncclCommSplit", here.communicator, -1 if rank == 0 else 7, 0, None, at=3)
        if rank == 0:
            assert most == 0
        else:
            assert place(here.library, most) == (rank - 1, 3)
            check_sum(here, most, 14.0)
            here.library("ncclCommDestroy", most)
        check_sum(here, here.communicator, 15.0)
        here.library("ncclCommDestroy", halves)


def shrink_and_grow(rank: int, path: Path, unique_id: bytes) -> None:
    if rank >= SIZE:
        return
    library = load(path)
    excluded = (ctypes.c_int * 1)(2)
    with joined(path, unique_id, rank, SIZE) as here:
        if rank != 2:
            shrunk = library.pointer("ncclCommShrink", here.communicator, excluded, 1, None, 0, at=3)
            assert place(library, shrunk) == (rank if rank < 2 else 2, 3)
            check_sum(here, shrunk, 11.0)
        grow_id = UniqueId()
        if rank == 1:
            library("ncclCommGetUniqueId", shrunk, ctypes.byref(grow_id))
            with pytest.raises(FakeNcclError, match="the id made before is not used up"):
                library("ncclCommGetUniqueId", shrunk, ctypes.byref(grow_id))
        place_of_id = ctypes.addressof(grow_id)
        library("ncclBcast", place_of_id, 128, INT8, 1, here.communicator, here.stream.handle)
        here.stream.synchronize()
        given = ctypes.byref(grow_id) if rank == 1 else None
        if rank == 2:
            grown = library.pointer("ncclCommGrow", None, 4, ctypes.byref(grow_id), 3, None, at=4)
        else:
            grown = library.pointer("ncclCommGrow", shrunk, 4, given, -1, None, at=4)
            library("ncclCommDestroy", shrunk)
        assert place(library, grown) == ({0: 0, 1: 1, 3: 2, 2: 3}[rank], 4)
        check_sum(here, grown, 15.0)
        library("ncclCommDestroy", grown)


@pytest.mark.parametrize("body", [split, shrink_and_grow])
def test_communicators_of_communicators(ranks: GlooRanks, double: Path, body) -> None:
    ranks.run(body, double, load(double).unique_id())


def test_all_ranks_of_a_process_at_once(nccl: FakeNccl) -> None:
    handles = (ctypes.c_void_p * 3)()
    nccl("ncclCommInitAll", handles, 3, (ctypes.c_int * 3)(2, 0, 1))
    assert [nccl.number("ncclCommCuDevice", handle) for handle in handles] == [2, 0, 1]
    assert [nccl.number("ncclCommUserRank", handle) for handle in handles] == [0, 1, 2]
    for handle in handles:
        nccl("ncclCommFinalize", handle)
        nccl("ncclCommDestroy", handle)


def test_several_ids(nccl: FakeNccl) -> None:
    ids = (UniqueId * 2)(*(UniqueId.from_buffer_copy(nccl.unique_id()) for _ in range(2)))
    made = ctypes.c_void_p()
    nccl("ncclCommInitRankScalable", ctypes.byref(made), 1, 0, 1, ids, None)
    nccl("ncclCommDestroy", made)
    with pytest.raises(FakeNcclError, match="2 ids for 1 ranks"):
        nccl("ncclCommInitRankScalable", ctypes.byref(made), 1, 0, 2, ids, None)


def wait_until(nccl: FakeNccl, communicator: int, state: str) -> None:
    deadline = time.monotonic() + 60
    while nccl.state(communicator) == "ncclInProgress":
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert nccl.state(communicator) == state


@contextmanager
def held_back(nccl: FakeNccl, communicators: list[int]) -> Iterator[None]:
    """What is asked of communicators within the block begins when the block is left, which waits for its end."""
    nccl.set(FAKE_NCCL_DELAY_MS=100_000)
    yield
    assert [nccl.state(each) for each in communicators] == ["ncclInProgress"] * len(communicators)
    nccl.set(FAKE_NCCL_DELAY_MS=0)
    for each in communicators:
        wait_until(nccl, each, "ncclSuccess")


def test_a_communicator_that_does_not_block(nccl: FakeNccl) -> None:
    nccl.set(FAKE_NCCL_DELAY_MS=100_000)
    with ranks_of_process(nccl, 2, Config(blocking=0)) as ranks:
        communicators = [rank.communicator for rank in ranks]
        with held_back(nccl, communicators), pytest.raises(FakeNcclError, match="a call before the one before it"):
            nccl.number("ncclCommCount", ranks[0].communicator)
        tensors = [torch.ones(3) for _ in ranks]
        with held_back(nccl, communicators):
            for rank in ranks:
                buffers, place = (tensors[rank.rank].data_ptr(),) * 2, (rank.communicator, rank.stream.handle)
                assert nccl.result("ncclAllReduce", *buffers, 3, FLOAT32, SUM, *place) == "ncclInProgress"
                assert rank.stream.is_idle()  # a wait for the stream would wait for nothing: nothing has come to it
        for rank in ranks:
            rank.stream.synchronize()
        assert_same(tensors[0], torch.full((3,), 2.0), "reduced")
        children = [ctypes.c_void_p() for _ in ranks]
        with held_back(nccl, communicators):
            for rank, child in zip(ranks, children, strict=True):
                made = nccl.result("ncclCommSplit", rank.communicator, 0, 0, ctypes.byref(child), None)
                assert (made, child.value) == ("ncclInProgress", None)  # written when the parent is ready again
        handles = [child.value or 0 for child in children]
        with held_back(nccl, handles):
            assert [nccl.result("ncclCommFinalize", handle) for handle in handles] == ["ncclInProgress"] * 2
        for handle in handles:
            nccl("ncclCommDestroy", handle)


def test_an_init_that_nobody_joins_is_aborted(nccl: FakeNccl) -> None:
    unique_id = nccl.unique_id()
    communicator = nccl.init(2, unique_id, 0, Config(blocking=0))
    nccl.wait_for_joined(unique_id, 1)
    assert nccl.state(communicator) == "ncclInProgress"
    nccl("ncclCommAbort", communicator)


def test_finalize_and_destroy_wait_for_what_was_issued(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 1, Config(blocking=0)) as (rank,):
        wait_until(nccl, rank.communicator, "ncclSuccess")
        rank.stream.launch(lambda: time.sleep(0.1))
        tensor, target = torch.ones(3), torch.zeros(3)
        rank("ncclAllReduce", tensor, target, 3, MAX)
        assert nccl.result("ncclCommFinalize", rank.communicator) == "ncclInProgress"
        with pytest.raises(FakeNcclError):
            rank("ncclAllReduce", tensor, target, 3, MAX)
        wait_until(nccl, rank.communicator, "ncclSuccess")
        assert_same(target, tensor, "flushed")
        with pytest.raises(FakeNcclError, match="the communicator is finalized"):
            rank("ncclAllReduce", tensor, target, 3, MAX)
        nccl("ncclCommDestroy", rank.communicator)
    with ranks_of_process(nccl, 1) as (rank,):
        rank.stream.launch(lambda: time.sleep(0.1))
        rank("ncclAllReduce", tensor, target.zero_(), 3, MAX)
        nccl("ncclCommDestroy", rank.communicator)
        assert_same(target, tensor, "waited for")


def test_handles_that_are_gone_are_found_out(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 1) as (rank,):
        nccl("ncclCommDestroy", rank.communicator)
        for name, rest in (("ncclCommDestroy", ()), ("ncclCommAbort", ()), ("ncclCommFinalize", ())):
            with pytest.raises(FakeNcclError, match="there is no such communicator in this process"):
                nccl(name, rank.communicator, *rest)
        nccl("ncclCommDestroy", None)
        nccl("ncclCommAbort", None)


BAD_CALLS = {
    "op 9 does not exist": lambda rank, x: rank("ncclAllReduce", x, x, 1, 9),
    "root 2 of 2 ranks": lambda rank, x: rank("ncclBroadcast", x, x, 1, 2),
    "peer -1 of 2 ranks": lambda rank, x: rank.send(x, -1),
    "a buffer is null": lambda rank, x: rank("ncclAllGather", torch.empty(0), x, 1),
    "4611686018427387904 elements": lambda rank, x: rank("ncclAllGather", x, x, 2**62),
}


@pytest.mark.parametrize("text", BAD_CALLS)
def test_a_bad_argument_is_refused_and_spoils_its_group(nccl: FakeNccl, text: str) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        tensor = torch.ones(1)
        with pytest.raises(FakeNcclError, match=text):
            BAD_CALLS[text](ranks[0], tensor)
        nccl("ncclGroupStart")
        ranks[0]("ncclAllReduce", tensor, tensor, 1, SUM)
        with pytest.raises(FakeNcclError, match=text):
            BAD_CALLS[text](ranks[0], tensor)
        assert nccl.result("ncclGroupEnd") == "ncclInvalidArgument"
        ranks[0].stream.synchronize()  # nothing of the group has been started


def test_groups_used_wrongly(nccl: FakeNccl) -> None:
    with pytest.raises(FakeNcclError, match="no group has been started"):
        nccl("ncclGroupEnd")
    with ranks_of_process(nccl, 1) as (rank,):
        tensor = torch.ones(1)
        with pytest.raises(FakeNcclError, match="sends to itself and receives from itself not as often"):
            rank.send(tensor, 0)
        nccl("ncclGroupStart")
        rank("ncclAllReduce", tensor, tensor, 1, SUM)
        handle, given = ctypes.c_void_p(), UniqueId.from_buffer_copy(nccl.unique_id())
        nccl("ncclCommInitRank", ctypes.byref(handle), 1, given, 0)
        with pytest.raises(FakeNcclError, match="a group makes communicators or uses them, not both"):
            nccl("ncclGroupEnd")


def test_ids_that_are_no_good(nccl: FakeNccl) -> None:
    with pytest.raises(FakeNcclError, match="rank 2 of 2 ranks"):
        nccl.init(2, nccl.unique_id(), 2)
    with pytest.raises(FakeNcclError, match="the unique id is not one of this double's"):
        nccl.init(1, bytes(128), 0)
    used = nccl.unique_id()
    nccl("ncclCommDestroy", nccl.init(1, used, 0))
    with pytest.raises(FakeNcclError, match=r"joining a communicator: (the unique id is used up|/proc/.*: No)"):
        nccl.init(1, used, 0)
    shared = nccl.unique_id()
    first = nccl.init(2, shared, 0, Config(blocking=0))
    nccl.wait_for_joined(shared, 1)
    with pytest.raises(FakeNcclError, match="rank 0 has joined before"):
        nccl.init(2, shared, 0)
    with pytest.raises(FakeNcclError, match="this rank says 3 ranks, another said 2"):
        nccl.init(3, shared, 1)
    nccl("ncclCommAbort", first)


def test_configurations_arrive(nccl: FakeNccl) -> None:
    given = Config(maxCTAs=8, trafficClass=3, netName=b"Socket", commName=b"rows", nvlsHostMode=1)
    with ranks_of_process(nccl, 1, given) as (rank,):
        found = Config()
        nccl("fakeCommConfig", rank.communicator, ctypes.byref(found))
        assert (found.maxCTAs, found.trafficClass, found.nvlsHostMode, found.minCTAs) == (8, 3, 1, UNDEFINED)
        assert (found.netName, found.commName) == (b"Socket", b"rows")
        tensor, call = torch.ones(1), CallConfig(maxCTAs=4, userProfilerTag=77)
        arguments = (tensor.data_ptr(), tensor.data_ptr(), 1, INT8, rank.communicator, rank.stream.handle)
        nccl("ncclAllGatherConfig", *arguments, ctypes.byref(call))
        seen = CallConfig()
        nccl("fakeCommCallConfig", rank.communicator, ctypes.byref(seen))
        assert (seen.maxCTAs, seen.userProfilerTag) == (4, 77)
        with pytest.raises(FakeNcclError, match=r"ncclCollConfig_t.maxCTAs is 9, above the communicator's 8"):
            nccl("ncclAllGatherConfig", *arguments, ctypes.byref(CallConfig(maxCTAs=9)))
        with pytest.raises(FakeNcclError, match="ncclCollConfig_t is not initialised"):
            nccl("ncclAllGatherConfig", *arguments, ctypes.byref(CallConfig(magic=1)))
    for fields, text in (
        ({"blocking": 2}, "ncclConfig_t.blocking is 2"),
        ({"minCTAs": 9, "maxCTAs": 8}, "minCTAs is above maxCTAs"),
        ({"magic": 1}, "ncclConfig_t is not initialised"),
    ):
        with pytest.raises(FakeNcclError, match=text):
            nccl.init(1, nccl.unique_id(), 0, Config(**fields))


def test_sums_with_a_factor(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        factors = [torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor([4.0], dtype=torch.bfloat16)]
        source, targets = torch.full((3,), 3.0).bfloat16(), [torch.zeros(3).bfloat16() for _ in ranks]
        gate = Gate(*(rank.stream for rank in ranks))
        for rank, factor, residence in zip(ranks, factors, (0, 1), strict=True):
            op = ctypes.c_int()
            dtype = DTYPES[factor.dtype]
            arguments = (ctypes.byref(op), factor.data_ptr(), dtype, residence, rank.communicator)
            nccl("ncclRedOpCreatePreMulSum", *arguments)
            rank("ncclAllReduce", source, targets[rank.rank], 3, op.value)
            nccl("ncclRedOpDestroy", op.value, rank.communicator)
            with pytest.raises(FakeNcclError, match=f"op {op.value} does not exist"):
                rank("ncclAllReduce", targets[0], targets[0], 3, op.value)
            factor.fill_(2.0)  # read when it runs, where it was said to lie on the device
        gate.open()
        for rank in ranks:
            rank.stream.synchronize()
        assert_same(targets[0], torch.full((3,), 18.0, dtype=torch.bfloat16), "3 times 2 and 3 times 4")


def test_a_simulated_group_runs_nothing(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        tensor, simulation = torch.ones(2000), Simulation()
        for with_collective, expected in ((True, 18.0), (False, -1.0)):
            nccl("ncclGroupStart")
            ranks[0].send(tensor, 1)
            if with_collective:
                ranks[0]("ncclAllReduce", tensor, tensor, 2000, SUM)
            nccl("ncclGroupSimulateEnd", ctypes.byref(simulation))
            assert simulation.estimatedTime == expected
        ranks[0].stream.synchronize()


def test_messages_of_a_simulated_group_stay_queued(nccl: FakeNccl) -> None:
    """As NCCL's do (2.28.9, on an H200): those of each later group are one behind."""
    with ranks_of_process(nccl, 1) as (rank,):
        simulated = torch.ones(6)
        nccl("ncclGroupStart")
        rank.send(simulated, 0)
        rank.receive(simulated, 0)
        nccl("ncclGroupSimulateEnd", ctypes.byref(Simulation()))
        sources, targets = [torch.arange(6.0) + number for number in range(3)], torch.zeros(3, 6)
        for source, target in zip(sources, targets, strict=True):
            with rank.group():
                rank.send(source, 0)
                rank.receive(target, 0)
            rank.stream.synchronize()
        assert_same(targets, torch.stack((*sources[:2], torch.zeros(6))), "one behind")


def test_registered_buffers_are_counted(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 1) as (rank,):
        tensor = torch.ones(4)
        handle = nccl.pointer("ncclCommRegister", rank.communicator, tensor.data_ptr(), 16, at=3)
        nccl("ncclCommDeregister", rank.communicator, handle)
        with pytest.raises(FakeNcclError, match="there is no such registration"):
            nccl("ncclCommDeregister", rank.communicator, handle)

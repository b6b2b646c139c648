"""Aborts that wait for each other, or for a captured graph, keep nobody: not the program, the watch or its exit."""

import gc
import re
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.doubles.fake_nccl.library import Gate, build, load
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import backend_ranks, fake_streams, ranks_on
from tritondt.comm import world
from tritondt.comm.nccl import aborts, watched
from tritondt.comm.nccl.bootstrap import connect
from tritondt.comm.nccl.stream_engine import StreamEngine
from tritondt.comm.nccl.stream_queue import StreamQueue
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.comm.transports.threads import run_ranks
from tritondt.nccl import NcclError
from tritondt.process_group.work import NcclWork


@pytest.fixture(autouse=True)
def no_abort_under_way() -> Iterator[None]:
    aborts.settle(0)
    yield
    aborts._under_way.clear()


def test_aborts_that_need_each_other_end() -> None:
    both = threading.Barrier(2)
    for name in ("ranks 0,1", "ranks 0,2"):
        aborts.begin(lambda: both.wait(30), name, 0)
    assert aborts.settle(30) is None


def test_an_abort_that_does_not_end_is_named_with_its_captures() -> None:
    end = threading.Event()
    for name, captured in (("ranks 0,1", 2), ("ranks 0,2", 1), ("ranks 0,3", 0)):
        aborts.begin(end.wait, name, captured)
    aborts.begin(lambda: None, "ranks 0,4", 5)
    started = time.monotonic()
    text = aborts.settle(0.3)
    end.set()
    assert time.monotonic() - started < 10
    assert text == (
        "NCCL had 0.3 s to abort and did not end "
        "ranks 0,1 (2 of its operations were captured into CUDA graphs; NCCL waits until these are deleted), "
        "ranks 0,2 (1 of its operations was captured into CUDA graphs; NCCL waits until these are deleted), ranks 0,3"
    )
    assert aborts.settle(0) is None  # told once


def test_an_abort_that_fails_is_told() -> None:
    def fail() -> None:
        raise NcclError("ncclCommAbort: unhandled")

    aborts.begin(fail, "ranks 0,1", 0)
    assert aborts.settle(30) == "ncclCommAbort failed for ranks 0,1: ncclCommAbort: unhandled"


def fakes() -> Any:
    return fake_streams(load(build()))


def captured(rank: int) -> None:
    """Captures a redistribution, and leaves its graph alive."""
    whole = T.distribute_tensor(torch.arange(6.0).reshape(2, 3), T.Mesh((2,)), [T.Shard(0)])
    whole.redistribute(placements=[T.Replicate()])
    with fakes().capturing():
        whole.redistribute(placements=[T.Replicate()])


def abort_with_a_live_graph(rank: int) -> str:
    captured(rank)
    aborts.LIMIT_S = 0.5
    with pytest.raises(T.TransportError) as caught:
        T.abort()
    fakes().destroy_graphs()
    found: Any = T.distribute_tensor(torch.ones(2, 3), T.Mesh((2,)), [T.Shard(0)])
    assert torch.equal(found.full_tensor(), torch.ones(2, 3))
    return str(caught.value)


def close_with_a_live_graph(rank: int) -> str:
    captured(rank)
    watched._CAPTURED_S = 0.5
    with pytest.raises(T.TransportError) as caught:
        T.close()
    fakes().destroy_graphs()
    return str(caught.value)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[GlooRanks]:
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="20") as ranks:
        yield ranks


CAPTURED = "(1 of its operations was captured into CUDA graphs; NCCL waits until these are deleted)"


def test_an_abort_says_which_communicator_a_graph_keeps(two_ranks: GlooRanks) -> None:
    text = f"NCCL had 0.5 s to abort and did not end ranks 0,1 {CAPTURED}"
    assert two_ranks.run(abort_with_a_live_graph) == [text, text]


def test_an_orderly_end_says_which_communicator_a_graph_keeps(two_ranks: GlooRanks) -> None:
    text = f"NCCL did not end ranks 0,1 within 0.5 s {CAPTURED}; delete them before tritondt.close()"
    assert two_ranks.run(close_with_a_live_graph) == [text, text]


def end_with_a_live_graph(rank: int, over: str) -> None:
    if over == "mesh":
        captured(rank)
    else:
        dist.all_reduce(torch.ones(3))
        with fakes().capturing():
            dist.all_reduce(torch.ones(3))
    raise ValueError("a program that closes nothing")  # its process ends as any does


@pytest.mark.in_core(1)
@pytest.mark.parametrize("over", ["mesh", "backend"])
def test_a_process_ends_while_a_graph_is_alive(over: str) -> None:
    ranks = ranks_on("nccl", 2) if over == "mesh" else backend_ranks("nccl", 2)
    try:
        found = ranks.outcomes(end_with_a_live_graph, over)
        assert [failure.kind for failure in found] == ["ValueError", "ValueError"]
        ranks.begin_close()
        assert [ranks.status(rank, timeout_s=150) for rank in range(2)] == [0, 0]
    finally:
        ranks.kill()


def look_at_what_is_under_way(rank: int) -> bool:
    mesh = T.Mesh((2,))
    rows = T.distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [T.Shard(0)])
    communicator = world.current().communicator(mesh.ranks)
    assert isinstance(communicator, NcclCommunicator)
    rows.redistribute(placements=[T.Replicate()])
    gate = Gate(communicator._queue.stream._stream)  # type: ignore[attr-defined]
    moved = rows.redistribute(placements=[T.Replicate()], async_op=True)
    watch = next(thread for thread in threading.enumerate() if thread.name == "tritondt-watch")
    deadline = time.monotonic() + 30
    while watch.ident not in fakes()._capture.bound_threads and time.monotonic() < deadline:
        time.sleep(0.05)
    gate.open()
    moved.to_local()
    return watch.ident in fakes()._capture.bound_threads and watch.is_alive()


def test_the_watch_asks_for_events_on_its_communicators_device(two_ranks: GlooRanks) -> None:
    assert two_ranks.run(look_at_what_is_under_way) == [True, True]


def connect_at_first(rank: int, stalls: bool) -> str:
    streams = fakes()
    streams.connects_late = True
    if stalls and rank == 0:
        load(build()).set(FAKE_NCCL_STALL="ncclSend:1")
    mesh = T.Mesh((2,))
    try:
        world.current().communicator(mesh.ranks)
    except T.PeerError as error:
        return str(error)
    rows = T.distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [T.Shard(0)])
    return str(rows.full_tensor().sum().item())


@pytest.mark.extended
def test_ranks_connect_when_they_meet_within_the_timeout() -> None:
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="20") as ranks:
        assert ranks.run(connect_at_first, False) == ["15.0", "15.0"]
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="3") as ranks:
        late = r"rank {} waited 3 s for all of ranks \(0, 1\) to join in NCCL"
        for rank, text in enumerate(ranks.run(connect_at_first, True)):
            heard = f"rank {1 - rank} failed while rank {rank} connected to .*: PeerError: {late.format(1 - rank)}"
            assert re.fullmatch(f"{late.format(rank)}|{heard}", text), text


@pytest.mark.parametrize(("size", "num_peers"), [(1, 0), (2, 1), (8, 7), (65, 64), (1000, 64)])
def test_each_rank_connects_with_the_nearest_and_they_with_it(size: int, num_peers: int) -> None:
    class Native:
        """Stands for a communicator, and notes peers and collectives, which read and write what there is."""

        def all_gather(self, source: int, target: int, count: int, dtype: str, stream: int) -> None:
            assert target - source >= size * count
            collectives.append(("all_gather", size * count))

        def reduce_scatter(self, source: int, target: int, count: int, dtype: str, op: str, stream: int) -> None:
            assert target - source >= size * count
            collectives.append(("reduce_scatter", size * count))

        def all_reduce(self, source: int, target: int, count: int, dtype: str, op: str, stream: int) -> None:
            assert target - source >= count
            collectives.append(("all_reduce", count))

        def exchange(self, sends: Any, receives: Any, stream: int) -> None:
            assert [peer for peer, _, _ in sends] == [peer for peer, _, _ in receives]
            assert len({address for _, address, _ in (*sends, *receives)}) == 2 * len(sends)
            peers.append({peer for peer, _, _ in sends})

    peers: list[set[int]] = []
    collectives: list[tuple[str, int]] = []
    native: Any = Native()
    for place in range(size):
        connect(native, place, size, fakes(), timedelta(seconds=60))
    assert [len(found) for found in peers] == [num_peers] * (size if size > 1 else 0)
    assert all(place in peers[peer] for place, found in enumerate(peers) for peer in found)
    few, many = size, (1 << 22) // size * size
    once = [(name, total) for total in (few, many) for name in ("all_gather", "reduce_scatter", "all_reduce")]
    assert collectives == once * (size if size > 1 else 0)


def hold_what_is_read(rank: int, waiter: str) -> None:
    streams = fakes()
    queue, other = StreamQueue(StreamEngine(streams)), streams.make()
    source = torch.ones(3)
    seen, gate = weakref.ref(source), Gate(queue.stream._stream)  # type: ignore[attr-defined]
    work = queue.submit(lambda: None, "a test", [source], sources_ready=True)
    del source
    if waiter == "other":
        with streams.on(other):
            work.wait()
    else:
        threading.Timer(0.2, gate.open).start()
        work.wait()  # of the double's own stream, the host waits
        assert seen() is None
        return
    gc.collect()
    assert seen() is not None
    gate.open()
    queue.close()
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("waiter", ["issuer", "other"])
def test_what_is_read_is_held_until_it_has_been_where_another_stream_waits(waiter: str) -> None:
    run_ranks(1, partial(hold_what_is_read, waiter=waiter))


class Passing:
    """Stands for streams and their events, none of which waits; `stream` is the calling thread's."""

    def __init__(self) -> None:
        self.stream = self.issuing = SimpleNamespace(record_event=lambda: self, wait_event=lambda event: None)
        self.is_over = False

    def current(self) -> Any:
        return self.stream

    def make(self) -> Any:
        return SimpleNamespace(wait_event=lambda event: None)

    def follow(self, stream: Any, other: Any) -> None:
        """Nothing runs."""

    def is_capturing(self) -> bool:
        return False

    def record(self, stream: Any) -> Any:
        return self

    def query(self) -> bool:
        return self.is_over


@pytest.mark.parametrize("waiter", ["issuer", "other"])
def test_a_collective_holds_what_it_reads_alike(waiter: str) -> None:
    passing: Any = Passing()
    operation: Any = SimpleNamespace(results=slice(1, 2), waits_on_host=False, text="a test", fingerprint=0)
    source = torch.ones(3)
    seen = weakref.ref(source)
    work = NcclWork(operation, [source, torch.empty(3)], passing, lambda: None, 0, 60.0)
    del source
    engine = StreamEngine(passing)
    engine.end(work.in_flight, engine.begin(work.in_flight))
    work.was_put()
    if waiter == "other":
        passing.stream = SimpleNamespace(wait_event=lambda event: None)
    work.wait()
    assert (seen() is None) == (waiter == "issuer")
    passing.is_over = True
    assert work.is_completed()
    assert seen() is None


def test_the_limit_for_captures_is_below_every_timeout() -> None:
    assert timedelta(seconds=watched._CAPTURED_S) < timedelta(seconds=300)

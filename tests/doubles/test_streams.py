"""Streams of the double: operations run later, in order, beside each other, as on a device."""

import ctypes
import threading
import time
from functools import partial

import pytest
import torch

from tests.doubles.fake_nccl.abi import SUM, CallConfig
from tests.doubles.fake_nccl.library import FakeNccl, FakeNcclError, Gate
from tests.doubles.fake_nccl.tensors import RankOfTensors, assert_same, ranks_of_process, values


def all_gather(ranks: list[RankOfTensors], sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for rank, source, target in zip(ranks, sources, targets, strict=True):
        rank("ncclAllGather", source, target, source.numel())


def synchronize(ranks: list[RankOfTensors]) -> None:
    for rank in ranks:
        rank.stream.synchronize()


def test_a_collective_returns_before_it_runs(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        sources = [torch.zeros(100) for _ in ranks]
        targets = [torch.full((2, 100), -1.0) for _ in ranks]
        gate, gate_of_peer = (Gate(rank.stream) for rank in ranks)
        all_gather(ranks, sources, targets)
        for rank, source in enumerate(sources):
            source.fill_(rank + 1)  # what is sent is read when the stream comes to it
        gate_of_peer.open()
        time.sleep(0.02)
        assert not ranks[0].stream.is_idle()
        assert not ranks[1].stream.is_idle()  # it waits for its peer
        assert (targets[0] == -1).all()
        gate.open()
        synchronize(ranks)
        assert ranks[0].stream.is_idle()
        assert_same(targets[0], torch.tensor([1.0, 2.0])[:, None].expand(2, 100).contiguous(), "rank 0")


def test_pack_exchange_and_unpack_run_in_the_order_of_one_stream(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        wholes = [values(rank, 2000, torch.float32).view(50, 40) for rank in range(2)]
        packed, received = ([torch.zeros(50, 20) for _ in ranks] for _ in range(2))
        unpacked = [torch.zeros(50, 20) for _ in ranks]
        gates = Gate(*(rank.stream for rank in ranks))
        for rank in ranks:
            me, peer = rank.rank, 1 - rank.rank
            rank.stream.launch(partial(packed[me].copy_, wholes[me][:, 20 * peer : 20 * peer + 20]))
            with rank.group():
                rank.send(packed[me], peer)
                rank.receive(received[me], peer)
            rank.stream.launch(partial(torch.mul, received[me], 2, out=unpacked[me]))
        gates.open()
        synchronize(ranks)
        for me in range(2):
            assert_same(unpacked[me], wholes[1 - me][:, 20 * me : 20 * me + 20] * 2, f"rank {me}")


def test_an_event_stands_for_what_was_before_it(nccl: FakeNccl) -> None:
    first, second, event = nccl.new_stream(), nccl.new_stream(), nccl.new_event()
    order: list[str] = []
    assert event.is_over()  # nothing is recorded
    gate = Gate(first)
    first.launch(lambda: order.append("before"))
    event.record(first)
    first.launch(lambda: time.sleep(0.02))
    first.launch(lambda: order.append("behind"))
    second.wait(event)
    second.launch(lambda: order.append("held"))
    assert not event.is_over()
    gate.open()
    event.synchronize()
    assert event.is_over()
    second.synchronize()
    first.synchronize()
    assert order == ["before", "held", "behind"]
    for thing in (first, second, event):
        thing.destroy()


def test_operations_of_a_communicator_run_in_order_of_issue_on_any_streams(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        firsts = [rank.stream for rank in ranks]
        gate = Gate(*firsts)
        tensor = [torch.ones(10) for _ in ranks]
        for rank in ranks:
            rank("ncclAllReduce", tensor[rank.rank], tensor[rank.rank], 10, SUM)
            rank.stream = nccl.new_stream()
            rank("ncclAllReduce", tensor[rank.rank], tensor[rank.rank], 10, SUM)
        time.sleep(0.02)
        assert not any(rank.stream.is_idle() for rank in ranks)
        gate.open()
        synchronize(ranks)
        assert_same(tensor[0], torch.full((10,), 4.0), "reduced twice")
        for first in firsts:
            first.destroy()


def test_a_group_on_two_streams_starts_when_both_have_come_to_it(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        first, second = ranks[0].stream, nccl.new_stream()
        gate = Gate(second)
        sent, received = values(0, 100, torch.int32), torch.zeros(100, dtype=torch.int32)
        with ranks[0].group():
            ranks[0].send(sent, 1)
            ranks[0].stream = second
            ranks[0].receive(received, 1)
        time.sleep(0.02)
        assert not first.is_idle()
        gate.open()
        time.sleep(0.02)
        assert not second.is_idle()  # it waits for the group, whichever stream has its part
        with ranks[1].group():
            ranks[1].receive(echo := torch.zeros(100, dtype=torch.int32), 0)
            ranks[1].send(sent, 0)
        synchronize(ranks)
        first.synchronize()
        assert_same(received, sent, "on the second stream")
        assert_same(echo, sent, "of the other rank")
        first.destroy()


def test_two_communicators_on_two_streams_run_beside_each_other(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks, ranks_of_process(nccl, 2) as others:
        gates = Gate(*(rank.stream for rank in ranks))
        blocked, free = ([torch.ones(10) for _ in ranks] for _ in range(2))
        for rank, other in zip(ranks, others, strict=True):
            with rank.group():
                rank("ncclAllReduce", blocked[rank.rank], blocked[rank.rank], 10, SUM)
                other("ncclAllReduce", free[rank.rank], free[rank.rank], 10, SUM)
        synchronize(others)
        assert_same(free[1], torch.full((10,), 2.0), "the free communicator")
        gates.open()
        synchronize(ranks)
        assert_same(blocked[1], torch.full((10,), 2.0), "the one that was held up")


def test_a_send_is_over_when_its_receive_has_all_of_it(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 2) as ranks:
        sent, received = values(0, 5, torch.int32), torch.zeros(5, dtype=torch.int32)
        ranks[0].send(sent, 1)
        time.sleep(0.02)
        assert not ranks[0].stream.is_idle()  # not lent room between the ranks
        ranks[1].receive(received, 0)
        ranks[0].stream.synchronize()
        assert_same(received, sent, "received")


def test_every_process_has_a_default_stream(nccl: FakeNccl) -> None:
    target = bytearray(4)
    address = torch.frombuffer(target, dtype=torch.uint8).data_ptr()
    source = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    nccl("fakeStreamCopy", None, address, source.data_ptr(), 4)
    nccl("fakeStreamSynchronize", None)
    assert bytes(target) == bytes([1, 2, 3, 4])


def test_a_destroyed_stream_still_runs_what_it_has(nccl: FakeNccl) -> None:
    stream, done = nccl.new_stream(), threading.Event()
    gate = Gate(stream)
    stream.launch(done.set)
    stream.destroy()
    gate.open()
    assert done.wait(10)
    with pytest.raises(FakeNcclError, match="fakeStreamSynchronize: there is no such stream"):
        stream.synchronize()


def test_a_stream_is_of_its_device(nccl: FakeNccl) -> None:
    nccl("fakeSetDevice", 1)
    stream = nccl.new_stream()
    nccl("fakeSetDevice", 0)
    assert stream.device == 1
    with ranks_of_process(nccl, 1) as (rank,):
        assert nccl.number("ncclCommCuDevice", rank.communicator) == 0
        own, rank.stream = rank.stream, stream
        with pytest.raises(FakeNcclError, match="the stream is of device 1, the communicator of device 0") as raised:
            rank("ncclAllGather", torch.zeros(1), torch.zeros(1), 1)
        assert raised.value.result == "ncclUnhandledCudaError"
        rank.stream = own
    stream.destroy()


def test_a_launch_event_is_over_when_the_operation_has_started(nccl: FakeNccl) -> None:
    event = nccl.new_event()
    with ranks_of_process(nccl, 2) as ranks:
        gate = Gate(ranks[0].stream)
        tensor = torch.ones(1)
        config = CallConfig(launchCompletionEvent=event.handle)
        arguments = (tensor.data_ptr(), tensor.data_ptr(), 1, 7, ranks[0].communicator, ranks[0].stream.handle)
        nccl("ncclAllGatherConfig", *arguments, ctypes.byref(config))
        assert not event.is_over()
        gate.open()
        event.synchronize()
        assert not ranks[0].stream.is_idle()  # the other rank has not come
    event.destroy()

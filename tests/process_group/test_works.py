"""What a Work of the backend says and does, on the double of NCCL: the host goes on while operations are under way."""

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.doubles.fake_nccl.library import Gate, build, load
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import FakeStream, fake_streams
from tests.process_group.collectives import own
from tritondt.comm.monitor.watch import INTERVAL_S

RanksOf = Callable[[str, int], GlooRanks]


@pytest.fixture
def ranks(ranks_of: RanksOf) -> GlooRanks:
    return ranks_of("nccl", 2)


def gate() -> Gate:
    """Holds up the stream of the default group's communicator."""
    dist.all_reduce(torch.ones(1))
    group: Any = dist.group.WORLD
    return Gate(group._router._nccl_groups["cpu"]._stream.engine.stream._stream)


def issue_behind_a_gate(rank: int) -> None:
    held, x, y = gate(), own(rank), torch.empty(12)
    first = dist.all_reduce(x, async_op=True)
    second = dist.all_gather_into_tensor(y, own(rank), async_op=True)
    assert not first.is_completed()
    assert not second.is_completed()
    assert not first.is_success()
    torch.testing.assert_close(x, own(rank), rtol=0, atol=0)
    with pytest.raises(T.PeerError, match=r"all_gather_into_tensor of 6 float32 was waited for 0.05 s, as asked"):
        second.wait(timedelta(seconds=0.05))
    held.open()
    second.wait()
    assert first.is_completed()
    assert first.exception() is None
    first.synchronize()
    assert first.result()[0] is x
    torch.testing.assert_close(x, own(0) + own(1), rtol=0, atol=0)
    torch.testing.assert_close(y, torch.cat([own(0), own(1)]), rtol=0, atol=0)
    assert second.is_success()


def test_the_host_goes_on(ranks: GlooRanks) -> None:
    ranks.run(issue_behind_a_gate)


def drop_behind_a_gate(rank: int) -> None:
    held, found = gate(), []
    for number in range(20):
        output = torch.empty(2 * 6)
        dist.all_gather_into_tensor(output, own(rank) + number, async_op=True)  # nobody keeps the work or the input
        found.append(output)
    torch.full((6,), -1.0)  # would take the memory that was freed
    held.open()
    dist.all_reduce(torch.ones(1))
    for number, output in enumerate(found):
        torch.testing.assert_close(output, torch.cat([own(0), own(1)]) + number, rtol=0, atol=0)


def test_tensors_are_kept_until_they_have_travelled(ranks: GlooRanks) -> None:
    ranks.run(drop_behind_a_gate)


def clear_the_list_behind_a_gate(rank: int) -> None:
    held = gate()
    tensors = [own(rank), own(rank) + 1]
    group: Any = dist.group.WORLD
    work = group.allreduce(tensors)
    tensors.clear()
    taken = [torch.full((6,), -1.0) for _ in range(4)]  # would take the memory that was freed
    held.open()
    work.wait()
    for number, found in enumerate(work.result()):
        torch.testing.assert_close(found, own(0) + own(1) + 2 * number, rtol=0, atol=0)
    assert all(torch.equal(each, torch.full((6,), -1.0)) for each in taken)


def test_the_callers_list_may_change(ranks: GlooRanks) -> None:
    ranks.run(clear_the_list_behind_a_gate)


def drop_what_was_looked_at(rank: int) -> int:
    """How many of its tensors outlive an operation that was under way when the watch looked."""
    gc.disable()
    try:
        held, x = gate(), own(rank)
        seen = weakref.ref(x)
        work = dist.all_reduce(x, async_op=True)
        time.sleep(2 * INTERVAL_S + 0.2)
        held.open()
        work.wait()
        del work, x
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        end = time.monotonic() + 2 * INTERVAL_S
        while seen() is not None and time.monotonic() < end:
            time.sleep(0.05)
        return int(seen() is not None)
    finally:
        gc.enable()


def test_nothing_keeps_what_the_watch_has_looked_at(ranks: GlooRanks) -> None:
    assert ranks.run(drop_what_was_looked_at) == [0, 0]


def reduce_in_streams(rank: int) -> list[bool]:
    """Sums in two streams and in the group's own, behind a gate in the first: whether each event has come."""
    held, streams, x = gate(), fake_streams(load(build())), own(rank)
    held.open()
    first, second = streams.make(), streams.make()
    behind, ends = Gate(first._stream), []
    for stream in (first, second):
        with streams.on(stream):
            dist.all_reduce(x)
        ends.append(stream.record_event())
    with streams.on(second):
        work = dist.all_reduce(x, async_op=True)
    found = [*(end.query() for end in ends), work.is_completed()]
    behind.open()
    work.wait()
    torch.testing.assert_close(x, 4 * (own(0) + own(1)), rtol=0, atol=0)
    streams.synchronize()
    return [*found, *(end.query() for end in ends), work.is_completed()]


def test_what_is_waited_for_at_once_goes_into_the_callers_stream_in_the_order_of_calls(ranks: GlooRanks) -> None:
    assert ranks.run(reduce_in_streams) == [[False] * 3 + [True] * 3] * 2


def count_events(rank: int) -> list[int]:
    """Events recorded, and waits, for a synchronous sum, for one with a wait of its own, and for one after that."""
    streams, x = fake_streams(load(build())), own(rank)
    stream, counts = streams.make(), Counter[str]()
    with streams.on(stream):
        dist.all_reduce(x)
        streams.synchronize()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("record_event", "wait_event"):
                patch.setattr(FakeStream, name, counted(counts, name, getattr(FakeStream, name)))
            found = []
            for is_asynchronous in (False, True, False):
                work = dist.all_reduce(x, async_op=is_asynchronous)
                if work is not None:
                    work.wait()
                found += [counts.pop("record_event", 0), counts.pop("wait_event", 0)]
    streams.synchronize()
    return found


def counted(counts: Counter[str], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*arguments: Any) -> Any:
        counts[name] += 1
        return run(*arguments)

    return counting


def test_a_synchronous_operation_records_its_end_and_waits_for_nothing(ranks: GlooRanks) -> None:
    assert ranks.run(count_events) == [[1, 0, 2, 2, 1, 0]] * 2


def chain_futures(rank: int) -> None:
    held, x = gate(), own(rank)
    future = dist.all_reduce(x, async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2)
    assert not future.done()
    held.open()
    torch.testing.assert_close(halved.wait(), (own(0) + own(1)) / 2, rtol=0, atol=0)
    assert future.value()[0] is x


def test_futures(ranks: GlooRanks) -> None:
    ranks.run(chain_futures)


def coalesce(rank: int) -> None:
    x, y = own(rank), torch.empty(3)
    group = dist.group.WORLD
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(x, src=1)
        dist.isend(own(rank, 3), 1 - rank)
        dist.irecv(y, 1 - rank)
    manager.wait()
    torch.testing.assert_close(x, own(1), rtol=0, atol=0)
    torch.testing.assert_close(y, own(1 - rank, 3), rtol=0, atol=0)
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True):
        pass  # nothing


def test_what_is_coalesced_travels_as_one(ranks: GlooRanks) -> None:
    ranks.run(coalesce)


def messages_know_their_source(rank: int) -> tuple[int, int]:
    x = torch.empty(3)
    if rank == 0:
        dist.send(own(0, 3), 1)
        return -1, -1
    work = dist.irecv(x, 0)
    assert work is not None
    work.wait()
    return work._source_rank(), work.source_rank()


def test_messages_know_their_source(ranks: GlooRanks) -> None:
    assert ranks.run(messages_know_their_source)[1] == (0, 0)


def what_torch_asks(rank: int) -> list[Any]:
    group: Any = dist.group.WORLD
    count = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    assert group._get_sequence_number_for_group() == count + 1
    group.set_timeout(timedelta(seconds=50))
    backend = group._get_backend(torch.device("cuda"))
    group.monitored_barrier(timedelta(seconds=30))
    return [
        *(dist.get_backend(), dist.get_backend_config(), group.name(), backend.name(), backend.supports_splitting),
        sorted(str(device) for device in group._device_types),
        type(group.get_group_store()).__name__,
    ]


def test_what_torch_asks_of_a_group(ranks: GlooRanks) -> None:
    expected = ["tritondt", "cpu:tritondt,cuda:tritondt", "tritondt", "tritondt", True, ["cpu", "cuda"], "PrefixStore"]
    assert ranks.run(what_torch_asks) == [expected] * 2


def wait_again(rank: int, is_nccl: bool) -> None:
    group: Any = dist.group.WORLD
    synchronous = dist.ReduceScatterOptions()
    synchronous.asyncOp = False
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda x: dist.all_reduce(x, async_op=True),
        "all_gather": lambda x: dist.all_gather_into_tensor(x, own(rank, 3), async_op=True),
        "scatter": lambda x: dist.scatter(x, [own(0), own(1)] if rank == 0 else None, async_op=True),
        "all_to_all": lambda x: dist.all_to_all_single(x, own(rank), async_op=True),
        "reduce_scatter": lambda x: dist.reduce_scatter(x, [own(rank), own(rank)], async_op=True),
        "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, own(rank, 12), async_op=True),
        "coalesced": lambda x: group.reduce_scatter_tensor_coalesced([x], [own(rank, 12)]),
        "synchronous": lambda x: group.reduce_scatter_tensor_coalesced([x], [own(rank, 12)], synchronous),
    }
    for name, call in calls.items():
        for x in (torch.ones(6), *(() if is_nccl else (torch.ones(6, 2)[:, 0],))):  # NCCL takes none with gaps
            work = call(x)
            assert work.wait(), name
            assert x.count_nonzero() == 6, name
            if is_nccl:  # the host has only queued it
                work.wait(timedelta(seconds=60))
            assert work.is_completed(), name
            assert work.is_success(), name
            assert work.exception() is None, name
            x.fill_(-1)
            assert work.wait(), name
            work.synchronize()
            torch.testing.assert_close(x, torch.full((6,), -1.0), rtol=0, atol=0, msg=name)


@pytest.mark.in_core(1)
@pytest.mark.parametrize("over", ["gloo", "shared-memory", "sockets", "nccl"])
def test_a_work_that_is_waited_for_again_writes_nothing(ranks_of: RanksOf, over: str) -> None:
    ranks_of(over, 2).run(wait_again, over == "nccl", timeout_s=100)

"""Collectives of tensors on the CPU through shared memory: which run there, their bits, order, failures and ends."""

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.comm.transports.test_reductions import in_order
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import backend_ranks
from tests.process_group.collectives import own
from tritondt.process_group import levels

RanksOf = Callable[[str, int], GlooRanks]
LARGE = 100_003  # float32 of more than 256 KB, which do not divide


@pytest.fixture
def ranks(ranks_of: RanksOf) -> GlooRanks:
    return ranks_of("shared-memory", 4)


def communicator_of(group: Any) -> Any:
    return group._router._cpu_group._carrier.whole


def count_exchanges(rank: int) -> dict[str, int]:
    """Exchanges of this rank's communicator for every call."""
    size, one, bits = dist.get_world_size(), own(rank, 8), torch.arange(8)
    apart = [torch.empty(place) for place in range(size)]
    strided = [torch.empty(8, 2)[:, 0] for _ in range(size)]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_reduce, large": lambda: dist.all_reduce(torch.ones(LARGE)),
        "all_reduce, avg": lambda: dist.all_reduce(one, op=dist.ReduceOp.AVG),
        "all_reduce, band": lambda: dist.all_reduce(bits, op=dist.ReduceOp.BAND),
        "all_reduce, none": lambda: dist.all_reduce(torch.empty(0)),
        "all_gather, uneven": lambda: dist.all_gather(apart, own(rank, rank)),
        "all_gather, strided": lambda: dist.all_gather(strided, one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(8 * size), one),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(2), list(one.chunk(4))),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(2), one),
        "broadcast": lambda: dist.broadcast(one, 2),
        "reduce": lambda: dist.reduce(one, 0),
        "gather": lambda: dist.gather(one, [torch.empty(8) for _ in range(size)] if rank == 1 else None, 1),
        "scatter": lambda: dist.scatter(torch.empty(2), list(one.chunk(4)) if rank == 1 else None, 1),
        "all_to_all": lambda: dist.all_to_all(list(torch.empty(4, 2)), list(one.chunk(4))),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(8), one),
        "barrier": dist.barrier,
    }
    dist.barrier()
    found = {}
    for name, call in calls.items():
        before = communicator_of(dist.group.WORLD).sequence
        call()
        found[name] = communicator_of(dist.group.WORLD).sequence - before
    torch.testing.assert_close(apart, [own(place, place) for place in range(size)], rtol=0, atol=0)
    return found


def test_each_is_one_exchange_there(ranks: GlooRanks) -> None:
    for found in ranks.run(count_exchanges):
        assert set(found.values()) == {1}


def reduce_where_one_rank_names(rank: int, transport: str) -> tuple[str, str]:
    """The carrier of a group for which one rank names another transport, or the error; all abort then."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setenv("TRITONDT_TRANSPORT", transport)
        carrier, told = "", ""
        try:
            group = dist.new_group(backend="tritondt")
            dist.all_reduce(reduced := own(rank), group=group)
            torch.testing.assert_close(reduced, own(0) * 10, rtol=0, atol=0)
            carrier = type(communicator_of(group)).__name__
            dist.destroy_process_group(group)
        except T.TritondtError as error:
            told = str(error)
    T.abort()
    return carrier, told


def reduce(rank: int) -> float:
    dist.all_reduce(found := own(rank))
    return float(found[0])


def test_all_ranks_use_sockets_where_one_names_them(ranks: GlooRanks) -> None:
    found = ranks.run(reduce_where_one_rank_names, "sockets", timeout_s=100)
    assert found == [("SocketCommunicator", "")] * 4
    assert ranks.run(reduce, timeout_s=100) == [10.0] * 4


def test_gloo_on_one_rank_alone_is_refused_on_all(ranks: GlooRanks) -> None:
    found = ranks.run(reduce_where_one_rank_names, "gloo", timeout_s=150)
    why = r"runs collectives of process group \d+ on the CPU over .*; set TRITONDT_TRANSPORT alike on all ranks"
    assert re.search(why, found[2][1]), found
    for carrier, told in found:
        assert carrier == "", found
        # Some hear of another one that has heard of it, and aborts.
        assert re.search(f"{why}|^rank . failed while rank . waited", told), found
    assert ranks.run(reduce, timeout_s=100) == [10.0] * 4


def random_terms(dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    scales = torch.pow(2.0, torch.randint(-9, 9, (4, numel), generator=generator))
    return list((torch.randn((4, numel), generator=generator) * scales).to(dtype))


def reduce_terms(rank: int, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
    term = random_terms(dtype, numel)[rank]
    whole, part = term.clone(), torch.empty(numel // 4, dtype=dtype)
    dist.all_reduce(whole)
    dist.reduce_scatter_tensor(part, term[: numel // 4 * 4])
    return [whole, part]


@pytest.mark.parametrize("numel", [41, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_are_added_in_the_order_of_ranks_on_all_of_them(ranks: GlooRanks, dtype: torch.dtype, numel: int) -> None:
    expected = in_order(random_terms(dtype, numel), "sum")
    for rank, (whole, part) in enumerate(ranks.run(reduce_terms, dtype, numel)):
        torch.testing.assert_close(whole, expected, rtol=0, atol=0)
        torch.testing.assert_close(part, expected[: numel // 4 * 4].chunk(4)[rank], rtol=0, atol=0)


def wait_in_any_order(rank: int) -> None:
    """Of many under way, those with results of another among them; half of the ranks wait for the last first."""
    tensors = [own(rank, 50 + number) for number in range(20)]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    output = torch.empty(4 * 50)
    works.append(dist.all_gather_into_tensor(output, tensors[0], async_op=True))
    dist.all_reduce(later := own(rank))  # one that waits runs after all of them
    assert all(work.is_completed() for work in works)
    for work in reversed(works) if rank % 2 else works:
        work.wait(timedelta(seconds=30))
        assert work.is_success()
    for number, tensor in enumerate(tensors):
        torch.testing.assert_close(tensor, own(0, 50 + number) * 10, rtol=0, atol=0)
    torch.testing.assert_close(output, (own(0, 50) * 10).repeat(4), rtol=0, atol=0)
    torch.testing.assert_close(later, own(0) * 10, rtol=0, atol=0)
    assert works[0].result()[0] is tensors[0]
    assert works[3].get_future().wait()[0] is tensors[3]


def test_works_end_in_any_order(ranks: GlooRanks) -> None:
    ranks.run(wait_in_any_order)


def reduce_what_a_future_gives(rank: int) -> list[float]:
    """A collective that another one's callback asks for, while this thread is in one more."""
    first, asked = own(rank), []

    def again(future: Any) -> Any:
        asked.append(dist.all_reduce(future.value()[0], async_op=True))
        return future.value()

    held = dist.all_reduce(torch.ones(1 << 20), async_op=True)  # long enough for the callback to be there in time
    work: Any = dist.all_reduce(first, async_op=True)
    done = work.get_future().then(again)
    held.wait()
    done.wait()
    asked[0].wait()
    dist.all_reduce(last := own(rank))
    return [float(first[0]), float(last[0])]


def test_callbacks_may_ask_for_more(ranks: GlooRanks) -> None:
    assert ranks.run(reduce_what_a_future_gives) == [[40.0, 10.0]] * 4


def disagree_and_go_on(rank: int) -> tuple[list[str], float]:
    """Another size on one rank, in a group of its own; then a world of their own."""
    group: Any = dist.new_group(backend="tritondt")
    told = []
    with pytest.raises(T.PeerError) as error:
        dist.all_reduce(own(rank, 7 if rank == 2 else 6), group=group)
    told.append(str(error.value))
    with pytest.raises(T.WorldError) as again:
        dist.all_reduce(own(rank), group=group)
    told.append(str(again.value))
    T.abort()
    dist.all_reduce(x := own(rank), group=group)
    dist.destroy_process_group(group)
    return told, float(x[0])


def test_ranks_that_disagree_are_told_and_go_on(ranks: GlooRanks) -> None:
    for told, found in ranks.run(disagree_and_go_on):
        assert "all_reduce (sum) of 6 float32" in told[0], told
        assert "all_reduce (sum) of 7 float32" in told[0], told
        assert found == 10


ROOTED: dict[str, Callable[[int, torch.Tensor, Any], Any]] = {
    "broadcast": lambda root, x, group: dist.broadcast(x, root, group=group),
    "reduce": lambda root, x, group: dist.reduce(x, root, group=group),
    "gather": lambda root, x, group: dist.gather(
        x, [torch.empty_like(x) for _ in range(4)] if dist.get_rank() == root else None, root, group=group
    ),
    "scatter": lambda root, x, group: dist.scatter(
        x, [torch.ones_like(x)] * 4 if dist.get_rank() == root else None, root, group=group
    ),
}


def name_other_roots(rank: int, kind: str, roots: tuple[int, ...]) -> list[str]:
    """The errors of a collective of other roots, or of what follows; then all go on in a new world."""
    group: Any = dist.new_group(backend="tritondt")
    told = []
    try:
        ROOTED[kind](roots[rank], own(rank, 6), group)
        dist.all_reduce(own(rank), group=group)
    except T.PeerError as error:
        told.append(f"{type(error).__name__}: {error}")
    T.abort()
    dist.all_reduce(x := own(rank), group=group)
    assert x[0] == 10
    dist.destroy_process_group(group)
    return told


@pytest.mark.parametrize("kind", ROOTED)
@pytest.mark.parametrize("roots", [(0, 0, 1, 0), (0, 1, 2, 3)], ids=["one other", "all others"])
def test_other_roots_are_found_by_those_that_wait_or_by_the_next_collective(
    ranks: GlooRanks, kind: str, roots: tuple[int, ...]
) -> None:
    for told in ranks.run(name_other_roots, kind, roots):
        assert len(told) == 1, told
        assert kind in told[0], told
        assert "root" in told[0], told


def refuse_alone(rank: int, is_first: bool) -> str:
    """Rank 1 gives a sparse tensor, which is refused; the others hear why, and all go on."""
    group: Any = dist.new_group(backend="tritondt")
    if not is_first:
        dist.all_reduce(own(rank), group=group)
    outputs, given = [torch.empty(4) for _ in range(4)], own(rank, 4)
    with pytest.raises(RuntimeError) as error:
        dist.all_gather(outputs, given.to_sparse() if rank == 1 else given, group=group)
    dist.all_reduce(x := own(rank), group=group)
    assert x[0] == 10
    dist.destroy_process_group(group)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("is_first", [False, True])
def test_the_others_hear_what_is_refused_on_one_rank(ranks: GlooRanks, is_first: bool) -> None:
    told = ranks.run(refuse_alone, is_first)
    for rank in (0, 2, 3):
        assert told[rank].startswith(f"RefusalError: rank 1 failed while rank {rank} waited for rank"), told
        assert "was given a tensor of the layout torch.sparse_coo; collectives carry torch.strided only" in told[rank]


def die(rank: int) -> str:
    dist.all_reduce(own(rank))
    if rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)  # as a profiler does
    began = time.monotonic()
    with pytest.raises(T.PeerError) as error:
        dist.all_reduce(own(rank))
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert time.monotonic() - began < 30, "a signal was taken for a message, again and again"
    return str(error.value)


@pytest.mark.extended
def test_a_rank_that_is_killed() -> None:
    mortal = backend_ranks("shared-memory", 3, TRITONDT_TIMEOUT="60")
    try:
        *told, died = mortal.outcomes(die)
    finally:
        mortal.kill()
    assert died.kind == "died"
    for text in told:
        assert "rank 2 closed its connection" in text, text
        assert "waited for it in all_reduce (sum) of 6 float32, asked for at" in text, text


def fork_and_look(rank: int) -> tuple[list[bool], list[bool]]:
    """Whether the connections of the group are open: in a forked child, and here."""
    dist.all_reduce(torch.ones(1))
    descriptors = [
        found.fileno() for found in communicator_of(dist.group.WORLD)._connections.sockets if found is not None
    ]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, bytes(are_open(descriptors)))
        os._exit(0)
    of_child = os.read(reading, len(descriptors))
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    dist.all_reduce(torch.ones(1))
    return [bool(each) for each in of_child], are_open(descriptors)


def are_open(descriptors: list[int]) -> list[bool]:
    return [os.path.lexists(f"/proc/self/fd/{descriptor}") for descriptor in descriptors]


def test_a_forked_child_has_none_of_the_connections(ranks: GlooRanks) -> None:
    assert ranks.run(fork_and_look) == [([False] * 3, [True] * 3)] * 4


def share_nothing(rank: int) -> tuple[str, float]:
    group: Any = dist.new_group(backend="tritondt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "share_arenas", lambda *_, **__: None)
        dist.all_reduce(x := own(rank), group=group)
    carrier = type(communicator_of(group)).__name__
    dist.destroy_process_group(group)
    return carrier, float(x[0])


def test_ranks_that_share_no_memory_use_sockets(ranks: GlooRanks) -> None:
    assert ranks.run(share_nothing) == [("SocketCommunicator", 10.0)] * 4

"""Calls that one rank of a group alone gets wrong: it is refused at once, and the others hear of it at once."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import backend_ranks

RanksOf = Callable[[str, int], GlooRanks]


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will have none of them some day
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)


def all_to_all_rows(is_wrong: bool, group: Any) -> None:
    dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [1, 1] if is_wrong else [2, 2], group=group)


def all_to_all_odd(is_wrong: bool, group: Any) -> None:
    length = 5 if is_wrong else 4
    dist.all_to_all_single(torch.empty(length), torch.ones(length), group=group)


def all_to_all_outputs(is_wrong: bool, group: Any) -> None:
    outputs = [torch.empty(2) for _ in range(1 if is_wrong else 2)]
    dist.all_to_all(outputs, [torch.ones(2), torch.ones(2)], group=group)


def of_quantised(is_wrong: bool, group: Any) -> None:
    dist.all_reduce(quantised() if is_wrong else torch.ones(4), group=group)


def of_nested(is_wrong: bool, group: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are in prototype stage
        given = torch.nested.nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.strided)
    dist.all_reduce(given if is_wrong else torch.ones(4), group=group)


def of_another_device(is_wrong: bool, group: Any) -> None:
    dist.all_reduce(torch.ones(4, device="meta" if is_wrong else "cpu"), group=group)


def of_nothing(is_wrong: bool, group: Any) -> None:
    group.allreduce([] if is_wrong else [torch.ones(4)]).wait()


CASES: dict[str, tuple[Callable[[bool, Any], None], str]] = {
    "rows": (all_to_all_rows, "was given input split sizes [1, 1]; they must be 2 sizes that make the 4 rows"),
    "odd": (all_to_all_odd, "was given an input of 5 rows without split sizes; 2 ranks must divide them"),
    "outputs": (all_to_all_outputs, "was given 1 outputs; there must be 2"),
    "quantised": (of_quantised, "was asked for with elements of quint8"),
    "nested": (of_nested, "takes a strided tensor, got a nested one of 2 tensors"),
    "device": (of_another_device, "was given a tensor on meta; process group"),
    "nothing": (of_nothing, "all_reduce (sum) was given no tensors"),
}


def ask(rank: int, name: str) -> str:
    group = dist.new_group(backend="tritondt")
    with pytest.raises(T.TritondtError) as told:
        CASES[name][0](rank == 1, group)
    dist.barrier()
    dist.destroy_process_group(group)
    kind = T.PeerError if rank == 0 else (T.LocalTensorError, T.TransportError, T.WorldError)
    assert isinstance(told.value, kind)
    return str(told.value)


@pytest.mark.in_core(3)
@pytest.mark.parametrize("name", CASES)
def test_the_others_hear_of_it(ranks_of: RanksOf, name: str) -> None:
    first, second = ranks_of("shared-memory", 2).run(ask, name, timeout_s=50)
    assert CASES[name][1] in second
    assert first.startswith("rank 1 failed while rank 0 waited for rank 1")


def ask_over_gloo(rank: int, name: str, how: str) -> tuple[list[str], float]:
    """Errors of a call that rank 1 gets wrong and of the next, and the seconds of the first; the group then goes on."""
    group: Any = dist.new_group(backend="tritondt")
    dist.all_reduce(torch.ones(1), group=group)  # connects all
    told, took_s, started = list[str](), 0.0, time.monotonic()
    asked: list[Callable[[], object]] = [lambda: CASES[name][0](rank == 1, group)]
    if how != "sync" and rank == 0:
        works: list[Any] = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(2)]
        asked = [works[0].get_future().wait if how == "future" else works[0].wait, works[1].wait]
    for ask in (*asked, lambda: dist.all_reduce(torch.ones(2), group=group)):
        try:
            ask()
            told.append("no error")
        except T.TritondtError as error:
            told.append(f"{type(error).__name__}: {error}")
        took_s = took_s or time.monotonic() - started
    T.abort()
    total = torch.full((2,), float(rank))
    dist.all_reduce(total, group=group)
    assert total.tolist() == [1.0, 1.0]
    dist.destroy_process_group(group)
    return told, took_s


@pytest.mark.in_core(2)
@pytest.mark.parametrize(
    ("name", "how"),
    [("quantised", "future"), ("device", "sync"), *((name, "sync") for name in CASES if name != "device")],
)
def test_over_gloo_the_others_hear_of_it(ranks_of: RanksOf, name: str, how: str) -> None:
    (told, took_s), (refused, _) = ranks_of("gloo", 2).run(ask_over_gloo, name, how, timeout_s=100)
    assert CASES[name][1] in refused[0]
    assert told[0].startswith("PeerError: rank 1 failed while rank 0 waited for rank 1 in all_")
    assert CASES[name][1] in told[0]
    assert "call tritondt.abort() on every rank to go on" in told[0]
    assert took_s < 30  # the timeout is 60 s, and on an idle machine it takes 1.0
    assert "failed before (" in told[-1] or told[-1].startswith("PeerError: rank 1 failed")
    assert refused[1].startswith("PeerError: rank 1 refused operation 2 of process group ")
    assert "Gloo tells operations apart by how many have run" in refused[1]


def all_refuse(rank: int) -> float:
    """Gloo has counted no call that all ranks refuse alike: they go on."""
    for _ in range(3):
        with pytest.raises(T.LocalTensorError, match="quint8"):
            dist.all_reduce(quantised())
    dist.all_reduce(x := torch.full((3,), rank + 1.0))
    return x[0].item()


def test_over_gloo_ranks_that_refuse_alike_go_on(ranks_of: RanksOf) -> None:
    assert ranks_of("gloo", 2).run(all_refuse) == [3.0, 3.0]


def name_other_roots(rank: int) -> str:
    group: Any = dist.new_group(backend="tritondt")
    work: Any = dist.broadcast(torch.ones(4), rank, group=group, async_op=True)
    with pytest.raises(T.PeerError) as told:
        dist.all_gather_object([None, None], work.wait(), group=group)
    T.abort()
    dist.all_reduce(x := torch.ones(1), group=group)
    assert x.item() == 2
    dist.destroy_process_group(group)
    return str(told.value)


@pytest.mark.extended
def test_over_gloo_ranks_that_name_other_roots_hear_of_it(ranks_of: RanksOf) -> None:
    for told in ranks_of("gloo", 2).run(name_other_roots, timeout_s=100):
        assert "ranks disagree at exchange 1: rank " in told
        assert "broadcast of 4 float32, root 0" in told
        assert "broadcast of 4 float32, root 1" in told


def die_in_gloo(rank: int, kind: str) -> list[str]:
    """Rank 1 of three dies: its neighbours lose a connection, and the other ones wait for those."""
    group: Any = dist.new_group(backend="tritondt")
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1 << 20), group=group),
        "recv": lambda: dist.recv(torch.ones(4), 1, group=group),
        "barrier": lambda: dist.barrier(group),
    }
    told = []
    for _ in range(2):
        with pytest.raises(T.TritondtError) as error:
            calls[kind]()
        told.append(f"{error.typename}: {error.value}")
    T.abort()
    return told


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["all_reduce", "recv", "barrier"])
def test_over_gloo_a_rank_that_dies_is_named_on_all(kind: str) -> None:
    ranks = backend_ranks("gloo", 3, TRITONDT_TIMEOUT="100")
    try:
        found = ranks.outcomes(die_in_gloo, kind)
        for first, then in (found[0], found[2]):
            assert first.startswith("PeerError: "), first
            assert "rank 1" in first, first
            assert then.startswith("WorldError: "), then
    finally:
        ranks.kill()


def ask_and_go_on(rank: int, name: str) -> tuple[str, list[float]]:
    told = ask(rank, name)
    T.abort()
    total = torch.full((2,), float(rank))
    dist.all_reduce(total, group=dist.new_group(backend="tritondt"))
    return told, total.tolist()


@pytest.mark.extended
def test_over_gloo_the_others_hear_of_it_where_ranks_compare_and_go_on_in_a_new_group() -> None:
    with GlooRanks(2, {"TRITONDT_TRANSPORT": "gloo", "TRITONDT_DEBUG": "1", "TRITONDT_TIMEOUT": "100"}) as ranks:
        for name, (_, text) in CASES.items():
            for rank, (told, total) in enumerate(ranks.run(ask_and_go_on, name)):
                assert text in told, told
                assert told.startswith("rank 1 refused ") == (rank == 0), told
                assert total == [1.0, 1.0]


def refuse_in_a_callback(rank: int) -> str:
    """Rank 1's callback asks for what is refused, while a call of the same rank waits for what it follows."""
    group: Any = dist.new_group(backend="tritondt")
    store = dist.distributed_c10d._get_default_store()
    told = list[BaseException]()

    def then(_: Any) -> None:
        try:
            dist.all_gather_into_tensor(torch.empty(7 if rank else 6), torch.ones(3), group=group)
        except T.TritondtError as error:
            told.append(error)

    dist.barrier(group)  # the first call of all connects them
    if rank == 0:
        store.wait(["refused_in_a_callback"])
    work: Any = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    followed = work.get_future().then(then)
    if rank == 1:
        store.set("refused_in_a_callback", "1")
    dist.all_reduce(x := torch.full((3,), rank + 1.0), group=group)
    followed.wait()
    dist.all_reduce(y := torch.full((3,), rank + 2.0), group=group)
    store.delete_key("refused_in_a_callback") if rank == 1 else None
    dist.destroy_process_group(group)
    assert (x.tolist(), y.tolist()) == ([3.0] * 3, [5.0] * 3)
    assert isinstance(told[0], T.RefusalError if rank == 0 else T.LocalTensorError)
    return str(told[0])


def test_the_others_hear_of_a_refusal_in_a_callback(ranks_of: RanksOf) -> None:
    first, second = ranks_of("shared-memory", 2).run(refuse_in_a_callback, timeout_s=100)
    assert "was given an output of 7 elements" in second
    assert first.startswith("rank 1 failed while rank 0 waited for rank 1")


def gather_lengths(rank: int, lengths: tuple[int, int], then: int) -> list[str]:
    """Rank 0 expects equal parts; another length than `then` is wrong, and found by what follows at the latest."""
    group: Any = dist.new_group(backend="tritondt")
    told = []
    try:
        for length in (lengths[rank], then):
            found = [torch.zeros(length) for _ in range(2)] if rank == 0 else None
            dist.gather(torch.full((length,), rank + 1.0), found, 0, group=group)
        dist.barrier(group)
    except T.TritondtError as error:
        told.append(f"{type(error).__name__}: {error}")
    T.abort()
    dist.all_reduce(x := torch.ones(1), group=group)
    assert x.item() == 2
    dist.destroy_process_group(group)
    return told


def scatter_lengths(rank: int, lengths: tuple[int, int], then: int) -> list[str]:
    group: Any = dist.new_group(backend="tritondt")
    told = []
    try:
        for length in (lengths[rank], then):
            given = [torch.ones(length) for _ in range(2)] if rank == 0 else None
            dist.scatter(torch.zeros(length), given, 0, group=group)
        dist.barrier(group)
    except T.TritondtError as error:
        told.append(f"{type(error).__name__}: {error}")
    T.abort()
    dist.all_reduce(x := torch.ones(1), group=group)
    assert x.item() == 2
    dist.destroy_process_group(group)
    return told


@pytest.mark.in_core(3)
@pytest.mark.parametrize("call", [gather_lengths, scatter_lengths])
@pytest.mark.parametrize("lengths", [(3, 0), (0, 3), (3, 2)], ids=str)
def test_lengths_that_differ_are_named_on_all_ranks(
    ranks_of: RanksOf, call: Callable[..., list[str]], lengths: tuple[int, int]
) -> None:
    kind = call.__name__.partition("_")[0]
    for told in ranks_of("shared-memory", 2).run(call, lengths, 3, timeout_s=100):
        assert len(told) == 1, told
        assert kind in told[0], told

"""Every collective on tensors that lie in memory in every way, which is a rank's own affair: as on contiguous ones."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks

RanksOf = Callable[[str, int], GlooRanks]
Laid = Callable[[torch.Tensor], torch.Tensor]
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
ROWS = 6


def filled(memory: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    memory.copy_(values)
    return memory


def negated(values: torch.Tensor) -> torch.Tensor:
    return torch.complex(torch.zeros_like(values), -values).conj().imag


# A view of each kind with the given values; memory around it is 1, which would be seen.
LAID: dict[str, Laid] = {
    "gaps": lambda x: filled(x.new_ones(x.shape[0], 2 * x.shape[1])[:, ::2], x),
    "rows apart": lambda x: filled(x.new_ones(2 * x.shape[0], x.shape[1])[::2], x),
    "columns of another": lambda x: filled(x.new_ones(x.shape[0], x.shape[1] + 3)[:, 1:-2], x),
    "transposed": lambda x: filled(x.new_ones(x.shape[1], x.shape[0]).t(), x),
    "at an offset": lambda x: filled(x.new_ones(x.numel() + 5)[5:].view(x.shape), x),
    "negated": lambda x: negated(x) if x.dtype in (torch.float32, torch.float64) else x,
    "conjugated": lambda x: filled(x.new_ones(x.shape[0], 2 * x.shape[1])[:, ::2].conj(), x),
}


def values(rank: int, dtype: torch.dtype, place: int = 0, rows: int = ROWS) -> torch.Tensor:
    whole = torch.arange(4 * rows).view(rows, 4) % 7 + 1 + 3 * rank + place
    if dtype.is_complex:
        return torch.complex(whole.double(), -2 * whole.double()).to(dtype)
    return whole % 3 == rank % 3 if dtype is torch.bool else whole.to(dtype)


class Given:
    """Tensors of a rank for one call, laid out in one way."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype, laid: Laid) -> None:
        self.rank, self.size, self.dtype, self.laid = rank, size, dtype, laid

    def own(self, rows: int = ROWS) -> torch.Tensor:
        return self.laid(values(self.rank, self.dtype, 0, rows))

    def parts(self) -> list[torch.Tensor]:
        return [self.laid(values(self.rank, self.dtype, place)) for place in range(self.size)]

    def empty(self, rows: int = ROWS) -> torch.Tensor:
        return self.laid(torch.zeros(rows, 4, dtype=self.dtype))

    def empties(self) -> list[torch.Tensor]:
        return [self.empty() for _ in range(self.size)]


Case = Callable[[Given], list[torch.Tensor]]


def in_place(run: Callable[[torch.Tensor], Any]) -> Case:
    def case(given: Given) -> list[torch.Tensor]:
        tensor = given.own()
        run(tensor)
        return [tensor]

    return case


def into(run: Callable[[torch.Tensor, Given], Any], rows: Callable[[int], int] = lambda size: ROWS) -> Case:
    def case(given: Given) -> list[torch.Tensor]:
        output = given.empty(rows(given.size))
        run(output, given)
        return [output]

    return case


def lists(run: Callable[[list[torch.Tensor], Given], Any]) -> Case:
    def case(given: Given) -> list[torch.Tensor]:
        outputs = given.empties()
        run(outputs, given)
        return outputs

    return case


def reduce_to_one(given: Given) -> list[torch.Tensor]:
    tensor = given.own()
    dist.reduce(tensor, 1)
    return [tensor] if given.rank == 1 else []


def reduce_expanded(given: Given) -> list[torch.Tensor]:
    """Other ranks than the root only read: theirs may have one row for all."""
    tensor = given.own() if given.rank == 1 else values(given.rank, given.dtype, 0, 1).expand(ROWS, 4)
    dist.reduce(tensor, 1)
    return [tensor] if given.rank == 1 else []


def gather_to_one(given: Given) -> list[torch.Tensor]:
    outputs = given.empties() if given.rank == 0 else None
    dist.gather(given.own(), outputs, 0)
    return outputs or []


def reduce_coalesced(given: Given) -> list[torch.Tensor]:
    tensors = [given.own(), given.own(3)]
    with dist._coalescing_manager(dist.group.WORLD):
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def message(given: Given) -> list[torch.Tensor]:
    tensor = given.own()
    (dist.send if given.rank == 0 else dist.recv)(tensor, 1 - given.rank)
    return [tensor]


def message_from_any(given: Given) -> list[torch.Tensor]:
    tensor = given.own()
    if given.rank == 0:
        dist.send(tensor, 1)
    else:
        assert dist.recv(tensor) == 0
    return [tensor]


def reduce_and_ask(given: Given) -> list[torch.Tensor]:
    """Asynchronous ones, of which one is waited for, one asked for its future, and one whether it is over."""
    tensors = [given.own() for _ in range(3)]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[0].wait()
    assert works[1].get_future().then(lambda done: done.value()[0]).wait() is not None
    while not works[2].is_completed():
        pass
    assert works[2].is_success()
    return tensors


CASES: dict[str, Case] = {
    "all_reduce": in_place(dist.all_reduce),
    "all_reduce, max": in_place(lambda x: None if x.is_complex() else dist.all_reduce(x, op=dist.ReduceOp.MAX)),
    "all_reduce, asynchronous": reduce_and_ask,
    "all_reduce, coalesced": reduce_coalesced,
    "broadcast": in_place(lambda x: dist.broadcast(x, 1)),
    "reduce": reduce_to_one,
    "reduce, expanded": reduce_expanded,
    "all_gather": lists(lambda outputs, given: dist.all_gather(outputs, given.own())),
    "all_gather_into_tensor": into(
        lambda output, given: dist.all_gather_into_tensor(output, given.own()), lambda size: ROWS * size
    ),
    "reduce_scatter": into(lambda output, given: dist.reduce_scatter(output, given.parts())),
    "reduce_scatter_tensor": into(
        lambda output, given: dist.reduce_scatter_tensor(output, given.own(ROWS * given.size))
    ),
    "gather": gather_to_one,
    "scatter": into(lambda output, given: dist.scatter(output, given.parts() if given.rank == 0 else None, 0)),
    "all_to_all": lists(lambda outputs, given: dist.all_to_all(outputs, given.parts())),
    "all_to_all_single": into(
        lambda output, given: dist.all_to_all_single(output, given.own(ROWS * given.size)), lambda size: ROWS * size
    ),
    "send and recv": message,
    "recv from any rank": message_from_any,
}


def is_taken_by_torch(laid: str, case: str, dtype: torch.dtype) -> bool:
    """Whether torch hands such a tensor on: of most it makes `view_as_real` itself, which refuses conjugated views."""
    handed_on = case in ("reduce", "reduce, expanded", "reduce_scatter", "reduce_scatter_tensor", "gather")
    return laid != "conjugated" or (dtype.is_complex and handed_on)


def compare(rank: int, name: str, is_nccl: bool) -> int:
    """Refusals, of all kinds of views and dtypes; on Gloo and through shared memory ranks have different ones."""
    size, num_refused = dist.get_world_size(), 0
    for dtype in DTYPES:
        expected = CASES[name](Given(rank, size, dtype, torch.Tensor.contiguous))
        kinds = [kind for kind in LAID if is_taken_by_torch(kind, name, dtype)]
        for place in range(len(kinds)):
            laid = LAID[kinds[place if is_nccl else (place + rank) % len(kinds)]]
            try:
                found = CASES[name](Given(rank, size, dtype, laid))
            except T.LocalTensorError:
                num_refused += 1
                continue
            assert all(map(torch.equal, found, expected)), (dtype, kinds[place], found, expected)
            assert len(found) == len(expected)
    return num_refused


@pytest.mark.in_core(10)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("over", ["shared-memory", "sockets"])
def test_how_tensors_lie_in_memory_changes_nothing(ranks_of: RanksOf, over: str, name: str) -> None:
    assert ranks_of(over, 2).run(compare, name, False) == [0, 0]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("reduce, expanded", "recv from any rank")])
def test_over_nccl_it_changes_nothing_or_is_refused(ranks_of: RanksOf, name: str) -> None:
    first, second = ranks_of("nccl", 2).run(compare, name, True)
    assert first == second or name in ("gather", "scatter", "reduce", "send and recv")


def write_to_expanded(rank: int) -> None:
    """On one rank alone, whose part in the collective the others have."""
    x = torch.ones(2).expand(3, 2) if rank else torch.ones(3, 2)
    for run in (
        lambda: dist.all_reduce(x),
        lambda: dist.all_gather([x, torch.ones(3, 2)], torch.ones(3, 2)),
        lambda: dist.recv(x, 0) if rank else dist.send(x, 1),
    ):
        if rank:
            with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
                run()
        else:
            run()
    dist.all_reduce(last := torch.ones(1))
    assert float(last) == 2.0


@pytest.mark.parametrize("over", ["shared-memory", "sockets"])
def test_a_tensor_whose_elements_share_memory_is_not_written(ranks_of: RanksOf, over: str) -> None:
    ranks_of(over, 2).run(write_to_expanded)


def ask_with_quantised(rank: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will have none of them some day
        x = torch.quantize_per_tensor(torch.ones(3, 2), 0.1, 0, torch.quint8)
    told = []
    group: Any = dist.group.WORLD
    for ask in (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather([x, x], x),
        lambda: group.allgather_coalesced([[x], [x]], [x]),
        lambda: group._allgather_base(x, x),
        lambda: dist.reduce_scatter(x, [x, x]),
        lambda: dist.gather(x, [x, x] if rank == 0 else None, 0),
        lambda: dist.scatter(x, [x, x] if rank == 0 else None, 0),
        lambda: dist.all_to_all([x, x], [x, x]),
        lambda: group.alltoall_base(x, x, [], []),
        lambda: dist.send(x, 1 - rank),
        lambda: dist.recv(x, 1 - rank),
    ):
        with pytest.raises(T.LocalTensorError) as error:
            ask()
        told.append(str(error.value))
    dist.all_reduce(torch.ones(1))  # nothing was sent
    return told


@pytest.mark.in_core(3)
@pytest.mark.parametrize("over", ["shared-memory", "sockets", "nccl"])
def test_quantised_tensors_are_refused(ranks_of: RanksOf, over: str) -> None:
    for told in ranks_of(over, 2).run(ask_with_quantised):
        for text in told:
            assert "was asked for with elements of quint8; those of a quantised tensor mean nothing without" in text


def write_where_elements_share_memory(rank: int) -> None:
    work: Any = dist.all_reduce(torch.zeros(1).expand(3), async_op=True)
    for ask in (work.wait, work.is_completed, work.wait, work.get_future().wait):
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single"):
            ask()
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == 2


def test_what_cannot_be_written_on_gloo_is_said_at_every_wait(ranks_of: RanksOf) -> None:
    ranks_of("gloo", 2).run(write_where_elements_share_memory)

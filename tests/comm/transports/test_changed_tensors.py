"""A tensor that changed between two calls of a program, or since it was issued: right, or refused and all go on.

Over NCCL see comm/nccl/test_programs.py; what is issued there has its addresses at once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.nccl_on_host import backend_ranks
from tritondt.comm.transports.threads import run_ranks

FULL = torch.arange(64.0).view(8, 8)
Everywhere = Callable[..., Any]


MORE = pytest.mark.extended
BY_MESSAGES = [pytest.param("sockets", marks=MORE), "shared-memory"]


@pytest.fixture(scope="module", params=["threads", *BY_MESSAGES, pytest.param("gloo", marks=MORE)])
def everywhere(request: pytest.FixtureRequest) -> Iterator[Everywhere]:
    """Runs a body on two ranks, with the name of what carries its messages."""
    if request.param == "threads":
        yield lambda body, *arguments: run_ranks(2, lambda rank: body(rank, request.param, *arguments))
        return
    with backend_ranks(request.param, 2, TRITONDT_TIMEOUT="60") as ranks:
        yield lambda body, *arguments: ranks.run(body, request.param, *arguments)


def layout(text: str) -> T.DTensorSpec:
    return T.DTensorSpec(T.Mesh((2,)), T.parse_placements(text), T.TensorMeta.contiguous((8, 8)))


def moved(rank: int, text: str, local: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's part after a redistribution from rows, or of terms to their sum."""
    source = "P" if text == "R" else "S0"
    local = given(rank, source) if local is None else local
    return T.redistribute(local, layout(source), layout(text))


def given(rank: int, source: str) -> torch.Tensor:
    return FULL + rank if source == "P" else FULL.chunk(2)[rank].clone()


def go_on(rank: int) -> None:
    torch.testing.assert_close(moved(rank, "S1"), FULL.chunk(2, 1)[rank], rtol=0, atol=0)
    torch.testing.assert_close(moved(rank, "R"), FULL * 2 + 1, rtol=0, atol=0)


def freed(local: torch.Tensor) -> torch.Tensor:
    local.untyped_storage().resize_(0)
    return local


# What the second call is given in place of a tensor like the first one's, and what is said of it.
CHANGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "resized": (lambda local: local.resize_(2, 2), r"found shape \(2, 2\) and torch.float32"),
    "another dtype": (torch.Tensor.double, "and torch.float64"),
    "another device": (lambda local: local.to("meta"), "takes local tensors on cpu, got one on meta"),
    "freed": (freed, r"whose storage is empty, as after resize_\(0\)"),
}


def change_between(rank: int, over: str, what: str) -> None:
    change, said = CHANGES[what]
    for text, source in (("S1", "S0"), ("R", "P")):
        for _ in range(2):
            go_on(rank)
        if over == "gloo":
            T.abort()  # what one rank refuses ends a communicator over Gloo, which takes no message back
        local = given(rank, source)
        error = (T.PeerError, (T.LocalTensorError, T.TransportError))[rank]
        with pytest.raises(error, match=said):
            moved(rank, text, change(local) if rank else local)
        if over == "gloo":
            T.abort()
        go_on(rank)


@pytest.mark.in_core(4)
@pytest.mark.parametrize("what", CHANGES)
def test_a_tensor_that_changed_between_two_calls_is_refused(everywhere: Everywhere, what: str) -> None:
    everywhere(change_between, what)


def start_elsewhere(rank: int, over: str) -> None:
    go_on(rank)
    for text, source in (("S1", "S0"), ("R", "P")):
        for start in (1, 2, 3, 4, 7):
            local = given(rank, source)
            memory = torch.zeros(local.numel() + 8)
            placed = memory[start : start + local.numel()].view(local.shape).copy_(local)
            expected = FULL.chunk(2, 1)[rank] if text == "S1" else FULL * 2 + 1
            torch.testing.assert_close(moved(rank, text, placed if rank else local), expected, rtol=0, atol=0)
    go_on(rank)


def test_a_tensor_that_starts_elsewhere_is_moved_right(everywhere: Everywhere) -> None:
    everywhere(start_elsewhere)


def start_past_the_end(rank: int, over: str) -> None:
    row = torch.arange(8.0).view(1, 8)
    mesh, meta = T.Mesh((2,)), T.TensorMeta.contiguous((1, 8))
    spec = T.DTensorSpec(mesh, (T.Shard(0),), meta)
    local = torch.empty(0).as_strided((0, 8), (8, 1), 15) if rank else row.clone()
    found = T.DTensor(local, spec).redistribute(placements=[T.Shard(1)], async_op=True)
    torch.testing.assert_close(found.to_local(), row.chunk(2, 1)[rank], rtol=0, atol=0)
    go_on(rank)


def test_a_part_without_elements_may_start_past_the_end_of_its_memory(everywhere: Everywhere) -> None:
    everywhere(start_past_the_end)


def other_memory(local: torch.Tensor) -> object:
    local.data = torch.zeros(3, 3, dtype=torch.float64)
    return local


# What happens to a tensor after a redistribution of it was issued, and what is said of it.
LATER: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "freed": (freed, "and given one of torch.float32 with 0"),
    "shrunk": (lambda local: local.untyped_storage().resize_(16), "and given one of torch.float32 with 4"),
    "given other memory": (other_memory, "and given one of torch.float64 with 9"),
}


def change_after(rank: int, over: str, what: str) -> None:
    change, said = LATER[what]
    for text, source in (("S1", "S0"), ("R", "P")):
        go_on(rank)
        local = given(rank, source)
        if rank == 0 and over != "threads":
            dist.barrier()
        # Rank 1 runs the second one after the first, which waits for rank 0: later than the change.
        works = [
            T.DTensor(each, layout(source)).redistribute(placements=layout(text).placements, async_op=True)
            for each in (given(rank, source), local)
        ]
        if rank == 1:
            change(local)
            if over != "threads":
                dist.barrier()
        works[0].to_local()
        with pytest.raises((T.PeerError, T.TransportError)[rank], match=said):
            works[1].to_local()
        if over == "gloo":
            T.abort()
        go_on(rank)


@pytest.mark.in_core(4)
@pytest.mark.parametrize("what", LATER)
def test_a_tensor_that_changed_after_it_was_issued_is_refused(everywhere: Everywhere, what: str) -> None:
    everywhere(change_after, what)


BY_BACKEND: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all_gather": lambda given, output: dist.all_gather_into_tensor(output, given, async_op=True),
    "reduce_scatter": lambda given, output: dist.reduce_scatter_tensor(output, given, async_op=True),
    "all_reduce": lambda given, output: dist.all_reduce(output, async_op=True),
}


def change_after_call(rank: int, over: str, name: str, changed: str) -> None:
    def issue(size: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        given, output = torch.ones(2 * size), torch.ones(size if name == "reduce_scatter" else 4 * size)
        return BY_BACKEND[name](given, output), given, output

    def run(work: Any, output: torch.Tensor) -> None:
        work.wait()
        expected = torch.full_like(output, 1.0 if name == "all_gather" else 2.0)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)

    store = dist.distributed_c10d._get_default_store()
    for size in (32, 1 << 16):  # sums in one exchange, and in two over sockets
        work, _, output = issue(size)
        run(work, output)
        if rank == 0:
            store.get(f"changed {name} {changed} {size}")
        (first, _, output), (second, *tensors) = issue(size), issue(size)
        if rank == 1:
            if name == "all_reduce":
                tensors[0] = tensors[1]
            other_memory(tensors[changed == "output"])
            store.set(f"changed {name} {changed} {size}", "")
        run(first, output)
        side = "target" if changed == "output" and name != "all_reduce" else "source"
        said = rf"was compiled for a {side} of torch\.float(32|64) .*; give it tensors like those of its layouts"
        with pytest.raises((T.PeerError, T.TransportError)[rank], match=said):
            second.wait()
        work, _, output = issue(size)
        run(work, output)


@pytest.mark.in_core(4)
@pytest.mark.parametrize("everywhere", BY_MESSAGES, indirect=True)
@pytest.mark.parametrize("changed", ["input", "output"])
@pytest.mark.parametrize("name", BY_BACKEND)
def test_a_tensor_that_changed_after_a_collective_was_called_is_refused(
    everywhere: Everywhere, name: str, changed: str
) -> None:
    everywhere(change_after_call, name, changed)

"""Collectives of NCCL in place of messages of our own, on its double: which calls are made, and what they give."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import Failure, GlooRanks
from tests.harness.nccl_on_host import ranks_on
from tritondt.comm import world

SIZE = 4
# So fast that every one that the layouts and the dtype have is taken.
PRICES = json.dumps({"collectives": 2, "collective_speedup": 1e6, "copy_bandwidth": 1e15, "launch_s": 1e-9})


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with ranks_on("nccl", SIZE, TRITONDT_TIMEOUT="15", TRITONDT_COSTS=PRICES) as started:
        yield started


CALLS = ("all_gather", "reduce_scatter", "all_reduce", "exchange_slices")


class Counted:
    """A double of a communicator's native part that notes the calls and makes them."""

    def __init__(self, native: Any) -> None:
        self._native, self.calls = native, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._native, name)


def moved(
    rank: int, source: str, target: str, shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool
) -> tuple[list[str], torch.Tensor, T.DTensorSpec, Any]:
    """Calls of NCCL and this rank's result of a redistribution of whole numbers, at once and asynchronously."""
    mesh = T.Mesh((SIZE,))
    meta = T.TensorMeta.contiguous(shape, dtype)
    before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
    whole = torch.arange(before.layout.numel).reshape(shape)
    local = (whole + 7 * rank if "P" in source else whole[region(before)]).to(dtype)
    if is_transposed:
        local = local.t().contiguous().t()
    communicator: Any = world.current().communicator(mesh.ranks)
    counted = communicator._watched.native = Counted(communicator._watched.native)
    try:
        found = T.redistribute(local, before, after)
        again = T.DTensor.from_local(local, mesh, before.placements, shape=torch.Size(shape), stride=meta.stride)
        later = again.redistribute(placements=after.placements, async_op=True).to_local()
        communicator._queue.stream.synchronize()
    finally:
        communicator._watched.native = counted._native
    torch.testing.assert_close(later, found, rtol=0, atol=0)
    calls = [name for name in counted.calls if name in CALLS]
    return calls, found, after, T.explain(before, after)


def region(spec: T.DTensorSpec) -> tuple[slice, ...]:
    """Slices of the whole tensor that this rank holds under a spec without repeats."""
    assert spec.coordinate is not None
    (box,) = spec.layout.boxes(spec.coordinate)
    return tuple(slice(*bounds) for bounds in box)


def expected(source: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor after terms were reduced."""
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    terms = torch.stack([whole + 7 * rank for rank in range(SIZE)])
    of = {"P": terms.sum(0), "P(max)": terms.amax(0), "P(avg)": terms.sum(0) / SIZE}.get(source, whole)
    return of.to(dtype)


def move_and_compare(rank: int, *case: Any) -> tuple[list[str], list[str]]:
    source, _, shape, dtype, _ = case
    calls, found, after, told = moved(rank, *case)
    torch.testing.assert_close(found, expected(source, shape, dtype)[region(after)], rtol=0, atol=0)
    return calls, [step.kind for step in told.steps]


@pytest.mark.parametrize(
    ("source", "target", "shape", "dtype", "call"),
    [
        ("S0", "R", (8, 5), torch.float32, "all_gather"),
        ("P", "R", (7, 5), torch.float32, "all_reduce"),
        ("P", "S1", (5, 8), torch.float64, "reduce_scatter"),
        ("S1", "R", (5, 8), torch.bfloat16, "all_gather"),
        ("P(avg)", "R", (8, 5), torch.float32, "all_reduce"),
        ("P(max)", "S0", (8, 5), torch.int32, "reduce_scatter"),
        ("S0", "R", (8,), torch.bool, "all_gather"),
    ],
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_even_layouts_are_one_collective(
    ranks: GlooRanks,
    source: str,
    target: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    call: str,
    is_transposed: bool,
) -> None:
    if is_transposed and len(shape) == 1:
        pytest.skip("one dim has no other strides")
    for calls, kinds in ranks.run(move_and_compare, source, target, shape, dtype, is_transposed):
        assert calls == [call, call]
        assert kinds == [call]


@pytest.mark.parametrize(
    ("source", "target", "shape", "dtype", "kinds"),
    [
        ("S0", "R", (10, 5), torch.float32, ["exchange"]),
        ("P", "R", (8, 5), torch.bfloat16, ["reduce", "gather"]),
        ("S0", "S1", (8, 8), torch.float32, ["exchange"]),
    ],
)
def test_others_are_messages_of_our_own(
    ranks: GlooRanks, source: str, target: str, shape: tuple[int, ...], dtype: torch.dtype, kinds: list[str]
) -> None:
    for calls, found in ranks.run(move_and_compare, source, target, shape, dtype, False):
        assert calls == ["exchange_slices"] * len(calls)
        assert calls
        assert found == kinds


def move_lists_and_narrow(rank: int) -> list[str]:
    """Calls for a list of tensors, which travel together, and for messages of another dtype."""
    mesh = T.Mesh((SIZE,))
    whole = torch.arange(40.0).reshape(8, 5)
    rows = [T.distribute_tensor(whole + number, mesh, [T.Shard(0)]) for number in range(2)]
    communicator: Any = world.current().communicator(mesh.ranks)
    counted = communicator._watched.native = Counted(communicator._watched.native)
    try:
        for number, found in enumerate(T.redistribute_many([(row, [T.Replicate()]) for row in rows])):
            torch.testing.assert_close(found.to_local(), whole + number, rtol=0, atol=0)
        narrow = rows[0].redistribute(placements=[T.Replicate()], wire_dtype=torch.bfloat16)
        torch.testing.assert_close(narrow.to_local(), whole, rtol=0, atol=0)
    finally:
        communicator._watched.native = counted._native
    return counted.calls


def test_lists_and_narrower_messages_are_our_own(ranks: GlooRanks) -> None:
    assert ranks.run(move_lists_and_narrow) == [["exchange_slices"] * 2] * SIZE


def gather(rank: int) -> None:
    T.distribute_tensor(torch.arange(8.0), T.Mesh((2,)), [T.Shard(0)]).full_tensor()


@pytest.mark.extended
@pytest.mark.parametrize(("transport", "name"), [("sockets", "SocketCommunicator"), ("direct", "DirectCommunicator")])
def test_prices_that_ask_a_transport_for_collectives_are_refused(transport: str, name: str) -> None:
    with ranks_on(transport, 2, TRITONDT_COSTS=PRICES) as started:
        for outcome in started.outcomes(gather):
            assert isinstance(outcome, Failure)
            assert outcome.kind == "TransportError"
            assert outcome.text.endswith(
                f" uint8 was priced as all_gather of NCCL, and {name} has none; allowed for tensors on cpu "
                'are prices with "collectives": 0 (TRITONDT_COSTS)'
            )

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
from tritondt.errors import LocalTensorError, PeerError
from tritondt.sharding.placement import Partial

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


def terms_at(spec: T.DTensorSpec, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor of terms at a coordinate: whole numbers, other ones along each axis that has terms."""
    shift = sum(7 * (axis + 1) * coordinate[axis] for axis in spec.layout.axes_where(Partial))
    return torch.arange(torch.Size(shape).numel()).reshape(shape) + shift


def move_in_groups(
    rank: int, source: str, target: str, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[str], list[str], tuple[int, ...], tuple[int, int]]:
    """Calls of NCCL among this rank's row or column, what explain tells, the ranks, and bytes counted and told."""
    mesh = T.Mesh((2, 2))
    meta = T.TensorMeta.contiguous(shape, dtype)
    before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
    at = mesh.coordinate
    assert at is not None
    (axis,) = (it for it in range(2) if before.placements[it] != after.placements[it])
    ranks = tuple(2 * at[0] + it if axis == 1 else 2 * it + at[1] for it in range(2))
    local = terms_at(before, shape, at)[region(before)].to(dtype)
    wanted = terms_at(before, shape, at)
    if isinstance(before.placements[axis], Partial):
        each = [terms_at(before, shape, (*at[:axis], it, *at[axis + 1 :])) for it in range(2)]
        wanted = torch.stack(each).sum(0)
    communicator: Any = world.current().communicator(ranks)
    counted, sent = Counted(communicator._watched.native), communicator.traffic.sent_bytes
    communicator._watched.native = counted
    try:
        for is_issued in (False, True):
            x = T.DTensor.from_local(local, mesh, before.placements, shape=torch.Size(shape), stride=meta.stride)
            found = x.redistribute(placements=after.placements, async_op=is_issued).to_local()
            torch.testing.assert_close(found, wanted[region(after)].to(dtype), rtol=0, atol=0)
    finally:
        communicator._watched.native = counted._native
    told = T.explain(before, after)
    num_bytes = (communicator.traffic.sent_bytes - sent) // 2, told.sent_bytes
    calls = [name for name in counted.calls if name in CALLS]
    return calls, [step.kind for step in told.steps], communicator.ranks, num_bytes


@pytest.mark.parametrize(
    ("source", "target", "shape", "dtype", "call"),
    [
        ("S0, R", "R, R", (8, 5), torch.float32, "all_gather"),
        ("R, S1", "R, R", (3, 8), torch.bfloat16, "all_gather"),
        ("S0, S0", "S0, R", (8, 5), torch.int64, "all_gather"),
        ("S0, S1", "S0, R", (9, 4), torch.float32, "all_gather"),  # groups of 5 and of 4 rows
        ("P, S1", "P, R", (3, 8), torch.float32, "all_gather"),
        ("P, R", "S0, R", (8, 5), torch.float32, "reduce_scatter"),
        ("S1, P", "S1, S0", (6, 5), torch.float64, "reduce_scatter"),
        ("P, S0", "R, S0", (9, 5), torch.float32, "all_reduce"),
        ("P, P", "P, R", (3, 5), torch.int32, "all_reduce"),
    ],
)
def test_one_axis_of_two_is_one_collective_in_each_group(
    ranks: GlooRanks, source: str, target: str, shape: tuple[int, ...], dtype: torch.dtype, call: str
) -> None:
    for calls, kinds, members, (sent, told) in ranks.run(move_in_groups, source, target, shape, dtype):
        assert calls == [call, call]
        assert kinds == [call]
        assert len(members) == 2
        assert sent == told


def move_off_by_four(rank: int, source: str, target: str, length: int) -> list[tuple[str, bool]]:
    """Calls of NCCL, and whether each read at a multiple of 16, where the tensors of odd ranks start 4 bytes behind."""
    mesh = T.Mesh((SIZE,))
    before, after = (
        T.DTensorSpec(mesh, T.parse_placements(text), T.TensorMeta.contiguous((length,), torch.float32))
        for text in (source, target)
    )
    whole = torch.arange(float(length))
    local = whole + rank if "P" in source else whole[region(before)]
    memory = torch.empty(local.numel() + 1)
    local = memory[rank % 2 :][: local.numel()].copy_(local)
    assert (local.data_ptr() % 16 != 0) == bool(rank % 2)
    communicator: Any = world.current().communicator(mesh.ranks)
    native, read = communicator._watched.native, list[tuple[str, bool]]()

    def noting(name: str) -> Any:
        def call(address: int, *arguments: Any) -> None:
            read.append((name, address % 16 == 0))
            getattr(native, name)(address, *arguments)

        return call

    communicator._watched.native = type("Noting", (), {"__getattr__": lambda _, name: noting(name)})()
    try:
        found = T.redistribute(local, before, after)
    finally:
        communicator._watched.native = native
    wanted = SIZE * whole + sum(range(SIZE)) if "P" in source else whole
    torch.testing.assert_close(found, wanted[region(after)], rtol=0, atol=0)
    return read


@pytest.mark.parametrize(("source", "target", "call"), [("S0", "R", "all_gather"), ("P", "R", "all_reduce")])
@pytest.mark.parametrize("length", [1 << 8, 1 << 17])
def test_tensors_that_start_elsewhere_are_packed_for_the_same_collective(
    ranks: GlooRanks, source: str, target: str, call: str, length: int
) -> None:
    """Messages from the ranks whose tensors are misaligned would meet a collective of the others, and hang."""
    is_large = length > 1 << 8
    for rank, calls in enumerate(ranks.run(move_off_by_four, source, target, length)):
        assert calls == [(call, is_large or rank % 2 == 0)]


def refuse_in_a_group(rank: int) -> tuple[str, float | None]:
    """What a rank is told whose peer, rank 3, has a tensor of a wrong shape; and a sum that goes on elsewhere."""
    mesh = T.Mesh((2, 2))
    meta = T.TensorMeta.contiguous((4, 4))
    before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("R, S0", "R, R"))
    try:
        found = T.redistribute(torch.ones(3 if rank == 3 else 2, 4), before, after)
    except (LocalTensorError, PeerError) as error:
        return type(error).__name__, None
    return "", found.sum().item()


@pytest.mark.extended
def test_who_refuses_a_collective_is_told_to_its_group_and_no_other() -> None:
    with ranks_on("nccl", SIZE, TRITONDT_TIMEOUT="15", TRITONDT_COSTS=PRICES) as started:
        told = started.run(refuse_in_a_group)
        started.run(abort)  # nothing may follow in that group, nor the barrier of its end
    assert told == [("", 16.0), ("", 16.0), ("PeerError", None), ("LocalTensorError", None)]


def abort(rank: int) -> None:
    T.abort()


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
@pytest.mark.parametrize(
    ("transport", "name"), [("sockets", "SocketCommunicator"), ("shared-memory", "SharedMemoryCommunicator")]
)
def test_prices_that_ask_a_transport_for_collectives_are_refused(transport: str, name: str) -> None:
    with ranks_on(transport, 2, TRITONDT_COSTS=PRICES) as started:
        for outcome in started.outcomes(gather):
            assert isinstance(outcome, Failure)
            assert outcome.kind == "TransportError"
            assert outcome.text.endswith(
                f" uint8 was priced as all_gather of NCCL, and {name} has none; allowed for tensors on cpu "
                'are prices with "collectives": 0 (TRITONDT_COSTS)'
            )

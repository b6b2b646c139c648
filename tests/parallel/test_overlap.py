"""Matmuls in chunks against the same one after the other: values, gradients, order of sums, bytes, pieces."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.oracle.arithmetic import indices_of, take
from tests.ops.sharded import Case, check_derivatives
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.parallel import all_gather_matmul, matmul_reduce_scatter
from tritondt.planning.cost import CostTable, Link

FEATURES, HIDDEN = 6, 10
# So slow that a few numbers are worth pieces of their own, each for a product of its own.
SLOW = CostTable(ranks_per_host=1, network=Link(1e-6, 1e4), flop_rate=1e6)


class Setting(NamedTuple):
    """Global shape of the side that is cut by position, how, and over how many ranks."""

    shape: tuple[int, ...]
    cut: T.Shard
    num_ranks: int
    dtype: torch.dtype = torch.float64
    chunks: int | None = 2


SETTINGS = {
    "even": Setting((8, FEATURES), T.Shard(0), 4),
    "uneven": Setting((2, 7, FEATURES), T.Shard(1), 3),
    "empty shards": Setting((2, 2, FEATURES), T.Shard(1), 4),
    "given sizes": Setting((3, 9, FEATURES), T.Shard(1, sizes=(0, 7, 2)), 3),
    "in units": Setting((2, 10, FEATURES), T.Shard(-2, unit=2), 3),
    "sequence first": Setting((7, 2, FEATURES), T.Shard(0), 3),
    "batch of two dims": Setting((2, 3, 5, FEATURES), T.Shard(2), 2),
    "nothing": Setting((0, 4, FEATURES), T.Shard(1), 2),
    "one rank": Setting((2, 5, FEATURES), T.Shard(1), 1),
    "eight ranks": Setting((2, 13, FEATURES), T.Shard(1), 8, chunks=1),
    "chunks by cost": Setting((2, 50, FEATURES), T.Shard(1), 3, chunks=None),
    "chunks by cost, uneven": Setting((2, 50, FEATURES), T.Shard(1, sizes=(0, 45, 5)), 3, chunks=None),
    "chunks by cost, sequence first": Setting((50, 2, FEATURES), T.Shard(0), 2, torch.float32, chunks=None),
    "fp32": Setting((2, 7, FEATURES), T.Shard(1), 3, torch.float32),
    "bf16": Setting((2, 7, FEATURES), T.Shard(1), 3, torch.bfloat16, chunks=3),
}


def number(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


class Products(TorchFunctionMode):
    """Notes which products run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.mm, torch.addmm, torch.bmm, torch.baddbmm):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def part(full: torch.Tensor, mesh: T.Mesh, placement: T.Placement) -> tuple[torch.Tensor, T.DTensorSpec]:
    """This rank's part of a whole tensor as a leaf, and its spec."""
    spec = T.DTensorSpec(mesh, (placement,), T.TensorMeta.contiguous(full.shape, full.dtype))
    assert spec.coordinate is not None, "every rank is in the mesh"
    return take(full.detach(), indices_of(spec.layout, spec.coordinate)).contiguous().requires_grad_(), spec


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The product on one device, the gradient that it is given, and those that come of it."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    out = F.linear(*leaves)
    seed = number(*out.shape, dtype=x.dtype, seed=9)
    out.backward(seed)
    return (out.detach(), seed, *[leaf.grad for leaf in leaves if leaf.grad is not None])


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_all_gather_matmul(setting, with_bias):
    x, weight = (number(*shape, dtype=setting.dtype, seed=1) for shape in (setting.shape, (HIDDEN, FEATURES)))
    bias = number(HIDDEN, dtype=setting.dtype, seed=2) if with_bias else None
    out, seed, *grads = reference(x, weight, bias)
    # Of the gradient of x each of up to 8 terms is rounded before it is added.
    tolerance: dict[str, Any] = {"rtol": 0.05, "atol": 0.1} if setting.dtype is torch.bfloat16 else {}

    def body(rank: int) -> None:
        mesh = T.Mesh((setting.num_ranks,))
        mine, source = part(x, mesh, setting.cut)
        own, _ = part(weight, mesh, T.Shard(0))
        leaves = [mine, own] + ([] if bias is None else [part(bias, mesh, T.Shard(0))[0]])
        found = all_gather_matmul(*leaves, source=source, chunks_per_peer=setting.chunks)
        torch.testing.assert_close(found, part(out, mesh, T.Shard(-1))[0].detach(), check_stride=False)
        assert found.is_contiguous()
        found.backward(part(seed, mesh, T.Shard(-1))[0].detach())
        for leaf, grad, placement in zip(leaves, grads, (setting.cut, T.Shard(0), T.Shard(0)), strict=False):
            torch.testing.assert_close(leaf.grad, part(grad, mesh, placement)[0].detach(), **tolerance)
        with torch.no_grad():
            again = all_gather_matmul(*leaves, source=source, chunks_per_peer=setting.chunks)
        assert not again.requires_grad
        torch.testing.assert_close(again, found.detach(), rtol=0, atol=0)

    run_ranks(setting.num_ranks, body, costs=SLOW)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_matmul_reduce_scatter(setting):
    x = number(*setting.shape[:-1], HIDDEN, dtype=setting.dtype, seed=1)
    weight = number(FEATURES, HIDDEN, dtype=setting.dtype, seed=2)
    out, seed, *grads = reference(x, weight, None)
    # Each of up to 8 terms is rounded before it is added.
    tolerance: dict[str, Any] = {"rtol": 0.05, "atol": 0.1} if setting.dtype is torch.bfloat16 else {}

    def body(rank: int) -> None:
        mesh = T.Mesh((setting.num_ranks,))
        leaves = [part(x, mesh, T.Shard(-1))[0], part(weight, mesh, T.Shard(1))[0]]
        expected, target = part(out, mesh, setting.cut)
        found = matmul_reduce_scatter(*leaves, target=target, chunks_per_peer=setting.chunks)
        torch.testing.assert_close(found, expected.detach(), **tolerance)
        found.backward(part(seed, mesh, setting.cut)[0].detach())
        for leaf, grad, placement in zip(leaves, grads, (T.Shard(-1), T.Shard(1)), strict=True):
            torch.testing.assert_close(leaf.grad, part(grad, mesh, placement)[0].detach())
        with torch.no_grad():
            again = matmul_reduce_scatter(*leaves, target=target, chunks_per_peer=setting.chunks)
        torch.testing.assert_close(again, found.detach(), rtol=0, atol=0)

    run_ranks(setting.num_ranks, body, costs=SLOW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_terms_are_added_as_redistribute_adds_them(dtype):
    """With a permutation as weight the products are exact however they are cut, and the sums' bits must agree."""
    chosen = torch.randperm(FEATURES, generator=torch.Generator().manual_seed(3))
    permutation = torch.eye(FEATURES, dtype=dtype)[chosen]

    def body(rank: int) -> None:
        mesh = T.Mesh((4,))
        x = number(2, 7, FEATURES, dtype=dtype, seed=rank) * 10.0 ** number(2, 7, 1, dtype=dtype, seed=rank + 4)
        target = T.DTensorSpec(mesh, (T.Shard(1),), T.TensorMeta.contiguous((2, 7, FEATURES), dtype))
        product = F.linear(x, permutation)
        torch.testing.assert_close(product, x[..., chosen], rtol=0, atol=0)
        expected = T.redistribute(product, target.with_placements((T.Partial(),)), target)
        for chunks in (1, 2, 5):
            found = matmul_reduce_scatter(x, permutation, target=target, chunks_per_peer=chunks)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    run_ranks(4, body)


def exchanges(costs: CostTable | None, cut: T.Shard, num_ranks: int = 2) -> list[list[int]]:
    """By rank, how many exchanges a gather, its gradients, a scatter and its gradients take."""
    meta = T.TensorMeta.contiguous((2, 50, FEATURES))

    def body(rank: int) -> list[int]:
        spec = T.DTensorSpec(T.Mesh((num_ranks,)), (cut,), meta)
        communicator: Any = world.current().communicator(spec.mesh.ranks)
        counts = [communicator.sequence]
        x, y, weight = (torch.ones(*shape, requires_grad=True) for shape in (spec.local_shape, (2, 50, 4), (6, 4)))
        for run in (
            lambda: all_gather_matmul(x, weight.t(), source=spec),
            lambda: matmul_reduce_scatter(y, weight, target=spec),
        ):
            out = run()
            counts.append(communicator.sequence)
            out.sum().backward()
            counts.append(communicator.sequence)
        return [after - before for before, after in pairwise(counts)]

    return run_ranks(num_ranks, body, costs=costs)


def test_pieces_follow_from_costs_alike_on_all_ranks():
    for cut in (T.Shard(1), T.Shard(1, sizes=(0, 48, 2))):
        (found, *others) = exchanges(SLOW, cut, num_ranks=3)
        assert found[0] == found[1] == found[2] == found[3] > 2
        assert others == [found, found]
    # Within a host the processors move the bytes themselves, and nothing is hidden.
    assert exchanges(None, T.Shard(1)) == [[1, 1, 1, 1]] * 2


@pytest.mark.parametrize(("length", "expected"), [(8, "mm"), (800, "bmm")])
def test_a_batch_is_multiplied_together_where_its_items_are_short(length, expected):
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        x, weight, bias = (number(*shape, dtype=torch.float64, seed=1) for shape in ((3, length, 64), (96, 64), (96,)))
        mine, spec = part(x, mesh, T.Shard(1))
        whole = F.linear(x, weight, bias)
        with torch.no_grad(), Products() as ran:
            found = all_gather_matmul(mine, weight, bias, source=spec, chunks_per_peer=4)
            torch.testing.assert_close(found, whole)
            assert {name.removeprefix("add").replace("baddbmm", "bmm") for name in ran.names} == {expected}
            ran.names.clear()
            found = matmul_reduce_scatter(whole, weight.t(), target=spec, chunks_per_peer=4)
            assert set(ran.names) == {expected}
        torch.testing.assert_close(found, part(2 * whole @ weight, mesh, T.Shard(1))[0].detach())

    run_ranks(2, body)


def test_arguments_of_any_strides():
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        x, weight = number(6, 2, 3, dtype=torch.float64, seed=rank).permute(1, 2, 0), torch.ones(4, 6).double()[::2]
        source = T.DTensorSpec(mesh, (T.Shard(1),), T.TensorMeta.contiguous((2, 6, 6), torch.float64))
        whole = T.redistribute(x, source, source.with_placements((T.Replicate(),)))
        torch.testing.assert_close(all_gather_matmul(x, weight, source=source), F.linear(whole, weight))
        own = x.transpose(1, 2)  # 6 positions of 3 features
        target = T.DTensorSpec(mesh, (T.Shard(1),), T.TensorMeta.contiguous((2, 6, 2), torch.float64))
        expected = T.redistribute(
            F.linear(own, weight[:, :3]).contiguous(), target.with_placements((T.Partial(),)), target
        )
        torch.testing.assert_close(matmul_reduce_scatter(own, weight[:, :3], target=target), expected)

    run_ranks(2, body)


@pytest.mark.parametrize("frozen", [(True, False, False), (False, True, False), (False, True, True)], ids=str)
def test_only_the_gradients_that_are_asked_for(frozen):
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        x, source = part(number(2, 5, FEATURES, dtype=torch.float64, seed=1), mesh, T.Shard(1))
        leaves = [x, *(number(*shape, dtype=torch.float64, seed=rank) for shape in ((3, FEATURES), (3,)))]
        for leaf, is_frozen in zip(leaves, frozen, strict=True):
            leaf.requires_grad_(not is_frozen)
        with CommDebugMode() as comm:
            all_gather_matmul(*leaves, source=source).sum().backward()
        assert [leaf.grad is None for leaf in leaves] == list(frozen)
        assert comm.get_total_counts() == (1 if frozen[0] else 2)
        own, weight = number(2, 5, 3, dtype=torch.float64, seed=2), number(FEATURES, 3, dtype=torch.float64, seed=3)
        own.requires_grad_(not frozen[0])
        weight.requires_grad_(not frozen[1])
        matmul_reduce_scatter(own, weight, target=source).sum().backward()
        assert [own.grad is None, weight.grad is None] == list(frozen[:2])

    run_ranks(2, body)


def columns(x: Any, weight: Any, bias: Any) -> Any:
    mesh = x.device_mesh
    out = all_gather_matmul(*(tensor.to_local() for tensor in (x, weight, bias)), source=x._spec, chunks_per_peer=2)
    return T.DTensor.from_local(out, mesh, [T.Shard(2)], shape=(*x.shape[:-1], weight.shape[0]), stride=(6, 2, 1)).pow(
        2
    )


def rows(x: Any, weight: Any) -> Any:
    shape = (*x.shape[:-1], weight.shape[0])
    target = T.DTensorSpec(x.device_mesh, (T.Shard(1),), T.TensorMeta.contiguous(shape, x.dtype))
    found = matmul_reduce_scatter(x.to_local(), weight.to_local(), target=target, chunks_per_peer=2)
    return T.DTensor.from_local(found, x.device_mesh, target.placements, shape=shape, stride=(6, 2, 1)).pow(2)


@pytest.mark.parametrize("name", ["columns", "rows"])
def test_first_and_second_derivatives(name):
    """Against finite differences of the whole tensors, over uneven shards."""
    x, weight, bias = (number(*shape, dtype=torch.float64, seed=5) for shape in ((1, 3, 2), (2, 2), (2,)))
    if name == "columns":
        check_derivatives(columns, Case((2,), [x, weight, bias], ["S1", "S0", "S0"]))
    else:
        check_derivatives(rows, Case((2,), [x, weight], ["S2", "S1"]))


def test_bytes_are_those_of_the_redistribution_and_told():
    def body(rank: int) -> None:
        mesh = T.Mesh((3,))
        x, source = part(number(2, 7, FEATURES, dtype=torch.float64, seed=1), mesh, T.Shard(1))
        weight = number(4, FEATURES, dtype=torch.float64, seed=rank)
        communicator, found = world.current().communicator(mesh.ranks), []
        for run in (
            lambda: T.redistribute(x, source, source.with_placements((T.Replicate(),)), grad_placements=(T.Partial(),)),
            lambda: all_gather_matmul(x, weight, source=source, chunks_per_peer=2),
        ):
            before = communicator.traffic.sent_bytes
            with CommDebugMode() as comm:
                run().sum().backward()
            kinds = {kind: (count.steps, count.sent_bytes) for kind, count in comm.by_kind().items()}
            assert sum(sent for _, sent in kinds.values()) == communicator.traffic.sent_bytes - before > 0
            found.append(kinds)
        assert found[0] == found[1]

    run_ranks(3, body)


def test_under_autocast_they_compute_as_linear_does():
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        x, source = part(number(2, 5, FEATURES, dtype=torch.float32, seed=1), mesh, T.Shard(1))
        weight = number(4, FEATURES, dtype=torch.float32, seed=rank)
        whole = T.redistribute(x, source, source.with_placements((T.Replicate(),)))
        with torch.autocast("cpu", torch.bfloat16):
            found = all_gather_matmul(x, weight, source=source)
            expected = F.linear(whole, weight)
            part_of_sum = matmul_reduce_scatter(
                whole,
                weight[:, :FEATURES],
                target=T.DTensorSpec(mesh, (T.Shard(1),), T.TensorMeta.contiguous((2, 5, 4))),
            )
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert part_of_sum.dtype is torch.float32

    run_ranks(2, body)


def a_step(rank: int) -> list[tuple[torch.Tensor, ...]]:
    """Outputs and gradients of both matmuls on real processes, and of the same one after the other."""
    mesh = T.Mesh((2,))
    source = T.DTensorSpec(mesh, (T.Shard(1),), T.TensorMeta.contiguous((3, 301, 64)))
    whole, terms = (source.with_placements((placement,)) for placement in (T.Replicate(), T.Partial()))
    tensors = [number(*shape, dtype=torch.float32, seed=rank) for shape in (source.local_shape, (96, 64), (64, 96))]
    found = []
    for overlap in (True, False):
        x, up, down = (tensor.clone().requires_grad_() for tensor in tensors)
        if overlap:
            hidden = all_gather_matmul(x, up, source=source, chunks_per_peer=4).relu()
            out = matmul_reduce_scatter(hidden, down, target=source, chunks_per_peer=4)
        else:
            hidden = F.linear(T.redistribute(x, source, whole, grad_placements=(T.Partial(),)), up).relu()
            out = T.redistribute(F.linear(hidden, down), terms, source)
        out.square().mean().backward()
        found.append((out.detach(), x.grad, up.grad, down.grad))
    return found  # type: ignore[return-value]


@pytest.mark.extended
def test_on_processes():
    with GlooRanks(2) as ranks:
        for overlapped, serial in ranks.run(a_step):
            torch.testing.assert_close(overlapped, serial)

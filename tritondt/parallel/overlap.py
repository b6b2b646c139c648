"""Matmuls whose input or output travels while they are computed, chunk by chunk.

    out = all_gather_matmul(x, weight, bias, source=spec_of_x)          # own positions in, own features out
    part = matmul_reduce_scatter(out, weight, target=spec_of_result)    # own features in, own positions out

They give what `redistribute` and `F.linear` give one after the other, and so do their gradients, whose chunks travel
while others are computed as well. Second derivatives, and calls under autocast or while torch traces a graph, go one
after the other; and so does everything where the cost table says that nothing is hidden, as between processes of one
host, whose own processors move the bytes. TRITONDT_COSTS tells of other networks.
"""

from contextlib import AbstractContextManager
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from tritondt import identity
from tritondt.comm import world
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError, LocalTensorError, ParallelizeError
from tritondt.errors.arguments import check_types, checked
from tritondt.kernels.memory import has_memory
from tritondt.parallel.chunked_matmul import AllGatherMatmul, ChunkSchedule, MatmulReduceScatter, rows_of
from tritondt.planning.pipelining import best_shares
from tritondt.redistribution.autograd import redistribute
from tritondt.redistribution.compile import exchanging_ranks
from tritondt.redistribution.refusals import refusing_next, refusing_redistributions
from tritondt.sharding.placement import Partial, Shard
from tritondt.sharding.spec import DTensorSpec


@checked
def all_gather_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    source: DTensorSpec,
    chunks_per_peer: int | None = None,
) -> torch.Tensor:
    """F.linear of the whole `x`, gathered during the product, with this rank's own `weight` and `bias`.

    `x` is this rank's part under `source`: Shard of a dim before the last, even, uneven or empty, on a mesh of one
    axis. `weight` is (own features, features), `bias` (own features,). Returns (..., own features) of all positions.
    The gradient of `x` is summed over ranks, because each rank has other features. `chunks_per_peer` is the number of
    pieces into which each rank's part is cut to travel and to be multiplied. By default the world's cost table
    determines it: a part that takes long to multiply and little time to send is cut into few pieces. A collective call
    of all ranks of the mesh.

    Raises LayoutError and ParallelizeError on all ranks alike before anything is sent; LocalTensorError and
    TransportError on the rank whose tensor is at fault, and PeerError on the others.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharding.mesh import Mesh
    >>> from tritondt.sharding.spec import TensorMeta
    >>> def shape_on(rank):
    ...     source = DTensorSpec(Mesh((2,)), (Shard(0),), TensorMeta.contiguous((5, 4)))
    ...     return tuple(all_gather_matmul(torch.ones(source.local_shape), torch.ones(3, 4), source=source).shape)
    >>> run_ranks(2, shape_on)
    [(5, 3), (5, 3)]
    """
    schedule = _schedule_of(source, chunks_per_peer)
    if source.coordinate is None:
        return x.new_empty((0,))
    with _refusing(schedule, x, schedule.shards, schedule.whole):
        check_types(all_gather_matmul, x=x, weight=weight, bias=bias)
        _check(source, source.local_shape, source.shape[-1], x, weight, bias)
    if not is_eager(x):
        return F.linear(redistribute(x, source, schedule.whole, grad_placements=(Partial(),)), weight, bias)
    result: torch.Tensor = AllGatherMatmul.apply(x, weight, bias, schedule)  # type: ignore[no-untyped-call]
    return result


@checked
def matmul_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, *, target: DTensorSpec, chunks_per_peer: int | None = None
) -> torch.Tensor:
    """Returns this rank's part, under `target`, of the sum over ranks of F.linear(x, weight), sent while it is
    computed.

    `x` is (..., own features) of all positions, `weight` (features of the result, own features). `target` is Shard of a
    dim before the last on a mesh of one axis. Terms are added in coordinate order, 16-bit ones in fp32, and rounded
    once, as in `redistribute`. `chunks_per_peer` is that of `all_gather_matmul`. A collective call of all ranks of the
    mesh; raises as `all_gather_matmul` does.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharding.mesh import Mesh
    >>> from tritondt.sharding.spec import TensorMeta
    >>> def shape_on(rank):
    ...     target = DTensorSpec(Mesh((2,)), (Shard(0),), TensorMeta.contiguous((5, 4)))
    ...     return tuple(matmul_reduce_scatter(torch.ones(5, 3), torch.ones(4, 3), target=target).shape)
    >>> run_ranks(2, shape_on)
    [(3, 4), (2, 4)]
    """
    schedule = _schedule_of(target, chunks_per_peer)
    if target.coordinate is None:
        return x.new_empty((0,))
    with _refusing(schedule, x, schedule.terms, schedule.shards):
        check_types(matmul_reduce_scatter, x=x, weight=weight)
        features = x.shape[-1] if x.ndim else 0
        _check(target, (*target.shape[:-1], features), features, x, weight, None, target.shape[-1])
    if not is_eager(x):
        product = F.linear(x, weight).to(target.dtype)
        return redistribute(product.contiguous(), schedule.terms, target)
    result: torch.Tensor = MatmulReduceScatter.apply(x, weight, schedule)  # type: ignore[no-untyped-call]
    return result


def is_divisible(spec: DTensorSpec) -> bool:
    """Whether every rank has one run of positions of a dim before the last."""
    placement = spec.placements[0]
    return (
        len(spec.placements) == 1
        and isinstance(placement, Shard)
        and placement.is_one_run
        and placement.dim != spec.ndim - 1
    )


def _schedule_of(spec: DTensorSpec, asked: int | None) -> ChunkSchedule:
    """Schedule of the chunks, equal on every rank."""
    if not is_divisible(spec):
        raise LayoutError(
            f"{spec} on {spec.mesh} cannot travel in chunks of positions; allowed is Shard of a dim before the last, "
            'without repeats or block, on a mesh of one axis, such as mesh["tp"]'
        )
    if asked is None:
        return ChunkSchedule(spec, _shares(spec), merges=True)
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ParallelizeError(f"chunks_per_peer got {asked!r}; allowed is a whole number of 1 or more, or None")
    return ChunkSchedule(spec, (1,) * asked, merges=False)


@lru_cache(maxsize=1024)
def _shares(spec: DTensorSpec) -> tuple[int, ...]:
    placement, rows = spec.placements[0], rows_of(spec)
    assert isinstance(placement, Shard), f"{spec} is divisible"
    return best_shares(
        rows, spec.shape[placement.dim] // rows.num_ranks, world.current().costs_for(spec.mesh.device_type)
    )


def _refusing(
    schedule: ChunkSchedule, x: object, source: DTensorSpec, target: DTensorSpec
) -> AbstractContextManager[None]:
    """Context of checks before a tensor goes from `source` to `target`, in pieces of each rank's part or at once."""
    is_divided = schedule.shares and (not isinstance(x, torch.Tensor) or is_eager(x))
    if not is_divided or len(exchanging_ranks(source, target, in_messages=True)[1]) != 1:
        return refusing_redistributions((source, target))
    return refusing_next(source.mesh, len(schedule.shares) * (len(source.mesh.ranks) - 1))


def _check(
    spec: DTensorSpec,
    shape: tuple[int, ...],
    features: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int | None = None,
) -> None:
    """Raises LocalTensorError for tensors that do not fit."""
    text = _misfit(spec, shape, features, x, weight, bias, out_features)
    if text is not None:
        raise LocalTensorError(text)


def _misfit(
    spec: DTensorSpec,
    shape: tuple[int, ...],
    features: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int | None,
) -> str | None:
    """Text that says which tensor does not fit, as found and as allowed; None where all do."""
    where = f"rank {spec.mesh.identity.rank} at coordinate {spec.coordinate} of {spec}"
    named = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in named.items():
        if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
            kind = "a DTensor" if isinstance(tensor, DTensor) else f"of layout {tensor.layout}"
            return f"{where} was given {name} that is {kind}; allowed are local strided tensors: call to_local()"
        if tensor.device.type != spec.mesh.device_type:
            return f"{where} was given {name} on {tensor.device}; allowed is {spec.mesh.device_type}, the mesh's"
        if tensor.numel() and has_memory(tensor) and not tensor.data_ptr():
            return f"{where} was given {name} at address 0; allowed are tensors with memory, not after resize_(0)"
        if tensor.dtype is not spec.dtype and (name == "x" or not torch.is_autocast_enabled(x.device.type)):
            return f"{where} was given {name} of {tensor.dtype}; allowed is {spec.dtype}, for x, weight and bias alike"
    if tuple(x.shape) != shape:
        return f"{where} was given x of shape {tuple(x.shape)}; allowed is {shape}"
    rows = "any" if out_features is None else out_features
    if weight.ndim != 2 or weight.shape[1] != features or out_features not in (None, weight.shape[0]):
        return f"{where} was given a weight of shape {tuple(weight.shape)}; allowed is ({rows}, {features})"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"{where} was given a bias of shape {tuple(bias.shape)}; allowed is ({weight.shape[0]},)"
    return None


def is_eager(x: torch.Tensor) -> bool:
    """Whether a matmul runs now and in the dtypes of its arguments: neither traced nor under autocast."""
    return not (
        torch.is_autocast_enabled(x.device.type)
        or torch.compiler.is_compiling()
        or isinstance(x, FakeTensor | FunctionalTensor)
    )


identity.on_end(_shares.cache_clear)

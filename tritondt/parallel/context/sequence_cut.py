"""Which positions of a sequence each rank of a context-parallel axis holds, and tensors cut so."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import LocalTensorError, MeshError, check_not_of_torch
from tritondt.errors.arguments import check_types, checked
from tritondt.redistribution.autograd import redistribute
from tritondt.redistribution.refusals import refusing_redistributions
from tritondt.redistribution.run import check_memory
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta


@dataclass(frozen=True)
class SequenceCut:
    """The cut of a sequence of `length` positions over `num_ranks`: runs of torch.chunk, or `balanced` ones.

    A balanced cut has 2 n runs, the lengths of which differ by one at most; rank r has run r and run 2 n - 1 - r, so
    that under a causal mask every rank has as much to do as the others.

    >>> cut = SequenceCut(9, 2, balanced=True)
    >>> [cut.positions(rank).tolist() for rank in range(2)], cut.sizes
    ([[0, 1, 6, 7, 8], [2, 3, 4, 5]], (5, 4))
    """

    length: int
    num_ranks: int
    balanced: bool = False

    def runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Starts and stops of the runs that a rank holds, in order."""
        if not self.balanced:
            piece = -(-self.length // self.num_ranks)
            return ((min(rank * piece, self.length), min((rank + 1) * piece, self.length)),)
        bounds = [place * self.length // (2 * self.num_ranks) for place in range(2 * self.num_ranks + 1)]
        return tuple((bounds[run], bounds[run + 1]) for run in (rank, 2 * self.num_ranks - 1 - rank))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions of every rank."""
        return tuple(sum(stop - start for start, stop in self.runs(rank)) for rank in range(self.num_ranks))

    def positions(self, rank: int) -> torch.Tensor:
        """Positions that a rank holds, in the order in which it holds them."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.runs(rank)])


@lru_cache(maxsize=256)
def whole_order(cut: SequenceCut) -> torch.Tensor:
    """Places, in the parts of all ranks one after the other, of positions 0, 1, ..."""
    return torch.cat([cut.positions(rank) for rank in range(cut.num_ranks)]).argsort()


def axis_mesh(device_mesh: "DeviceMesh | Mesh", what: str) -> tuple[Mesh, int]:
    """The mesh of one axis and this rank's index; MeshError for another mesh, or a rank outside of it."""
    mesh = canonical_mesh(device_mesh)
    if mesh.ndim != 1:
        raise MeshError(f"{what} takes a mesh of one axis, got {mesh}; give it one slice, as mesh['cp']")
    if mesh.coordinate is None:
        raise MeshError(f"{what} was called on rank {mesh.identity.rank}, outside of {mesh}; allowed are its ranks")
    return mesh, mesh.coordinate[0]


@checked
def context_parallel_shard(
    tensor: torch.Tensor, device_mesh: "DeviceMesh | Mesh", dim: int, *, balanced: bool = False
) -> torch.Tensor:
    """Returns this rank's positions, along `dim`, of a tensor that every rank has whole; differentiable, and not
    collective.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> run_ranks(2, lambda rank: context_parallel_shard(torch.arange(8), Mesh((2,)), 0, balanced=True).tolist())
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    check_not_of_torch(tensor, "context_parallel_shard")
    mesh, rank = axis_mesh(device_mesh, "context_parallel_shard")
    _check_dim("context_parallel_shard", tensor, dim)
    cut = SequenceCut(tensor.shape[dim], mesh.shape[0], balanced)
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in cut.runs(rank)], dim)


@checked
def context_parallel_unshard(
    local: torch.Tensor, device_mesh: "DeviceMesh | Mesh", dim: int, *, length: int, balanced: bool = False
) -> torch.Tensor:
    """Returns the whole tensor on every rank; `local` is this rank's part of `length` positions along `dim`.

    A collective call of the mesh, and differentiable: the gradient of a result that is alike on all ranks comes back as
    this rank's part. Raises LocalTensorError where the part has another number of positions.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def body(rank):
    ...     part = context_parallel_shard(torch.arange(5), Mesh((2,)), 0)
    ...     return context_parallel_unshard(part, Mesh((2,)), 0, length=5).tolist()
    >>> run_ranks(2, body)
    [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    """
    mesh, rank = axis_mesh(device_mesh, "context_parallel_unshard")
    cut = SequenceCut(length, mesh.shape[0], balanced)
    with refusing_redistributions(gathered_specs(mesh, cut)):
        check_types(context_parallel_unshard, local=local, dim=dim)
        _check_dim("context_parallel_unshard", local, dim)
        dim %= local.ndim
        check_length("local", local, dim, cut, rank)
    shape = (*local.shape[:dim], length, *local.shape[dim + 1 :])
    meta = TensorMeta.contiguous(shape, local.dtype)
    source, target = (DTensorSpec(mesh, [p], meta) for p in (Shard(dim, sizes=cut.sizes), Replicate()))
    whole = redistribute(local, source, target)
    return whole.index_select(dim, whole_order(cut).to(local.device)) if balanced else whole


def gathered_specs(mesh: Mesh, cut: SequenceCut) -> tuple[DTensorSpec, DTensorSpec]:
    """Specs between which a sequence of one number a position is gathered, in as many exchanges as any other."""
    meta = TensorMeta.contiguous((cut.length,))
    return DTensorSpec(mesh, [Shard(0, sizes=cut.sizes)], meta), DTensorSpec(mesh, [Replicate()], meta)


def _check_dim(taker: str, tensor: torch.Tensor, dim: int) -> None:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise LocalTensorError(
            f"{taker} got dim {dim} of a tensor of shape {tuple(tensor.shape)}, which has no such dim"
        )


_SEQUENCE = 2


class AttentionParts(NamedTuple):
    """Query, key and value of a rank, its parts of a sequence of queries and of one of keys."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cut: SequenceCut
    key_cut: SequenceCut

    def check(self, function: Callable[..., object], rank: int) -> None:
        """Refuses what `function` was given where it is not the parts of rank `rank`, or does not fit each other."""
        taker = function.__name__
        check_types(function, query=self.query, key=self.key, value=self.value)
        cuts = {"query": self.cut, "key": self.key_cut, "value": self.key_cut}
        for name, tensor in zip(cuts, self[:3], strict=True):
            check_memory(tensor, taker)
            if tensor.ndim != 4:
                raise LocalTensorError(
                    f"{taker} got a {name} of shape {tuple(tensor.shape)}; allowed are 4 dims: batch, heads, "
                    "positions, width"
                )
            check_length(name, tensor, _SEQUENCE, cuts[name], rank)
        heads, key_heads = self.query.shape[1], self.key.shape[1]
        if self.key.shape[:3] != self.value.shape[:3] or key_heads == 0 or heads % key_heads:
            raise LocalTensorError(
                f"{taker} got {heads} heads, key {tuple(self.key.shape)} and value {tuple(self.value.shape)}; allowed "
                "are keys and values of one batch and number of heads that divides the heads"
            )
        if not self.query.dtype == self.key.dtype == self.value.dtype:
            dtypes = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in self[:3])
            raise LocalTensorError(f"{taker} got query, key and value of {dtypes}; allowed is one dtype for all three")


def check_length(name: str, local: torch.Tensor, dim: int, cut: SequenceCut, rank: int) -> None:
    """Refuses a local tensor of another number of positions than the cut gives this rank."""
    check_not_of_torch(local, name)
    if local.shape[dim] != cut.sizes[rank]:
        kind = "balanced " if cut.balanced else ""
        raise LocalTensorError(
            f"{name} has {local.shape[dim]} positions along dim {dim} on rank {rank} of the mesh; a {kind}cut of "
            f"{cut.length} positions over {cut.num_ranks} ranks gives it {cut.sizes[rank]}: context_parallel_shard "
            "makes the parts"
        )

"""Layouts of torch.distributed.tensor as specs of ours, and back, where both can say the same."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from tritondt.errors import LayoutError, MeshError
from tritondt.sharding.layout import Layout
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement, ReduceOp, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta

_OPS: tuple[ReduceOp, ...] = ("sum", "avg", "max", "min", "product")


def placements_of_torch(spec: Any) -> tuple[tuple[Placement, ...], tuple[int, ...] | None] | None:
    """Placements and cut order of torch's spec; None where it has placements that no order of ours says."""
    found = [_placement(placement) for placement in spec.placements]
    placements = tuple(placement for placement in found if placement is not None)
    if len(placements) != len(found):
        return None
    if any(type(placement) is _StridedShard for placement in spec.placements):
        cuts = _cuts_of_strided(spec)
        if cuts is None:
            return None
    else:  # torch before 2.10 cuts from left to right only
        cuts = [entry.mesh_dims for entry in getattr(spec, "shard_order", None) or ()]
    order = list(range(len(found)))
    for axes in cuts:
        for slot, axis in zip(sorted(axes), axes, strict=True):
            order[slot] = axis
    return placements, tuple(order)


def _placement(placement: Any) -> Placement | None:
    if type(placement) in (TorchShard, _StridedShard):
        return Shard(placement.dim)
    if type(placement) is TorchReplicate:
        return Replicate()
    if type(placement) is TorchPartial and placement.reduce_op in _OPS:
        return Partial(placement.reduce_op)
    return None


def _cuts_of_strided(spec: Any) -> list[list[int]] | None:
    """Axes that cut each dim, in cut order, where _StridedShard is among them.

    Its split factor is the product of the sizes of axes to its right that cut before it. None where no order has these
    factors, and where a length does not divide: pieces of interleaved chunks are others than those of cuts in turn.
    """
    if spec.tensor_meta is None:
        return None
    axes_of_dim: dict[int, list[int]] = {}
    for axis in reversed(range(len(spec.placements))):
        placement = spec.placements[axis]
        if type(placement) not in (TorchShard, _StridedShard):
            continue
        axes = axes_of_dim.setdefault(placement.dim, [])
        wanted = placement.split_factor if type(placement) is _StridedShard else 1
        factors = [prod(spec.mesh.size(before) for before in axes[:place]) for place in range(len(axes) + 1)]
        if wanted not in factors:
            return None
        axes.insert(factors.index(wanted), axis)
    shape = spec.tensor_meta.shape
    if any(shape[dim] % prod(map(spec.mesh.size, axes)) for dim, axes in axes_of_dim.items()):
        return None
    return list(axes_of_dim.values())


def spec_of_torch(spec: Any, dtype: torch.dtype) -> DTensorSpec | None:
    """Our spec of a tensor of `dtype` under torch's spec; None where that says what ours cannot."""
    found = placements_of_torch(spec)
    if found is None or spec.tensor_meta is None:
        return None
    shape = tuple(spec.tensor_meta.shape)
    return DTensorSpec(spec.mesh, found[0], TensorMeta(shape, tuple(spec.tensor_meta.stride), dtype), found[1])


def torch_placements(layout: Layout) -> list[Any]:
    """Torch's placements for our layout, alike on all ranks; _StridedShard for axes that cut out of order.

    LayoutError where torch cannot hold it: its axes cut into the pieces of torch.chunk, in another order than from left
    to right only where lengths divide.
    """
    if _is_chunked(layout):
        return [_torch_placement(placement) for placement in layout.placements]
    if not _is_even(layout):
        raise LayoutError(
            f"torch's DTensor cannot hold {layout} of {layout.shape}: there axes cut a dim from left to right, into "
            "the pieces of torch.chunk; redistribute to Shard(dim) without unit, sizes, repeats, block and order first"
        )
    found = []
    for axis, placement in enumerate(layout.placements):
        factor = 1
        if isinstance(placement, Shard):
            axes = layout.axes_of_dim[placement.dim]
            factor = prod(layout.mesh_shape[before] for before in axes[: axes.index(axis)] if before > axis)
        is_strided = isinstance(placement, Shard) and factor > 1
        found.append(
            _StridedShard(placement.dim, split_factor=factor)  # type: ignore[attr-defined]
            if is_strided
            else _torch_placement(placement)
        )
    return found


def _is_even(layout: Layout) -> bool:
    """Whether axes cut in some order alone, into equal pieces."""
    plain = all(not isinstance(p, Shard) or p == Shard(p.dim) for p in layout.placements)
    return plain and all(
        length % prod(layout.mesh_shape[axis] for axis in axes) == 0
        for length, axes in zip(layout.shape, layout.axes_of_dim, strict=True)
    )


def _torch_placement(placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    return TorchPartial(placement.reduce_op) if isinstance(placement, Partial) else TorchReplicate()


@lru_cache(maxsize=4096)
def _is_chunked(layout: Layout) -> bool:
    """Whether every coordinate holds what torch.chunk, axis by axis from the left, would give it."""
    plain: Sequence[Placement] = [Shard(p.dim) if isinstance(p, Shard) else p for p in layout.placements]
    other = Layout(layout.mesh_shape, plain, layout.shape)
    return other is layout or all(layout.region(at) == other.region(at) for at in layout.coordinates())


def torch_mesh(mesh: Mesh, given: DeviceMesh | None) -> DeviceMesh:
    """Torch's mesh of the same ranks: `given`, or the one that `mesh` was made of; MeshError where there is none."""
    if given is None:
        if mesh.device_mesh is None:
            raise MeshError(
                f"to_torch() of a tensor on {mesh}, which has no process groups; give to_torch a DeviceMesh of the "
                "same ranks, or make the tensor on one: init_device_mesh(...)"
            )
        return mesh.device_mesh
    same = tuple(given.mesh.shape) == mesh.shape and tuple(given.mesh.flatten().tolist()) == mesh.ranks
    if not same or given.device_type != mesh.device_type:
        raise MeshError(
            f"to_torch() of a tensor on {mesh} was given {given}; allowed is one of the same ranks and shape"
        )
    return given

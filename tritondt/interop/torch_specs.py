"""Layouts of torch.distributed.tensor as specs of ours, and back, where both can say the same."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from tritondt.errors import LayoutError, MeshError
from tritondt.sharding.layout import Layout
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement, ReduceOp, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta

_OPS: tuple[ReduceOp, ...] = ("sum", "avg", "max", "min", "product")


def placements_of_torch(spec: Any) -> tuple[tuple[Placement, ...], tuple[int, ...] | None] | None:
    """Placements and cut order of torch's spec; None where it has placements of its own, as _StridedShard."""
    found = [_placement(placement) for placement in spec.placements]
    placements = tuple(placement for placement in found if placement is not None)
    if len(placements) != len(found):
        return None
    order = list(range(len(found)))
    for entry in getattr(spec, "shard_order", None) or ():  # torch before 2.10 cuts from left to right only
        for slot, axis in zip(sorted(entry.mesh_dims), entry.mesh_dims, strict=True):
            order[slot] = axis
    return placements, tuple(order)


def _placement(placement: Any) -> Placement | None:
    if type(placement) is TorchShard:
        return Shard(placement.dim)
    if type(placement) is TorchReplicate:
        return Replicate()
    if type(placement) is TorchPartial and placement.reduce_op in _OPS:
        return Partial(placement.reduce_op)
    return None


def spec_of_torch(spec: Any, dtype: torch.dtype) -> DTensorSpec | None:
    """Our spec of a tensor of `dtype` under torch's spec; None where that says what ours cannot."""
    found = placements_of_torch(spec)
    if found is None or spec.tensor_meta is None:
        return None
    shape = tuple(spec.tensor_meta.shape)
    return DTensorSpec(spec.mesh, found[0], TensorMeta(shape, tuple(spec.tensor_meta.stride), dtype), found[1])


def torch_placements(spec: DTensorSpec) -> list[Any]:
    """Torch's placements for a tensor of our spec, alike on all ranks.

    LayoutError where torch cannot hold it: its axes cut from left to right, into the pieces of torch.chunk.
    """
    found = [_torch_placement(placement) for placement in spec.placements]
    if not _is_chunked(spec.layout):
        raise LayoutError(
            f"torch's DTensor cannot hold {spec}: there axes cut a dim from left to right, into the pieces of "
            "torch.chunk; redistribute to Shard(dim) without unit, sizes, repeats and order first"
        )
    return found


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

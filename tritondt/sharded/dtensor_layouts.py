"""Distributed tensors of shards, and shards of distributed tensors: boxes of the one as a layout of the other."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch

from tritondt import identity
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError
from tritondt.planning.box_exchange import Boxes
from tritondt.sharded.groups import own_device
from tritondt.sharded.held import HeldShards, moved_shards
from tritondt.sharded.metadata import Shard as LocalShard
from tritondt.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from tritondt.sharding.intervals import Box
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta


@lru_cache(maxsize=1024)
def chunk_spec(boxes: Boxes, shape: tuple[int, ...], mesh: Mesh, dtype: torch.dtype) -> DTensorSpec | None:
    """Spec of the DTensor with one shard to a rank along one dim that holds these boxes; None where there is none.

    Its mesh has the ranks that hold a shard, in the order of their shards along the dim.
    """
    if not shape or any(len(held) > 1 for held in boxes):
        return None
    placed = [(held[0], rank) for held, rank in zip(boxes, mesh.ranks, strict=True) if held]
    cut = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box, _ in placed)]
    if len(cut) > 1 or not placed:
        return None
    dim = cut[0] if cut else 0
    # Empty shards stand wherever they start; the sizes alone say where the others are.
    placed.sort(key=lambda found: found[0][dim])
    sizes = tuple(box[dim][1] - box[dim][0] for box, _ in placed)
    even = -(-shape[dim] // len(sizes))
    is_default = sizes == tuple(max(min(shape[dim] - even * number, even), 0) for number in range(len(sizes)))
    placement = Shard(dim) if is_default else Shard(dim, sizes=sizes)
    of_shards = Mesh((len(placed),), ranks=[rank for _, rank in placed], device_type=mesh.device_type)
    return DTensorSpec(of_shards, [placement], TensorMeta.contiguous(shape, dtype))


def boxes_under(spec: DTensorSpec) -> Boxes:
    """Boxes of every position of a spec's mesh; LayoutError for Partial, of which a rank holds terms and no values."""
    if any(isinstance(placement, Partial) for placement in spec.placements):
        raise LayoutError(
            f"shards hold values, and a rank holds a term of each element under {spec}; redistribute to Shard first"
        )
    layout = spec.layout
    positions = [layout.region(layout.coordinate(position)) for position in range(layout.num_ranks)]
    return tuple(tuple(product(*(intervals or ((0, 0),) for intervals in region))) for region in positions)


def metadata_under(spec: DTensorSpec, device: torch.device, requires_grad: bool) -> ShardedTensorMetadata:
    """Metadata of the shards that a DTensor of this spec consists of, this rank's on `device`.

    Other ranks' shards are on the CUDA device that their number chooses among as many as there are here. LayoutError
    where elements are on several ranks.
    """
    replicated = [axis for axis, placement in enumerate(spec.placements) if isinstance(placement, Replicate)]
    if any(spec.mesh.shape[axis] > 1 for axis in replicated):
        raise LayoutError(
            f"an element lies in one shard only, and on several ranks under {spec}; redistribute to Shard"
        )
    shards = []
    for rank, boxes in zip(spec.mesh.ranks, boxes_under(spec), strict=True):
        where = device
        if device.type == "cuda" and rank != spec.mesh.identity.rank:
            where = torch.device("cuda", rank % torch.cuda.device_count())
        shards += [_shard(box, rank, where) for box in boxes]
    properties = TensorProperties(spec.dtype, requires_grad=requires_grad)
    return ShardedTensorMetadata(shards, torch.Size(spec.shape), properties)


def _shard(box: Box, rank: int, device: torch.device) -> ShardMetadata:
    return ShardMetadata([start for start, _ in box], [stop - start for start, stop in box], f"rank:{rank}/{device}")


def local_boxes(spec: DTensorSpec) -> list[tuple[slice, ...]]:
    """Slices of the local tensor that this rank's boxes are, in the order of `boxes_under`; none outside the mesh."""
    if spec.coordinate is None:
        return []
    slices = []
    for intervals in spec.layout.region(spec.coordinate):
        of_dim, at = [], 0
        for start, stop in intervals or ((0, 0),):
            of_dim.append(slice(at, at + stop - start))
            at += stop - start
        slices.append(of_dim)
    return list(product(*slices))


def shared_dtensor(held: HeldShards) -> DTensor:
    """The distributed tensor that shares the shards' memory; LayoutError where they are no chunks of one dim."""
    spec = chunk_spec(held.boxes, held.shape, held.mesh, held.dtype)
    if spec is None:
        raise LayoutError(
            "a distributed tensor shares memory with shards where every rank holds one at most, cut along one dim; "
            f"these of size {held.shape} are cut as {held.boxes}: give to_dtensor a device_mesh and placements"
        )
    # Beyond the mesh, and only there, a rank holds nothing.
    local = held.tensors[0] if held.tensors else torch.empty(0, dtype=held.dtype, device=spec.mesh.device_type)
    return DTensor.from_local(local, spec.mesh, spec.placements, shape=spec.shape, stride=spec.tensor_meta.stride)


def laid_out(held: HeldShards, mesh: Mesh, placements: Sequence[Placement]) -> DTensor:
    """The values under any layout without Partial on a mesh within the group, by one exchange."""
    spec = DTensorSpec(mesh, placements, TensorMeta.contiguous(held.shape, held.dtype))
    if not set(mesh.ranks) <= set(held.mesh.ranks):
        raise LayoutError(f"{mesh} has ranks outside the group {held.mesh.ranks} of the sharded tensor")
    has_replicas = any(
        size > 1 and isinstance(placement, Replicate)
        for size, placement in zip(mesh.shape, spec.placements, strict=True)
    )
    if has_replicas and held.metadata.tensor_properties.requires_grad and torch.is_grad_enabled():
        raise LayoutError(
            f"a gradient comes back from one rank for each element, and {spec} has several; take placements without "
            "Replicate, and redistribute the result"
        )
    of_rank = dict(zip(mesh.ranks, boxes_under(spec), strict=True))
    target = tuple(of_rank.get(rank, ()) for rank in held.mesh.ranks)
    parts = moved_shards(held, target, own_device(held.metadata, held.mesh))
    if len(parts) == 1:
        local = parts[0]
    else:
        shape = (0,) if spec.coordinate is None else spec.local_shape
        local = torch.empty(shape, dtype=held.dtype, device=mesh.device_type)
        for part, place in zip(parts, local_boxes(spec), strict=True):
            local[place] = part
    return DTensor.from_local(local, mesh, placements, shape=held.shape, stride=spec.tensor_meta.stride)


def shards_of(tensor: DTensor) -> tuple[ShardedTensorMetadata, list[LocalShard]]:
    """Metadata of the sharded tensor that a distributed one is, and this rank's shards, of its memory if contiguous."""
    spec, local = tensor._spec, tensor.to_local()
    metadata = metadata_under(spec, local.device, local.requires_grad)
    own = [shard for shard in metadata.shards_metadata if shard.rank == spec.mesh.identity.rank]
    # One box is the whole local tensor, which is not sliced: a slice would be a view.
    parts = [local] if len(own) == 1 else [local[place] for place in local_boxes(spec)]
    return metadata, [LocalShard(part.contiguous(), found) for part, found in zip(parts, own, strict=True)]


identity.on_end(chunk_spec.cache_clear)

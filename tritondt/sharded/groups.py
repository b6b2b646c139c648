"""Ranks that hold a sharded tensor: a process group, a mesh, or the whole world, as a mesh of one axis."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tritondt import identity
from tritondt.errors import LayoutError, MeshError
from tritondt.planning.box_exchange import Boxes
from tritondt.sharded.metadata import ShardedTensorMetadata
from tritondt.sharding.intervals import Box
from tritondt.sharding.mesh import Mesh, canonical_mesh

Group = dist.ProcessGroup | DeviceMesh | Mesh | None


def ranks_of(process_group: Group) -> tuple[int, ...]:
    """World's ranks of a process group or of a mesh, in order; all of the world's for None."""
    if process_group is None:
        return tuple(range(identity.current().size))
    if isinstance(process_group, (DeviceMesh, Mesh)):
        return canonical_mesh(process_group).ranks
    if not isinstance(process_group, dist.ProcessGroup):
        raise MeshError(
            f"a sharded tensor takes a process group, a mesh, or None for the world, got {type(process_group).__name__}"
        )
    return tuple(dist.get_process_group_ranks(process_group))


def mesh_of(process_group: Group, device_type: str = "cpu") -> Mesh:
    """Mesh of one axis over the group's ranks, whose local tensors are on `device_type`."""
    ranks = ranks_of(process_group)
    return Mesh((len(ranks),), ranks=ranks, device_type=device_type)


def device_type_of(metadata: ShardedTensorMetadata) -> str:
    """Type of the devices of all shards; LayoutError where shards are on devices of different types."""
    found = {shard.placement.device().type: shard for shard in metadata.shards_metadata if shard.placement is not None}
    if len(found) != 1:
        raise LayoutError(
            "shards of one tensor are placed on devices of one type, got "
            f"{' and '.join(str(shard) for shard in found.values()) or 'no placement'}"
        )
    (device_type,) = found
    return device_type


def boxes_of(metadata: ShardedTensorMetadata, mesh: Mesh) -> Boxes:
    """Boxes of every mesh position, in the metadata's order; LayoutError for a shard of a rank outside the mesh."""
    held: list[list[Box]] = [[] for _ in mesh.ranks]
    for shard in metadata.shards_metadata:
        if shard.rank not in mesh.ranks:
            raise LayoutError(f"{shard} is placed on rank {shard.rank}, which is not among the group's {mesh.ranks}")
        held[mesh.ranks.index(shard.rank)].append(shard.box)
    return tuple(map(tuple, held))


def own_device(metadata: ShardedTensorMetadata, mesh: Mesh) -> torch.device:
    """Device of this rank's first shard, else the current one of the mesh's type."""
    for shard in metadata.shards_metadata:
        if shard.rank == mesh.identity.rank and shard.placement is not None:
            return torch.device(shard.placement.device())
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)

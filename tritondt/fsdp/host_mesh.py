"""Meshes whose first axis has the hosts of the world, so that all others lie inside hosts."""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tritondt.comm import world
from tritondt.errors import MeshError
from tritondt.errors.arguments import checked
from tritondt.planning.between_hosts import Hosts
from tritondt.sharding.coordinates import ranks_text


@checked
def init_host_mesh(
    device_type: str, inner_shape: Sequence[int] = (-1,), *, mesh_dim_names: Sequence[str] = ("replicate", "shard")
) -> DeviceMesh:
    """Makes a DeviceMesh of all ranks whose first axis has an index for each host, found without being told.

    The other axes, of sizes `inner_shape`, lie inside hosts, however the launcher has numbered the ranks; one size may
    be -1, for the ranks that are left. `fully_shard` over ("replicate", "shard") then gathers parameters inside hosts,
    and only reduced gradients cross between them. `device_type` is "cpu" or "cuda"; `mesh_dim_names` has one name per
    axis. A collective call of all ranks, since torch makes process groups. Raises MeshError, on all ranks alike and
    before any group is made, where there is no world of torch.distributed, where hosts have different numbers of ranks,
    and for sizes or names that do not fit.

    >>> dist.init_process_group("fake", rank=0, world_size=8)
    >>> mesh = init_host_mesh("cpu", (-1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    >>> tuple(mesh.mesh.shape), mesh["tp"].mesh.tolist()
    ((1, 4, 2), [0, 1])
    >>> dist.destroy_process_group()
    """
    if not dist.is_initialized():
        raise MeshError(
            "init_host_mesh was called before torch.distributed.init_process_group, and asks the ranks of that world "
            "on which hosts they are; call that first"
        )
    names = tuple(mesh_dim_names)
    if len(names) != len(inner_shape) + 1 or len(set(names)) != len(names):
        raise MeshError(
            f"init_host_mesh with inner_shape={tuple(inner_shape)} makes {len(inner_shape) + 1} axes, that of the "
            f"hosts first, and takes as many different names; got mesh_dim_names={names}"
        )
    shape, ranks = grid_of_hosts(world.current().hosts(range(dist.get_world_size())), inner_shape)
    return DeviceMesh(device_type, torch.tensor(ranks).view(shape), mesh_dim_names=names)


def grid_of_hosts(hosts: Hosts, inner_shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of a mesh of hosts and of `inner_shape` inside each, and its ranks in row-major order; MeshError for none.

    `hosts` has the host of each rank. Hosts and their ranks come in the order of ranks.

    >>> grid_of_hosts((0, 1, 0, 1, 0, 1, 0, 1), (-1, 2))
    ((2, 2, 2), (0, 2, 4, 6, 1, 3, 5, 7))
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    counts = [len(ranks) for ranks in ranks_of.values()]
    if len(set(counts)) > 1:
        found = "; ".join(f"{len(ranks)} on one ({ranks_text(ranks)})" for ranks in ranks_of.values())
        raise MeshError(
            f"init_host_mesh takes hosts of as many ranks each, found {found}; start as many on each, or shard over "
            "one axis of all ranks, whose gathers bring each host what it lacks once"
        )
    sizes, (count, *_) = tuple(inner_shape), counts
    known = prod(size for size in sizes if size != -1)
    fits = sizes.count(-1) <= 1 and all(size == -1 or size > 0 for size in sizes)
    if not fits or count % known or (-1 not in sizes and count != known):
        raise MeshError(
            f"init_host_mesh got inner_shape={sizes}, and each host has {count} ranks; allowed are sizes above 0 whose "
            f"product is {count}, one of them -1 for what is left"
        )
    shape = (len(counts), *(count // known if size == -1 else size for size in sizes))
    return shape, tuple(rank for ranks in ranks_of.values() for rank in ranks)

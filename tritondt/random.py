"""Seeds of the random numbers of distributed tensors, by the names of torch.distributed.tensor._random."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import MeshError
from tritondt.errors.arguments import checked, first
from tritondt.sharding.mesh import Mesh, canonical_mesh

__all__ = ["is_rng_supported_mesh", "manual_seed"]


@checked
def is_rng_supported_mesh(device_mesh: "DeviceMesh | Mesh") -> bool:
    """Whether random operators run on a mesh: on all, because numbers depend on an element's place in the whole tensor.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> run_ranks(2, lambda rank: is_rng_supported_mesh(Mesh((2,))))
    [True, True]
    """
    canonical_mesh(device_mesh)
    return True


@first("seed")  # torch rounds a float
def manual_seed(seed: int, device_mesh: "DeviceMesh | Mesh") -> None:
    """Seeds the generators of this process, from which random operators on `device_mesh` draw.

    All ranks of the mesh must pass the same seed, which is compared at their first draw; this call sends nothing. Ranks
    of other meshes, as of other pipeline stages, may have other seeds. Raises MeshError on a rank outside the mesh.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def drawn(rank):
    ...     mesh = Mesh((2,))
    ...     manual_seed(3, mesh)
    ...     return T.rand(4, device_mesh=mesh, placements=[T.Shard(0)]).full_tensor().tolist()
    >>> first, second = run_ranks(2, drawn)
    >>> first == second
    True
    """
    mesh = canonical_mesh(device_mesh)
    if mesh.coordinate is None:
        raise MeshError(
            f"manual_seed was called on rank {mesh.identity.rank}, outside of {mesh}; allowed are its ranks"
        )
    torch.manual_seed(seed)

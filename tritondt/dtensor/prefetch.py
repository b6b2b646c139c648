"""prefetch: redistributions issued before their result is asked for."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt.comm.packing.wire_dtype import narrower
from tritondt.dtensor.pending import issue_prefetch
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import check_not_of_torch
from tritondt.errors.arguments import checked
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Placement, as_placements
from tritondt.sharding.spec import target_spec


@checked
def prefetch(
    tensor: DTensor,
    placements: Sequence[Placement],
    *,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    order: Sequence[int | str] | None = None,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Starts the redistribution of a tensor to `placements`; its next `redistribute` to them takes the result.

    A collective call that returns at once. `placements` (one per mesh axis), `device_mesh`, `order` and `wire_dtype`
    must equal those of the later `DTensor.redistribute`. A write to the tensor discards the result. Raises LayoutError
    and TransportError. A failure in flight is raised at the wait for the result. It does nothing in a function that
    torch.compile traces: a graph redistributes where it is told to.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def ahead(rank):
    ...     weight = T.ones(4, 4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
    ...     T.prefetch(weight, [T.Replicate()])
    ...     before = weight.sum().full_tensor().item()  # meanwhile
    ...     return before, tuple(weight.redistribute(placements=[T.Replicate()]).to_local().shape)
    >>> run_ranks(2, ahead)
    [(16.0, (4, 4)), (16.0, (4, 4))]
    """
    if torch.compiler.is_dynamo_compiling():
        return
    check_not_of_torch(tensor, "prefetch")
    mesh = None if device_mesh is None else canonical_mesh(device_mesh)
    target = target_spec(tensor._spec, as_placements(placements), None if order is None else tuple(order), mesh)
    if target is not tensor._spec:
        with torch.no_grad():
            issue_prefetch(tensor, DTensor, target, narrower(target.dtype, wire_dtype))

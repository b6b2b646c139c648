"""Distribution of a module's parameters; a parameter that two modules share stays one."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.dtensor.distribute import distribute_tensor
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Placement, placements_text
from tritondt.sharding.spec import DTensorSpec, TensorMeta

# On a plain parameter: the distributed one that has taken its place, for modules that share it.
_SUCCESSOR = "_tritondt_distributed_as"


def distribute_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh | Mesh, placement: Placement, src_data_rank: int | None
) -> None:
    """Cuts the parameter `name` of `module` over the mesh; nothing where it is None.

    With a `src_data_rank` a collective call. ParallelizeError where it is distributed already in another way.
    """
    plain = module._parameters[name]
    if plain is None:
        return
    found: Any = plain if isinstance(plain, DTensor) else getattr(plain, _SUCCESSOR, None)
    if found is None:
        whole = distribute_tensor(plain.detach(), mesh, (placement,), src_data_rank=src_data_rank)
        found = nn.Parameter(whole, plain.requires_grad)
        setattr(plain, _SUCCESSOR, found)
    wanted = DTensorSpec(canonical_mesh(mesh), (placement,), TensorMeta.contiguous(plain.shape, plain.dtype))
    if found._spec.layout is not wanted.layout or found._spec.mesh is not wanted.mesh:
        raise ParallelizeError(
            f"its {name} is shared with another module, which has it as {placements_text(found._spec.placements)} on "
            f"{found._spec.mesh}; here it would be {placements_text(wanted.placements)} on {wanted.mesh}: give both "
            "modules styles that cut it alike, or untie them with a copy"
        )
    module._parameters[name] = found

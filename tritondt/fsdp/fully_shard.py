"""fully_shard: parameters, gradients and optimizer states sharded over a data axis, gathered where a module runs."""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import FullyShardError, check_not_of_torch
from tritondt.errors.arguments import first
from tritondt.fsdp.group import ParameterGroup
from tritondt.fsdp.meshes import DataMesh, data_mesh
from tritondt.fsdp.module import FSDPModule, sharded_class, state_of
from tritondt.fsdp.parameter import ShardedParameter, ShardPlacement, User, shard_dim
from tritondt.fsdp.state import ShardedState
from tritondt.interop.transformers.trainer import tell_trainer_of_data_axis
from tritondt.kernels.memory import has_memory
from tritondt.parallel.forward_pass import APART
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.spec import check_strided

# On a parameter that was sharded: the name that it had, for modules that have it too.
_SHARDED_AS = "_tritondt_fully_sharded"
_DEFAULT_POLICY = MixedPrecisionPolicy()
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@overload
def fully_shard(module: AnyModule, **options: Any) -> AnyModule: ...
@overload
def fully_shard(module: list[nn.Module], **options: Any) -> list[nn.Module]: ...
@first("ignored_params")  # type: ignore[misc]
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _DEFAULT_POLICY,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shards the parameters of a module, or list of modules, over the data axis `mesh`, in place, and returns it.

    All parameters that no earlier call took become distributed tensors. They are Shard(0) on the last axis of `mesh`,
    or on each axis in `dp_mesh_dims.shard`, unless `shard_placement_fn`, a function from the parameter to None or
    Shard(dim), returns another dim. They are Replicate on the axes before. On a tensor axis they keep the layout of
    `parallelize_module`, and the data axis cuts each rank's part. Sizes need not divide. One exchange gathers them
    before the module's forward and backward, while the module before it computes. Another one brings gradients,
    averaged over `mesh`, to the shards during backward. Call it on the layers first and on the model last, after
    `parallelize_module`.

    `mesh` is a slice, flattened or not, of the DeviceMesh with the tensor axis. It may also be that whole mesh, or a
    `Mesh`, with `dp_mesh_dims` (torch's DataParallelMeshDims, with `shard` and `replicate`). Default: the world.
    `reshard_after_forward` frees whole parameters between forward and backward (default: except for the outermost
    module). A number, a divisor of the ranks that shard, leaves them cut among each so many neighbours, as the GPUs of
    a host, and backward gathers them there. `mp_policy` has the dtypes of forward and of the gather, of the gradients'
    messages, and of outputs; gradients are added in float32. Parameters start as each rank has them. Forward, backward
    and `unshard` are collective calls of `mesh`.

    Raises FullyShardError for a module that is sharded already, a module without parameters, and unsupported options;
    MeshError for a mesh that does not fit. Source: torch.distributed.fsdp.fully_shard.

    >>> import torch
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def train_on(rank):
    ...     model = fully_shard(nn.Linear(3, 5), mesh=Mesh((2,), ("dp",)))
    ...     model(torch.ones(2, 3)).sum().backward()
    ...     return tuple(model.weight.to_local().shape), model.weight.grad.placements
    >>> run_ranks(2, train_on)
    [((3, 3), (S0,)), ((2, 3), (S0,))]
    """
    modules = _checked_modules(module)
    _check_options(mp_policy, offload_policy)
    data = data_mesh(mesh, dp_mesh_dims)
    frees_after_forward = _frees_after_forward(reshard_after_forward, data.mesh.shape[data.shard_axis])
    managed, children = _managed(modules)
    parameters = _parameters(modules, managed, children, data, ignored_params or set(), shard_placement_fn)
    if not parameters and not children:
        names = ", ".join(type(each).__name__ for each in modules)
        raise FullyShardError(
            f"fully_shard was given {names} without parameters to shard; allowed are modules with parameters that are "
            "not in ignored_params, or with modules inside that were sharded before"
        )
    group = ParameterGroup(parameters, data, mp_policy.param_dtype) if parameters else None
    if group is not None:
        group.register(whole=False)
    for user in (user for parameter in parameters for user in parameter.users):
        user.module.__dict__[APART] = True
    state = ShardedState(modules, managed, group, mp_policy, frees_after_forward)
    for tree in {id(child.tree): child.tree for child in children}.values():
        state.tree.take_over(tree)
    for each in modules:
        each.__class__ = sharded_class(type(each))  # type: ignore[arg-type]
        each.__dict__["_tritondt_fully_sharded"] = state
        tell_trainer_of_data_axis(each, len(data.mesh.ranks))
    return module


def _checked_modules(module: Any) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in modules:
        if not isinstance(each, nn.Module):
            raise FullyShardError(f"fully_shard takes an nn.Module or a list of them, got {each!r}")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)):
            raise FullyShardError(
                f"fully_shard was given {type(each).__name__}, which has no forward before which to gather; allowed "
                "are the modules in it, one by one or as a list"
            )
        if state_of(each) is not None:
            raise FullyShardError(
                f"this {type(each).__name__} was sharded by fully_shard already; call it once for each module, on "
                "layers first and on the model that has them last"
            )
    if not modules:
        raise FullyShardError("fully_shard was given no module; allowed are an nn.Module and a list of them")
    return modules


def _frees_after_forward(given: bool | int | None, num_ranks: int) -> bool | int | None:
    """`reshard_after_forward` as torch means it: all ranks are True, and one alone, which has them whole, is False."""
    if given is None or isinstance(given, bool):
        return given
    if given < 1 or num_ranks % given:
        raise FullyShardError(
            f"fully_shard got reshard_after_forward={given!r}; allowed are True, False, None, and a divisor of "
            f"{num_ranks}, the number of ranks that shard: after forward each so many keep the parameters"
        )
    return {1: False, num_ranks: True}.get(given, given)


def _check_options(mp_policy: Any, offload_policy: Any) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise FullyShardError(f"fully_shard got mp_policy={mp_policy!r}; allowed is a MixedPrecisionPolicy")
    if offload_policy is not None and type(offload_policy) is not OffloadPolicy:
        raise FullyShardError(
            f"fully_shard got offload_policy={offload_policy!r}; shards stay on the device of the mesh: for shards in "
            "host memory make the model and the mesh there (device type cpu)"
        )


def _managed(modules: Sequence[nn.Module]) -> tuple[list[nn.Module], list[ShardedState]]:
    """Modules whose parameters this call takes, and the states of earlier calls below them."""
    managed: dict[int, nn.Module] = {}
    states: dict[int, ShardedState] = {}

    def visit(module: nn.Module) -> None:
        found = state_of(module)
        if found is not None:
            states[id(found)] = found
            return
        if id(module) not in managed:
            managed[id(module)] = module
            for child in module.children():
                visit(child)

    for module in modules:
        visit(module)
    return list(managed.values()), list(states.values())


def _parameters(
    modules: Sequence[nn.Module],
    managed: Sequence[nn.Module],
    children: Sequence[ShardedState],
    data: DataMesh,
    ignored: Set[nn.Parameter],
    placement_of: ShardPlacement | None,
) -> list[ShardedParameter]:
    """Parameters of the modules, a shared one once; refused before any of them is changed."""
    names = {id(found): name for module in modules for name, found in module.named_modules()}
    passed = set(map(id, ignored))
    users: dict[int, list[User]] = {}
    found: dict[int, nn.Parameter] = {}
    for module in managed:
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in passed:
                found[id(parameter)] = parameter
                dotted = f"{names.get(id(module), '')}.{key}".lstrip(".")
                users.setdefault(id(parameter), []).append(User(module, key, dotted))
    for number, parameter in found.items():
        _check_parameter(users[number][0].name, parameter, data)
    dims = {number: shard_dim(users[number][0].name, parameter, placement_of) for number, parameter in found.items()}
    tensor_mesh = _tensor_mesh(managed, children, data)
    made = [
        ShardedParameter(users[number], parameter, data, dims[number], tensor_mesh)
        for number, parameter in found.items()
    ]
    for number, parameter in found.items():
        setattr(parameter, _SHARDED_AS, users[number][0].name)
    return made


def _check_parameter(name: str, parameter: nn.Parameter, data: DataMesh) -> None:
    check_not_of_torch(parameter, f"fully_shard of {name}")
    check_not_of_torch(parameter.data, f"fully_shard of {name}")
    before = getattr(parameter, _SHARDED_AS, None)
    if before is not None:
        raise FullyShardError(
            f"{name} is shared with a module that was sharded before, as {before}, and would be trained apart from it; "
            "shard both in one call: fully_shard([first, second]), or the model that has both"
        )
    check_strided(f"fully_shard of {name}", parameter)
    is_plain = type(parameter.data) is torch.Tensor or isinstance(parameter, DTensor)
    if not is_plain and has_memory(parameter.data):
        raise FullyShardError(
            f"{name} is a {type(parameter.data).__name__}, whose class says what its operators do, and shards are cut "
            "from plain memory; allowed are plain tensors (x.dequantize()), or put it in ignored_params"
        )
    if parameter.device.type not in (data.mesh.device_type, "meta"):
        raise FullyShardError(
            f"{name} is on {parameter.device}, and the mesh on {data.mesh.device_type}; move the module there before, "
            "as by model.to(device), or to meta, for model.to_empty(device=...) after fully_shard"
        )


def _tensor_mesh(managed: Iterable[nn.Module], children: Iterable[ShardedState], data: DataMesh) -> Mesh | None:
    """Mesh of the tensor axis of modules that have one, over which their plain parameters are taken for replicated."""
    if data.is_whole:
        return None
    for module in managed:
        for parameter in module._parameters.values():
            if isinstance(parameter, DTensor):
                return parameter._spec.mesh
    for child in children:
        for held in () if child.group is None else child.group.parameters:
            if held.computed is not None:
                return held.computed.mesh
    return None


__all__ = ["FSDPModule", "fully_shard"]

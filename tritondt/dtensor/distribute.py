"""Distributed tensors from global ones, and modules with distributed parameters."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError, LocalTensorError, MeshError, TritondtError
from tritondt.errors.arguments import check_types, checked
from tritondt.redistribution.agreement import agreed, check_agreed
from tritondt.redistribution.given_local import given_local
from tritondt.redistribution.refusals import refusing_comparison
from tritondt.redistribution.run import check_address, redistribute_local
from tritondt.redistribution.send import distribute_from
from tritondt.sharding.layout import Layout
from tritondt.sharding.mesh import Mesh, canonical_mesh, mesh_or_current
from tritondt.sharding.placement import Placement, Replicate, as_placements, placements_code, placements_text
from tritondt.sharding.spec import DTensorSpec, TensorMeta
from tritondt.sharding.strides import dense_strides


@checked
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """The distributed tensor of a global one: a leaf with memory of its own, a Parameter where `tensor` is one.

    A collective call. The rank whose coordinate is `src_data_rank` on every axis sends every other rank its part. With
    None every rank cuts its own values, and nothing is sent. `placements`, one per mesh axis, default to Replicate;
    terms of a sum or product are the values at coordinate 0 and 0 or 1 elsewhere. `order` lists the axes in the order
    in which they cut a dim. A distributed tensor is returned unchanged if it already has the requested layout. Raises
    MismatchError on all ranks where their tensors' shapes or dtypes differ, LayoutError, MeshError, LocalTensorError,
    PeerError.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def rows(rank):
    ...     return T.distribute_tensor(torch.arange(5), T.Mesh((2,)), [T.Shard(0)]).to_local().tolist()
    >>> run_ranks(2, rows)
    [[0, 1, 2], [3, 4]]
    """
    mesh = canonical_mesh(mesh_or_current(device_mesh))
    wanted = (Replicate(),) * mesh.ndim if placements is None else placements
    if isinstance(tensor, DTensor):
        return _check_layout(tensor, mesh, as_placements(wanted), order)
    prepare = partial(_prepared, tensor, mesh, wanted, src_data_rank, order)
    is_local = src_data_rank is None or (isinstance(tensor, torch.Tensor) and tensor.is_meta)
    whole, target, source_position = prepare()[1] if is_local else agreed(mesh, "distribute_tensor", prepare)
    made = DTensor(_local_part(whole, target, source_position), target)
    if isinstance(tensor, nn.Parameter):
        return cast(DTensor, nn.Parameter(made, requires_grad=tensor.requires_grad))
    made.requires_grad_(tensor.requires_grad)
    return made


class _Prepared(NamedTuple):
    """A tensor to be distributed, on its mesh's type of device, its target, and the mesh position it comes from."""

    whole: torch.Tensor
    target: DTensorSpec
    source_position: int | None


def _prepared(
    tensor: torch.Tensor,
    mesh: Mesh,
    placements: Sequence[Placement],
    src_data_rank: int | None,
    order: Sequence[int | str] | None,
) -> tuple[str, _Prepared]:
    """A text of the arguments of distribute_tensor, which must be equal on all ranks, and what follows from them.

    Raises what is wrong with them on this rank.
    """
    tensor, placements = given_local(tensor, "distribute_tensor"), as_placements(placements)
    source_position = None if src_data_rank is None else _source_position(mesh, src_data_rank)
    if not tensor.is_leaf:
        raise LocalTensorError(
            "distribute_tensor takes a leaf of the autograd graph, got the result of an operator; call detach() first, "
            "or DTensor.from_local, which passes gradients on"
        )
    target = DTensorSpec(mesh, placements, TensorMeta.contiguous(tensor.shape, tensor.dtype), order)
    whole = tensor.detach()
    if not whole.is_meta:
        whole = whole if whole.device.type == mesh.device_type else whole.to(mesh.device_type)
        if source_position is not None and mesh.coordinate == target.layout.coordinate(source_position):
            check_address(whole, target)
    return _description(tensor, target, order, src_data_rank), _Prepared(whole, target, source_position)


def _check_layout(
    tensor: DTensor, mesh: Mesh, placements: Sequence[Placement], order: Sequence[int | str] | None
) -> DTensor:
    spec = tensor._spec
    if spec.mesh is not mesh:
        raise MeshError(
            f"distribute_tensor was given a tensor that is distributed over {spec.mesh} already, and asked for {mesh}; "
            "give it x.full_tensor(), or make it on that mesh"
        )
    wanted = spec.with_placements(placements, order)
    if wanted is not spec:
        raise LayoutError(
            f"distribute_tensor was given a tensor that is distributed as {placements_text(spec.placements)} already, "
            f"and asked for {wanted}; use x.redistribute(placements={placements_code(placements)})"
        )
    return tensor


def _source_position(mesh: Mesh, src_data_rank: int) -> int:
    """The mesh position of the rank whose coordinate is `src_data_rank` on every axis."""
    if any(not 0 <= src_data_rank < size for size in mesh.shape):
        raise MeshError(
            f"src_data_rank={src_data_rank} is a coordinate on every axis of {mesh}; allowed are 0.."
            f"{min(mesh.shape) - 1}, and None for every rank's own values"
        )
    return src_data_rank * sum(dense_strides(mesh.shape))


def _description(
    tensor: torch.Tensor, target: DTensorSpec, order: Sequence[int | str] | None, src_data_rank: int | None
) -> str:
    """A text of shape, dtype, placements, source and flags."""
    details = "" if order is None else f" in order {tuple(order)}"
    details += f" with src_data_rank={src_data_rank}" if src_data_rank else ""
    details += ", requiring gradients" if tensor.requires_grad else ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype} as {placements_text(target.placements)}{details}"


def _local_part(whole: torch.Tensor, target: DTensorSpec, source_position: int | None) -> torch.Tensor:
    """This rank's part of the global tensor that the rank at mesh position `source_position` has, or of its own."""
    mesh = target.mesh
    if whole.is_meta:
        return whole.new_empty(target.local_shape)
    if source_position is not None and len(mesh.ranks) > 1:
        return distribute_from(whole, Layout((1,), (Replicate(),), target.shape), (source_position,), target)
    meta = TensorMeta(target.shape, whole.stride(), whole.dtype)
    own = DTensorSpec(mesh, [Replicate()] * mesh.ndim, meta)
    if own.coordinate is None:
        return whole.new_empty(0)
    if own.layout is target.layout:
        return whole.clone(memory_format=torch.contiguous_format)
    return redistribute_local(whole, own, target)


PartitionFunction = Callable[[str, nn.Module, Any], None]


@checked
def distribute_module(
    module: nn.Module,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    partition_fn: PartitionFunction | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Makes every parameter and buffer of `module` distributed, in place, and returns it: a collective call.

    `partition_fn(name, submodule, device_mesh)` is called for every submodule and may replace its parameters.
    Parameters that it leaves plain are replicated from coordinate 0; those that several submodules share stay shared.
    `input_fn(module, inputs, device_mesh)` runs before every forward of the module, and `output_fn(module, outputs,
    device_mesh)` after it. Unless they return None, their results replace the inputs and outputs. Hooks of two
    arguments, without the module, give a FutureWarning. Raises TritondtError, before anything is changed, for a module
    that is distributed already or a hook with another number of arguments; LayoutError for tied weights with different
    layouts; and the errors of `distribute_tensor`.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def columns(name, module, mesh):
    ...     if isinstance(module, nn.Linear):
    ...         weight = T.distribute_tensor(module.weight, mesh, [T.Shard(0)])
    ...         module.register_parameter("weight", nn.Parameter(weight))
    >>> def layouts(rank):
    ...     linear = T.distribute_module(nn.Linear(2, 4), T.Mesh((2,)), columns)
    ...     return [str(parameter.placements) for parameter in linear.parameters()]
    >>> run_ranks(2, layouts)[0]
    ['(S0,)', '(R,)']
    """
    mesh = mesh_or_current(device_mesh)
    with refusing_comparison(canonical_mesh(mesh)):
        input_fn, output_fn = _checked_hooks(module, input_fn, output_fn)
        tied = _tied_places(module)
        if partition_fn is not None:
            for name, submodule in module.named_modules():
                partition_fn(name, submodule, mesh)
            for places in tied:
                _tie_again(places)
        _replicate_plain(module, mesh)
    check_agreed(canonical_mesh(mesh), "distribute_module", "a module whose parameters are distributed")
    if input_fn is not None:
        module.register_forward_pre_hook(lambda called, inputs: input_fn(called, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda called, inputs, outputs: output_fn(called, outputs, mesh))
    module._tritondt_distributed = True  # type: ignore[assignment]
    return module


_Hook = Callable[..., Any] | None


def _checked_hooks(module: nn.Module, input_fn: _Hook, output_fn: _Hook) -> tuple[_Hook, _Hook]:
    """Hooks of three arguments; TritondtError for other ones, and for a module that was distributed before."""
    check_types(distribute_module, module=module)
    if getattr(module, "_tritondt_distributed", False):
        raise TritondtError(
            f"distribute_module was called twice for one {type(module).__name__}; call it once, with a partition_fn "
            "for all submodules"
        )
    if input_fn is not None:
        input_fn = _checked_hook("input_fn", input_fn, "inputs")
    if output_fn is not None:
        output_fn = _checked_hook("output_fn", output_fn, "outputs")
    return input_fn, output_fn


class _Place(NamedTuple):
    """One place in a module that holds a parameter or a buffer."""

    path: str
    held: dict[str, Any]
    name: str


def _places(module: nn.Module) -> Iterator[_Place]:
    """Places in the module and its submodules that hold a tensor."""
    for path, submodule in module.named_modules():
        for held in (submodule._parameters, submodule._buffers):
            for name in held:
                if held[name] is not None:
                    yield _Place(f"{path}.{name}".lstrip("."), held, name)


def _tied_places(module: nn.Module) -> list[list[_Place]]:
    """Groups of places that hold one and the same tensor."""
    of_tensor: dict[int, list[_Place]] = {}
    for place in _places(module):
        of_tensor.setdefault(id(place.held[place.name]), []).append(place)
    return [places for places in of_tensor.values() if len(places) > 1]


def _tie_again(places: Sequence[_Place]) -> None:
    """Puts the distributed tensor of one place into all places of a tied group; LayoutError where two differ."""
    found = [place for place in places if isinstance(place.held.get(place.name), DTensor)]
    for place in found[1:]:
        first, other = found[0].held[found[0].name], place.held[place.name]
        if first._spec is not other._spec:
            raise LayoutError(
                f"{found[0].path} and {place.path} were one tensor, and partition_fn made {first._spec} of the one and "
                f"{other._spec} of the other; tied weights need one layout"
            )
    for place in places if found else ():
        place.held[place.name] = found[0].held[found[0].name]


def _replicate_plain(module: nn.Module, mesh: "DeviceMesh | Mesh") -> None:
    """Replicates plain parameters and buffers; one tensor in several places stays one."""
    # The plain tensors are kept as well, so that no other one gets the id of one that has gone.
    replaced: dict[int, tuple[torch.Tensor, DTensor]] = {}
    for _, held, name in list(_places(module)):
        tensor = held[name]
        if not isinstance(tensor, DTensor):
            if id(tensor) not in replaced:
                replaced[id(tensor)] = tensor, distribute_tensor(tensor, mesh)
            held[name] = replaced[id(tensor)][1]


def _checked_hook(name: str, function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The hook of three arguments that a user's hook of three, or of the former two, makes."""
    taken = len(inspect.signature(function).parameters)
    if taken == 2:
        warnings.warn(
            f"{name} of two arguments ({what}, device_mesh) is deprecated; let it take (module, {what}, device_mesh)",
            FutureWarning,
            stacklevel=5,
        )
        return lambda module, values, mesh: function(values, mesh)
    if taken != 3:
        raise TritondtError(f"{name} takes (module, {what}, device_mesh), got a function of {taken} arguments")
    return function

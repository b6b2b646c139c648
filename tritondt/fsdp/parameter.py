"""A parameter of a sharded module: its shard, which optimizers see, and the whole, which forward computes with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tritondt.dtensor.tensor import DTensor
from tritondt.dtensor.writes import MEMORY
from tritondt.errors import FullyShardError
from tritondt.fsdp.flat_layout import Member
from tritondt.fsdp.meshes import DataMesh
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta
from tritondt.sharding.strides import dense_strides


class User(NamedTuple):
    """A module that has a parameter, the parameter's name in it, and its dotted name for messages."""

    module: nn.Module
    key: str
    name: str


ShardPlacement = Callable[[nn.Parameter], Any]


class ShardedParameter:
    """A parameter and how it is laid out: `member` is what this rank computes with, `spec` the whole tensor's layout.

    `computed` is the spec of the parameter in forward, None where it is a plain tensor there.
    """

    def __init__(
        self, users: list[User], parameter: nn.Parameter, data: DataMesh, dim: int, tensor_mesh: Mesh | None
    ) -> None:
        self.users, self.dim = users, dim
        self.computed = _computed_spec(parameter, data)
        self.spec = _spec_of(users[0].name, parameter, data, dim, tensor_mesh)
        local: torch.Tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
        self.member = Member(tuple(local.shape), dim, data.cuts)
        own = data.mesh.coordinate
        assert own is not None, f"{data.mesh} is that of the calling rank"
        num_ranks = data.mesh.shape[data.shard_axis]
        shard_shape = self.member.shard_shape(num_ranks, own[data.shard_axis])
        assert self.spec.local_shape == shard_shape, f"{self.spec} gives {self.spec.local_shape}, not {shard_shape}"
        start, stop = self.member.bounds(num_ranks, own[data.shard_axis])
        self.attributes = {key: value for key, value in vars(parameter).items() if not key.startswith("_")}
        # On the memory of the parameter until its group has placed it.
        shard = DTensor(local.detach().narrow(dim, start, stop - start), self.spec)
        self.sharded = nn.Parameter(shard, parameter.requires_grad)
        vars(self.sharded).update(self.attributes)
        self.sharded._backward_hooks = parameter._backward_hooks
        self.sharded._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        # The parameter of forward, and the device on which it and the shard lie.
        self.whole: nn.Parameter
        self.device: torch.device
        # Tensors whose versions say what the memory of the parameter of forward holds.
        self.versioned: tuple[torch.Tensor, ...]
        # Gradients of passes that were not reduced yet, as this rank has them.
        self.accumulated: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """Dotted name of the parameter in the module that was sharded."""
        return self.users[0].name

    @property
    def shard(self) -> torch.Tensor:
        """Local tensor of the sharded parameter."""
        held: Any = self.sharded
        found: torch.Tensor = held._local_tensor
        return found

    def place_shard(self, memory: torch.Tensor) -> None:
        """Moves the sharded parameter to memory of the shape of its shard, with its values."""
        held: Any = self.sharded
        with torch.no_grad():
            memory.copy_(held._local_tensor)
        held._local_tensor = memory
        vars(held).pop(MEMORY, None)

    def convert(self) -> bool:
        """Takes over what the modules have in place of the sharded parameter where its device or dtype is another, as
        after to_empty and double; returns whether it is."""
        user = self.users[0]
        found: Any = user.module._parameters[user.key]
        if found is self.whole or not isinstance(found, DTensor):
            return False
        local = found._local_tensor
        meta = TensorMeta(self.spec.tensor_meta.shape, self.spec.tensor_meta.stride, local.dtype)
        spec = DTensorSpec(self.spec.mesh, self.spec.placements, meta, self.spec.order)
        if found._spec is not spec or (spec is self.spec and local.device == self.device):
            return False
        vars(found).update(self.attributes)
        self.spec, self.sharded = spec, user.module._parameters[user.key]  # type: ignore[assignment]
        return True

    def place_whole(self, local: torch.Tensor) -> None:
        """Makes the parameter of forward, on memory that is there while it is gathered."""
        found: torch.Tensor = local
        if self.computed is not None:
            meta = TensorMeta.contiguous(self.computed.shape, local.dtype)
            self.computed = DTensorSpec(self.computed.mesh, self.computed.placements, meta, self.computed.order)
            found = DTensor(local, self.computed)
        self.device = local.device
        self.whole = nn.Parameter(found, self.sharded.requires_grad)
        held: Any = self.whole
        self.versioned = (held,) if self.computed is None else (held, held._local_tensor)

    def replace(self, found: nn.Parameter) -> None:
        """Makes `found` the sharded parameter; the one before, which may come back, has memory of its own from now."""
        before: Any = self.sharded
        before._local_tensor = before._local_tensor.clone()
        vars(before).pop(MEMORY, None)
        self.sharded = found

    def register(self, parameter: nn.Parameter) -> None:
        """Makes `parameter` that of all modules that have it."""
        for user in self.users:
            user.module._parameters[user.key] = parameter

    def take_gradient(self) -> torch.Tensor | None:
        """This rank's gradient of the parameter of forward, which loses it; a collective call where it is laid out
        otherwise than the parameter.
        """
        gradient: Any = self.whole.grad
        if gradient is None:
            return None
        self.whole.grad = None
        if gradient.layout is not torch.strided:
            raise FullyShardError(
                f"{self.name} has a gradient of {gradient.layout}, and gradients of shards are strided; write "
                "sparse=False in the nn.Embedding or functional.embedding that uses it"
            )
        if self.computed is None:
            return gradient if not isinstance(gradient, DTensor) else gradient.full_tensor()
        if gradient._spec.layout is not self.computed.layout:
            gradient = gradient.redistribute(placements=self.computed.placements, order=self.computed.order)
        found: torch.Tensor = gradient._local_tensor
        return found

    def add_gradient(self, shard: torch.Tensor) -> None:
        """Adds the gradient of the shard to that of the sharded parameter, and runs the hooks of both."""
        found: Any = DTensor(shard, self.spec)
        for changes in tuple((self.sharded._backward_hooks or {}).values()):
            changed = changes(found)
            found = found if changed is None else changed
        if self.sharded.grad is None:
            self.sharded.grad = found
        else:
            self.sharded.grad.add_(found)
        for hook in tuple((getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(self.sharded)


def shard_dim(name: str, parameter: nn.Parameter, placement_of: ShardPlacement | None) -> int:
    """Dim over which the data axis cuts a parameter: 0, or as the caller's function says."""
    if parameter.ndim == 0:
        raise FullyShardError(f"{name} has no dim that could be cut; allowed is a parameter of shape (1,)")
    found = None if placement_of is None else placement_of(parameter)
    if found is None:
        return 0
    plain = isinstance(found, Shard) and found == Shard(found.dim) and -parameter.ndim <= found.dim < parameter.ndim
    if not plain:
        raise FullyShardError(
            f"shard_placement_fn gave {found!r} for {name} of shape {tuple(parameter.shape)}; allowed are None and "
            f"tritondt's Shard(dim) with a dim below {parameter.ndim}"
        )
    dim: int = found.dim
    return dim % parameter.ndim


def _spec_of(name: str, parameter: nn.Parameter, data: DataMesh, dim: int, tensor_mesh: Mesh | None) -> DTensorSpec:
    """Layout over data and tensor axes, in which the data axis cuts what the tensor axes have left."""
    found: Any = parameter
    given: DTensorSpec | None = found._spec if isinstance(found, DTensor) else None
    joint = data.beside(tensor_mesh if given is None else given.mesh)
    placements: list[Placement] = [Replicate()] * joint.mesh.ndim
    order: list[int] = []
    if given is not None:
        if any(isinstance(placement, Partial) for placement in given.placements):
            raise FullyShardError(f"{name} is {given}; allowed are parameters that are sharded or replicated")
        numbers = joint.tensor_axes
        for axis, placement in zip(numbers, given.placements, strict=True):
            placements[axis] = placement
        if any(not placements[axis].is_replicate() for axis in joint.data_axes):
            raise FullyShardError(
                f"{name} is {given} on {given.mesh}, cut over an axis of {data.mesh} already; allowed are parameters "
                "that are whole along the data axes"
            )
        order = [numbers[axis] for axis in given.order]
    for axis in joint.data_axes[-len(data.cuts) :]:
        placements[axis] = Shard(dim)
    order = [axis for axis in order if axis not in joint.data_axes]
    rest = [axis for axis in range(joint.mesh.ndim) if axis not in order and axis not in joint.data_axes]
    meta = TensorMeta(tuple(parameter.shape), dense_strides(tuple(parameter.shape)), parameter.dtype)
    return DTensorSpec(joint.mesh, placements, meta, (*order, *rest, *joint.data_axes))


def _computed_spec(parameter: Any, data: DataMesh) -> DTensorSpec | None:
    """Spec of the parameter in forward: over tensor axes alone, where the data axes have it whole."""
    if not isinstance(parameter, DTensor):
        return None
    spec = parameter._spec
    if spec.mesh is not data.whole:
        return spec
    others = data.without_data()
    if others is None:
        return None
    kept = [axis for axis in range(spec.mesh.ndim) if axis not in (data.axes or ())]
    order = [kept.index(axis) for axis in spec.order if axis in kept]
    return DTensorSpec(others, [spec.placements[axis] for axis in kept], spec.tensor_meta, order)

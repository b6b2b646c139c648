"""input_reshard: a module's replicated inputs, of which every rank keeps a part for the backward pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import first
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Replicate, Shard

_STATE = "_tritondt_input_reshard"


@first("input_reshard_dim")  # it is used in the first forward
def input_reshard(
    module: nn.Module, tp_device_mesh: "DeviceMesh | Mesh", input_reshard_dim: int | None = None
) -> nn.Module:
    """Makes a module keep only 1/n of each replicated input for its backward pass, in place, and returns it.

    The n ranks of `tp_device_mesh` have the same inputs of a tensor-parallel module, and autograd keeps all of them.
    This function's hooks keep only a rank's part of tensors saved in forward, and gather them in backward, which is
    collective then. They apply to plain positional inputs of the module and their views, and cut them along
    `input_reshard_dim`, or reshaping views along their first dim. Other saved tensors stay as they are. None as the dim
    changes nothing. Inputs must be the same on all ranks. Raises ParallelizeError for a mesh of several axes and for a
    second call. Source: torch.distributed.tensor.parallel.input_reshard.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def gradient_on(rank):
    ...     linear = input_reshard(nn.Linear(4, 1, bias=False), Mesh((2,)), 0)
    ...     linear(torch.arange(12.0).view(3, 4)).sum().backward()
    ...     return linear.weight.grad.tolist()
    >>> run_ranks(2, gradient_on)[1]
    [[12.0, 15.0, 18.0, 21.0]]
    """
    if input_reshard_dim is None:
        return module
    mesh = canonical_mesh(tp_device_mesh)
    if mesh.ndim != 1:
        raise ParallelizeError(f"input_reshard takes a mesh of one axis, got {mesh}; give it one slice, as mesh['tp']")
    if _STATE in module.__dict__:
        raise ParallelizeError(f"input_reshard was called twice for one {type(module).__name__}; call it once")
    hooks = _Resharding(mesh, input_reshard_dim)
    module.__dict__[_STATE] = hooks
    module.register_forward_pre_hook(hooks.enter)
    module.register_forward_hook(hooks.leave, always_call=True)
    return module


class _Kept:
    """A part of a saved tensor, and how it was cut."""

    def __init__(self, saved: torch.Tensor, mesh: Mesh, dim: int) -> None:
        self.mesh, self.dim, self.shape, self.stride = mesh, dim, tuple(saved.shape), saved.stride()
        whole = DTensor.from_local(saved.detach(), mesh, [Replicate()])
        # A copy: a slice would keep the whole input's memory.
        self.part = whole.redistribute(placements=[Shard(dim)]).to_local().clone()

    def whole(self) -> torch.Tensor:
        """The saved tensor again."""
        sharded = DTensor.from_local(self.part, self.mesh, [Shard(self.dim)], shape=self.shape, stride=self.stride)
        return sharded.full_tensor()


class _Resharding:
    """Hooks of input_reshard around a module's forward."""

    def __init__(self, mesh: Mesh, dim: int) -> None:
        self.mesh, self.dim = mesh, dim
        self._scopes: list[torch.autograd.graph.saved_tensors_hooks] = []

    def enter(self, module: nn.Module, inputs: Sequence[Any]) -> None:
        """Lets parts be kept of what is saved from here on, where that is an input."""
        plain = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)]
        shapes = {(tensor.untyped_storage().data_ptr(), tensor.numel()): tuple(tensor.shape) for tensor in plain}

        def pack(saved: torch.Tensor) -> Any:
            if isinstance(saved, DTensor):
                return saved
            shape = shapes.get((saved.untyped_storage().data_ptr(), saved.numel()))
            if shape is None or not saved.ndim:
                return saved
            return _Kept(saved, self.mesh, self.dim if tuple(saved.shape) == shape else 0)

        scope = torch.autograd.graph.saved_tensors_hooks(pack, _unpack)
        scope.__enter__()
        self._scopes.append(scope)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Ends the scope of the forward pass that ends."""
        if self._scopes:
            self._scopes.pop().__exit__(None, None, None)


def _unpack(kept: Any) -> torch.Tensor:
    found: torch.Tensor = kept.whole() if isinstance(kept, _Kept) else kept
    return found

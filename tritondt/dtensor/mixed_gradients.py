"""Gradients of tensors that meet in one operator: plain for a plain tensor, distributed for a distributed one.

Autograd hands an operator's gradients on as they are, whatever kind of tensor they belong to. Hooks on the tensors put
that right before anybody else sees the gradient.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from tritondt.dtensor.tensor import DTensor
from tritondt.ops.propagation.replication import as_replicated
from tritondt.sharding.mesh import Mesh

_Hook = Callable[[torch.Tensor], torch.Tensor | None]


def keep_kinds(tensors: Iterable[Any], *, writes_plain: bool) -> None:
    """Lets the plain ones of an operator's arguments have plain gradients, the same on every rank of the mesh.

    Where the operator writes to a plain one (`writes_plain`), its gradient is plain, and what the distributed ones get
    of it is made distributed; so are the plain zeros that torch.cat gives one of shape (0,), which it leaves out.
    """
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            if not isinstance(tensor, DTensor):
                _hook_first(tensor, _whole)
            elif writes_plain or tensor.shape == (0,):
                _hook_first(tensor, _Distributed(tensor._spec.mesh))


@unserializable_hook  # type: ignore[untyped-decorator]
def _whole(grad: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a plain tensor, which counts as replicated: all of it, terms added up; a collective call.

    Zeros on a rank outside the mesh, which knows nothing of it.
    """
    if not isinstance(grad, DTensor):
        return None
    if grad._spec.coordinate is None:
        return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    return grad.full_tensor()


class _Distributed:
    """Hook that takes a plain gradient for one that all ranks of `mesh` hold."""

    __torch_unserializable__ = True

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Distributed) and other.mesh is self.mesh

    __hash__ = object.__hash__

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        # None where nothing reaches one of an operator's several results, as linalg.svd's of no elements.
        if grad is None or isinstance(grad, DTensor):
            return None
        return DTensor.from_local(grad, self.mesh) if grad.requires_grad else DTensor(*as_replicated(grad, self.mesh))


def _hook_first(tensor: torch.Tensor, hook: _Hook) -> None:
    """Registers a hook before all others, once; an in-place operator on the tensor takes its hooks away."""
    hooks = {} if tensor._backward_hooks is None else tensor._backward_hooks
    if hook in hooks.values():
        return
    tensor.register_hook(hook)
    # Torch goes by the order of insertion, not by that of the OrderedDict.
    for number in tuple(hooks)[:-1]:
        hooks[number] = hooks.pop(number)

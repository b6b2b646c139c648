"""Copies of distributed tensors, deep and shallow, by rank: nothing is sent."""

import copy
from typing import Any

import torch

from tritondt.dtensor.writes import MEMORY, NOTES_OF_VIEWS, memory_of
from tritondt.errors import PropagationError


def deep_copy(distributed: Any, memo: dict[int, Any]) -> Any:
    """A leaf with memory of its own; tensors of one `memo` that share memory share it in their copies as well."""
    if id(distributed) in memo:
        return memo[id(distributed)]
    if not distributed.is_leaf:
        raise PropagationError(
            f"deepcopy of {distributed._spec}, which is the result of an operator; copy a leaf, or x.detach()"
        )
    kind, local = type(distributed), distributed._local_tensor
    copied = copy.deepcopy(local.detach() if local.requires_grad else local, memo)
    made = memo[id(distributed)] = kind(copied, distributed._spec, requires_grad=distributed.requires_grad)
    attributes, memory = distributed.__dict__, memory_of(distributed)
    if distributed._base is not None:
        attributes.setdefault(MEMORY, memory)
    made.__dict__.update(copy.deepcopy(_without_notes(attributes), memo))
    if distributed.grad is not None:
        made.grad = copy.deepcopy(distributed.grad, memo)
    return made


def shallow_copy(distributed: Any) -> Any:
    """A tensor with the same memory and attributes, and without history."""
    made = type(distributed)(distributed._local_tensor, distributed._spec, requires_grad=distributed.requires_grad)
    made.__dict__.update({**_without_notes(distributed.__dict__), MEMORY: memory_of(distributed)})
    return made


def _without_notes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that a copy has, too: autograd has recorded no views of it."""
    return {name: value for name, value in attributes.items() if name not in NOTES_OF_VIEWS}


def own_view(local: torch.Tensor) -> torch.Tensor:
    """Another tensor on the memory of a local one, of its class and strides.

    >>> own_view(torch.empty_strided((1, 4, 3), (12, 1, 4))).stride()
    (12, 1, 4)
    """
    # view_as gives dims of length 1 strides of its own; a subclass answers it, and may not answer an index.
    return local[...] if type(local) is torch.Tensor else local.view_as(local)

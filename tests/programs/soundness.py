"""Statements to which one device has no one answer: results follow from addresses, or from what torch made of them."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from tests.programs.statements import Statement

# Gradients that go to the elements that equal the result. Where it was overwritten without autograd's knowledge none
# does: torch divides by their number on CUDA and for subclasses (nan, as amax does everywhere), but not on the CPU (0).
_OF_EQUAL_ELEMENTS = frozenset(("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"))
# Writes that read their source at other places than they write to.
_BY_INDEX = re.compile(r"scatter_|index_|setitem|put_")
# Besides statements of the kind "write", those that read another tensor itself, not a copy, while they write.
_READS_ANOTHER = re.compile(r"\.data\.copy_\(v|\.lerp_\(v|\[\.\.\., :1\] = v|out=v|_foreach_\w+_\(\[\w+\], \[v")
_OUT = re.compile(r"out=(v\d+)")


def shares_memory(names: Collection[str], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether other variables have the memory of some: what is resized keeps it on one device alone."""
    held = {tensors[name].untyped_storage().data_ptr() for name in names}
    return any(it.untyped_storage().data_ptr() in held for name, it in tensors.items() if name not in names)


def reads_own_elements(statement: Statement, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a write reads elements that it writes to, in an order of the kernel's."""
    if statement.kind != "write" and not _READS_ANOTHER.search(statement.source):
        return False
    out = _OUT.search(statement.source)
    name = out[1] if out else statement.reads[0]
    written = tensors[name]
    for other in (tensors[read] for read in statement.reads if read != name):
        is_same = other.data_ptr() == written.data_ptr() and other.stride() == written.stride()
        if is_same and other.shape == written.shape and not _BY_INDEX.search(statement.source):
            continue
        shares = other.untyped_storage().data_ptr() == written.untyped_storage().data_ptr()
        if shares and not _places(written).isdisjoint(_places(other)):
            return True
    return False


def _places(tensor: torch.Tensor) -> set[int]:
    """The places of a tensor's elements in its memory, in bytes."""
    starts = [int(tensor.storage_offset()) * tensor.itemsize]
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        starts = [start + index * step * tensor.itemsize for start in starts for index in range(length)]
    return set(starts)


def is_extremum(written: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a tensor has the memory of a result of which the gradient depends on what is equal to it."""
    held = written.untyped_storage().data_ptr()
    sharing = (it for it in tensors.values() if it.grad_fn is not None and it.untyped_storage().data_ptr() == held)
    return any(it.grad_fn is not None and it.grad_fn.name() in _OF_EQUAL_ELEMENTS for it in sharing)


def is_of_detached_base(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of what was detached in place and then written to.

    Its graph is made anew then, of a base that has none. That of a plain tensor ends in as_strided; where views are
    replayed, as they are for every tensor without memory, torch asserts that the view has a graph of its own.
    """
    node = tensor.grad_fn
    if node is None or node.name() != "AsStridedBackward0":
        return False
    return all(of is None for of, _ in node.next_functions)


def is_of_replaced_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of a base with other memory, as `view.data = x` leaves it, and was then written to.

    Its graph is made anew then, by as_strided on the base with the strides and the offset that it has in its own
    memory: torch (2.13) gives the gradient to elements that the view was never of.
    """
    node, base = tensor.grad_fn, tensor._base
    if node is None or base is None or node.name() != "AsStridedBackward0":
        return False
    return base.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def graph_nodes(roots: Iterable[torch.Tensor]) -> set[Any]:
    """The operators that the gradients of some tensors pass."""
    found: set[Any] = set()
    waiting = [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting.extend(of for of, _ in node.next_functions)
    return found

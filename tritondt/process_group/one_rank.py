"""Collectives that send nothing: those of a group of one rank, and those of tensors without elements.

Torch's arguments are outputs, or what is worked on in place, and then inputs. Where this is not for them, as for the
op of a reduction that nobody has, the functions say so, and the transport runs or refuses the collective.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tritondt.process_group.shared_memory_reductions import reduction_of
from tritondt.process_group.staging import copy_back, readable, tensors_of

# Ranks have other sizes than each other there: one without elements does not say that others have none.
_UNEVEN = frozenset({"alltoall", "alltoall_base"})
_NO_TENSORS = frozenset({"barrier"})


def is_empty(kind: str, arguments: Sequence[Any]) -> bool:
    """Whether no rank has an element in a collective, which the arguments of this one say."""
    if kind in _UNEVEN or kind in _NO_TENSORS:
        return False
    return not (_has_elements(arguments[0]) or _has_elements(arguments[1]))


def _has_elements(found: Any) -> bool:
    """Whether a tensor of an argument has an element; nearly always the first that is looked at has."""
    if isinstance(found, (list, tuple)):
        for each in found:  # noqa: SIM110  a generator takes twice as long, for every collective
            if _has_elements(each):
                return True
        return False
    return isinstance(found, torch.Tensor) and found.numel() > 0


def run_alone(kind: str, arguments: Sequence[Any]) -> bool:
    """Runs a collective of one rank, which copies its inputs to its outputs; False where this is not for it."""
    if kind in _NO_TENSORS or not _reduces(arguments):
        return False
    written, given = tensors_of(arguments[0]), arguments[1]
    if not isinstance(given, (torch.Tensor, list, tuple)):  # options: in place
        return True
    read = tensors_of(given)
    if len(read) != len(written) or not all(map(_is_copied, written, read)):
        return False
    memories = [readable(each) for each in read]
    # One of the outputs may be another one's input.
    kept = [each if memory is None else memory.clone() for each, memory in zip(read, memories, strict=True)]
    copy_back([(target, each.view(target.shape)) for target, each in zip(written, kept, strict=True)])
    return True


def _is_copied(target: torch.Tensor, source: torch.Tensor) -> bool:
    is_alike = (target.dtype, target.numel()) == (source.dtype, source.numel())
    return is_alike and all(each.layout is torch.strided and each.is_cpu for each in (target, source))


def _reduces(arguments: Sequence[Any]) -> bool:
    """Whether one term is its own reduction: of every op that we have, and not of a factor or of none."""
    op = getattr(arguments[-1], "reduceOp", None)
    if op is None:
        return True
    return all(reduction_of(tensor.dtype, op, 1) is not None for tensor in _all_tensors(arguments))


def _all_tensors(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [tensor for each in arguments[:2] if isinstance(each, _TENSORS) for tensor in tensors_of(each)]


_TENSORS = (torch.Tensor, list, tuple)

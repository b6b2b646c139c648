"""Stand-ins for a model and its inputs: tensors with shapes and without memory, and one of each kind of block."""

import copy
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from tritondt import identity
from tritondt.found_plan.given_results import GivenResults, answer_by_hand


@contextmanager
def without_memory(rank: int, num_ranks: int) -> Iterator[None]:
    """Context in which the thread is one rank of so many that nobody else is, and new tensors take no memory."""
    who = identity.Identity(identity.new_generation(), rank, num_ranks)
    # Constants of a model, which are no buffers of it, come as they are.
    with (
        identity.assumed(who),
        identity.without_others(),
        _without_torch_log(),
        _WithoutMemory(allow_non_fake_inputs=True),
    ):
        yield


class _WithoutMemory(FakeTensorMode):
    """Tensors without memory, of all dtypes in multiplications by groups: torch's own are of bfloat16 alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            first, second = args[:2]
            groups = args[2] if len(args) > 2 else (kwargs or {}).get("offs")
            # torch's kernels refuse the same.
            if any(max(each.stride()[-2:]) * each.element_size() % 16 for each in (first, second) if each.numel()):
                raise RuntimeError("strides should be multiple of 16 bytes")
            with self:
                return torch.empty(grouped_shape(first, second, groups), dtype=first.dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


def grouped_shape(first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor | None) -> tuple[int, ...]:
    """Shape of torch._grouped_mm: rows, columns or what is added up come in groups, or all are batches.

    >>> grouped_shape(torch.empty(7, 4), torch.empty(3, 4, 5), torch.empty(3))
    (7, 5)
    >>> grouped_shape(torch.empty(4, 7), torch.empty(7, 5), torch.empty(3))
    (3, 4, 5)
    """
    rows, columns = first.shape[-2], second.shape[-1]
    if first.ndim != second.ndim:
        return (rows, columns)
    if first.ndim == 3:
        return (first.shape[0], rows, columns)
    assert offsets is not None, "two matrices are multiplied in groups"
    return (offsets.shape[0], rows, columns)


@contextmanager
def _without_torch_log() -> Iterator[None]:
    """Context in which torch does not print what fails on tensors without memory: a trial that fails is an answer."""
    log, caller = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != caller

    log.addFilter(is_of_others)
    try:
        yield
    finally:
        log.removeFilter(is_of_others)


def stand_in(
    model: nn.Module, kept: Mapping[str, Sequence[int]] | None = None, given: Sequence[GivenResults] = ()
) -> nn.Module:
    """Copy of a model with parameters and buffers of the same shapes, made where tensors take no memory.

    Of the lists that `kept` names it has the children of these indices. Modules whose results are `given` answer with
    these.
    """
    lists = {id(model.get_submodule(name)): {str(index) for index in indices} for name, indices in (kept or {}).items()}
    memo = _tensors_of(_copied(model, lists).values())
    for name, indices in (kept or {}).items():
        container = model.get_submodule(name)
        # A class of one's own may have blocks made by its constructor.
        listed = memo[id(container)] = container.__class__.__new__(container.__class__)
        vars(listed).update(copy.deepcopy({**vars(container), "_modules": {}}, memo))
        for place, index in enumerate(indices):
            listed.add_module(str(place), copy.deepcopy(container._modules[str(index)], memo))
    made = copy.deepcopy(model, memo)
    answer_by_hand(made, given)
    return made


def _tensors_of(modules: Collection[nn.Module]) -> dict[int, Any]:
    """Tensors without memory in place of all that modules have, by the ids of these."""
    memo: dict[int, Any] = {}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                memo.setdefault(id(parameter), nn.Parameter(_like(parameter), parameter.requires_grad))
        for buffer in module._buffers.values():
            if buffer is not None:
                memo.setdefault(id(buffer), _like(buffer))
    for module in modules:
        # Tensors that code keeps as plain attributes, tables of positions say; those with values keep them.
        for constant in tree_leaves(vars(module)):
            if isinstance(constant, torch.Tensor):
                memo.setdefault(id(constant), constant if constant.device.type == "cpu" else _like(constant))
    return memo


def _copied(module: nn.Module, lists: Mapping[int, Set[str]]) -> dict[int, nn.Module]:
    """Modules by id that a copy has: all but those that are only in children of `lists` that it leaves out."""
    found = {id(module): module}
    for name, child in module._modules.items():
        if child is not None and name in lists.get(id(module), (name,)) and id(child) not in found:
            found |= _copied(child, lists)
    return found


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def fake_inputs(inputs: Any) -> Any:
    """Inputs with tensors of the same shapes and dtypes, made where tensors take no memory."""
    return tree_map(lambda value: _like(value) if isinstance(value, torch.Tensor) else value, inputs)

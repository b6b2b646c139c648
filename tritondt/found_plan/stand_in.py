"""Stand-ins for a model and its inputs: tensors with shapes and without memory, and one of each kind of block."""

import copy
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from tritondt import identity
from tritondt.found_plan.repeated_blocks import RepeatedBlocks


@contextmanager
def without_memory(rank: int, num_ranks: int) -> Iterator[None]:
    """Context in which the thread is one rank of so many that nobody else is, and new tensors take no memory."""
    who = identity.Identity(identity.new_generation(), rank, num_ranks)
    # Constants of a model, which are no buffers of it, come as they are.
    with identity.assumed(who), _without_torch_log(), _WithoutMemory(allow_non_fake_inputs=True):
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


def stand_in(model: nn.Module, blocks: RepeatedBlocks | None = None) -> nn.Module:
    """Copy of a model with parameters and buffers of the same shapes, made where tensors take no memory.

    With `blocks` the first of each kind of repeated block stands for all of them.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        made = nn.Parameter(_like(parameter), parameter.requires_grad)
        memo[id(parameter)] = made
    for buffer in model.buffers():
        memo[id(buffer)] = _like(buffer)
    for module in model.modules():
        # Tensors that code keeps as plain attributes, tables of positions say; those with values keep them.
        for constant in tree_leaves(vars(module)):
            if isinstance(constant, torch.Tensor):
                memo.setdefault(id(constant), constant if constant.device.type == "cpu" else _like(constant))
    if blocks is not None:
        for name, kept in blocks.kept():
            container = model.get_submodule(name)
            # A class of one's own may have blocks made by its constructor.
            listed = memo[id(container)] = container.__class__.__new__(container.__class__)
            vars(listed).update(copy.deepcopy({**vars(container), "_modules": {}}, memo))
            for place, index in enumerate(kept):
                listed.add_module(str(place), copy.deepcopy(container._modules[str(index)], memo))
    return copy.deepcopy(model, memo)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def fake_inputs(inputs: Any) -> Any:
    """Inputs with tensors of the same shapes and dtypes, made where tensors take no memory."""
    return tree_map(lambda value: _like(value) if isinstance(value, torch.Tensor) else value, inputs)

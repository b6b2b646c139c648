"""Work of operators on one rank: what each computes and reads and writes, and the work of optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Work(NamedTuple):
    """One operator on local tensors: its FLOPs, the bytes that it reads and writes, and the dtype of its result."""

    flops: int
    num_bytes: int
    dtype: str


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention: scores and their products with values, those above the diagonal too, as torch counts."""
    return 2 * query.shape[:3].numel() * key.shape[2] * (query.shape[3] + value.shape[3])


def _attention_backward_flops(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any
) -> int:
    """FLOPs of attention's backward: scores once more, and two products for the gradients of each of the factors."""
    return 2 * query.shape[:3].numel() * key.shape[2] * (3 * query.shape[3] + 2 * value.shape[3])


def _grouped_flops(first: torch.Tensor, second: torch.Tensor, *_: Any, out_val: torch.Tensor, **__: Any) -> int:
    """FLOPs of torch._grouped_mm: each row, and each column, is in one group."""
    is_by_groups = first.ndim == second.ndim == 2
    return 2 * first.shape[-1] * (first.shape[0] * second.shape[1] if is_by_groups else out_val.numel())


def num_groups(func: Any, args: Any, kwargs: Any) -> int:
    """Number of groups of a call of torch._grouped_mm on rows by groups; 0 for any other operator."""
    if func is not torch.ops.aten._grouped_mm.default:
        return 0
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    return 0 if offsets is None else int(offsets.shape[0])


# Operators that torch counts no FLOPs for: the kernels that take attention on the CPU, and on tensors without memory,
# and products by groups.
_COUNTED: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm.default: _grouped_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_flops,
}


def work_of(func: Any, args: Any, kwargs: Any, found: Any) -> Work:
    """Work of one call of an operator of aten."""
    counted = _COUNTED.get(func) or flop_registry.get(func._overloadpacket)
    flops = 0 if counted is None else int(counted(*args, **kwargs, out_val=found))
    results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    # Tensors that are written in place are among the results, too.
    num_bytes = sum(each.numel() * each.element_size() for each in (*taken, *results))
    return Work(flops, num_bytes, str(results[0].dtype).removeprefix("torch.") if results else "")


class OptimizerWork(NamedTuple):
    """Work of one step of an optimizer for each parameter: operators, and bytes for each byte of the parameter."""

    operators: float
    bytes_a_byte: float


_NUMEL = 1024
# Classes by the number of tensors as large as a parameter that they hold for it.
_OPTIMIZERS: dict[int, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    0: lambda it: torch.optim.SGD(it, foreach=False),
    1: lambda it: torch.optim.SGD(it, momentum=0.9, foreach=False),
    2: lambda it: torch.optim.AdamW(it, foreach=False),
}


@lru_cache
def optimizer_work(num_tensors: int) -> OptimizerWork:
    """Work of the optimizer that holds so many tensors for each parameter, counted in a step of a small one.

    >>> optimizer_work(0)
    OptimizerWork(operators=1, bytes_a_byte=3.0)
    """
    counted: Counter[Work] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if not func.is_view and func.namespace == "aten":
                counted[work_of(func, args, kwargs or {}, found)] += 1
            return found

    parameter = torch.zeros(_NUMEL, device="cpu", requires_grad=True)
    parameter.grad = torch.zeros(_NUMEL, device="cpu")
    optimizer = _OPTIMIZERS[num_tensors]([parameter])
    optimizer.step()  # which makes what it holds
    with Counting():  # type: ignore[no-untyped-call]
        optimizer.step()
    passes = sum(number * work.num_bytes for work, number in counted.items() if work.num_bytes >= parameter.nbytes)
    return OptimizerWork(counted.total(), round(passes / parameter.nbytes, 2))

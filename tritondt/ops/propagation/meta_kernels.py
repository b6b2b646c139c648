"""Operators whose results are known without fake tensors.

The first fake tensor imports all of torch's compiler (torch._dynamo, torch._inductor: 2 s of CPU), which eager programs
do without, and so does the first of torch's elementwise operators in Python. Elementwise operators are told by torch's
rule for strides and a run on one element. Others run on meta tensors: fake ones end at an operator's meta kernel
anyway, unless torch has something of its own for the operator; where it has, what is left of that for whole shapes on
one device is said here.
"""

import sys
from collections.abc import Iterator
from functools import lru_cache
from inspect import isfunction, unwrap
from itertools import chain
from types import CellType, CodeType, ModuleType
from typing import Any

import torch
from torch._decomp import decomposition_table, global_decomposition_table, meta_table
from torch._library.simple_registry import singleton as registered_fakes
from torch._ops import OpOverload
from torch._subclasses.fake_impls import has_meta, op_implementations_checks

from tritondt._importing import when_imported
from tritondt.ops.propagation.elementwise import is_pointwise

aten = torch.ops.aten

# Torch's own forms of these treat devices, and numbers that a graph leaves open, or take the operator apart in Python:
# they give what the meta kernel gives (found equal on 29,405 calls of torch's operator database).
_LIKE_THE_META_KERNEL: frozenset[OpOverload] = frozenset({
    *(aten.view.default, aten._unsafe_view.default, aten.select.int, aten.slice.Tensor, aten.detach.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.split.Tensor, aten.unsafe_split.Tensor),
    *(aten.empty_like.default, aten.full_like.default, aten.zeros_like.default, aten.ones_like.default),
    *(aten.new_empty.default, aten.new_empty_strided.default, aten.new_full.default, aten.new_zeros.default),
    *(aten.new_ones.default, aten.rand_like.default, aten.randn_like.default, aten._to_copy.default),
    *(aten.copy_.default, aten.copy.default, aten.slice_scatter.default, aten.diagonal_scatter.default),
    *(aten.select_backward.default, aten.slice_backward.default, aten.uniform_.default, aten.sum.default),
    *(aten.embedding.default, aten.index.Tensor, aten.index_put.default, aten.index_put_.default),
    *(aten.addmm.default, aten.addmv.default, aten.mv.default, aten.index_add.default, aten.index_add_.default),
    *(aten._log_softmax.default, aten._log_softmax_backward_data.default, aten._softmax_backward_data.default),
    *(aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten.native_dropout_backward.default),
    *(aten.linear.default, aten.native_group_norm_backward.default),
    *(aten.mse_loss.default, aten.mse_loss_backward.default),
})  # fmt: skip
# What they keep of bfloat16 and float16 has another dtype on some devices.
_LIKE_THE_META_KERNEL_IN_FULL_PRECISION: frozenset[OpOverload] = frozenset({
    *(aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
})  # fmt: skip
_FULL_PRECISION = frozenset((torch.float32, torch.float64))

# What a meta kernel in Python asks for where the device decides: on meta tensors it would hear of none.
_OUTCOME = "__dynamo_disable"
_ASKS_FOR_DEVICE = frozenset(("device_hint", "fake_device", "is_cuda"))


@lru_cache(maxsize=4096)
def runs_on_meta(op: OpOverload, dtypes: frozenset[torch.dtype]) -> bool:
    """Whether the meta kernel of an operator says of its results, for arguments of `dtypes`, what fake tensors say."""
    if op.namespace != "aten" or not has_meta(op):
        return False
    if op in _LIKE_THE_META_KERNEL or op.name().startswith("aten::_foreach_"):
        return True
    if op in _LIKE_THE_META_KERNEL_IN_FULL_PRECISION:
        return dtypes <= _FULL_PRECISION
    if any(applies(op) for applies, _ in op_implementations_checks):
        return False
    if registered_fakes.find(op.name()).fake_impl.kernel is not None or _is_composite(op):
        return False
    if op in meta_table:
        return not _asks_for_device(meta_table[op])
    return not _is_decomposed(op)


@lru_cache(maxsize=4096)
def is_elementwise(op: OpOverload) -> bool:
    """Whether an operator has one result, of which an element follows from those of the arguments at its place."""
    if op.namespace != "aten" or not is_pointwise(op) or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    returns, arguments = op._schema.returns, {argument.name for argument in op._schema.arguments}
    one = len(returns) == 1 and str(returns[0].type) == "Tensor"
    return one and arguments.isdisjoint(("out", "memory_format", "layout", "device", "generator"))


@lru_cache(maxsize=1)
def leave_compiler_out() -> None:
    """Lets torch's operators in Python run as they are, without an import of the compiler, until somebody imports it.

    Operators with type promotion are kept from being traced (`torch._disable_dynamo`), for which their first call
    imports the compiler; they look for the outcome in the attribute `__dynamo_disable` first. It is taken away once
    there is a compiler, and not after each call: threads that call side by side would take away each other's.
    """
    if "torch._dynamo" in sys.modules:
        return
    for function in _kept_from_traces():
        function.__dict__[_OUTCOME] = function
    when_imported("torch._dynamo", _bring_compiler_in)


def _bring_compiler_in(_: ModuleType) -> None:
    for function in _kept_from_traces():
        if function.__dict__.get(_OUTCOME) is function:
            del function.__dict__[_OUTCOME]


@lru_cache(maxsize=1)
def _kept_from_traces() -> tuple[Any, ...]:
    """Functions of torch's operators in Python that `torch._disable_dynamo` has in its closures."""
    modules = [module for name, module in sys.modules.items() if name.startswith(("torch._refs", "torch._decomp"))]
    forms = global_decomposition_table["post_autograd"].values()
    left = list(chain(forms, *(vars(module).values() for module in modules)))
    reached, found = set[Any](), list[Any]()
    while left:
        function = left.pop()
        if isfunction(function) and function not in reached:
            reached.add(function)
            within = [*map(_content, function.__closure__ or ())]
            if function.__globals__["__name__"] == "torch._compile":
                found += filter(isfunction, within)
            left += within
    return tuple(found)


def _content(cell: CellType) -> Any:
    """The content of a closure's cell; None for a name that has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_composite(op: OpOverload) -> bool:
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _is_decomposed(op: OpOverload) -> bool:
    """Whether fake tensors take the operator apart in Python; the forms of torch._refs they pass by."""
    found = decomposition_table.get(op)
    return found is not None and found.__module__.startswith("torch._decomp")


def _asks_for_device(kernel: Any) -> bool:
    """Whether a meta kernel in Python, or a function beside it that it calls, asks for the device."""
    reached, left = set[Any](), [unwrap(kernel)]
    while left:
        function = left.pop()
        if function in reached or not isfunction(function):
            continue
        reached.add(function)
        names = set(_names_in(function.__code__))
        if names & _ASKS_FOR_DEVICE:
            return True
        beside = (function.__globals__.get(name) for name in names)
        left += [each for each in beside if getattr(each, "__module__", None) == "torch._meta_registrations"]
    return False


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)

"""Dtypes for which an operator has no kernel, of which on one device the kernel itself tells.

Ranks outside a mesh run no kernel, and those whose part has no elements run one that does not look: they would go on
where the others raise. So they run the operator once on few elements, and raise what that raises of dtypes; all ranks
do where dtypes are others than floats, whose local form may be another operator, and where an argument moves first: a
rank that raised before would leave the others waiting for it. Not on a GPU, nor where there are only large tensors:
there the ranks that have elements raise alone.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from tritondt.ops.propagation.elementwise import is_pointwise
from tritondt.ops.propagation.schema import OpSchema, OutputSharding
from tritondt.sharding.spec import DTensorSpec

# An operator takes some microseconds on so many elements.
MAX_ELEMENTS = 4096
# What torch (2.13) says of a dtype, as NotImplementedError or as RuntimeError.
_OF_DTYPE = (
    "not implemented",
    "not yet implemented",
    "does not support",
    "not supported",
    "only support",
    "to support",
    "no longer supported",
    "can't be cast",
    "Found dtype",  # ... Long but expected Char, of an out
)

# Their kernels (LAPACK) swap rows by numbers from 1 on and look at none: 0 writes outside the matrix.
_PIVOTED = frozenset(
    op
    for packet in (torch.ops.aten.linalg_ldl_solve, torch.ops.aten.linalg_lu_solve, torch.ops.aten.lu_unpack)
    for op in (packet.default, packet.out)
)

# What torch said of an operator for some dtypes; None where it ran.
_told: dict[Hashable, Exception | None] = {}


def check_kernel(schema: OpSchema, decision: OutputSharding) -> None:
    """Raises what a kernel says of the dtypes of a call, where this rank's own call may not, or too late."""
    specs = schema.args_spec
    if schema.mesh.device_type != "cpu" or schema.op.namespace != "aten" or not all(it.layout.numel for it in specs):
        return
    if torch.Tag.nondeterministic_seeded in schema.op.tags or schema.is_view or torch._C._len_torch_dispatch_stack():
        return
    has_elements = all(spec.coordinate is not None and prod(spec.local_shape) for spec in specs)
    if has_elements and all(spec.dtype.is_floating_point for spec in specs) and not decision.needs_redistribute:
        return
    key = (schema.op, *_facts(schema.args_schema), *_facts(schema.kwargs_schema))
    if key not in _told:
        elementwise = is_pointwise(schema.op)
        if not elementwise and _most_elements(specs, decision.output_spec) > MAX_ELEMENTS:
            return
        try:
            _run(schema, _one_element if elementwise else _ones if schema.op in _PIVOTED else _zeros)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            if not any(text in str(error) for text in _OF_DTYPE):
                return
            _told[key] = type(error)(str(error))  # without the frames of this one
        else:
            _told[key] = None
    found = _told[key]
    if found is not None:
        raise found.with_traceback(None)


def _most_elements(specs: Sequence[DTensorSpec], outputs: DTensorSpec | Sequence[DTensorSpec | None] | None) -> int:
    made = (outputs,) if isinstance(outputs, DTensorSpec) else outputs or ()
    return max(prod(spec.shape) for spec in (*specs, *made) if spec is not None)


def _run(schema: OpSchema, make: Callable[[DTensorSpec], torch.Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        schema.op(*_with_tensors(schema.args_schema, make), **_with_tensors(schema.kwargs_schema, make))


def _one_element(spec: DTensorSpec) -> torch.Tensor:
    return torch.ones((1,) * len(spec.shape), dtype=spec.dtype)


def _ones(spec: DTensorSpec) -> torch.Tensor:
    return torch.ones(spec.shape, dtype=spec.dtype)


def _zeros(spec: DTensorSpec) -> torch.Tensor:
    """Zeros, which are the place of an element in every dim."""
    return torch.zeros(spec.shape, dtype=spec.dtype)


def _with_tensors(argument: Any, make: Callable[[DTensorSpec], torch.Tensor]) -> Any:
    if isinstance(argument, DTensorSpec):
        return make(argument)
    if isinstance(argument, list | tuple):
        return type(argument)([_with_tensors(item, make) for item in argument])
    if isinstance(argument, Mapping):
        return {name: _with_tensors(item, make) for name, item in argument.items()}
    return argument


def _facts(argument: Any) -> Iterator[Hashable]:
    """Facts of arguments that a kernel may be chosen by: dtypes, names and flags, and the kinds of numbers."""
    if isinstance(argument, DTensorSpec):
        yield argument.dtype
        yield len(argument.shape) > 0  # a number gives way to the dtype of others
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _facts(item)
    elif isinstance(argument, Mapping):
        for name, item in argument.items():
            yield name
            yield from _facts(item)
    else:
        yield str(argument) if isinstance(argument, bool | str | torch.dtype) else type(argument).__name__

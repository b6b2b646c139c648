"""Operators of which some arguments must have one dtype, which on one device only kernels compare.

Ranks outside a mesh run no kernel, and would go on where the others raise.
"""

from collections.abc import Mapping
from typing import Any

from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagation.schema import OpSchema
from tritondt.sharding.spec import DTensorSpec

# Found equal to what CPU kernels of torch 2.13 refuse, with elements and without.
_ALIKE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("index_put", "_unsafe_index_put"), ("self", "values")),
    **dict.fromkeys(("index_copy", "index_add", "index_reduce", "put"), ("self", "source")),
    "mm": ("self", "mat2"),
    "addmm": ("self", "mat1", "mat2"),
    "mv": ("self", "vec"),
    "addmv": ("self", "mat", "vec"),
    "linear": ("input", "weight"),
    "linalg_cross": ("self", "other"),
    "heaviside": ("self", "values"),
    "binary_cross_entropy": ("self", "target"),
}


def check_dtypes(schema: OpSchema) -> None:
    """Raises PropagationError, alike on all ranks, for arguments of several dtypes where the operator takes one."""
    names = _ALIKE.get(_name(schema.op))
    if names is None:
        return
    given: dict[str, Any] = {
        declared.name: argument
        for declared, argument in zip(schema.op._schema.arguments, schema.args_schema, strict=False)
    }
    given |= schema.kwargs_schema
    dtypes = {name: given[name].dtype for name in names if isinstance(given.get(name), DTensorSpec)}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} of {dtype}" for name, dtype in dtypes.items())
        first = next(iter(dtypes))
        raise PropagationError(
            f"{schema.op} takes {' and '.join(dtypes)} of one dtype, got {found}; convert them to that of {first}: "
            f"x.to({dtypes[first]})"
        )


def _name(op: OpOverload) -> str:
    """The operator's name, in place or not."""
    return op._schema.name.removeprefix("aten::").removesuffix("_")

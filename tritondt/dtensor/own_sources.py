"""Writes by index from the written tensor itself, which have no defined order: refused, as torch's kernels refuse them.

A kernel sees that its two arguments share memory; where the tensors had to move first, it is given copies and cannot.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch._ops import OpOverload

from tritondt.dtensor.compiled_call import Compiled
from tritondt.errors import PropagationError

_BY_INDEX = frozenset({
    *("aten::scatter_", "aten::scatter_add_", "aten::scatter_reduce_", "aten::put_"),
    *("aten::index_add_", "aten::index_copy_", "aten::index_reduce_", "aten::index_fill_"),
    *("aten::index_put_", "aten::_index_put_impl_"),
})  # fmt: skip


def from_others(op: OpOverload, run: Compiled) -> Compiled:
    """A compiled call that writes by index, refused where it reads from what it writes to; others as they are."""
    if op._schema.name not in _BY_INDEX:
        return run

    def write(
        local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        check_from_others(op, args, kwargs)
        return run(local_args, local_kwargs, args, kwargs)

    return write


def check_from_others(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises PropagationError where a write by index reads from what it writes to."""
    if op._schema.name in _BY_INDEX and any(read is args[0] for read in (*args[1:], *kwargs.values())):
        raise PropagationError(
            f"{op} would read from {args[0]._spec} while it writes to it, in an order that is not defined; read from a "
            "copy: x.clone()"
        )

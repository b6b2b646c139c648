"""Operators that need some dims whole, one line each: order statistics, shifts, gates, writes at indices, FFTs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.ops.propagation.homomorphisms import ADDITIVE, LINEAR, SELECTIVE
from tritondt.ops.propagation.schema import LocalOp, OpSchema
from tritondt.ops.rules.whole_dims import dims_named, register_whole_dims


def _of_own_elements(op: OpOverload) -> LocalOp:
    """The operator on tensors of which every element has memory of its own.

    The CPU kernel of torch 2.13 takes a step of 0 along the dim for one of 1, and reads what lies behind the row.
    """
    run = op._op

    def of_own_elements(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        return run(x.contiguous() if 0 in x.stride() else x, *args, **options)

    return of_own_elements


for _name in ("cummax", "cummin"):
    register_whole_dims(_name)
for _name in ("kthvalue", "mode", "hash_tensor"):
    register_whole_dims(_name, reduces=True)
for _name in ("median.dim", "nanmedian.dim"):
    register_whole_dims(_name, reduces=True, runs=_of_own_elements)
register_whole_dims("roll", "dims", passing=[SELECTIVE.at(0)])
register_whole_dims("rot90", "dims", passing=[SELECTIVE.at(0)])
register_whole_dims("glu")
register_whole_dims("glu_backward", passing=[LINEAR.at(0)])
register_whole_dims("linalg_cross", passing=[ADDITIVE.at(0), ADDITIVE.at(1)])
for _name in ("index_fill.int_Scalar", "index_fill.int_Tensor"):
    register_whole_dims(_name, whole=("index", "value"))
register_whole_dims("index_copy", whole=("index",))
register_whole_dims("index_reduce", whole=("index",))
register_whole_dims("slice_scatter", passing=[SELECTIVE.at(0, 1)])


def _all_but_one(schema: OpSchema) -> Sequence[int]:
    """Each slice of the dim is scaled by its own norm."""
    (dim,) = dims_named("dim")(schema)
    return [other for other in range(schema.args_spec[0].ndim) if other != dim]


register_whole_dims("renorm", _all_but_one)
for _name in ("_fft_c2c", "_fft_r2c", "_fft_c2r"):
    register_whole_dims(_name, passing=[LINEAR.at(0)])

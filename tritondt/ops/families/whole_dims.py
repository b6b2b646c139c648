"""Operators along one dim: running extremes, order statistics, shifts, products of vectors, and what indices pick."""

from collections.abc import Sequence

from tritondt.ops.propagation.schema import OpSchema
from tritondt.ops.rules.whole_dims import dims_named, lay_out_along

for _name in ("cummax", "cummin"):
    lay_out_along(_name)
for _name in ("kthvalue", "median.dim", "nanmedian.dim", "mode", "hash_tensor"):
    lay_out_along(_name, reduces=True)
lay_out_along("roll", "dims", linear_in=[(0,)])
lay_out_along("rot90", "dims", linear_in=[(0,)])
lay_out_along("glu")
lay_out_along("glu_backward", linear_in=[(0,)])
lay_out_along("linalg_cross", linear_in=[(0,), (1,)])
for _name in ("index_fill.int_Scalar", "index_fill.int_Tensor"):
    lay_out_along(_name, whole=("index", "value"))
lay_out_along("index_copy", whole=("index",))
lay_out_along("index_reduce", whole=("index",))
lay_out_along("slice_scatter", linear_in=[(0, 1)])


def _all_but_one(schema: OpSchema) -> Sequence[int]:
    """Each slice of the dim is scaled by its own norm."""
    (dim,) = dims_named("dim")(schema)
    return [other for other in range(schema.args_spec[0].ndim) if other != dim]


lay_out_along("renorm", _all_but_one)


for _name in ("_fft_c2c", "_fft_r2c", "_fft_c2r"):
    lay_out_along(_name, linear_in=[(0,)])

"""Reductions: which dims are reduced, where the others are afterwards, and how ranks complete a reduction.

Some reductions cannot be left pending: the root of a sum, or a softmax over a sharded dim. These are completed within
the operator, by redistributing what every rank has reduced already: one number for each row, never the rows. The
engine carries them, so whoever counts its bytes sees them.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from tritondt.ops.propagation.schema import AxisStrategy, OpSchema
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Partial, Placement, ReduceOp, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta

aten = torch.ops.aten

# An empty list of dims reduces nothing here, and everything elsewhere.
_EMPTY_IS_NONE = (aten.any.dims, aten.all.dims)
# Every rank's own reduction, dims kept with length 1, to that of all ranks.
Completion = Callable[[torch.Tensor], torch.Tensor]


def reduced_dims(dims: int | Sequence[int] | None, num_dims: int) -> tuple[int, ...]:
    """The dims that a `dim` argument names, counted from the front, ascending; all for None and for an empty list.

    Dims that the tensor does not have are left for the operator itself to refuse.

    >>> reduced_dims(-1, 3), reduced_dims(None, 2), reduced_dims([2, 0], 3)
    ((2,), (0, 1), (0, 2))
    """
    if dims is None or (not isinstance(dims, int) and not dims):
        return tuple(range(num_dims))
    given = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({dim % num_dims for dim in given})) if num_dims else ()


def check_rows_have_elements(schema: OpSchema, dims: Sequence[int]) -> None:
    """Raises IndexError, alike on all ranks, for a dim of no elements where only the kernel refuses it."""
    shape = schema.args_spec[0].shape
    empty = [dim for dim in dims if not shape[dim]] if shape else []
    if empty:
        raise IndexError(
            f"{schema.op} of {tuple(shape)} has no value along dim {empty[0]}, which has no elements; "
            f"expected dim {empty[0]} to have non-zero size"
        )


def places_of_kept(dims: Sequence[int], num_dims: int, keepdim: bool) -> Mapping[int, int]:
    """The dim of the result for every dim that is not reduced.

    >>> places_of_kept((1,), 3, False), places_of_kept((1,), 3, True)
    ({0: 0, 2: 1}, {0: 0, 2: 2})
    """
    kept = [dim for dim in range(num_dims) if dim not in dims]
    return {dim: dim if keepdim else place for place, dim in enumerate(kept)}


def reduced(schema: OpSchema) -> tuple[tuple[int, ...], bool]:
    """The dims that a call reduces, and whether they stay with length 1."""
    declared = [argument.name for argument in schema.op._schema.arguments]
    dims: Any = schema.argument(declared.index("dim"), "dim") if "dim" in declared else None
    keepdim: Any = schema.argument(declared.index("keepdim"), "keepdim", False) if "keepdim" in declared else False
    if dims is not None and not isinstance(dims, int) and not dims and schema.op in _EMPTY_IS_NONE:
        return (), keepdim
    return reduced_dims(dims, schema.args_spec[0].ndim), keepdim


def rows(schema: OpSchema, num_outputs: int = 1) -> list[AxisStrategy]:
    """The strategies that shard dims that are not reduced."""
    dims, keepdim = reduced(schema)
    places = places_of_kept(dims, schema.args_spec[0].ndim, keepdim)
    return [AxisStrategy((Shard(dim),), (Shard(place),) * num_outputs) for dim, place in places.items()]


def whole(num_outputs: int = 1) -> AxisStrategy:
    """The strategy that shards nothing."""
    return AxisStrategy((Replicate(),), (Replicate(),) * num_outputs)


def is_sharded(spec: DTensorSpec, dims: Sequence[int]) -> bool:
    """Whether any axis cuts one of `dims`."""
    return any(spec.layout.axes_of_dim[dim] for dim in dims)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which terms are added before they leave the rank: float32 for the 16-bit floats."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def completion(spec: DTensorSpec, dims: Sequence[int], reduce_op: ReduceOp, dtype: torch.dtype) -> Completion:
    """The function that completes a reduction over `dims` of a tensor under `spec`.

    The function takes this rank's reduction of `dtype`, reduced dims kept with length 1, and gives that of all ranks;
    it is a collective call where one of the dims is sharded, and else the identity. `spec` must have no Partial.
    """
    if not is_sharded(spec, dims):
        return lambda own: own
    source, target = _row_specs(spec, dims, Partial(reduce_op), dtype)
    return lambda own: redistribute_local(own, source, target)


def _row_specs(
    spec: DTensorSpec, dims: Sequence[int], pending: Placement, dtype: torch.dtype
) -> tuple[DTensorSpec, DTensorSpec]:
    """The specs of one number a row: pending on the axes that cut `dims`, and complete."""
    shape = [1 if dim in dims else length for dim, length in enumerate(spec.shape)]
    meta = TensorMeta.contiguous(shape, dtype)

    def spec_with(on_cut_axes: Placement) -> DTensorSpec:
        placements = [on_cut_axes if isinstance(p, Shard) and p.dim in dims else p for p in spec.placements]
        return DTensorSpec(spec.mesh, placements, meta, spec.order)

    return spec_with(pending), spec_with(Replicate())


def largest_and_sum(
    spec: DTensorSpec, dims: tuple[int, ...], dtype: torch.dtype
) -> Callable[..., Sequence[torch.Tensor]]:
    """A function that finds m, the largest x along `dims`, and the sum of exp(x - m), over all ranks, dims kept.

    The function takes this rank's x of `dtype`. Every rank gives its own two numbers a row, which one exchange brings
    to all and every rank combines alike: for k ranks that is 2(k - 1) numbers received a row, where reducing the one
    and then the other takes four exchanges. A row of nothing but -inf has m = -inf and sum nan, as it would unsharded.
    """
    gather = _gathering(spec, dims, dtype)

    def find(x: torch.Tensor) -> Sequence[torch.Tensor]:
        if all(x.shape[dim] for dim in dims):
            largest = x.amax(dims, keepdim=True)
        else:
            kept = [1 if dim in dims else length for dim, length in enumerate(x.shape)]
            largest = x.new_full(kept, float("-inf"))
        # A piece that is empty or all -inf adds nothing; another rank may hold more of the row.
        shift = largest.masked_fill(largest == float("-inf"), 0)
        pieces = gather(torch.stack([largest, (x - shift).exp_().sum(dims, keepdim=True)])[None])
        each_largest, each_sum = pieces.unbind(1)
        largest = each_largest.amax(0)
        return largest, (each_sum * (each_largest - largest).exp_()).sum(0)

    return find


def _gathering(spec: DTensorSpec, dims: Sequence[int], dtype: torch.dtype) -> Completion:
    """The function that gathers two numbers a row of all ranks that cut `dims`: (1, 2, *row) to (ranks, 2, *row)."""
    cutting = [axis for dim in dims for axis in spec.layout.axes_of_dim[dim]]
    num_pieces = prod(spec.mesh.shape[axis] for axis in cutting)
    shape = [1 if dim in dims else length for dim, length in enumerate(spec.shape)]
    meta = TensorMeta.contiguous((num_pieces, 2, *shape), dtype)

    def spec_with(on_cut_axes: Placement) -> DTensorSpec:
        placements = [
            on_cut_axes if axis in cutting else p.on(p.dim + 2) if isinstance(p, Shard) else p
            for axis, p in enumerate(spec.placements)
        ]
        return DTensorSpec(spec.mesh, placements, meta, spec.order)

    source, target = spec_with(Shard(0)), spec_with(Replicate())
    return lambda own: redistribute_local(own, source, target)

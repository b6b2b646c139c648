"""Operators that run on gathered tensors only, each with the reason why no shard is enough."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagation.fallback import replicate_all
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSharding, Strategies
from tritondt.sharding.placement import Partial, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta

aten = torch.ops.aten

_COUNTED = "how many elements there are is known when all have been seen"
_SORTED = "all elements are put in one order"
_POSITIONS = "positions are counted through the whole tensor, whatever its dims"
_RAGGED = "rows of different lengths lie one after the other, and lengths are held by tensors"
_ALL_PAIRS = "every row meets every other, and the result is one long row of them"

_CHECKED = "what does not hold is to fail on every rank"
_BINS = "bins follow from all elements"

REASONS: Mapping[str, str] = {
    **dict.fromkeys(("nonzero", "nonzero_static", "masked_select"), _COUNTED),
    **dict.fromkeys(("masked_scatter", "masked_scatter_backward"), _COUNTED),
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _COUNTED),
    **dict.fromkeys(("bincount", "repeat_interleave.Tensor"), _COUNTED),
    "linalg_lstsq": "which residuals there are is known when the ranks of all matrices are",
    **dict.fromkeys(("median", "nanmedian"), _SORTED),
    **dict.fromkeys(("histogram.bin_ct", "histogram.bins_tensor", "_histogramdd_bin_edges"), _BINS),
    **dict.fromkeys(("_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors"), _BINS),
    "put": _POSITIONS,
    **dict.fromkeys(("segment_reduce", "_segment_reduce_backward"), _RAGGED),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward"), _RAGGED),
    **dict.fromkeys(("_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward"), _RAGGED),
    **dict.fromkeys(("_ctc_loss", "_ctc_loss.Tensor", "_ctc_loss_backward", "_ctc_loss_backward.Tensor"), _RAGGED),
    **dict.fromkeys(("_pdist_forward", "_pdist_backward"), _ALL_PAIRS),
    **dict.fromkeys(("as_strided", "as_strided_copy", "as_strided_scatter"), _POSITIONS),
    "histc": _BINS,
    **dict.fromkeys(("_assert_async", "_assert_async.msg", "_functional_assert_async.msg"), _CHECKED),
}


def _operators(names: Iterator[str] | Mapping[str, str]) -> Iterator[OpOverload]:
    for name in names:
        packet, _, overload = name.partition(".")
        found = getattr(getattr(aten, packet, None), overload or "default", None)
        if found is not None:
            yield found


for _op in _operators(REASONS):
    propagator.set_rule(_op, replicate_all)


def counted_in_bins(schema: OpSchema) -> Strategies:
    """Counts of each rank's elements add up, where the bins are given."""
    if schema.argument(2, "min", 0) == schema.argument(3, "max", 0):
        return replicate_all(schema)
    (spec,) = schema.args_spec
    cut = [AxisStrategy((Shard(dim),), (Partial(),)) for dim in range(spec.ndim)]
    return [*cut, AxisStrategy((Replicate(),), (Replicate(),))]


propagator.set_strategy(aten.histc.default, counted_in_bins)


def strided(schema: OpSchema) -> OutputSharding:
    """The decision about views by positions in memory, which are those of the global tensor's elements in order.

    PropagationError where the call counts from the beginning of a memory that only one device has, or reaches beyond
    the tensor.
    """
    spec = schema.args_spec[0]
    if all(isinstance(placement, Replicate) for placement in spec.placements):
        return replace(replicate_all(schema), local=_by_local_strides(schema.op, spec))
    first = _place_of_size(schema.op)
    sizes, strides = schema.argument(first, "size"), schema.argument(first + 1, "stride")
    offset = schema.argument(first + 2, "storage_offset")
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0
    dense = spec.tensor_meta == TensorMeta.contiguous(spec.shape, spec.dtype)
    if offset is not None or not dense or last >= max(prod(spec.shape), 1):
        raise PropagationError(
            f"{schema} reads by places in the memory of one device: size {tuple(sizes)}, stride {tuple(strides)}, "
            f"offset {offset}; of a distributed tensor these are its elements in order, without an offset, within its "
            f"{prod(spec.shape)}: index it, or ask for x.full_tensor() and use that"
        )
    return replicate_all(schema)


def _place_of_size(op: OpOverload) -> int:
    """The place of the argument `size`, behind the tensors; stride and offset follow."""
    return 2 if op is aten.as_strided_scatter.default else 1


def _by_local_strides(op: OpOverload, spec: DTensorSpec) -> LocalOp:
    """The operator on a local tensor that lies otherwise than the global one, as the copy of a moved view does.

    The offset of a distributed tensor is 0, wherever its part begins, and `fill_diagonal_` gives that one: 0 is the
    part's own. Any other counts from where the memory begins, which is known of a part that lies as one device has it.
    """
    first = _place_of_size(op)

    def run(*args: Any) -> Any:
        local_strides, own = args[0].stride(), args[0].storage_offset()
        sizes, strides, *offset = args[first:]
        if local_strides == spec.tensor_meta.stride:
            return op(*args[:first], sizes, strides, *[given or own for given in offset])
        is_own = not any(offset)
        found = strides_in_copy(spec.shape, spec.tensor_meta.stride, local_strides, sizes, strides) if is_own else None
        if found is None:
            raise PropagationError(
                f"{op} of {spec} reads by places in memory, and this is a view of which the elements had to move: "
                f"size {tuple(sizes)}, stride {tuple(strides)}, offset {offset[0] if offset else None} are not places "
                "of its own elements, alike for all steps: index it, or ask for x.clone() and use that"
            )
        return op(*args[:first], sizes, found, *[own for _ in offset])

    return run


def strides_in_copy(
    shape: Sequence[int], stride: Sequence[int], copied: Sequence[int], sizes: Sequence[int], steps: Sequence[int]
) -> list[int] | None:
    """Steps through a tensor's memory as steps through that of a copy with strides `copied`.

    None where a step is none along the tensor's dims, or steps together leave it.

    >>> strides_in_copy((2, 2), (4, 1), (2, 1), (2,), (5,))  # the diagonal of x[:, 0, :], of 2 x 2 x 2 elements
    [3]
    """
    outer_first = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    found, left = [], list(shape)
    for size, step in zip(sizes, steps, strict=True):
        in_copy, rest = 0, step
        for dim in outer_first:
            count = min(rest // stride[dim], shape[dim] - 1) if stride[dim] else 0
            rest -= count * stride[dim]
            in_copy += count * copied[dim]
            left[dim] -= max(size - 1, 0) * count
        if size > 1 and (rest or min(left, default=1) < 1):
            return None
        found.append(in_copy)
    return found


for _op in (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default):
    propagator.set_rule(_op, strided)

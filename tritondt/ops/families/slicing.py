"""Operators that take indices of one dim, and their gradients.

A dim that is whole on every rank is sliced there. Of a dim that is cut every rank keeps what it holds of the slice,
a view of its part: pieces of explicit sizes, where that is a layout.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tritondt.errors import LayoutError, OpenLengthError
from tritondt.ops.propagation.schema import LocalOp, OpSchema, OutputSharding
from tritondt.ops.propagation.tensor_meta import propagate_tensor_meta
from tritondt.ops.rules.view_layouts import (
    cuts_of,
    inserted,
    local_slice,
    num_indices,
    num_within,
    real_cuts,
    selected,
    shard_of_sizes,
    sliced,
    with_cuts,
)
from tritondt.ops.rules.views import dim_of, meta_of_view, rule_of, spec_of_view, view_of
from tritondt.redistribution.implicit import redistribute_input
from tritondt.sharding.cut import ChunkCut
from tritondt.sharding.intervals import Intervals
from tritondt.sharding.layout import Layout
from tritondt.sharding.lengths import are_open
from tritondt.sharding.placement import Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta

aten = torch.ops.aten


@rule_of([aten.select.int])
def selection(schema: OpSchema) -> OutputSharding:
    """The decision about select: of a whole dim a local view; of a cut one the holder of the index sends to all."""
    dim, spec = dim_of(schema, 1, "dim"), schema.args_spec[0]
    meta = meta_of_view(schema)
    index = _from_front(schema.argument(2, "index"), spec.shape[dim])
    try:
        selected(spec.layout, dim)
    except LayoutError:
        sent = _sent_to_all(spec, dim, index)
    else:
        sent = None
    if sent is None:
        return view_of(schema, lambda layout: selected(layout, dim))
    layout = selected(sent[1].layout, dim)
    output = DTensorSpec(spec.mesh, layout.placements, meta, layout.order)
    return OutputSharding(output, None, _local_selection(schema, *sent, index), copies_view=True)


def _sent_to_all(spec: DTensorSpec, dim: int, index: int) -> tuple[DTensorSpec, DTensorSpec] | None:
    """The specs of one index of a cut dim, as a dim of length 1: on its holder, and on all ranks that cut the dim.

    None where several axes cut it so that no layout says who holds the index.
    """
    try:
        held = sliced(spec.layout, dim, index, index + 1, 1)
    except LayoutError:
        return None
    shape = (*spec.shape[:dim], 1, *spec.shape[dim + 1 :])
    part = DTensorSpec(spec.mesh, held.placements, TensorMeta(shape, spec.tensor_meta.stride, spec.dtype), held.order)
    return part, part.with_placements([Replicate() if p.is_shard(dim) else p for p in part.placements])


def _local_selection(schema: OpSchema, part: DTensorSpec, whole: DTensorSpec, index: int) -> LocalOp:
    dim = dim_of(schema, 1, "dim")
    first, end = local_slice(_held(schema.args_spec[0], dim), range(index, index + 1))

    def select(local: torch.Tensor, *_: Any) -> torch.Tensor:
        own = aten.slice.Tensor(local, dim, first, end)
        return redistribute_input(schema.op, own, part, whole).select(dim, 0)

    return select


@rule_of([aten.unbind.int])
def unbinding(schema: OpSchema) -> OutputSharding:
    """The decision about unbind: every index of a dim that is whole on every rank."""
    dim, metas = dim_of(schema, 1, "dim"), _metas(schema)
    specs = [spec_of_view(schema, meta, lambda layout: selected(layout, dim)) for meta in metas]
    return OutputSharding(specs)


@rule_of([aten.slice.Tensor])
def slicing(schema: OpSchema) -> OutputSharding:
    """The decision about slice: every rank keeps its part of the slice."""
    meta, dim = meta_of_view(schema), dim_of(schema, 1, "dim")
    start, stop, step = (schema.argument(2, "start"), schema.argument(3, "end"), schema.argument(4, "step", 1))
    spec = schema.args_spec[0]
    kept = _indices(start, stop, step, spec.shape[dim])
    output = spec_of_view(schema, meta, lambda layout: sliced(layout, dim, *kept))
    if not _is_cut(spec, dim):
        return OutputSharding(output)
    first, end = _local_bounds(spec, dim, kept)
    return OutputSharding(output, None, lambda local, *_, **__: aten.slice.Tensor(local, dim, first, end, step))


@rule_of([
    *(aten.split.Tensor, aten.split_with_sizes.default),
    *(aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default),
])  # fmt: skip
def splitting(schema: OpSchema) -> OutputSharding:
    """The decision about split: every rank keeps its part of each slice."""
    metas, dim, spec = _metas(schema), dim_of(schema, 2, "dim"), schema.args_spec[0]
    specs, pieces, start = [], [], 0
    for meta in metas:
        kept = _Indices(start, start + meta.shape[dim], 1)
        specs.append(spec_of_view(schema, meta, partial(sliced, dim=dim, start=kept.start, stop=kept.stop, step=1)))
        pieces.append(kept)
        start = kept.stop
    if not _is_cut(spec, dim):
        return OutputSharding(specs)
    bounds = [_local_bounds(spec, dim, kept) for kept in pieces]

    def split(local: torch.Tensor, *_: Any, **__: Any) -> list[torch.Tensor]:
        return [aten.slice.Tensor(local, dim, first, end) for first, end in bounds]

    return OutputSharding(specs, None, split)


class _Indices(NamedTuple):
    """The indices start:stop:step of a dim, with 0 <= start <= stop; a graph may leave them open, as no range can."""

    start: int
    stop: int
    step: int

    @property
    def known(self) -> range:
        """The indices where they are ints."""
        return range(*self)


def _indices(start: int | None, stop: int | None, step: int, length: int) -> _Indices:
    """The indices that a slice of a dim picks."""
    first = 0 if start is None else _within(start, length)
    end = length if stop is None else _within(stop, length)
    return _Indices(first, first if end < first else end, step)


def _within(bound: int, length: int) -> int:
    """A bound of a slice, counted from the front, within the dim."""
    from_front = _from_front(bound, length)
    if from_front < 0:
        return 0
    return length if from_front >= length else from_front


def _from_front(index: int, length: int) -> int:
    return index + length if index < 0 else index


def _local_bounds(spec: DTensorSpec, dim: int, kept: _Indices) -> tuple[int, int]:
    """Bounds of local indices that list what this rank holds of `kept`."""
    cuts = real_cuts(spec.layout, cuts_of(spec.layout)[dim])
    length = spec.shape[dim]
    if not are_open((length, *kept)):
        return local_slice(_held(spec, dim), kept.known)
    if kept == (0, length, 1):
        return 0, spec.local_shape[dim] if spec.coordinate is not None else 0
    if not cuts:
        return kept.start, kept.stop
    ((_, shard),) = cuts  # whole blocks of it: others are decided by values
    of_block = spec.local_shape[dim] // shard.repeats if spec.coordinate is not None else 0
    block = length // shard.repeats
    return kept.start // block * of_block, kept.stop // block * of_block


def _metas(schema: OpSchema) -> list[TensorMeta]:
    metas = propagate_tensor_meta(schema)
    assert isinstance(metas, Sequence), f"{schema.op} gives several tensors"
    return [meta for meta in metas if isinstance(meta, TensorMeta)]


def _is_cut(spec: DTensorSpec, dim: int) -> bool:
    """Whether any rank may hold less than all indices of a dim."""
    return bool(real_cuts(spec.layout, cuts_of(spec.layout)[dim]))


def _held(spec: DTensorSpec, dim: int) -> Intervals:
    """The indices of a dim that this rank holds."""
    return () if spec.coordinate is None else spec.layout.intervals(dim, spec.coordinate)


@rule_of([aten.select_backward.default])
def select_backward(schema: OpSchema) -> OutputSharding:
    """The decision about the gradient of select: zeros around one index, on every rank for its part of other dims."""
    meta = meta_of_view(schema)
    dim, index = dim_of(schema, 2, "dim", ndim=len(meta.shape)), schema.argument(3, "index")
    output = spec_of_view(schema, meta, lambda layout: inserted(layout, dim, meta.shape[dim]))
    shape = output.local_shape
    return OutputSharding(output, None, lambda local, *_: aten.select_backward.default(local, shape, dim, index))


@rule_of([aten.slice_backward.default])
def slice_backward(schema: OpSchema) -> OutputSharding:
    """The decision about the gradient of slice; zeros around the gradient go to ranks that hold neighbouring indices.

    A gradient cut by several axes, or in blocks, is gathered along the dim first.
    """
    meta, dim = meta_of_view(schema), dim_of(schema, 2, "dim")
    start, stop, step = (schema.argument(3, "start"), schema.argument(4, "end"), schema.argument(5, "step"))
    kept = _indices(start, stop, step, meta.shape[dim])
    given = schema.args_spec[0]
    cuts = real_cuts(given.layout, cuts_of(given.layout)[dim])
    source = given
    num_kept = num_indices(*kept)
    if num_kept < meta.shape[dim] and (len(cuts) > 1 or any(not shard.is_one_run for _, shard in cuts)):
        source = given.with_placements([Replicate() if p.is_shard(dim) else p for p in given.placements])
    layout = _before_slice(source.layout, dim, kept, meta.shape[dim])
    output = DTensorSpec(source.mesh, layout.placements, meta, layout.order)
    local = _local_slice_backward(output, dim, kept)
    return OutputSharding(output, None if source is given else (source,), local)


def _before_slice(layout: Layout, dim: int, kept: _Indices, length: int) -> Layout:
    """A layout of a dim of `length` of whose indices `kept` every rank holds what `layout` says."""
    if num_indices(*kept) == length:
        return layout
    shape, cuts = list(layout.shape), cuts_of(layout)
    shape[dim] = length
    real = real_cuts(layout, cuts[dim])
    idle = [(axis, Shard(dim)) for axis, _ in cuts[dim] if layout.mesh_shape[axis] == 1]
    if real and are_open((length, *kept)):
        raise OpenLengthError(f"the gradient of {kept.start}:{kept.stop}:{kept.step} of dim {dim} is cut by sizes")
    cuts[dim] = [*((axis, _widened(layout, dim, axis, kept.known, length)) for axis, _ in real), *idle]
    return with_cuts(layout, shape, cuts)


def _widened(layout: Layout, dim: int, axis: int, kept: range, length: int) -> Shard:
    """The cut of a dim of `length` whose pieces hold, of the indices `kept`, what the pieces of the slice are."""
    cut, shard = layout.cut(axis), layout.placements[axis]
    assert isinstance(shard, Shard), f"axis {axis} of {layout!r} cuts a dim"
    bounds = [cut.bounds(layout.shape[dim], index) for index in range(cut.parts)]
    sizes = [stop - start for start, stop in bounds]
    # The slice comes from a default cut as a rule.
    for tried in (shard.unit, 1):
        if length % tried == 0 and sizes == _sliced_sizes(ChunkCut(cut.parts, length, tried), length, kept):
            return Shard(dim, tried)
    # What lies between two pieces goes to the former, what lies in front of all to the first that holds anything.
    ends = [0 if stop == 0 else length if stop == len(kept) else kept[stop] for _, stop in bounds]
    return shard_of_sizes(dim, [end - start for start, end in zip([0, *ends], ends, strict=False)])


def _sliced_sizes(cut: ChunkCut, length: int, kept: range) -> list[int]:
    return [num_within(kept, *cut.bounds(length, index)) for index in range(cut.parts)]


def _local_slice_backward(output: DTensorSpec, dim: int, kept: _Indices) -> LocalOp:
    shape = output.local_shape
    first, end = _local_bounds(output, dim, kept)
    return lambda local, *_: aten.slice_backward.default(local, shape, dim, first, end, kept.step)

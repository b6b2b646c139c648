"""Layouts of views whose dims are the argument's dims or parts of them.

All functions take the argument's layout and give that of the result, without a tensor and alike on every rank. A view
moves nothing: where no layout says who holds what, LayoutError gives the reason.
"""

from collections.abc import Sequence
from dataclasses import replace

from tritondt.errors import LayoutError
from tritondt.sharding import intervals as regions
from tritondt.sharding.cut import ChunkCut
from tritondt.sharding.intervals import Intervals
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Placement, Replicate, Shard

# An axis and how it cuts; the dim is where the pair stands, whatever the Shard says.
AxisCut = tuple[int, Shard]
# The cuts of every dim, in cut order.
DimCuts = Sequence[Sequence[AxisCut]]


def cuts_of(layout: Layout) -> list[list[AxisCut]]:
    """The cuts of every dim of a layout."""
    found: list[list[AxisCut]] = []
    for axes in layout.axes_of_dim:
        found.append([])
        for axis in axes:
            placement = layout.placements[axis]
            assert isinstance(placement, Shard), f"axis {axis} of {layout!r} cuts a dim"
            found[-1].append((axis, placement))
    return found


def with_cuts(layout: Layout, shape: Sequence[int], cuts: DimCuts) -> Layout:
    """The layout of a tensor of `shape` with these cuts, on the mesh of `layout` and Partial where that is.

    An axis that cuts nothing any more replicates. LayoutError where the cuts cannot be those of one layout.
    """
    placements: list[Placement] = [Replicate() if isinstance(p, Shard) else p for p in layout.placements]
    order = []
    for dim, cuts_of_dim in enumerate(cuts):
        for axis, shard in cuts_of_dim:
            placements[axis] = replace(shard, dim=dim)
            order.append(axis)
    rest = [axis for axis in range(len(placements)) if axis not in order]
    return Layout(layout.mesh_shape, placements, shape, [*order, *rest])


def permuted(layout: Layout, dims: Sequence[int]) -> Layout:
    """The layout after its dims are put in the order `dims`."""
    cuts = cuts_of(layout)
    return with_cuts(layout, [layout.shape[dim] for dim in dims], [cuts[dim] for dim in dims])


def inserted(layout: Layout, dim: int, length: int = 1) -> Layout:
    """The layout with a whole dim of `length` in front of `dim`."""
    shape, cuts = list(layout.shape), cuts_of(layout)
    shape.insert(dim, length)
    cuts.insert(dim, [])
    return with_cuts(layout, shape, cuts)


def selected(layout: Layout, dim: int) -> Layout:
    """The layout of one index of `dim`, which lacks that dim; refused where an axis of two or more cuts it."""
    shape, cuts = list(layout.shape), cuts_of(layout)
    for axis, shard in real_cuts(layout, cuts[dim]):
        raise LayoutError(
            f"axis {axis} cuts dim {dim} by {shard!r}: one of its coordinates holds the index, others none"
        )
    del shape[dim], cuts[dim]
    return with_cuts(layout, shape, cuts)


def expanded(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout after new dims in front and dims of length 1 repeated to those of `shape`.

    The coordinate that holds a lone index holds all its repetitions.
    """
    lead = len(shape) - len(layout.shape)
    cuts: list[list[AxisCut]] = [[] for _ in range(lead)]
    for dim, cuts_of_dim in enumerate(cuts_of(layout)):
        times = shape[lead + dim] if layout.shape[dim] == 1 else 1
        cuts.append([(axis, shard.scaled(1, times)) for axis, shard in cuts_of_dim])
    return with_cuts(layout, shape, cuts)


def tiled(layout: Layout, times: Sequence[int]) -> Layout:
    """The layout after dims are repeated, new ones first, `times` for each: every rank repeats what it holds."""
    lead = len(times) - len(layout.shape)
    lengths = [*times[:lead], *(many * length for many, length in zip(times[lead:], layout.shape, strict=True))]
    cuts: list[list[AxisCut]] = [[] for _ in range(lead)]
    for many, cuts_of_dim in zip(times[lead:], cuts_of(layout), strict=True):
        cuts.append([(axis, shard.scaled(many, 1) if many else Shard(0)) for axis, shard in cuts_of_dim])
    return with_cuts(layout, lengths, cuts)


def sliced(layout: Layout, dim: int, start: int, stop: int, step: int) -> Layout:
    """The layout of indices `start:stop:step` of `dim`, where start <= stop lie within it.

    A dim that one axis cuts, within one block: explicit sizes, what each coordinate holds of the slice. Whole blocks of
    every cut: fewer repeats. Everything: as before. Otherwise LayoutError.
    """
    shape, cuts = list(layout.shape), cuts_of(layout)
    length = shape[dim]
    if (start, stop, step) == (0, length, 1):
        return layout
    shape[dim] = num_indices(start, stop, step)
    real = real_cuts(layout, cuts[dim])
    # Axes of one coordinate cut last: their unit, 1, divides all others.
    idle = [(axis, Shard(dim)) for axis, _ in cuts[dim] if layout.mesh_shape[axis] == 1]
    cuts[dim] = [*_sliced_cuts(layout, dim, real, start, stop, step), *idle]
    return with_cuts(layout, shape, cuts)


def num_indices(start: int, stop: int, step: int) -> int:
    """Number of indices of `start:stop:step`, where start <= stop and a graph may leave both open."""
    return (stop - start + step - 1) // step


def _sliced_cuts(layout: Layout, dim: int, real: Sequence[AxisCut], start: int, stop: int, step: int) -> list[AxisCut]:
    if start == stop or not real:
        return [(axis, Shard(dim)) for axis, _ in real]
    if step == 1:
        found = _of_whole_blocks(layout, dim, real, start, stop)
        if found is not None:
            return found
    layout.check_known(dim)  # explicit sizes, which are ints
    kept = range(start, stop, step)
    if len(real) > 1:
        axes = ", ".join(str(axis) for axis, _ in real)
        raise LayoutError(
            f"axes {axes} cut dim {dim}, and only a lone cut, or whole blocks of all, can be sliced in place"
        )
    ((axis, shard),) = real
    cut = shard.cut_of_block(layout.mesh_shape[axis], layout.shape[dim])
    if cut is None:
        raise LayoutError(
            f"axis {axis} cuts dim {dim} by {shard!r}, and only slices that begin with a block of the first coordinate "
            "keep that"
        )
    block = cut.length
    number = kept.start // block
    if kept[-1] // block != number:
        raise LayoutError(f"axis {axis} cuts dim {dim} by {shard!r}, and the slice lies in several blocks of {block}")
    within = range(kept.start - number * block, kept[-1] - number * block + 1, kept.step)
    sizes = [num_within(within, *cut.bounds(block, index)) for index in range(cut.parts)]
    return [(axis, shard_of_sizes(dim, sizes, shard.unit))]


def _of_whole_blocks(layout: Layout, dim: int, real: Sequence[AxisCut], start: int, stop: int) -> list[AxisCut] | None:
    """The cuts of a slice of whole blocks of every cut; None where it is none."""
    found: list[AxisCut] = []
    for axis, shard in real:
        left = shard.of_whole_blocks(layout.mesh_shape[axis], layout.shape[dim], start, stop, is_lone=len(real) == 1)
        if left is None:
            return None
        found.append((axis, left))
    return found


def num_within(indices: range, start: int, stop: int) -> int:
    """Number of ascending indices that lie in [start, stop).

    >>> num_within(range(1, 10, 3), 2, 8)
    2
    """
    below = [max(0, -(-(bound - indices.start) // indices.step)) for bound in (start, stop)]
    return min(below[1], len(indices)) - min(below[0], len(indices))


def shard_of_sizes(dim: int, sizes: Sequence[int], unit: int = 1) -> Shard:
    """The simplest cut with these pieces: the default one with `unit` or without where that gives them.

    >>> shard_of_sizes(0, (2, 2, 1)), shard_of_sizes(0, (4, 4, 0), 2), shard_of_sizes(0, (1, 2, 2))
    (S0, S0(unit=2), S0(sizes=1/2/2))
    """
    length, parts = sum(sizes), len(sizes)
    units = [unit, 1] if all(size % unit == 0 for size in sizes) else [1]
    for tried in units:
        cut = ChunkCut(parts, length, tried)
        if all(stop - start == size for (start, stop), size in zip(_all_bounds(cut, length), sizes, strict=True)):
            return Shard(dim, tried)
    return Shard(dim, units[0], tuple(sizes))


def _all_bounds(cut: ChunkCut, held: int) -> list[tuple[int, int]]:
    return [cut.bounds(held, index) for index in range(cut.parts)]


def local_slice(held: Intervals, kept: range) -> tuple[int, int]:
    """Bounds [start, stop) of local indices that, by the step of `kept`, list what is held of it.

    `held` may be several intervals only where the step is 1 or the slice meets one of them.

    >>> local_slice(((4, 8),), range(1, 10, 3)), local_slice(((0, 2), (4, 6)), range(1, 6))
    ((0, 4), (1, 4))
    """
    common = regions.intersect_intervals(held, regions.merge([(kept.start, kept.stop)]))
    if not common:
        return 0, 0
    low = common[0][0]
    first = regions.positions(held, common)[0]
    stop = first + regions.total(common)
    return min(first + (kept.start - low) % kept.step, stop), stop


def real_cuts(layout: Layout, cuts: Sequence[AxisCut]) -> list[AxisCut]:
    """The cuts by axes of two or more coordinates; the others hold everything."""
    return [(axis, shard) for axis, shard in cuts if layout.mesh_shape[axis] > 1]

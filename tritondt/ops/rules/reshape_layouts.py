"""Layouts after a reshape: dims merged and divided, in row-major order.

Every group of dims that turns into another group of dims is merged into one dim and divided again. A cut of a dim is a
cut of the merged dim: its unit grows by the lengths inside it, its repeats by those outside. A cut of the merged dim is
one of a part where each of its pieces is whole indices of that part. All of it is arithmetic on cuts: the work does not
grow with the mesh, except with the different lengths of pieces where several axes cut one dim off their units.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd, lcm, prod
from typing import NamedTuple

from tritondt.errors import LayoutError
from tritondt.ops.rules.view_layouts import AxisCut, cuts_of, with_cuts
from tritondt.sharding.cut import ChunkCut
from tritondt.sharding.layout import Layout
from tritondt.sharding.lengths import are_open
from tritondt.sharding.placement import Shard

# A dim of the result with an axis that cuts it and how.
Placed = tuple[int, AxisCut]


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout after a view as `shape`, with as many elements; who holds which element stays.

    LayoutError where that is no layout of the new shape.

    >>> reshaped(Layout((4,), (Shard(1, unit=5),), (2, 30)), (2, 6, 5))
    Layout((S1) of (2, 6, 5) on 4)
    """
    shape = tuple(shape)
    if shape == layout.shape:
        return layout
    if not layout.numel:
        return _of_nothing(layout, shape)
    try:
        return _divided(layout, shape)
    except LayoutError:
        idle = [axis for axis, size in enumerate(layout.mesh_shape) if size == 1]
        if not any(isinstance(layout.placements[axis], Shard) for axis in idle):
            raise
        # Axes of one coordinate hold everything: their cuts can be left out.
        return _divided(layout, shape, left_out=idle)


def dim_groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[range, range]]:
    """Groups of dims of a shape with the dims of another that they turn into, both of as many elements, not none.

    A dim of length 1 goes with what follows it, the last ones with what comes before.

    >>> dim_groups((4, 1, 6, 5), (4, 2, 3, 5))
    [(range(0, 1), range(0, 1)), (range(1, 3), range(1, 3)), (range(3, 4), range(3, 4))]
    """
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(source) and j < len(target):
        first, left, right = (i, j), source[i], target[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1
        groups.append((range(first[0], i), range(first[1], j)))
    last = groups.pop() if groups else (range(0), range(0))
    groups.append((range(last[0].start, len(source)), range(last[1].start, len(target))))
    return groups


def possible_units(layout: Layout, shape: Sequence[int], dim: int) -> list[int]:
    """Units in which `dim` may be cut so that a view as `shape` can keep the cut, without 1; for suggestions."""
    if not layout.numel:
        return []
    found = []
    for sources, targets in dim_groups(layout.shape, shape):
        if dim not in sources:
            continue
        inside = prod(layout.shape[dim + 1 : sources.stop])
        found += [prod(shape[target + 1 : targets.stop]) for target in targets]
        found = [lcm(inside, inner) // inside for inner in found]
    return [unit for unit in dict.fromkeys(found) if unit > 1 and layout.shape[dim] % unit == 0]


def _divided(layout: Layout, shape: tuple[int, ...], left_out: Sequence[int] = ()) -> Layout:
    """The layout without the cuts by axes that are left out."""
    cuts = [[cut for cut in cuts_of_dim if cut[0] not in left_out] for cuts_of_dim in cuts_of(layout)]
    found: list[list[AxisCut]] = [[] for _ in shape]
    for sources, targets in dim_groups(layout.shape, shape):
        lengths = tuple(layout.shape[dim] for dim in sources)
        merged = _merged([cuts[dim] for dim in sources], lengths, layout.mesh_shape)
        division = _Division(tuple(shape[dim] for dim in targets), layout.mesh_shape)
        placed = next(division.placed(merged), None)
        if placed is None:
            raise LayoutError(_no_place(layout, lengths, division, merged))
        for dim, cut in placed:
            found[targets.start + dim].append(cut)
    return with_cuts(layout, shape, found)


def _no_place(layout: Layout, lengths: tuple[int, ...], division: "_Division", merged: Sequence[AxisCut]) -> str:
    """The first cut that has no place among the new dims, in words."""
    number = next(n for n in range(len(merged)) if next(division.placed(merged[: n + 1]), None) is None)
    axis, shard = merged[number]
    begin = f"axis {axis} cuts it by {layout.placements[axis]!r}"
    if number and shard.sizes is not None:
        return f"{begin}, and sizes are kept only by the first cut of a dim; axis {merged[0][0]} cuts outside"
    return f"{begin}; as {division.lengths} in place of {lengths} these pieces are not whole indices of one dim"


def _merged(cuts: Sequence[Sequence[AxisCut]], lengths: Sequence[int], mesh_shape: Sequence[int]) -> list[AxisCut]:
    """The cuts of the dim that dims of these lengths merge into: those of outer dims come first."""
    found: list[AxisCut] = []
    for dim, cuts_of_dim in enumerate(cuts):
        outer, inner = prod(lengths[:dim]), prod(lengths[dim + 1 :])
        for axis, shard in cuts_of_dim:
            # Sizes are for the first cut of a dim only.
            fitting = _without_sizes(shard, mesh_shape[axis], lengths[dim]) if found else shard
            # Equal pieces need no unit, which would be a length that a graph leaves open.
            is_even = are_open([inner]) and _is_even(cuts_of_dim, lengths[dim], mesh_shape)
            found.append((axis, fitting.scaled(outer, 1 if is_even else inner)))
    return found


def _is_even(cuts: Sequence[AxisCut], length: int, mesh_shape: Sequence[int]) -> bool:
    """Whether cuts without units or sizes give every coordinate equally many of `length` indices."""
    parts = prod(mesh_shape[axis] for axis, _ in cuts)
    return all(shard == Shard(shard.dim) for _, shard in cuts) and length % parts == 0


def _without_sizes(shard: Shard, parts: int, length: int) -> Shard:
    """A cut into equal pieces by a unit where there is one, else `shard` itself."""
    if shard.sizes is None:
        return shard
    block = length // shard.repeats
    # The largest unit that the first piece allows makes the longest pieces.
    unit = gcd(shard.sizes[0], block)
    same = unit % shard.unit == 0 and _pieces(ChunkCut(parts, block, unit), block) == shard.sizes
    return Shard(shard.dim, unit, None, shard.repeats) if same else shard


def _pieces(cut: ChunkCut, held: int) -> tuple[int, ...]:
    """Lengths of all pieces of `held` positions."""
    return tuple(stop - start for start, stop in (cut.bounds(held, index) for index in range(cut.parts)))


class _Division(NamedTuple):
    """One dim divided into dims of these lengths, on a mesh of this shape."""

    lengths: tuple[int, ...]
    mesh_shape: tuple[int, ...]

    def placed(self, merged: Sequence[AxisCut], done: tuple[Placed, ...] = ()) -> Iterator[tuple[Placed, ...]]:
        """Every way to make the cuts of the one dim, in turn, cuts of its parts; `done` are those of the first cuts."""
        if len(done) == len(merged):
            yield done
            return
        axis, shard = merged[len(done)]
        for dim, repeats in self._candidates(shard, done):
            cut = self._cut_of_part(axis, shard, dim, repeats, done)
            if cut is not None:
                yield from self.placed(merged, (*done, (dim, (axis, cut))))

    def _candidates(self, shard: Shard, done: Sequence[Placed]) -> list[tuple[int, int]]:
        """Dims that a cut may be one of, with its repeats there, outermost first.

        Only the innermost dim that is cut already and those inside it: a cut divides what the earlier ones left, laid
        end to end.
        """
        found: list[tuple[int, int]] = []
        whole: list[tuple[int, int]] = []
        innermost = max((dim for dim, (axis, _) in done if self.mesh_shape[axis] > 1), default=0)
        for dim in range(innermost, len(self.lengths)):
            outside = prod(self.lengths[:dim])
            repeats = shard.repeats // outside if shard.repeats % outside == 0 else 0
            if repeats and self.lengths[dim] % repeats == 0:
                # Blocks of one index all go to the first coordinate: a dim that is really cut is the better guess.
                (found if self.lengths[dim] > repeats else whole).append((dim, repeats))
            elif shard.repeats == 1 and self._most_outside(dim, done) <= 1:
                found.append((dim, 1))
        return found + whole

    def _most_outside(self, dim: int, done: Sequence[Placed]) -> int:
        """The most indices that any rank holds of all that lies outside `dim`, or more."""
        held = list(self.lengths)
        for of_dim, (axis, shard) in done:
            held[of_dim] = shard.cut(self.mesh_shape[axis], self.lengths[of_dim]).largest(held[of_dim])
        return prod(held[:dim])

    def _cut_of_part(self, axis: int, shard: Shard, dim: int, repeats: int, done: Sequence[Placed]) -> Shard | None:
        """The cut of `dim` with the pieces that `shard` cuts; None where a piece ends inside an index."""
        inner, block = prod(self.lengths[dim + 1 :]), self.lengths[dim] // repeats
        earlier = [cut for of_dim, cut in done if of_dim == dim]
        if are_open([inner]) and _is_even([*earlier, (axis, shard)], block, self.mesh_shape):
            return Shard(dim)
        found = shard.divided(inner)
        if found is None or (earlier and shard.sizes is not None):
            return None
        found = replace(found, dim=dim, repeats=repeats)
        if shard.sizes is None and shard.grain % inner:
            cut = ChunkCut(self.mesh_shape[axis], block * inner, shard.unit)
            # All pieces but the last are as long as the first.
            lengths = self._held(dim, repeats, earlier)
            if lengths is None or any(cut.bounds(held * inner, 0)[1] % inner for held in lengths):
                return None
        return found if found.sizes is not None or block % found.unit == 0 else None

    def _held(self, dim: int, repeats: int, earlier: Sequence[AxisCut]) -> set[int] | None:
        """All lengths that earlier cuts of `dim` may leave of a block; None where their blocks differ."""
        block = self.lengths[dim] // repeats
        held = {block}
        for axis, shard in earlier:
            cut = shard.cut_of_block(self.mesh_shape[axis], self.lengths[dim])
            if cut is None or cut.length != block:
                return None
            held = {piece for total in held for piece in _pieces(cut, total)}
        return held


def _of_nothing(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout of a tensor without elements: the cuts of equal dims in front and at the end."""
    ndim, most = len(shape), min(len(shape), len(layout.shape))
    lead = next((n for n in range(most) if layout.shape[n] != shape[n]), most)
    trail = next((n for n in range(most - lead) if layout.shape[-1 - n] != shape[-1 - n]), most - lead)
    cuts = cuts_of(layout)
    kept = [cuts[dim] if dim < lead else cuts[dim - ndim] if dim >= ndim - trail else [] for dim in range(ndim)]
    return with_cuts(layout, shape, kept)

"""Collectives of NCCL that do what a step does, as values: which step is one, and which ones prices offer.

A collective goes along the axes of the mesh whose placements change, among ranks that differ in no other coordinate:
all ranks, or several such groups side by side. Only even layouts have one: every rank of a group holds a block of equal
length, in the order of the ranks. Bytes are those of a ring, and so as many as by messages of our own; what is saved
are the pack, the unpack and the second step of a sum. NCCL adds terms in an order that it chooses by size and machine;
all ranks get the same bits of each sum, but not those of coordinate order, and floats of 16 bits are rounded at every
addition.
"""

from collections.abc import Sequence
from itertools import product
from math import ceil, log2, prod
from typing import Literal, NamedTuple

from tritondt.sharding.coordinates import position_of
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import Partial, Placement, ReduceOp, Replicate, Shard

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]

# What `CostTable.collectives` offers: nothing; what has one result in any order; sums of floats of 32 bits and more;
# sums of those of 16 bits as well.
NONE, EXACT, WIDE, ALL = 0, 1, 2, 3
_WHOLE_NUMBERS = ("int8", "uint8", "int32", "int64")
_WIDE_FLOATS = ("float32", "float64")
_NARROW_FLOATS = ("float16", "bfloat16")
# Blocks are compared with the layout rank by rank.
_MAX_RANKS = 1024


class Collective(NamedTuple):
    """A collective of the ranks along some axes of a mesh, `num_ranks` in each group.

    `numel` is the number of elements on the side that has all of a group's, in the largest group. Where `is_dense` is
    false these are cut along an inner dim and copied, before a reduce_scatter or after an all_gather. `divisor` divides
    the reduced sum. `axes` are those of more than one rank, and a group lies within `span` consecutive ranks; without
    `axes`, which is for tests and examples, it is the whole mesh. With `registered_bytes` every rank copies into and
    out of so much memory, which is registered with the communicator.
    """

    kind: CollectiveKind
    num_ranks: int
    numel: int
    is_dense: bool = True
    op: ReduceOp | None = None
    divisor: int = 1
    axes: tuple[int, ...] = ()
    span: int = 0
    registered_bytes: int = 0

    @property
    def moved_elements(self) -> int:
        """Elements that each rank sends, and receives, in a ring."""
        passed = self.numel * (self.num_ranks - 1) // self.num_ranks
        return 2 * passed if self.kind == "all_reduce" else passed

    @property
    def name(self) -> str:
        """Text of the collective in explanations."""
        return f"{self.kind} of NCCL" + (" through registered memory" if self.registered_bytes else "")

    @property
    def sides(self) -> tuple[int, int]:
        """Elements that each rank gives and gets."""
        part = self.numel // self.num_ranks
        return part if self.kind == "all_gather" else self.numel, part if self.kind == "reduce_scatter" else self.numel

    @property
    def num_hops(self) -> int:
        """Messages that follow one another until the last rank has all: in a ring, and for all_reduce in two trees.

        >>> Collective("all_gather", 8, 64).num_hops, Collective("all_reduce", 8, 64).num_hops
        (7, 6)
        """
        return 2 * ceil(log2(self.num_ranks)) if self.kind == "all_reduce" else self.num_ranks - 1


def collective_between(source: Layout, target: Layout) -> Collective | None:
    """Collective that takes a tensor from one layout to another on one mesh; None where there is none.

    >>> rows = Layout((2, 4), (Replicate(), Shard(0)), (8, 3))
    >>> found = collective_between(rows, rows.with_placements([Replicate(), Replicate()]))
    >>> found.kind, found.num_ranks, found.numel, found.axes
    ('all_gather', 4, 24, (1,))
    """
    axes = _changed_axes(source, target)
    if not axes or source.num_ranks > _MAX_RANKS or _has_narrow_terms(source, target, axes):
        return None
    before, after = ([layout.placements[axis] for axis in axes] for layout in (source, target))
    sizes = [source.mesh_shape[axis] for axis in axes]
    span = prod(source.mesh_shape[axes[0] :])
    if _are(Shard, before) and _are(Replicate, after):
        dim = _even_dim(source, target, axes)
        if dim is None:
            return None
        numel, is_dense = target.max_local_numel, _is_outer(target, dim)
        return Collective("all_gather", prod(sizes), numel, is_dense, axes=axes, span=span)
    if not _are(Partial, before):
        return None
    ops = [placement.reduce_op for placement in before if isinstance(placement, Partial)]
    op: ReduceOp = "sum" if ops[0] == "avg" else ops[0]
    divisor = prod(size for size, each in zip(sizes, ops, strict=True) if each == "avg")
    reduced = Collective("all_reduce", prod(sizes), source.max_local_numel, True, op, divisor, axes, span)
    if _are(Replicate, after):
        return reduced if _holds_alike(source, target) else None
    dim = _even_dim(target, source, axes) if _are(Shard, after) else None
    if dim is None:
        return None
    return reduced._replace(kind="reduce_scatter", is_dense=_is_outer(source, dim))


def group_of(mesh_shape: Sequence[int], axes: Sequence[int], coordinate: Coordinate) -> tuple[int, ...]:
    """Positions in the mesh of the ranks that differ from a coordinate along some axes only, ascending.

    >>> group_of((2, 3), (0,), (1, 2)), group_of((2, 3), (1,), (1, 2)), group_of((2, 3), (), (1, 2))
    ((2, 5), (3, 4, 5), (0, 1, 2, 3, 4, 5))
    """
    varied = axes or range(len(mesh_shape))
    along = [range(size) if axis in varied else (coordinate[axis],) for axis, size in enumerate(mesh_shape)]
    return tuple(position_of(each, mesh_shape) for each in product(*along))


def is_offered(collective: Collective, dtype: str, level: int) -> bool:
    """Whether prices of a level offer a collective of elements of a dtype, named as torch does; "" is none.

    >>> terms = Collective("all_reduce", 4, 24, op="sum")
    >>> [is_offered(terms, dtype, WIDE) for dtype in ("int32", "float32", "bfloat16", "complex64")]
    [True, True, False, False]
    """
    if not dtype or level == NONE:
        return False
    if collective.op is None:
        return True
    if dtype in _WHOLE_NUMBERS:
        return collective.divisor == 1
    # The greater of a number and nan is for each library to say.
    return collective.op in ("sum", "product") and (
        (dtype in _WIDE_FLOATS and level >= WIDE) or (dtype in _NARROW_FLOATS and level >= ALL)
    )


def _are(kind: type[Placement], placements: Sequence[Placement]) -> bool:
    return all(isinstance(placement, kind) for placement in placements)


def _changed_axes(source: Layout, target: Layout) -> tuple[int, ...]:
    """Axes of more than one rank whose placements differ."""
    pairs = zip(source.placements, target.placements, strict=True)
    return tuple(
        axis for axis, (size, pair) in enumerate(zip(source.mesh_shape, pairs, strict=True)) if _differ(size, pair)
    )


def _differ(size: int, pair: tuple[Placement, Placement]) -> bool:
    return size > 1 and pair[0] != pair[1]


def _has_narrow_terms(source: Layout, target: Layout, axes: Sequence[int]) -> bool:
    """Whether terms are along axes of one rank, or new in the target, which a step completes in its own way."""
    narrow = {axis for axis, size in enumerate(source.mesh_shape) if size == 1}
    before, after = ({*layout.axes_where(Partial)} for layout in (source, target))
    return bool((before | after) & narrow or after & {*axes})


def _even_dim(cut: Layout, whole: Layout, axes: Sequence[int]) -> int | None:
    """The dim whose equal blocks lie with the ranks of each group in their order; None where there is no such dim.

    The blocks of a group make up what all its ranks hold under `whole`.
    """
    dims = {placement.dim for placement in (cut.placements[axis] for axis in axes) if isinstance(placement, Shard)}
    if len(dims) != 1:
        return None
    (dim,) = dims
    sizes = [cut.mesh_shape[axis] for axis in axes]
    for coordinate in cut.coordinates():
        number = position_of([coordinate[axis] for axis in axes], sizes)
        held = list(whole.region(coordinate))
        if len(held[dim]) != 1 or not all(held):
            return None
        ((start, end),) = held[dim]
        length, left = divmod(end - start, prod(sizes))
        held[dim] = ((start + number * length, start + (number + 1) * length),)
        if left or tuple(held) != tuple(cut.region(coordinate)):
            return None
    return dim


def _holds_alike(source: Layout, target: Layout) -> bool:
    """Whether every rank holds as much before as after, and something."""
    regions = ((source.region(each), target.region(each)) for each in source.coordinates())
    return all(before == after and all(before) for before, after in regions)


def _is_outer(layout: Layout, dim: int) -> bool:
    """Whether blocks along a dim lie one after the other in a dense local tensor, on every rank."""
    return all(prod(layout.local_shape(each)[:dim]) == 1 for each in layout.coordinates())

"""Collectives of NCCL that do what a step does, as values: which step is one, and which ones prices offer.

Only even layouts have one: every rank of the mesh holds a block of equal length, in the order of the ranks. Bytes are
those of a ring, and so as many as by messages of our own; what is saved are the pack, the unpack and the second step of
a sum. NCCL adds terms in an order that it chooses by size and machine; all ranks get the same bits of each sum, but not
those of coordinate order, and floats of 16 bits are rounded at every addition.
"""

from collections.abc import Sequence
from math import ceil, log2, prod
from typing import Literal, NamedTuple

from tritondt.sharding.layout import Layout
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
    """A collective of all ranks of a mesh.

    `numel` is the number of elements on the side that has all of them. Where `is_dense` is false these are cut along an
    inner dim and copied, before a reduce_scatter or after an all_gather. `divisor` divides the reduced sum.
    """

    kind: CollectiveKind
    num_ranks: int
    numel: int
    is_dense: bool = True
    op: ReduceOp | None = None
    divisor: int = 1

    @property
    def moved_elements(self) -> int:
        """Elements that each rank sends, and receives, in a ring."""
        passed = self.numel * (self.num_ranks - 1) // self.num_ranks
        return 2 * passed if self.kind == "all_reduce" else passed

    @property
    def num_hops(self) -> int:
        """Messages that follow one another until the last rank has all: in a ring, and for all_reduce in two trees.

        >>> Collective("all_gather", 8, 64).num_hops, Collective("all_reduce", 8, 64).num_hops
        (7, 6)
        """
        return 2 * ceil(log2(self.num_ranks)) if self.kind == "all_reduce" else self.num_ranks - 1


def collective_between(source: Layout, target: Layout) -> Collective | None:
    """Collective that takes a tensor from one layout to another on one mesh; None where there is none.

    >>> rows = Layout((4,), (Shard(0),), (8, 3))
    >>> collective_between(rows, rows.with_placements([Replicate()]))
    Collective(kind='all_gather', num_ranks=4, numel=24, is_dense=True, op=None, divisor=1)
    """
    num_ranks, wide = source.num_ranks, [axis for axis, size in enumerate(source.mesh_shape) if size > 1]
    if not 1 < num_ranks <= _MAX_RANKS or not source.numel or _has_narrow_terms(source, target, wide):
        return None
    before, after = ([layout.placements[axis] for axis in wide] for layout in (source, target))
    if _are(Shard, before) and _are(Replicate, after):
        dim = _even_dim(source, wide)
        return None if dim is None else Collective("all_gather", num_ranks, source.numel, _is_outer(source, dim))
    if not _are(Partial, before):
        return None
    ops = [placement.reduce_op for placement in before if isinstance(placement, Partial)]
    op: ReduceOp = "sum" if ops[0] == "avg" else ops[0]
    divisor = prod(source.mesh_shape[axis] for axis, each in zip(wide, ops, strict=True) if each == "avg")
    if _are(Replicate, after):
        return Collective("all_reduce", num_ranks, source.numel, op=op, divisor=divisor)
    dim = _even_dim(target, wide) if _are(Shard, after) else None
    if dim is None:
        return None
    return Collective("reduce_scatter", num_ranks, source.numel, _is_outer(target, dim), op, divisor)


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


def _has_narrow_terms(source: Layout, target: Layout, wide: Sequence[int]) -> bool:
    """Whether terms are along axes of one rank, or in the target, which a step completes in its own way."""
    terms = {*source.axes_where(Partial)} - {*wide}
    return bool(terms or target.axes_where(Partial))


def _even_dim(layout: Layout, wide: Sequence[int]) -> int | None:
    """The dim whose equal blocks lie with the ranks in their order; None where there is no such dim."""
    dims = {placement.dim for placement in (layout.placements[axis] for axis in wide) if isinstance(placement, Shard)}
    if len(dims) != 1:
        return None
    (dim,) = dims
    length, left = divmod(layout.shape[dim], layout.num_ranks)
    if left:
        return None
    for number, coordinate in enumerate(layout.coordinates()):
        if layout.intervals(dim, coordinate) != ((number * length, (number + 1) * length),):
            return None
    return dim


def _is_outer(layout: Layout, dim: int) -> bool:
    """Whether blocks along a dim lie one after the other in a dense tensor."""
    return prod(layout.shape[:dim]) == 1

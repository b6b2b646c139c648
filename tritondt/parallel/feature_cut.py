"""How a style cuts features or rows: in units, by listed sizes, evenly, or by groups that ranks share."""

from collections.abc import Sequence
from dataclasses import dataclass

from tritondt.errors import ParallelizeError
from tritondt.sharding.placement import Shard


@dataclass(frozen=True)
class FeatureCut:
    """The cut of a dim that a style asks for, whose lengths follow where the dim and the mesh are known.

    `sizes` are the lengths of the pieces in indices, one per rank. With `balanced` pieces are whole units, and the
    first ranks have one more where they do not divide: no rank goes without as long as there are as many units. With
    `groups` the dim is so many equal blocks; no rank has parts of two blocks, unless it has whole blocks only.

    >>> FeatureCut(unit=4, balanced=True).shard(0, 24, 4)
    S0(unit=4, sizes=8/8/4/4)
    >>> FeatureCut(unit=4, groups=2).shard(0, 24, 4)
    S0(unit=4, sizes=8/4/8/4)
    """

    unit: int = 1
    sizes: tuple[int, ...] | None = None
    balanced: bool = False
    repeats: int = 1
    groups: int | None = None

    def shard(self, dim: int, length: int, num_ranks: int) -> Shard:
        """The placement of a dim of `length` indices over `num_ranks`; Layout refuses one that the dim has not."""
        if self.groups is not None:
            return Shard(dim, self.unit, self._by_groups(self.groups, length, num_ranks))
        if not self.balanced:
            return Shard(dim, self.unit, self.sizes, self.repeats)
        num_units, left = divmod(length, self.unit * self.repeats)
        if left:
            blocks = "" if self.repeats == 1 else f" in {self.repeats} equal blocks"
            raise ParallelizeError(
                f"balanced=True cuts {length} features{blocks} into whole units of {self.unit}; allowed is a length "
                f"that {self.unit * self.repeats} divides"
            )
        return Shard(dim, self.unit, evenly(num_units, num_ranks, self.unit), self.repeats)

    def _by_groups(self, groups: int, length: int, num_ranks: int) -> tuple[int, ...]:
        num_units, left = divmod(length, self.unit * groups)
        if left:
            raise ParallelizeError(
                f"groups={groups} cuts {length} features into equal groups of whole units of {self.unit}; allowed is "
                f"a length that {self.unit * groups} divides"
            )
        if groups >= num_ranks:
            return evenly(groups, num_ranks, self.unit * num_units)
        members = evenly(num_ranks, groups)
        return tuple(size for num_members in members for size in evenly(num_units, num_members, self.unit))


def evenly(num_units: int, num_ranks: int, unit: int = 1) -> tuple[int, ...]:
    """Lengths of pieces of whole units, of which the first have one more where they do not divide.

    >>> evenly(6, 4, unit=4)
    (8, 8, 4, 4)
    """
    each, more = divmod(num_units, num_ranks)
    return tuple(unit * (each + (place < more)) for place in range(num_ranks))


def members_of_group(groups: int, num_ranks: int, rank: int) -> range:
    """Mesh ranks that share a group of features with `rank`; only itself where there are as many groups as ranks.

    >>> [members_of_group(2, 5, rank) for rank in (0, 3)]
    [range(0, 3), range(3, 5)]
    """
    first = 0
    for num_members in evenly(num_ranks, min(groups, num_ranks)):
        if rank < first + num_members:
            break
        first += num_members
    return range(first, first + num_members)


def feature_cut(
    unit: int, sizes: Sequence[int] | None, balanced: bool, repeats: int = 1, groups: int | None = None
) -> FeatureCut:
    """The cut of a style's arguments; ParallelizeError where two of them say how long pieces are."""
    if balanced and sizes is not None:
        raise ParallelizeError(f"sizes={tuple(sizes)} and balanced=True were given; allowed is one of them")
    if groups is not None and (balanced or sizes is not None or repeats != 1):
        others = f"sizes={sizes}, balanced={balanced} and repeats={repeats}"
        raise ParallelizeError(f"groups={groups} was given with {others}; allowed is groups with unit alone")
    if groups is not None and groups < 1:
        raise ParallelizeError(f"groups got {groups}; allowed is a number of at least 1")
    made = FeatureCut(unit, None if sizes is None else tuple(sizes), balanced, repeats, groups)
    Shard(0, unit, made.sizes, repeats)  # refuses numbers that no cut has
    return made

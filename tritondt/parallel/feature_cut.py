"""How a style cuts features or rows: in units, by listed sizes, or in pieces that differ by one unit at most."""

from collections.abc import Sequence
from dataclasses import dataclass

from tritondt.errors import ParallelizeError
from tritondt.sharding.placement import Shard


@dataclass(frozen=True)
class FeatureCut:
    """The cut of a dim that a style asks for, whose lengths follow where the dim and the mesh are known.

    `sizes` are the lengths of the pieces in indices, one per rank. With `balanced` pieces are whole units, and the
    first ranks have one more where they do not divide: no rank goes without as long as there are as many units.

    >>> FeatureCut(unit=4, balanced=True).shard(0, 24, 4)
    S0(unit=4, sizes=8/8/4/4)
    """

    unit: int = 1
    sizes: tuple[int, ...] | None = None
    balanced: bool = False
    repeats: int = 1

    def shard(self, dim: int, length: int, num_ranks: int) -> Shard:
        """The placement of a dim of `length` indices over `num_ranks`; Layout refuses one that the dim has not."""
        if not self.balanced:
            return Shard(dim, self.unit, self.sizes, self.repeats)
        num_units, left = divmod(length, self.unit * self.repeats)
        if left:
            blocks = "" if self.repeats == 1 else f" in {self.repeats} equal blocks"
            raise ParallelizeError(
                f"balanced=True cuts {length} features{blocks} into whole units of {self.unit}; allowed is a length "
                f"that {self.unit * self.repeats} divides"
            )
        each, more = divmod(num_units, num_ranks)
        sizes = tuple(self.unit * (each + (place < more)) for place in range(num_ranks))
        return Shard(dim, self.unit, sizes, self.repeats)


def feature_cut(unit: int, sizes: Sequence[int] | None, balanced: bool, repeats: int = 1) -> FeatureCut:
    """The cut of a style's arguments; ParallelizeError where `sizes` and `balanced` are both given."""
    if balanced and sizes is not None:
        raise ParallelizeError(f"sizes={tuple(sizes)} and balanced=True were given; allowed is one of them")
    made = FeatureCut(unit, None if sizes is None else tuple(sizes), balanced, repeats)
    Shard(0, unit, made.sizes, repeats)  # refuses numbers that no cut has
    return made

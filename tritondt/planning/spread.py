"""Spread of a figure over all ranks: least, mean and most."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Least, mean and most of a figure over all ranks, the sum, and the first rank that has the most."""

    least: int
    mean: float
    most: int
    total: int
    most_on: int

    @classmethod
    def of(cls, values: Sequence[int]) -> "Spread":
        """Spread of one value per rank.

        >>> Spread.of([4, 0, 8])
        Spread(least=0, mean=4.0, most=8, total=12, most_on=2)
        """
        most = max(values)
        return cls(min(values), sum(values) / len(values), most, sum(values), values.index(most))

"""The search: one choice for each part of a model, the cheapest of all together under a bound of memory.

Costs of choices add up, as each begins and ends with whole activations. So the sums of the choices made so far, of
which none is worse in all respects than another, are all that the rest of a search needs to know.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tritondt.found_plan.candidates import Candidate

# Sums that are kept at a time; a search that drops any says so.
MOST_KEPT = 2000


class Cost(NamedTuple):
    """Costs that one choice adds to a step of a rank: seconds, bytes received, of parameters, kept for backward."""

    seconds: float = 0.0
    received_bytes: int = 0
    parameter_bytes: int = 0
    kept_bytes: int = 0

    def plus(self, other: "Cost") -> "Cost":
        """The sum of two costs."""
        return Cost(
            self.seconds + other.seconds,
            self.received_bytes + other.received_bytes,
            self.parameter_bytes + other.parameter_bytes,
            self.kept_bytes + other.kept_bytes,
        )

    def times(self, number: int) -> "Cost":
        """The cost of so many alike."""
        held = number * self.parameter_bytes, number * self.kept_bytes
        return Cost(number * self.seconds, number * self.received_bytes, *held)

    def is_worse(self, other: "Cost") -> bool:
        """Whether another is as good in all respects."""
        return all(its <= own for own, its in zip(self, other, strict=True))


class Priced(NamedTuple):
    """A candidate, with what it adds for all modules that are alike."""

    candidate: Candidate
    cost: Cost


class Chosen(NamedTuple):
    """Candidates that exclude each other nowhere, and the sum of their costs."""

    candidates: tuple[Candidate, ...]
    cost: Cost


def frontier(priced: Sequence[Priced]) -> tuple[list[Chosen], bool]:
    """Choices of which no other is as good in all respects, and whether all were looked at.

    Two candidates that name one module exclude each other. Exact as long as `MOST_KEPT` sums suffice.

    >>> from tritondt.found_plan.style_choice import WHOLE
    >>> one, two = (Candidate(label, (("up", WHOLE),)) for label in ("one", "two"))
    >>> found, is_exact = frontier([Priced(one, Cost(-2.0, 5)), Priced(two, Cost(-1.0, 9))])
    >>> [[each.label for each in chosen.candidates] for chosen in found], is_exact
    ([['one'], []], True)
    """
    kept, is_exact = [Chosen((), Cost())], True
    remaining = _last_uses(priced)
    for place, item in enumerate(priced):
        added = [
            Chosen((*chosen.candidates, item.candidate), chosen.cost.plus(item.cost))
            for chosen in kept
            if all(item.candidate.names.isdisjoint(each.names) for each in chosen.candidates)
        ]
        kept = _undominated([*kept, *added], remaining[place])
        if len(kept) > MOST_KEPT:
            kept, is_exact = sorted(kept, key=lambda chosen: chosen.cost)[:MOST_KEPT], False
    return sorted(kept, key=lambda chosen: chosen.cost), is_exact


def _last_uses(priced: Sequence[Priced]) -> list[frozenset[str]]:
    """After each candidate, the names that later ones have."""
    found, later = [], frozenset[str]()
    for item in reversed(priced):
        found.append(later)
        later |= item.candidate.names
    return found[::-1]


def _undominated(listed: Iterable[Chosen], later: frozenset[str]) -> list[Chosen]:
    """Choices of which none is worse than one that leaves as many modules to later candidates."""
    by_taken: dict[frozenset[str], list[Chosen]] = {}
    for chosen in sorted(listed, key=lambda each: each.cost):
        taken = frozenset(name for each in chosen.candidates for name in each.names) & later
        others = by_taken.setdefault(taken, [])
        if not any(chosen.cost.is_worse(other.cost) for other in others):
            others.append(chosen)
    return [chosen for others in by_taken.values() for chosen in others]


def best(
    listed: Sequence[Chosen], key: Callable[[Chosen], tuple[float, ...]], fits: Callable[[Chosen], bool]
) -> Chosen | None:
    """The choice of the least key among those that fit; None where none does."""
    fitting = [chosen for chosen in listed if fits(chosen)]
    return min(fitting, key=key) if fitting else None

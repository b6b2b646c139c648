"""Lengths that a graph of torch.compile leaves open, in place of ints; what is known of them, without importing torch.

A length left open is a SymInt. Arithmetic gives other such lengths; a comparison gives what holds for the value at
hand, and a guard by which torch compiles anew where it does not.
"""

from collections.abc import Iterable
from typing import Any


def are_open(lengths: Iterable[Any]) -> bool:
    """Whether any length is left open."""
    for length in lengths:  # noqa: SIM110  a generator takes twice as long, for every spec
        if not isinstance(length, int):
            return True
    return False


def settled(length: Any) -> Any:
    """The int that a length is known to be, else the length itself."""
    if isinstance(length, int):
        return length
    found = length.node.maybe_as_int()
    return length if found is None else found


def hint_of(length: Any) -> int:
    """The value at hand of a length, without a guard: for what may be better or worse, but not wrong."""
    return length if isinstance(length, int) else int(length.node.hint)


def has_hint(length: Any) -> bool:
    """Whether there is a value at hand."""
    return isinstance(length, int) or bool(length.node.has_hint())


def least(first: Any, second: Any) -> Any:
    """The smaller of two lengths, left open where one of them is."""
    if isinstance(first, int) and isinstance(second, int):
        return min(first, second)
    return second.__sym_min__(first) if isinstance(first, int) else first.__sym_min__(second)

"""The communicators of this process, and functions that are told of new ones.

They are a recording's, which hides methods of each communicator with its own, so that an exchange asks nothing.
"""

from abc import ABCMeta
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

made: WeakSet[Any] = WeakSet()
on_made: list[Callable[[Any], object]] = []


class Announced(ABCMeta):
    """The class of classes whose objects are told of when they are whole, whatever class they are of.

    >>> on_made.append(print)
    >>> class Parity(metaclass=Announced):
    ...     def __init__(self, number):
    ...         self.number = number
    >>> class Even(Parity):
    ...     def __repr__(self):
    ...         return f"{self.number} is made"
    >>> made_now = Even(2)
    2 is made
    >>> on_made.remove(print)
    """

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        """A new object, of which those who want to know have been told."""
        found = super().__call__(*arguments, **named)
        made.add(found)
        for hook in on_made:
            hook(found)
        return found

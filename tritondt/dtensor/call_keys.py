"""Arguments of a call besides its distributed tensors: their part of a signature's key, and numbers of graphs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

_NUMBERS = (int, float, complex)
# Numbers that a graph leaves open have no hash; what they are where they are known.
_SYMBOLS: Mapping[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
OPEN_NUMBERS = tuple(_SYMBOLS)


def value_of(argument: Any) -> Any:
    """A number in place of one that a graph leaves open, for which the graph then holds; others as they are."""
    return _SYMBOLS[type(argument)](argument) if isinstance(argument, OPEN_NUMBERS) else argument


def plain_key(argument: Any, by_value: bool) -> Sequence[Any]:
    """The part of a key for an argument that is no distributed tensor."""
    if argument is None or isinstance(argument, bool):
        return (argument,)
    if isinstance(argument, torch.Tensor):
        return torch.Tensor, argument.dtype, argument.shape
    if isinstance(argument, _NUMBERS):
        return (type(argument), argument) if by_value else (type(argument),)
    if isinstance(argument, OPEN_NUMBERS):
        return ([],)  # has no hash; that of a SymFloat is its value's, for which the graph would hold
    return type(argument), argument


def flat(arguments: Sequence[Any]) -> Iterator[Any]:
    """The arguments, with the items of lists in place of these."""
    return chain.from_iterable(
        flat(argument) if isinstance(argument, list | tuple) else (argument,) for argument in arguments
    )

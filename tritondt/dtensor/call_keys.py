"""Arguments of a call besides its distributed tensors: their part of a signature's key, and numbers of graphs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

_NUMBERS = (int, float, complex)
# Numbers that a graph leaves open have no hash; what they are where they are known.
_SYMBOLS: Mapping[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def is_symbolic(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a graph leaves a number among the arguments open."""
    return any(isinstance(item, tuple(_SYMBOLS)) for item in flat((*args, *kwargs.values())))


def with_values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments with values in place of numbers that a graph leaves open; the graph then holds for these values."""
    return [*map(_with_value, args)], {name: _with_value(argument) for name, argument in kwargs.items()}


def _with_value(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [_with_value(item) for item in argument]
    for symbol, number in _SYMBOLS.items():
        if isinstance(argument, symbol):
            return number(argument)
    return argument


def plain_key(argument: Any, by_value: bool) -> Sequence[Any]:
    """The part of a key for an argument that is no distributed tensor."""
    if argument is None or isinstance(argument, bool):
        return (argument,)
    if isinstance(argument, torch.Tensor):
        return torch.Tensor, argument.dtype, argument.shape
    if isinstance(argument, _NUMBERS):
        return (type(argument), argument) if by_value else (type(argument),)
    return type(argument), argument


def flat(arguments: Sequence[Any]) -> Iterator[Any]:
    """The arguments, with the items of lists in place of these."""
    return chain.from_iterable(
        flat(argument) if isinstance(argument, list | tuple) else (argument,) for argument in arguments
    )

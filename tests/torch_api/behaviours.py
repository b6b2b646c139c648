"""What the docstrings of torch.distributed.tensor describe, and a registry of tests of it under the same names.

A behaviour is the summary of a public function or class, one of its arguments, what it returns, or a note. A test is a
function of one of 4 thread ranks; `behaviour` says of which function and which of these it is.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed.tensor as reference
import torch.distributed.tensor.experimental as experimental_reference
import torch.distributed.tensor.parallel as parallel_reference

NUM_RANKS = 4
_SECTION = re.compile(r"\s*(Args|Arguments|Keyword args|Keyword Args|Returns|Return)::?\s*$")
_NOTE = re.compile(r"\s*\.\. (note|warning)::")
_ARGUMENT = re.compile(r"(\w+)\s*(\(.*\))?:")


class Behaviour(NamedTuple):
    """A test of some behaviours of one function."""

    function: str
    items: tuple[str, ...]
    run: Callable[[int], None]

    def __str__(self) -> str:
        return f"{self.function}-{'+'.join(self.items)}"


_REGISTERED: list[Behaviour] = []


def behaviour(function: str, *items: str) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    """Registers a test of behaviours of a function of torch's."""

    def register(run: Callable[[int], None]) -> Callable[[int], None]:
        _REGISTERED.append(Behaviour(function, items, run))
        return run

    return register


def behaviours_of(module: str) -> list[Behaviour]:
    """Tests that a module has registered."""
    return [found for found in _REGISTERED if found.run.__module__ == module]


def with_tests() -> set[tuple[str, str]]:
    """Functions and items that have a test."""
    return {(found.function, item) for found in _REGISTERED for item in found.items}


def documented(*more: ModuleType) -> list[tuple[str, str]]:
    """Functions and items that torch's docstrings describe, in public modules and in `more`."""
    found = []
    for module in (reference, parallel_reference, experimental_reference, *more):
        for name in sorted(set(module.__all__)):
            for full_name, value in _with_members(name, getattr(module, name)):
                found += [(full_name, item) for item in _items(inspect.getdoc(value) or "")]
    return list(dict.fromkeys(found))


def _with_members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if inspect.isclass(value):
        for member, described in vars(value).items():
            is_described = isinstance(described, (property, staticmethod, classmethod)) or callable(described)
            if not member.startswith("_") and is_described:
                yield f"{name}.{member}", getattr(value, member)


def _items(text: str) -> Iterator[str]:
    if text:
        yield "summary"
    section, indent, num_notes = "", -1, 0
    for line in text.splitlines():
        found = _SECTION.match(line)
        if found:
            section, indent = found.group(1), -1
            if section.startswith("Return"):
                yield "returns"
        elif _NOTE.match(line):
            num_notes += 1
            yield f"note {num_notes}"
            section = ""
        elif section and not section.startswith("Return") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent < 0 else indent
            argument = _ARGUMENT.match(line.strip())
            if depth == indent and argument:
                yield argument.group(1)

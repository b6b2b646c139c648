"""Parameters of several modules: whether a plan cuts them alike, and whether they are one when it is applied."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError
from tritondt.sharding.placement import Placement, placements_text


class User(NamedTuple):
    """A module that has a parameter, the parameter's name in it, and its dotted name in the tree."""

    module: nn.Module
    key: str
    name: str


def ties_of(root: nn.Module) -> list[list[User]]:
    """Users of every plain parameter that several modules of the tree have."""
    users: dict[int, list[User]] = {}
    for name, module in root.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                users.setdefault(id(parameter), []).append(User(module, key, f"{name}.{key}".lstrip(".")))
    return [shared for shared in users.values() if len(shared) > 1]


def check_planned(
    ties: Sequence[Sequence[User]], placements: Mapping[int, Mapping[str, Placement]], unknown: set[int]
) -> None:
    """Refuses a parameter of two modules that would not be cut alike in both.

    `placements` are those of the modules, by id, whose styles say them; `unknown` are modules whose styles do not.
    """
    for shared in ties:
        planned = [
            (
                user.name,
                str(placements[id(user.module)].get(user.key)) if id(user.module) in placements else "not at all",
            )
            for user in shared
            if id(user.module) not in unknown
        ]
        other = next((found for found in planned if found[1] != planned[0][1]), None)
        if other is not None:
            raise ParallelizeError(
                f"{planned[0][0]} and {other[0]} are one parameter, and the plan cuts the first "
                f"{_cut_text(planned[0][1])} and the second {_cut_text(other[1])}; allowed are styles that cut both "
                "alike, or copies that are not tied"
            )


def check_applied(ties: Sequence[Sequence[User]]) -> None:
    """Refuses what styles have made of a parameter of two modules, where that is two parameters now."""
    for shared in ties:
        found = [(user.name, user.module._parameters.get(user.key)) for user in shared]
        held = [(name, parameter) for name, parameter in found if parameter is not None]
        other = next((each for each in held if each[1] is not held[0][1]), None)
        if other is not None:
            raise ParallelizeError(
                f"{held[0][0]} and {other[0]} were one parameter, and the styles of the plan have made two of it: the "
                f"first is {_layout_text(held[0][1])} now and the second {_layout_text(other[1])}, so that they would "
                "be trained apart; allowed are styles that give both modules one parameter, or copies that are not tied"
            )


def _cut_text(planned: str) -> str:
    return planned if planned == "not at all" else f"as {planned}"


def _layout_text(parameter: nn.Parameter) -> str:
    if isinstance(parameter, DTensor):
        return f"distributed as {placements_text(parameter._spec.placements)}"
    return f"a plain {type(parameter.data).__name__}"

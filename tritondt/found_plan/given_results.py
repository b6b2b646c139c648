"""Results of modules that do not run without values, given by hand: their shapes and dtypes, by pattern of name."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tritondt.errors import ArgumentError
from tritondt.found_plan.attention_heads import matches


class GivenResults(NamedTuple):
    """Results of the modules of one pattern: shape and dtype's name of each tensor, and whether they are a tuple."""

    pattern: str
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    is_tuple: bool

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> "GivenResults":
        """The results that were written as a list.

        >>> given = GivenResults("gate", (((3, 4), "float32"),), is_tuple=False)
        >>> GivenResults.from_json(["gate", [[[3, 4], "float32"]], False]) == given
        True
        """
        pattern, tensors, is_tuple = found
        return cls(pattern, tuple((tuple(shape), dtype) for shape, dtype in tensors), is_tuple)


def given_results(model: nn.Module, results: Mapping[str, Any] | None) -> tuple[GivenResults, ...]:
    """Results by pattern as values; ArgumentError for patterns of no module, and for what is no tensor.

    >>> given_results(nn.Sequential(nn.Linear(2, 3)), {"0": torch.empty(4, 3)})
    (GivenResults(pattern='0', tensors=(((4, 3), 'float32'),), is_tuple=False),)
    """
    names, found = [name for name, _ in model.named_modules() if name], []
    for pattern, result in (results or {}).items():
        if not any(matches(name, pattern) for name in names):
            raise ArgumentError(
                f"module_results names {pattern!r}, and {type(model).__name__} has no such module inside; allowed are "
                "names of its modules, with * for an index"
            )
        listed = list(result) if isinstance(result, tuple | list) else [result]
        others = [each for each in listed if not isinstance(each, torch.Tensor)]
        if others or not listed:
            raise ArgumentError(
                f"module_results has {others[0] if others else result!r} for {pattern!r}; allowed are a tensor, whose "
                "values do not count, or a tuple of tensors, as forward returns"
            )
        tensors = tuple((tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in listed)
        found.append(GivenResults(pattern, tensors, isinstance(result, tuple | list)))
    return tuple(found)


def answer_by_hand(model: nn.Module, given: Sequence[GivenResults]) -> None:
    """Has the modules of a stand-in give results of these shapes, in place of their forward."""
    for each in given:
        for name, module in model.named_modules():
            if matches(name, each.pattern):
                module.__dict__["forward"] = _GivenForward(module, each)


def is_answered(module: nn.Module) -> bool:
    """Whether a module gives results by hand.

    >>> is_answered(nn.Linear(2, 2))
    False
    """
    return isinstance(vars(module).get("forward"), _GivenForward)


class _GivenForward:
    """Forward that gives tensors of some shapes, of which what it takes in and all parameters get gradients."""

    def __init__(self, module: nn.Module, given: GivenResults) -> None:
        self.module, self.given = module, given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results, as one tensor or a tuple."""
        taken = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        found = _Given.apply(self.given.tensors, *taken, *self.module.parameters())  # type: ignore[no-untyped-call]
        return found if self.given.is_tuple else found[0]


class _Given(torch.autograd.Function):
    """Tensors of some shapes, made of others as far as autograd knows."""

    @staticmethod
    def forward(ctx: Any, tensors: Any, *taken: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """New tensors; those of integers have no gradients."""
        ctx.save_for_backward(*taken)
        found = tuple(torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") for shape, dtype in tensors)
        ctx.mark_non_differentiable(*(each for each in found if not each.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Gradients of the shapes of what was taken in."""
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return (None, *(torch.empty_like(each) if wanted else None for each, wanted in needed))

"""Operators by equation: one line says which indices of which tensors may be cut, and which results follow.

    "nc..,oc..->no.."       a letter is one index: it may be cut, in all tensors that have it alike
    "*..->*..,*"            a dot is a dim that must be whole; a star is any number of leading dims that broadcast
    "nk,ok,+o->no"          a tensor with + is added: where the result is terms of a sum, so is it
    "*..->*.,-"             a result - is the same whatever is cut

Where a letter is missing in a result every rank has a term of it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagation.homomorphisms import Passing, term_strategies
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.ops.rules.empty_shards import empty_shard_result
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten


class Term(NamedTuple):
    """One tensor of an equation: its indices after the leading ones, "." for those that must be whole."""

    indices: str
    is_batched: bool
    is_added: bool

    def num_leading(self, ndim: int) -> int:
        """Number of leading dims that a tensor of `ndim` dims has."""
        return ndim - len(self.indices) if self.is_batched else 0


@lru_cache(maxsize=1024)
def parse_equation(equation: str) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """The terms of the arguments and of the results.

    >>> parse_equation("*..->*.")
    ((Term(indices='..', is_batched=True, is_added=False),), (Term(indices='.', is_batched=True, is_added=False),))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        raise PropagationError(f"the equation {equation!r} is not understood: '->' is missing")
    inputs, outputs = (tuple(map(_term, side.split(","))) for side in (left, right))
    return inputs, outputs


# A result that none of the indices reach: empty where it is not asked for, or the same whatever is cut.
UNINDEXED = Term("-", False, False)


def _term(text: str) -> Term:
    if text == "-":
        return UNINDEXED
    indices = text.lstrip("+").removeprefix("*")
    letters = indices.replace(".", "")
    if (letters and not letters.isalpha()) or len(set(letters)) < len(letters):
        raise PropagationError(
            f"the term {text!r} is not understood; allowed are '+', then '*', then dots and letters, no letter twice"
        )
    return Term(indices, "*" in text, text.startswith("+"))


def equation_strategies(equation: str, tensors: Sequence[DTensorSpec | None]) -> list[AxisStrategy]:
    """Strategies of an equation: one per index that may be cut, and the replicated one last.

    `tensors` are those that the operator declares, None where one was not given.
    """
    inputs, outputs = parse_equation(equation)
    given = [(term, spec) for term, spec in zip(inputs, tensors, strict=True) if spec is not None]
    found = [_of_letter(letter, given, outputs) for letter in _letters(given)]
    found += _of_leading_dims(given, outputs)
    whole: tuple[Placement, ...] = (Replicate(),) * len(given)
    return [*found, AxisStrategy(whole, (Replicate(),) * len(outputs))]


def equation_terms(schema: OpSchema, equation: str, passing: Sequence[Passing]) -> list[AxisStrategy]:
    """Strategies in which terms pass a call with this equation: places are those of the tensors that it declares.

    An added argument is terms where the result is.
    """
    inputs, _ = parse_equation(equation)
    given = [place for place, spec in enumerate(declared_tensors(schema)) if spec is not None]
    added = [place for place in given if inputs[place].is_added]
    of_call = []
    for homomorphism, places in passing:
        together = [number for number, place in enumerate(given) if place in places or place in added]
        if together:
            of_call.append(homomorphism.at(*together))
    return term_strategies(schema, of_call)


def _letters(given: Sequence[tuple[Term, DTensorSpec]]) -> list[str]:
    return list(dict.fromkeys(letter for term, _ in given for letter in term.indices if letter != "."))


def _of_letter(letter: str, given: Sequence[tuple[Term, DTensorSpec]], outputs: Sequence[Term]) -> AxisStrategy:
    """The strategy that cuts one index; results have as many leading dims as the argument that has the most."""
    leading = max(term.num_leading(spec.ndim) for term, spec in given)

    def of_result(term: Term) -> Placement:
        if term is UNINDEXED:
            return Replicate()
        place = term.indices.find(letter)
        return Partial() if place < 0 else Shard(place + (leading if term.is_batched else 0))

    results = tuple(map(of_result, outputs))
    is_sum = any(isinstance(placement, Partial) for placement in results)

    def of_argument(term: Term, spec: DTensorSpec) -> Placement:
        place = term.indices.find(letter)
        if place >= 0:
            return Shard(place + term.num_leading(spec.ndim))
        return Partial() if is_sum and term.is_added else Replicate()

    return AxisStrategy(tuple(of_argument(term, spec) for term, spec in given), results)


def _of_leading_dims(given: Sequence[tuple[Term, DTensorSpec]], outputs: Sequence[Term]) -> list[AxisStrategy]:
    """The strategies that cut a leading dim: where an argument has length 1 it serves all pieces."""
    leading = max(term.num_leading(spec.ndim) for term, spec in given)
    found = []
    for dim in range(leading):
        places = [dim - leading + term.num_leading(spec.ndim) for term, spec in given]
        lengths = [spec.shape[place] for place, (_, spec) in zip(places, given, strict=True) if place >= 0]
        longest = next((length for length in lengths if length != 1), 1)
        inputs = tuple(
            Shard(place) if place >= 0 and spec.shape[place] == longest else Replicate()
            for place, (_, spec) in zip(places, given, strict=True)
        )
        results = tuple(
            Replicate() if term is UNINDEXED else Shard(dim) if term.is_batched else Partial() for term in outputs
        )
        found.append(AxisStrategy(inputs, results))
    return found


def declared_tensors(schema: OpSchema) -> list[DTensorSpec | None]:
    """The tensors that the operator declares, in order, None where one was not given."""
    found: list[DTensorSpec | None] = []
    for place, declared in enumerate(schema.op._schema.arguments):
        if str(declared.type) in ("Tensor", "Optional[Tensor]"):
            argument = schema.argument(place, declared.name)
            found.append(argument if isinstance(argument, DTensorSpec) else None)
    return found


def register_equation(
    name: str,
    equation: str | Callable[[OpSchema], str],
    *,
    passing: Sequence[Passing] = (),
    sizes: str | None = None,
) -> None:
    """Registers the operator `aten.name` by its equation, or by a function that gives the equation of a call.

    `passing` says which of its tensors may be terms. `sizes` names the argument that holds the sizes of the first
    result; a rank's call gets the local sizes there. An operator that this torch does not have is left out.
    """
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet, None), overload or "default", None)
    if op is None:
        return

    def strategy(schema: OpSchema) -> list[AxisStrategy]:
        text = equation if isinstance(equation, str) else equation(schema)
        return [*equation_strategies(text, declared_tensors(schema)), *equation_terms(schema, text, passing)]

    def localize(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
        return empty_shard_result(schema, outputs) or (None if sizes is None else with_local_sizes(op, sizes, outputs))

    propagator.set_strategy(op, strategy, localize=localize)


def with_local_sizes(op: OpOverload, name: str, outputs: OutputSpecs) -> LocalOp | None:
    """The operator with the local sizes of its first result in place of its argument `name`."""
    first = outputs if isinstance(outputs, DTensorSpec) or outputs is None else outputs[0]
    if first is None or first.local_shape == first.shape:
        return None
    place = [argument.name for argument in op._schema.arguments].index(name)
    shape, run = list(first.local_shape), op._op

    def resized(*args: Any, **options: Any) -> Any:
        if place >= len(args):
            return run(*args, **{**options, name: shape})
        return run(*args[:place], shape, *args[place + 1 :], **options)

    return resized

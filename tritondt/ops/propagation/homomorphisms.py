"""Homomorphisms: which reductions an operator commutes with, so that terms of a Partial may pass through it.

An operator f, as a function of some of its arguments while the others are whole, may run on terms where
f(reduce(terms)) = reduce(f(terms)). Whether it may depends on three things, and this file is the one place that
combines them: the algebra of f (`Homomorphism`, which strategies name), the reduce op, and the dtypes of terms and
results (`converts`). Ints wrap around, so for them equal means equal; for floats it means up to the rounding that the
terms have already.
"""

from collections.abc import Collection, Iterable, Sequence
from math import isfinite, prod
from typing import NamedTuple

import torch

from tritondt.ops.propagation.schema import AxisStrategy, OpSchema
from tritondt.ops.propagation.tensor_meta import propagate_tensor_meta
from tritondt.sharding.placement import REDUCE_OPS, ElementKind, Partial, Placement, ReduceOp, Replicate
from tritondt.sharding.spec import DTensorSpec, TensorMeta, element_kind, has_reduction

_SUMS: tuple[ReduceOp, ...] = ("sum", "avg")
_KINDS: tuple[ElementKind, ...] = ("float", "complex", "int", "bool")
_FIELDS: tuple[ElementKind, ...] = ("float", "complex")


class Homomorphism(NamedTuple):
    """Reductions that a function commutes with, and the kinds of elements for which it does."""

    reduce_ops: tuple[ReduceOp, ...]
    kinds: tuple[ElementKind, ...] = _KINDS

    def at(self, *places: int) -> "Passing":
        """This homomorphism of the tensor arguments at `places`, all of them together."""
        return Passing(self, places)

    def passes(self, reduce_op: ReduceOp, specs: Iterable[DTensorSpec], results: Collection[torch.dtype]) -> bool:
        """Whether the arguments of `specs` may be terms of a reduction, and results of these dtypes terms of it too."""
        if reduce_op not in self.reduce_ops or any(element_kind(dtype) not in self.kinds for dtype in results):
            return False
        return all(self._passes_one(reduce_op, spec, dtype) for spec in specs for dtype in results)

    def _passes_one(self, reduce_op: ReduceOp, spec: DTensorSpec, result: torch.dtype) -> bool:
        if not (has_reduction(reduce_op, spec.dtype) and has_reduction(reduce_op, result)):
            return False
        if reduce_op not in ("max", "min") and not any(isinstance(p, Partial) for p in spec.placements):
            return True  # becomes one term, beside terms of 0 or 1
        return element_kind(spec.dtype) in self.kinds and converts(reduce_op, spec.dtype, result)


class Passing(NamedTuple):
    """A homomorphism of some arguments: places among the tensors that a call is given, which are terms together."""

    homomorphism: Homomorphism
    places: tuple[int, ...]


# Every element of the result is an element of the argument, or 0.
SELECTIVE = Homomorphism(REDUCE_OPS)
# f(a + b) = f(a) + f(b), in ints that wrap around too.
ADDITIVE = Homomorphism(_SUMS)
# Additive where numbers can be divided: ints are rounded after a division, a term at a time.
LINEAR = Homomorphism(_SUMS, _FIELDS)
# f(a * b) = f(a) * f(b).
MULTIPLICATIVE = Homomorphism(("product",))
# Complex conjugation: additive and multiplicative.
CONJUGATE = Homomorphism((*_SUMS, "product"))
# The largest or smallest of several elements; of bools, whether any or all are true.
LARGEST, SMALLEST = Homomorphism(("max",)), Homomorphism(("min",))
ANY, ALL = Homomorphism(("max",), ("bool",)), Homomorphism(("min",), ("bool",))
# x + c: increasing, and affine. An int would wrap around, and be no longer the largest.
SHIFT = Homomorphism(("avg", "max", "min"), ("float", "complex", "bool"))
# x <= y makes f(x) <= f(y), and a nan stays one: f of the largest term is the largest of f's.
INCREASING = Homomorphism(("max", "min"), ("float", "int"))
# Constants at some elements, whatever the terms are.
_CONSTANT = Homomorphism(("avg", "max", "min"))
_FAR_CONSTANT = Homomorphism(("max", "min"))
# Bits of elements: nothing passes.
NONE = Homomorphism(())


def filling(value: complex, spec: DTensorSpec) -> Homomorphism:
    """The homomorphism that writes `value` to some elements: 0 is the reduction of zeros, whatever the op.

    Any value is the largest and the smallest of itself, and the mean where the sum of all terms is finite: masks fill
    with the lowest float, twice which is none.
    """
    if value == 0:
        return SELECTIVE
    dtype, size = spec.dtype.to_real(), abs(value)
    if dtype.is_floating_point and isfinite(size):
        wide = torch.promote_types(dtype, torch.float32)
        if size * prod(spec.mesh.shape) > torch.finfo(wide).max:
            return _FAR_CONSTANT
    return _CONSTANT


def converts(reduce_op: ReduceOp, source: torch.dtype, result: torch.dtype) -> bool:
    """Whether terms may become another dtype one by one, for what their reduction would have become.

    Sums and products: ints that become no longer wrap around alike, floats that become no shorter lose nothing. An
    extreme: every conversion that keeps the order, so a rounding too.

    >>> converts("sum", torch.bfloat16, torch.float32), converts("sum", torch.float32, torch.bfloat16)
    (True, False)
    >>> converts("max", torch.float32, torch.bfloat16), converts("sum", torch.int8, torch.int32)
    (True, False)
    """
    if source is result:
        return True
    kinds = element_kind(source), element_kind(result)
    if reduce_op in ("max", "min"):
        if kinds == ("int", "int"):
            return torch.promote_types(source, result) is result
        return kinds in (("float", "float"), ("int", "float"), ("bool", "int"), ("bool", "float"))
    if kinds == ("int", "int"):
        return result.itemsize <= source.itemsize
    if "int" in kinds or "bool" in kinds or (kinds == ("complex", "float") and reduce_op == "product"):
        return False
    return torch.promote_types(source.to_real(), result.to_real()) is result.to_real()


def partials_of(specs: Iterable[DTensorSpec]) -> list[Partial]:
    """The Partial placements that any argument has."""
    return list(dict.fromkeys(p for spec in specs for p in spec.placements if isinstance(p, Partial)))


def term_strategies(
    schema: OpSchema, passing: Sequence[Passing], *, whole_results: Sequence[int] = ()
) -> list[AxisStrategy]:
    """Strategies in which terms pass: arguments at a Passing's places are terms, the others whole, results are terms.

    Results at `whole_results` do not depend on the terms. Empty where no argument is Partial.
    """
    specs = schema.args_spec
    partials = partials_of(specs)
    if not partials or not passing:
        return []
    dtypes = _result_dtypes(schema)
    kept = [dtype for place, dtype in enumerate(dtypes) if dtype is not None and place not in whole_results]
    return passing_strategies(specs, passing, kept, len(dtypes), whole_results)


def passing_strategies(
    specs: Sequence[DTensorSpec],
    passing: Sequence[Passing],
    dtypes: Collection[torch.dtype],
    num_results: int,
    whole_results: Sequence[int] = (),
) -> list[AxisStrategy]:
    """The strategies of `term_strategies` for arguments of `specs` and, of results that are terms, these `dtypes`."""
    found = []
    for partial in partials_of(specs):
        for homomorphism, places in passing:
            if not homomorphism.passes(partial.reduce_op, [specs[place] for place in places], dtypes):
                continue
            inputs = tuple(partial if place in places else Replicate() for place in range(len(specs)))
            outputs: tuple[Placement, ...] = tuple(
                Replicate() if place in whole_results else partial for place in range(num_results)
            )
            found.append(AxisStrategy(inputs, outputs))
    return found


def _result_dtypes(schema: OpSchema) -> list[torch.dtype | None]:
    metas = propagate_tensor_meta(schema)
    several = [metas] if isinstance(metas, TensorMeta) else metas or []
    return [None if meta is None else meta.dtype for meta in several]

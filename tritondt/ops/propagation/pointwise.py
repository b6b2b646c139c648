"""Elementwise operators with broadcasting.

A dim may be sharded wherever an argument is; terms pass as `_PASSING` says.
"""

from collections.abc import Mapping, Sequence

import torch
from torch._ops import OpOverload

from tritondt.ops.propagation.homomorphisms import (
    ADDITIVE,
    CONJUGATE,
    INCREASING,
    LARGEST,
    LINEAR,
    SELECTIVE,
    SHIFT,
    SMALLEST,
    Passing,
    partials_of,
    term_strategies,
)
from tritondt.ops.propagation.schema import AxisStrategy, OpSchema
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, element_kind

aten = torch.ops.aten

# Of an operator and of its forms that write to an argument or take lists: which arguments may be terms together.
_PASSING: Mapping[str, tuple[Passing, ...]] = {
    **dict.fromkeys(("neg", "real", "imag"), (ADDITIVE.at(0),)),
    **dict.fromkeys(("positive", "clone", "zero"), (SELECTIVE.at(0),)),
    "conj_physical": (CONJUGATE.at(0),),
    "mul": (ADDITIVE.at(0), ADDITIVE.at(1)),
    "div": (LINEAR.at(0),),
    "copy": (SELECTIVE.at(0, 1),),
    "where": (SELECTIVE.at(1, 2),),
    "lerp": (LINEAR.at(0, 1),),
    "complex": (ADDITIVE.at(0, 1),),
    **dict.fromkeys(("maximum", "clamp_min"), (INCREASING.at(0), INCREASING.at(1), LARGEST.at(0, 1))),
    **dict.fromkeys(("minimum", "clamp_max"), (INCREASING.at(0), INCREASING.at(1), SMALLEST.at(0, 1))),
    **dict.fromkeys(("logaddexp", "logaddexp2"), (INCREASING.at(0), INCREASING.at(1))),
    # Not those that make a number of a nan, as sign and nan_to_num do: another term is the largest then.
    **dict.fromkeys(
        (
            *("asinh", "atan", "ceil", "deg2rad", "erf", "exp", "exp2", "expm1", "floor", "rad2deg", "relu", "round"),
            *("sigmoid", "sinh", "tanh", "trunc"),
        ),
        (INCREASING.at(0),),
    ),
}
# x <= y makes f(x) >= f(y): f of the largest term is the smallest of f's.
_DECREASING = ("neg", "erfc")
_MIRRORED = {"max": Partial("min"), "min": Partial("max")}
# All together: terms of the one add to terms of the other. A number that is added belongs to one term only.
_ADDING = ("add", "sub")
# Quotients are rounded to ints.
_ROUNDING = ("Tensor_mode", "Scalar_mode")


def broadcast_shape(specs: Sequence[DTensorSpec]) -> tuple[int, ...]:
    """The shape that tensors of these specs broadcast to."""
    return tuple(torch.broadcast_shapes(*(spec.shape for spec in specs)))


def elementwise_strategies(specs: Sequence[DTensorSpec], num_outputs: int = 1) -> list[AxisStrategy]:
    """One strategy a dim of the broadcast shape, and the replicated one last."""
    shape = broadcast_shape(specs)
    found = []
    for dim, length in enumerate(shape):
        inputs = tuple(broadcast_placement(spec, dim - len(shape), length) for spec in specs)
        if any(isinstance(placement, Shard) for placement in inputs):
            found.append(AxisStrategy(inputs, (Shard(dim),) * num_outputs))
    found.append(AxisStrategy((Replicate(),) * len(specs), (Replicate(),) * num_outputs))
    return found


def broadcast_placement(spec: DTensorSpec, from_end: int, length: int) -> Placement:
    """Shard of the dim at `from_end`, a negative number; Replicate where the tensor is broadcast along that dim."""
    dim = from_end + spec.ndim
    return Shard(dim) if dim >= 0 and spec.shape[dim] == length else Replicate()


def passing_of(op: OpOverload, name: str, num_tensors: int) -> Sequence[Passing]:
    """The arguments of an elementwise operator `name` that may be terms, the result being terms alike.

    An argument that is written to becomes the result, and is terms with it.
    """
    writes = op._schema.arguments[0].alias_info is not None and op._schema.arguments[0].alias_info.is_write
    if name in _ADDING:
        return (ADDITIVE.at(*range(num_tensors)), SHIFT.at(0)) if num_tensors > 1 else ()
    if name.endswith("_backward") and op._schema.arguments[0].name.startswith("grad"):
        return (LINEAR.at(0),)
    if op._overloadname in _ROUNDING:
        return ()
    known = _PASSING.get(name, ())
    return [one for one in known if one.places[-1] < num_tensors and (one.places[0] == 0 or not writes)]


def elementwise_passing(schema: OpSchema) -> Sequence[Passing]:
    """The arguments of an elementwise call that may be terms."""
    namespace, _, name = schema.op._schema.name.partition("::")
    if namespace != "aten" or schema.is_out_variant:
        return ()
    return passing_of(schema.op, name.removesuffix("_"), len(schema.args_spec))


def pointwise_strategy(schema: OpSchema) -> list[AxisStrategy]:
    """The strategies that `propagator` uses for every pointwise operator."""
    found = elementwise_strategies(schema.args_spec, len(schema.op._schema.returns))
    return [*found, *term_strategies(schema, elementwise_passing(schema)), *_mirrored(schema)]


def _mirrored(schema: OpSchema) -> list[AxisStrategy]:
    """Strategies of an operator that turns the order of numbers round: the largest terms become the smallest."""
    specs = schema.args_spec
    if schema.op._schema.name.removeprefix("aten::") not in _DECREASING or schema.is_out_variant:
        return []
    if element_kind(specs[0].dtype) != "float":  # the least int has no other sign
        return []
    return [
        AxisStrategy((placement,), (_MIRRORED[placement.reduce_op],))
        for placement in partials_of(specs)
        if placement.reduce_op in _MIRRORED
    ]

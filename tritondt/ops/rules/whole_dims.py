"""Operators along dims that an argument names: those must be whole, and every other dim may be cut.

One line an operator says how the argument is called, whether the dims go, and which tensors take no part in the dims.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.ops.propagation.homomorphisms import Passing, term_strategies
from tritondt.ops.propagation.pointwise import broadcast_placement
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.ops.rules.empty_shards import empty_shard_result
from tritondt.ops.rules.equations import declared_tensors, with_local_sizes
from tritondt.ops.rules.reductions import check_rows_have_elements, places_of_kept, reduced_dims
from tritondt.sharding.placement import Placement, Replicate, Shard

aten = torch.ops.aten

# The dims along which a call works.
DimsOf = Callable[[OpSchema], Sequence[int]]


def dims_named(*names: str) -> DimsOf:
    """The dims that arguments name, an int or a list each; all dims for None and for an empty list."""

    def find(schema: OpSchema) -> Sequence[int]:
        found: set[int] = set()
        for place, declared in enumerate(schema.op._schema.arguments):
            if declared.name in names:
                given: Any = schema.argument(place, declared.name, declared.default_value)
                found.update(reduced_dims(given, schema.args_spec[0].ndim))
        return sorted(found)

    return find


def along_strategies(
    schema: OpSchema,
    dims: Sequence[int],
    *,
    reduces: bool = False,
    whole: Sequence[str] = (),
    passing: Sequence[Passing] = (),
) -> list[AxisStrategy]:
    """Strategies that cut a dim other than `dims` in all tensors that have it, counted from the end.

    Tensors that `whole` names are not cut; `passing` says which may be terms. Results
    lack `dims` where they are reduced and `keepdim` is not given.
    """
    names = [a.name for a in schema.op._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
    tensors = declared_tensors(schema)
    given = [(name, spec) for name, spec in zip(names, tensors, strict=True) if spec is not None]
    num_dims, num_outputs = given[0][1].ndim, len(schema.op._schema.returns)
    places = places_of_kept(dims, num_dims, not reduces or _keeps_dims(schema))
    along = [spec for name, spec in given if name not in whole]
    found = []
    for dim, place in places.items():
        from_end = dim - num_dims
        length = max((spec.shape[from_end] for spec in along if spec.ndim >= -from_end), default=0)
        inputs = tuple(
            Replicate() if name in whole else broadcast_placement(spec, from_end, length) for name, spec in given
        )
        found.append(AxisStrategy(inputs, (Shard(place),) * num_outputs))
    everywhere: tuple[Placement, ...] = (Replicate(),) * len(given)
    found += term_strategies(schema, passing)
    return [*found, AxisStrategy(everywhere, (Replicate(),) * num_outputs)]


def _keeps_dims(schema: OpSchema) -> bool:
    declared = [argument.name for argument in schema.op._schema.arguments]
    return "keepdim" in declared and bool(schema.argument(declared.index("keepdim"), "keepdim", False))


def register_whole_dims(
    name: str,
    dims: str | DimsOf = "dim",
    *,
    reduces: bool = False,
    whole: Sequence[str] = (),
    passing: Sequence[Passing] = (),
    sizes: str | None = None,
    runs: Callable[[OpOverload], LocalOp] | None = None,
) -> None:
    """Registers `aten.name` and its in-place form by the dims along which they work.

    `dims` is an argument's name or a function that finds the dims; see `along_strategies`. `sizes` names the argument
    that holds the sizes of the result; a rank's call gets the local sizes there. `runs` gives the function that runs in
    an operator's place. An operator that this torch does not have is left out.
    """
    find = dims_named(dims) if isinstance(dims, str) else dims

    def strategy(schema: OpSchema) -> list[AxisStrategy]:
        if reduces:
            check_rows_have_elements(schema, find(schema))
        return along_strategies(schema, find(schema), reduces=reduces, whole=whole, passing=passing)

    for op in _overloads(name):

        def localize(schema: OpSchema, outputs: OutputSpecs, op: OpOverload = op) -> LocalOp | None:
            if (made := empty_shard_result(schema, outputs)) is not None:
                return made
            if runs is not None:
                return runs(op)
            return None if sizes is None else with_local_sizes(op, sizes, outputs)

        propagator.set_strategy(op, strategy, localize=localize)


def _overloads(name: str) -> list[OpOverload]:
    packet, _, overload = name.partition(".")
    found = [getattr(getattr(aten, packet + suffix, None), overload or "default", None) for suffix in ("", "_")]
    return [op for op in found if op is not None]

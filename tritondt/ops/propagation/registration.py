"""How the files of this folder register the operators of their family with the propagator in use."""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch._ops import OpOverload

from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import (
    AxisStrategy,
    LocalizeFunction,
    OpSchema,
    RuntimeSchemaInfo,
    StrategyFunction,
)
from tritondt.sharding.placement import Placement

# Numbers among the arguments do not decide the layout: they may change at every call.
NUMBERS_BY_TYPE = RuntimeSchemaInfo(static_argnum=100)


def strategy_of(
    ops: Sequence[OpOverload],
    *,
    schema_info: RuntimeSchemaInfo | None = None,
    localize: LocalizeFunction | None = None,
) -> Callable[[StrategyFunction], StrategyFunction]:
    """Decorates the strategy function of these operators."""

    def register(strategy: StrategyFunction) -> StrategyFunction:
        for op in ops:
            propagator.set_strategy(op, strategy, schema_info, localize)
        return strategy

    return register


# What a user's function gives for one axis: placements of the results and of the arguments, None for what is no tensor.
Sharding = tuple[Sequence[Placement | None], Sequence[Any]]


def register_sharding(
    op: OpOverload | list[OpOverload],
) -> Callable[[Callable[..., Sequence[Sharding]]], Callable[..., Sequence[Sharding]]]:
    """Decorates a function that says how `op` may be laid out over one axis of a mesh, whatever the mesh.

    It is called as the operator is, with a DTensorSpec for every tensor, and gives pairs: the placements of the
    results, and those of the arguments, in lists where those are lists, None for what is no tensor. Keyword arguments
    that are tensors come last, in the order that the operator declares. PropagationError where users have registered
    something for `op` already.

        @register_sharding(torch.ops.mylib.scaled.default)
        def scaled(x, factor):
            anywhere = [*map(Shard, range(x.ndim)), Replicate(), Partial()]
            return [([placement], [placement, None]) for placement in anywhere]
    """

    def register(function: Callable[..., Sequence[Sharding]]) -> Callable[..., Sequence[Sharding]]:
        def strategy(schema: OpSchema) -> list[AxisStrategy]:
            return [
                AxisStrategy(tuple(_placements_in(inputs)), tuple(outputs))
                for outputs, inputs in function(*schema.args_schema, **schema.kwargs_schema)
            ]

        for each in op if isinstance(op, list) else [op]:
            propagator.register_op_strategy(each, wraps(function)(strategy))
        return function

    return register


def _placements_in(inputs: Sequence[Any]) -> Iterator[Placement]:
    for item in inputs:
        if isinstance(item, Placement):
            yield item
        elif isinstance(item, list | tuple):
            yield from _placements_in(item)

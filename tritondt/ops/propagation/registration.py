"""Registration of operators: decorators for the families of this package and for users."""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch._ops import OpOverload

from tritondt.errors.arguments import first
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


@first("op")
def register_sharding(
    op: OpOverload | list[OpOverload],
) -> Callable[[Callable[..., Sequence[Sharding]]], Callable[..., Sequence[Sharding]]]:
    """Decorates a function that lists the ways to shard `op` over one axis of any mesh.

    The function is called with the operator's arguments, with a DTensorSpec for every tensor. It returns pairs: the
    placements of the results and of the arguments, in lists where those are lists, None for arguments that are not
    tensors. Keyword arguments that are tensors come last, in the order that the operator declares. Not collective, but
    all ranks must register alike. Raises PropagationError where a user has already registered a function for `op`.

    >>> import torch, tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> scaled = torch.library.custom_op("doctest::scaled", lambda x, factor: x * factor, mutates_args=(),
    ...                                  schema="(Tensor x, float factor) -> Tensor")
    >>> @scaled.register_fake
    ... def scaled_meta(x, factor):
    ...     return torch.empty_like(x)
    >>> @register_sharding(torch.ops.doctest.scaled.default)
    ... def placements(x, factor):
    ...     anywhere = [*map(T.Shard, range(x.ndim)), T.Replicate(), T.Partial()]
    ...     return [([placement], [placement, None]) for placement in anywhere]
    >>> def run(rank):
    ...     x = T.ones(4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
    ...     return torch.ops.doctest.scaled(x, 3.0).to_local().tolist()
    >>> run_ranks(2, run)
    [[3.0, 3.0], [3.0, 3.0]]
    """

    def register(function: Callable[..., Sequence[Sharding]]) -> Callable[..., Sequence[Sharding]]:
        def strategy(schema: OpSchema) -> list[AxisStrategy]:
            schema = schema.with_specs_alone()
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

"""How the files of this folder register the operators of their family with the propagator in use."""

from collections.abc import Callable, Sequence

from torch._ops import OpOverload

from tritondt.ops.propagator import propagator
from tritondt.ops.schema import LocalizeFunction, RuntimeSchemaInfo, StrategyFunction

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
            propagator.register_op_strategy(op, strategy, schema_info, localize)
        return strategy

    return register

"""Decides how the outputs of an operator are laid out, and which of its arguments have to move first.

`propagator` is the one in use; the files of this folder and users register operators with it.
"""

from collections.abc import Callable
from dataclasses import replace

from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.fallback import Fallback
from tritondt.ops.pointwise import is_pointwise, pointwise_strategy
from tritondt.ops.schema import (
    LocalizeFunction,
    OpSchema,
    OpStrategy,
    OutputSharding,
    RuleFunction,
    RuntimeSchemaInfo,
    StrategyFunction,
)
from tritondt.ops.selection import decide

_BY_VALUE = RuntimeSchemaInfo()
_BY_TYPE = RuntimeSchemaInfo(static_argnum=100)


class ShardingPropagator:
    """What is known of operators, and the decision that follows from it for a call.

    Operators that torch tags as pointwise need no registration.
    """

    def __init__(self) -> None:
        self.op_to_rules: dict[OpOverload, RuleFunction] = {}
        self.op_strategy_funcs: dict[OpOverload, StrategyFunction] = {}
        self.op_to_schema_info: dict[OpOverload, RuntimeSchemaInfo] = {}
        self.op_to_localize: dict[OpOverload, LocalizeFunction] = {}
        self.fallback = Fallback(self._changed)
        self._on_change: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back when decisions may change, as at every registration: whoever keeps decisions drops them then."""
        self._on_change.append(callback)

    def _changed(self) -> None:
        for callback in self._on_change:
            callback()

    def register_sharding_prop_rule(
        self, op: OpOverload, rule: RuleFunction, schema_info: RuntimeSchemaInfo | None = None
    ) -> None:
        """Lets `rule` decide about all axes of a call at once, in place of what was registered before."""
        self.forget(op)
        self.op_to_rules[op] = rule
        self.op_to_schema_info[op] = schema_info or _BY_VALUE

    def register_op_strategy(
        self,
        op: OpOverload,
        strategy: StrategyFunction,
        schema_info: RuntimeSchemaInfo | None = None,
        localize: LocalizeFunction | None = None,
    ) -> None:
        """Offers the ways to lay `op` over one axis (a list of AxisStrategy) or over all (an OpStrategy).

        `localize` gives what runs on local tensors where that is not `op` itself.
        """
        self.forget(op)
        self.op_strategy_funcs[op] = strategy
        self.op_to_schema_info[op] = schema_info or _BY_VALUE
        if localize is not None:
            self.op_to_localize[op] = localize

    def forget(self, op: OpOverload) -> None:
        """Takes back what was registered for `op`."""
        for table in (self.op_to_rules, self.op_strategy_funcs, self.op_to_schema_info, self.op_to_localize):
            table.pop(op, None)
        self._changed()

    def knows(self, op: OpOverload) -> bool:
        """Whether there is a strategy or a rule for `op`, or torch says that it is pointwise."""
        return op in self.op_strategy_funcs or op in self.op_to_rules or is_pointwise(op)

    def schema_info(self, op: OpOverload) -> RuntimeSchemaInfo:
        """What besides tensors decides about `op`."""
        found = self.op_to_schema_info.get(op)
        if found is None:
            return _BY_TYPE if is_pointwise(op) else _BY_VALUE
        return found

    def propagate(self, schema: OpSchema) -> OutputSharding:
        """The decision about a call; PropagationError where the operator cannot be laid out as asked."""
        if not self.knows(schema.op):
            return self.fallback.decide(schema)
        rule = self.op_to_rules.get(schema.op)
        if rule is not None:
            return rule(schema)
        strategy = self.op_strategy_funcs.get(schema.op, pointwise_strategy)
        offered = strategy(schema)
        if isinstance(offered, OpStrategy):
            return self._select_strategy(offered, schema)
        decision = decide([offered] * schema.mesh.ndim, schema)
        localize = self.op_to_localize.get(schema.op)
        if localize is None:
            return decision
        running = schema if decision.input_specs is None else schema.with_specs(decision.input_specs)
        return replace(decision, local=localize(running, decision.output_spec))

    def _select_strategy(self, offered: OpStrategy, schema: OpSchema) -> OutputSharding:
        """The cheapest of the strategies over all axes that a function in torch's style gives."""
        if not offered.strategies:
            raise PropagationError(f"the strategy function of {schema.op} offers nothing for {schema}")
        best = min(offered.strategies, key=lambda strategy: sum(strategy.redistribute_cost or (0.0,)))
        return OutputSharding(best.output_specs, best.input_specs)


propagator = ShardingPropagator()

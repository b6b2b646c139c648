"""The propagator: placements of an operator's results, and which of its arguments have to move first.

`propagator` is the one in use; the families of operators and users register with it.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from inspect import unwrap
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagation.decision_check import checked
from tritondt.ops.propagation.elementwise import is_pointwise
from tritondt.ops.propagation.fallback import Fallback
from tritondt.ops.propagation.kernel_dtypes import check_kernel
from tritondt.ops.propagation.one_dtype import check_dtypes
from tritondt.ops.propagation.pointwise import pointwise_strategy
from tritondt.ops.propagation.schema import (
    AxisStrategy,
    LocalizeFunction,
    OpSchema,
    OutputSharding,
    RuleFunction,
    RuntimeSchemaInfo,
    StrategyFunction,
)
from tritondt.ops.propagation.selection import decide
from tritondt.ops.propagation.strategies import OpStrategy, TupleStrategy, specs_in
from tritondt.ops.propagation.whole_strategies import selected
from tritondt.sharding.placement import Placement

_BY_VALUE = RuntimeSchemaInfo()
_BY_TYPE = RuntimeSchemaInfo(static_argnum=100)


class ShardingPropagator:
    """Rules and strategies of operators, and the decision about a call that follows from them.

    Operators that torch tags as pointwise need no registration.
    """

    def __init__(self) -> None:
        self.op_to_rules: dict[OpOverload, RuleFunction] = {}
        self.op_strategy_funcs: dict[OpOverload, StrategyFunction] = {}
        self.op_to_schema_info: dict[OpOverload, RuntimeSchemaInfo] = {}
        self.op_to_localize: dict[OpOverload, LocalizeFunction] = {}
        self.fallback = Fallback(self._changed)
        self._on_change: list[Callable[[], None]] = []
        self._families = ""
        # What users registered, with what it replaced.
        self._replaced: dict[OpOverload, tuple[Any, ...]] = {}

    def on_change(self, callback: Callable[[], None]) -> None:
        """Registers a callback for changes of decisions, such as registrations, so that callers drop cached ones."""
        self._on_change.append(callback)

    def register_sharding_prop_rule(
        self, op: OpOverload, rule: RuleFunction, schema_info: RuntimeSchemaInfo | None = None
    ) -> None:
        """Registers a rule that decides about all axes of a call at once, in place of what tritondt knows of `op`.

        `rule` takes an OpSchema and gives an OutputSharding; see RuntimeSchemaInfo for `schema_info`. Not collective,
        but all ranks must register alike. Raises PropagationError where a user has already registered a function for
        `op`.

        >>> import torch
        >>> import tritondt as T
        >>> from tritondt.comm.transports.threads import run_ranks
        >>> from tritondt.ops import OpSchema, OutputSharding, propagator
        >>> @torch.library.custom_op("examples::doubled", mutates_args=())
        ... def doubled(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> _ = doubled.register_fake(torch.empty_like)
        >>> def as_it_comes(schema: OpSchema) -> OutputSharding:
        ...     return OutputSharding(schema.args_spec[0])
        >>> propagator.register_sharding_prop_rule(torch.ops.examples.doubled.default, as_it_comes)
        >>> x = lambda: T.ones(4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
        >>> run_ranks(2, lambda rank: doubled(x()).placements)
        [(S0,), (S0,)]
        """
        self._replace(op, rule)
        self.set_rule(op, rule, schema_info)

    def register_op_strategy(
        self,
        op: OpOverload,
        strategy: StrategyFunction,
        schema_info: RuntimeSchemaInfo | None = None,
        localize: LocalizeFunction | None = None,
    ) -> None:
        """Registers the ways to shard `op` over one axis (a list of AxisStrategy) or over all axes (an OpStrategy).

        `strategy` takes an OpSchema with an OpStrategy in `args_schema` for each tensor and a TupleStrategy for each
        list of tensors, like torch's strategies; `args_spec` has their specs. `localize` returns the function for local
        tensors where that is not `op` itself; see RuntimeSchemaInfo for `schema_info`. Not collective, but all ranks
        must register alike. Raises PropagationError where a user has already registered a function for `op`.

        >>> import torch, tritondt as T
        >>> from tritondt.ops import AxisStrategy, propagator, register_op_strategy
        >>> op = torch.ops.aten.celu.default
        >>> register_op_strategy(op, lambda schema: [AxisStrategy((T.Replicate(),), (T.Replicate(),))])
        >>> propagator.forget(op)
        """
        self._replace(op, strategy)
        self.set_strategy(op, strategy, schema_info, localize)

    def forget(self, op: OpOverload) -> None:
        """Removes a user's registration for `op`, and restores tritondt's own."""
        before = self._replaced.pop(op, None)
        if before is not None:
            self._set(op, *before)

    def set_rule(self, op: OpOverload, rule: RuleFunction, schema_info: RuntimeSchemaInfo | None = None) -> None:
        """Registers a rule of tritondt's own."""
        self._set(op, rule, None, schema_info or _BY_VALUE, None)

    def set_strategy(
        self,
        op: OpOverload,
        strategy: StrategyFunction,
        schema_info: RuntimeSchemaInfo | None = None,
        localize: LocalizeFunction | None = None,
    ) -> None:
        """Registers a strategy of tritondt's own."""
        self._set(op, None, strategy, schema_info or _BY_VALUE, localize)

    @property
    def _tables(self) -> tuple[dict[OpOverload, Any], ...]:
        return self.op_to_rules, self.op_strategy_funcs, self.op_to_schema_info, self.op_to_localize

    def _set(self, op: OpOverload, *values: Any) -> None:
        for table, value in zip(self._tables, values, strict=True):
            if value is None:
                table.pop(op, None)
            else:
                table[op] = value
        self._changed()

    def _replace(self, op: OpOverload, new: Callable[..., Any]) -> None:
        """Keeps what users replace; refuses to replace what users registered."""
        self._loaded()
        if op in self._replaced:
            known = self.op_to_rules.get(op) or self.op_strategy_funcs[op]
            raise PropagationError(
                f"{op} was given {_place(known)} already and is given {_place(new)} now; if that is meant, take the "
                f"former back first: tritondt.ops.propagation.propagator.forget({op})"
            )
        self._replaced[op] = tuple(table.get(op) for table in self._tables)

    def load_at_first_use(self, families: str) -> None:
        """Names the module whose import registers the operators that tritondt itself knows."""
        self._families = families

    def _loaded(self) -> None:
        if self._families:
            import_module(self._families)
            self._families = ""

    def _changed(self) -> None:
        for callback in self._on_change:
            callback()

    def knows(self, op: OpOverload) -> bool:
        """Whether there is a strategy or a rule for `op`, or torch says that it is pointwise."""
        self._loaded()
        return op in self.op_strategy_funcs or op in self.op_to_rules or is_pointwise(op)

    def schema_info(self, op: OpOverload) -> RuntimeSchemaInfo:
        """The arguments besides tensors that decide about `op`."""
        self._loaded()
        found = self.op_to_schema_info.get(op)
        if found is None:
            return _BY_TYPE if is_pointwise(op) else _BY_VALUE
        return found

    def propagate(self, schema: OpSchema) -> OutputSharding:
        """The decision about a call; PropagationError where the operator cannot be sharded as asked.

        A rank without elements raises what kernels say of the dtypes on those that have some.
        """
        check_dtypes(schema)
        decision = self._decision(schema)
        if schema.op in self._replaced:
            decision = checked(decision, schema)
        elif decision.input_specs is not None and decision.redistribute_schema is None:
            decision = replace(decision, redistribute_schema=schema.with_specs(decision.input_specs))
        check_kernel(schema, decision)
        return decision

    def _decision(self, schema: OpSchema) -> OutputSharding:
        if not self.knows(schema.op):
            return self.fallback.decide(schema)
        rule = self.op_to_rules.get(schema.op)
        if rule is not None:
            return _with_suggestion(rule, schema)
        strategy = self.op_strategy_funcs.get(schema.op, pointwise_strategy)
        is_of_user = schema.op in self._replaced
        offered = strategy(schema.with_strategies(self.schema_info(schema.op)) if is_of_user else schema)
        if isinstance(offered, OutputSharding):
            return offered
        if isinstance(offered, OpStrategy | TupleStrategy):
            return selected(offered, schema)
        _check_offered(offered, schema)
        decision = decide([offered] * schema.mesh.ndim, schema)
        localize = self.op_to_localize.get(schema.op)
        # A rank outside the mesh runs nothing: it has no coordinate of which local sizes would follow.
        if localize is None or schema.mesh.coordinate is None:
            return decision
        running = schema if decision.input_specs is None else schema.with_specs(decision.input_specs)
        return replace(decision, local=localize(running, decision.output_spec))


def _with_suggestion(rule: RuleFunction, schema: OpSchema) -> OutputSharding:
    """A rule's decision; where it suggests another call without saying what comes out, the rule is asked about that."""
    decision = rule(schema)
    suggested = getattr(decision, "redistribute_schema", None)
    if suggested is None:
        return decision
    if suggested.op is not schema.op or _num_arguments(suggested) != _num_arguments(schema):
        raise PropagationError(
            f"the rule of {schema.op} suggests {suggested} for {schema}; allowed is a call of that operator with as "
            "many tensors and other arguments"
        )
    if decision.output_spec is None and schema.op._schema.returns:
        found = rule(suggested)
        if found.redistribute_schema is not None:
            raise PropagationError(f"the rule of {schema.op} suggests {suggested} for {schema}, and then another call")
        decision = replace(decision, output_spec=found.output_spec, local=decision.local or found.local)
    if decision.use_val_from_redistribute_schema and decision.local is None:
        return replace(decision, local=_ValuesOf(suggested))
    return decision


def _num_arguments(schema: OpSchema) -> tuple[int, int, list[str]]:
    return len(schema.args_spec), len(schema.args_schema), sorted(schema.kwargs_schema)


class _ValuesOf:
    """An operator on local tensors, with the other arguments of a suggested call."""

    def __init__(self, suggested: OpSchema) -> None:
        self._suggested = suggested

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        suggested = self._suggested
        values = map(_tensors_of, args, suggested.args_schema)
        return suggested.op(
            *values, **{name: _tensors_of(kwargs[name], suggested.kwargs_schema[name]) for name in kwargs}
        )


def _tensors_of(given: Any, suggested: Any) -> Any:
    """The argument that was given where it is a tensor or has some, else the suggested one."""
    is_tensor = isinstance(given, torch.Tensor) or next(specs_in((suggested,)), None) is not None
    return given if is_tensor else suggested


def _check_offered(offered: Any, schema: OpSchema) -> None:
    """Refuses strategies that do not fit the arguments; whether they fit the results is seen when these are known."""
    count = len(schema.args_spec)
    if not isinstance(offered, list | tuple) or not all(isinstance(strategy, AxisStrategy) for strategy in offered):
        raise PropagationError(
            f"the strategy function of {schema.op} gives {offered!r}; allowed are a list of AxisStrategy, an "
            "OpStrategy, a TupleStrategy and an OutputSharding"
        )
    if not offered:
        raise PropagationError(f"the strategy function of {schema.op} offers nothing for {schema}")
    for strategy in offered:
        if len(strategy.inputs) != count:
            raise PropagationError(
                f"the strategy of {schema.op} gives placements for {len(strategy.inputs)} tensors, but {schema} has "
                f"{count}"
            )
        for placement in (*strategy.inputs, *(placed for placed in strategy.outputs if placed is not None)):
            if not isinstance(placement, Placement):
                raise PropagationError(
                    f"the strategy of {schema.op} gives {placement!r} for a placement; allowed are tritondt's Shard, "
                    "Replicate and Partial"
                )


def _place(function: Callable[..., Any]) -> str:
    """A function's name with the place where it is defined."""
    written = unwrap(function)
    code = getattr(written, "__code__", None)
    name = getattr(written, "__qualname__", repr(written))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


propagator = ShardingPropagator()

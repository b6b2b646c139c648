"""How operators act on distributed tensors: strategies, rules and the propagator that chooses among them."""

from tritondt.ops.propagator import ShardingPropagator, propagator
from tritondt.ops.registration import register_sharding
from tritondt.ops.rules import einop_rule, pointwise_rule
from tritondt.ops.schema import (
    AxisStrategy,
    OpSchema,
    OpStrategy,
    OutputSharding,
    PlacementStrategy,
    RuntimeSchemaInfo,
    TupleStrategy,
)

register_op_strategy = propagator.register_op_strategy
register_sharding_prop_rule = propagator.register_sharding_prop_rule
set_fallback = propagator.fallback.set

__all__ = [
    "AxisStrategy",
    "OpSchema",
    "OpStrategy",
    "OutputSharding",
    "PlacementStrategy",
    "RuntimeSchemaInfo",
    "ShardingPropagator",
    "TupleStrategy",
    "einop_rule",
    "pointwise_rule",
    "propagator",
    "register_op_strategy",
    "register_sharding",
    "register_sharding_prop_rule",
    "set_fallback",
]

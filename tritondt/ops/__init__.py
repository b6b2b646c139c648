"""Operators on distributed tensors: strategies, rules and the propagator that chooses among them."""

from tritondt.ops.propagation.propagator import ShardingPropagator, propagator
from tritondt.ops.propagation.registration import register_sharding
from tritondt.ops.propagation.schema import AxisStrategy, OpSchema, OutputSharding, RuntimeSchemaInfo
from tritondt.ops.propagation.strategies import OpSpec, OpStrategy, PlacementStrategy, TupleStrategy
from tritondt.ops.propagation.whole_strategies import expand_to_full_mesh_op_strategy, generate_redistribute_costs
from tritondt.ops.rules.einop import einop_rule, pointwise_rule

# All families take 0.2 s to import; they import what is above, so that their name is all that is said of them here.
propagator.load_at_first_use("tritondt.ops.families")
register_op_strategy = propagator.register_op_strategy
register_sharding_prop_rule = propagator.register_sharding_prop_rule
set_fallback = propagator.fallback.set

__all__ = [
    "AxisStrategy",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "OutputSharding",
    "PlacementStrategy",
    "RuntimeSchemaInfo",
    "ShardingPropagator",
    "TupleStrategy",
    "einop_rule",
    "expand_to_full_mesh_op_strategy",
    "generate_redistribute_costs",
    "pointwise_rule",
    "propagator",
    "register_op_strategy",
    "register_sharding",
    "register_sharding_prop_rule",
    "set_fallback",
]

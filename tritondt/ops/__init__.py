"""How operators act on distributed tensors: strategies, rules and the propagator that chooses among them."""

# Importing a family registers its operators.
from tritondt.ops import (  # noqa: F401
    along_one_dim,
    attention,
    batched_linalg,
    completed_reductions,
    dropout,
    foreach,
    foreach_reductions,
    fused,
    identity,
    indexing,
    joining,
    loss,
    matrix,
    normalization,
    reductions,
    slicing,
    spatial,
    spectral,
    views,
    views_in_place,
)
from tritondt.ops.propagator import ShardingPropagator, propagator
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
    "register_sharding_prop_rule",
    "set_fallback",
]

"""Views that change a tensor's own shape, as `squeeze_` does: decided like the view that gives another tensor.

The local tensor is replaced by its view; whoever runs the call gives the distributed tensor the new shape.
"""

import torch
from torch._ops import OpOverload

from tritondt.ops.propagator import propagator
from tritondt.ops.schema import OpSchema, OutputSharding

aten = torch.ops.aten

_VIEW_OF: dict[OpOverload, OpOverload] = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.transpose_.default: aten.transpose.int,
    aten.swapdims_.default: aten.transpose.int,
    aten.swapaxes_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
}


def changed_in_place(schema: OpSchema) -> OutputSharding:
    """The decision about the view of the same arguments."""
    view = _VIEW_OF[schema.op]
    decision = propagator.propagate(OpSchema(view, schema.args_schema, schema.kwargs_schema))
    return OutputSharding(decision.output_spec, None, decision.local or view._op)


for _op in _VIEW_OF:
    propagator.register_sharding_prop_rule(_op, changed_in_place)

"""Views that change a tensor's own shape, as `squeeze_` does: decided like the view that gives another tensor.

The local tensor is replaced by its view; whoever runs the call gives the distributed tensor the new shape.
"""

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagator import propagator
from tritondt.ops.schema import OpSchema, OutputSharding
from tritondt.placement import placements_code

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
    """The decision about the view of the same arguments; PropagationError where elements would have to move.

    Others may know the tensor's memory, which it would leave.
    """
    view = _VIEW_OF[schema.op]
    decision = propagator.propagate(OpSchema(view, schema.args_schema, schema.kwargs_schema))
    if decision.input_specs is not None:
        call = f"x.redistribute(placements={placements_code(decision.input_specs[0].placements)})"
        raise PropagationError(f"{schema} would have to move what it changes in place; ask for it first: x = {call}")
    return OutputSharding(decision.output_spec, None, decision.local or view._op)


for _op in _VIEW_OF:
    propagator.set_rule(_op, changed_in_place)

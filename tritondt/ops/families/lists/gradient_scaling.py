"""The operator of torch.amp.GradScaler: gradients divided by the scale, and whether any rank found one not finite."""

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import OpSchema, OutputSharding
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Partial, Replicate
from tritondt.sharding.spec import DTensorSpec, TensorMeta

_OP = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def unscale_rule(schema: OpSchema) -> OutputSharding:
    """The decision for a list of gradients: each rank scales its parts, and one number is the maximum over all ranks.

    PropagationError for a gradient that holds terms, whose sum may overflow where no term does.
    """
    for spec in schema.args_schema[0]:
        if spec.layout.axes_where(Partial):
            raise PropagationError(
                f"{schema.op} got a gradient {spec}, which holds terms; redistribute it to Replicate or Shard first"
            )
    return OutputSharding(None, None, _Unscale(schema.op, schema.args_schema[1]))


class _Unscale:
    """Function of local tensors: the operator on this rank's parts, and an exchange of what it found."""

    def __init__(self, op: OpOverload, found: DTensorSpec) -> None:
        self._op, axes = op, found.mesh.ndim
        meta = TensorMeta.contiguous((1,), found.dtype)
        self._pending = DTensorSpec(found.mesh, [Partial("max")] * axes, meta)
        self._complete = self._pending.with_placements([Replicate()] * axes)

    def __call__(self, gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Divides the parts in place; `found_inf` becomes 1 on all ranks where any part has a value not finite."""
        self._op(gradients, found_inf, inv_scale)
        found_inf.copy_(
            redistribute_local(found_inf.reshape(1), self._pending, self._complete).reshape(found_inf.shape)
        )


propagator.set_rule(_OP, unscale_rule)

"""prefetch: a redistribution that is issued before anybody asks for its result."""

from collections.abc import Sequence

import torch

from tritondt.comm.packing.wire_dtype import narrower
from tritondt.dtensor.pending import issue_prefetch
from tritondt.dtensor.tensor import DTensor
from tritondt.sharding.placement import Placement
from tritondt.sharding.spec import target_spec


def prefetch(
    tensor: DTensor,
    placements: Sequence[Placement],
    *,
    order: Sequence[int | str] | None = None,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Starts moving a tensor to `placements`: its next `redistribute` to them finds it there, or under way.

    A collective call that returns at once. What was moved is dropped if the tensor is written to before, and found only
    by a `redistribute` with the same `wire_dtype`.

        T.prefetch(weight, [T.Replicate()])
        y = layer(x)  # meanwhile
        whole = weight.redistribute(placements=[T.Replicate()])
    """
    target = target_spec(tensor._spec, tuple(placements), None if order is None else tuple(order))
    if target is not tensor._spec:
        with torch.no_grad():
            issue_prefetch(tensor, DTensor, target, narrower(target.dtype, wire_dtype))

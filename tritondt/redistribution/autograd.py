"""`redistribute`: the engine on a plain local tensor and two specs, differentiable any number of times."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from tritondt.comm.packing.wire_dtype import Wire, wire_of
from tritondt.errors import ReductionError
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Partial, Placement, Replicate
from tritondt.sharding.spec import DTensorSpec


def redistribute(
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    *,
    grad_placements: Sequence[Placement] | None = None,
    wire_dtype: torch.dtype | None = None,
    grad_wire_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """This rank's local tensor under `target` of the tensor that `local` is its part of under `source`.

    A collective call of all ranks of the mesh. The result never aliases `local`, except where the specs are
    one. Backward goes the other way: `grad_placements` says how the gradient of the result will be laid out
    (default: as `target`, with Partial as Replicate, for every term of a sum has the sum's gradient), and the
    gradient of `local` comes as `source`, likewise. Give (Partial(),) where a replicated result is used
    differently on every rank, as in front of a column-parallel matmul: backward is then a reduction.

    With `wire_dtype` messages hold that dtype: bfloat16 or float16 of float32, and float32 too of float64. Every step
    of the plan in which anything moves then rounds all values of the tensor, or terms of a sum, to the wire dtype, to
    nearest even: what stays on its rank like what is sent, so that ranks that hold the same elements hold the same
    bits. Terms are added up in the tensor's own dtype, and sums that travel on are rounded again. Where nothing has to
    move nothing is rounded. Backward does the same in `grad_wire_dtype` (default: `wire_dtype`; the tensor's own dtype
    for gradients as they are), and takes the rounding for the identity.

    float32, bfloat16 and float16 may travel as float8_e4m3fn or float8_e5m2. Then each box of a message, indices
    without a gap in any dim, has a float32 scale in front, the least power of two with which its largest finite number
    fits: numbers that are too small for it become 0.

    Raises MeshError, LayoutError, LocalTensorError, TransportError, PeerError, MismatchError; ReductionError in
    the backward of a max, min or product.

        meta = TensorMeta.contiguous((1024, 1000))
        rows, columns = (DTensorSpec(mesh, (Shard(dim),), meta) for dim in (0, 1))
        local_columns = redistribute(local_rows, rows, columns)
    """
    wire = None
    if wire_dtype is not None or grad_wire_dtype is not None:
        wire = wire_of(source.dtype, source.dtype, wire_dtype, grad_wire_dtype)
    if not (torch.is_grad_enabled() and local.requires_grad):
        return redistribute_local(local, source, target, None if wire is None else wire.forward)
    gradient = gradient_spec(target) if grad_placements is None else target.with_placements(grad_placements)
    if source is target and gradient is gradient_spec(source):
        return local
    result: torch.Tensor = Redistribute.apply(local, source, target, gradient, wire)  # type: ignore[no-untyped-call]
    return result


@lru_cache(maxsize=4096)
def gradient_spec(spec: DTensorSpec) -> DTensorSpec:
    """How the gradient of a tensor under `spec` is laid out: alike, with Partial as Replicate."""
    if not any(isinstance(placement, Partial) for placement in spec.placements):
        return spec
    return spec.with_placements([Replicate() if isinstance(p, Partial) else p for p in spec.placements])


# The functions take their context in `forward`: with a `setup_context` of its own, torch binds the arguments to the
# signature by inspection at every call, which takes 30 us.


class Redistribute(torch.autograd.Function):
    """Redistribution as a linear map from local tensors to local tensors, and its transpose."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        source: DTensorSpec,
        target: DTensorSpec,
        gradient: DTensorSpec,
        wire: Wire | None = None,
    ) -> torch.Tensor:
        """Moves `local`; `gradient` is how the result's gradient will come."""
        ctx.specs, ctx.wire = (source, target, gradient), wire
        result = redistribute_local(local, source, target, None if wire is None else wire.forward)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        """Takes the result's gradient to the layout of the input's."""
        source, target, gradient = ctx.specs
        check_linear(source)
        check_linear(target)
        grad = _times(grad, mean_size(target, gradient))
        wanted = gradient_spec(source)
        back: torch.Tensor
        if torch.is_grad_enabled() and grad.requires_grad:
            wire = None if ctx.wire is None else Wire(ctx.wire.backward, ctx.wire.backward)
            back = Redistribute.apply(grad, gradient, wanted, cotangent_spec(source), wire)  # type: ignore[no-untyped-call]
        else:
            back = redistribute_local(grad, gradient, wanted, None if ctx.wire is None else ctx.wire.backward)
        divisor = mean_size(source, wanted)
        return (back if divisor == 1 else back / divisor), None, None, None, None


def _times(grad: torch.Tensor, factor: int) -> torch.Tensor:
    return grad if factor == 1 else grad * factor


def mean_size(spec: DTensorSpec, gradient: DTensorSpec) -> int:
    """Terms of the mean that `spec` holds: each has 1/n of the gradient of the mean, which `gradient` holds."""
    return prod(
        size
        for size, placement, of_gradient in zip(spec.mesh.shape, spec.placements, gradient.placements, strict=True)
        if placement.is_partial("avg") and of_gradient.is_replicate()
    )


@lru_cache(maxsize=4096)
def cotangent_spec(source: DTensorSpec) -> DTensorSpec:
    """How what multiplies the input's gradient is laid out: every rank has its own, so the terms add up."""
    return source.with_placements([Partial() if isinstance(p, Partial) else p for p in source.placements])


def check_linear(spec: DTensorSpec) -> None:
    """Refuses terms of a reduction that has no gradient: all but sum and avg."""
    for placement in spec.placements:
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise ReductionError(
                f"{spec} is a reduction by {placement.reduce_op}, which has no gradient here; allowed are sum and avg: "
                "redistribute to Replicate under no_grad, or reduce before"
            )

"""`redistribute`: the engine on a plain local tensor and two specs, differentiable any number of times."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from tritondt.errors import ReductionError
from tritondt.execute import redistribute_local
from tritondt.placement import Partial, Placement, Replicate
from tritondt.spec import DTensorSpec


def redistribute(
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    *,
    grad_placements: Sequence[Placement] | None = None,
) -> torch.Tensor:
    """This rank's local tensor under `target` of the tensor that `local` is its part of under `source`.

    A collective call of all ranks of the mesh. The result never aliases `local`, except where the specs are
    one. Backward goes the other way: `grad_placements` says how the gradient of the result will be laid out
    (default: as `target`, with Partial as Replicate, for every term of a sum has the sum's gradient), and the
    gradient of `local` comes as `source`, likewise. Give (Partial(),) where a replicated result is used
    differently on every rank, as in front of a column-parallel matmul: backward is then a reduction.

    Raises MeshError, LayoutError, LocalTensorError, TransportError, PeerError, MismatchError; ReductionError in
    the backward of a max, min or product.

        meta = TensorMeta.contiguous((1024, 1000))
        rows, columns = (DTensorSpec(mesh, (Shard(dim),), meta) for dim in (0, 1))
        local_columns = redistribute(local_rows, rows, columns)
    """
    if not (torch.is_grad_enabled() and local.requires_grad):
        return redistribute_local(local, source, target)
    gradient = gradient_spec(target) if grad_placements is None else target.with_placements(grad_placements)
    if source is target and gradient is gradient_spec(source):
        return local
    result: torch.Tensor = Redistribute.apply(local, source, target, gradient)  # type: ignore[no-untyped-call]
    return result


def gradient_spec(spec: DTensorSpec) -> DTensorSpec:
    """How the gradient of a tensor under `spec` is laid out: alike, with Partial as Replicate."""
    if not any(isinstance(placement, Partial) for placement in spec.placements):
        return spec
    return spec.with_placements([Replicate() if isinstance(p, Partial) else p for p in spec.placements])


class Redistribute(torch.autograd.Function):
    """Redistribution as a linear map from local tensors to local tensors, and its transpose."""

    @staticmethod
    def forward(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, gradient: DTensorSpec) -> torch.Tensor:
        """Moves `local`; `gradient` is how the result's gradient will come."""
        result = redistribute_local(local, source, target)
        return result.view_as(result) if result is local else result

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keeps the specs; no tensor is needed."""
        ctx.specs = inputs[1:]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        """Takes the result's gradient to the layout of the input's."""
        source, target, gradient = ctx.specs
        _check_linear(source)
        _check_linear(target)
        grad = _times(grad, _mean_size(target, gradient))
        moved: torch.Tensor = Redistribute.apply(grad, gradient, gradient_spec(source), _cotangent_spec(source))  # type: ignore[no-untyped-call]
        divisor = _mean_size(source, gradient_spec(source))
        return (moved if divisor == 1 else moved / divisor), None, None, None


def _times(grad: torch.Tensor, factor: int) -> torch.Tensor:
    return grad if factor == 1 else grad * factor


def _mean_size(spec: DTensorSpec, gradient: DTensorSpec) -> int:
    """Terms of the mean that `spec` holds: each has 1/n of the gradient of the mean, which `gradient` holds."""
    return prod(
        size
        for size, placement, of_gradient in zip(spec.mesh.shape, spec.placements, gradient.placements, strict=True)
        if placement.is_partial("avg") and of_gradient.is_replicate()
    )


def _cotangent_spec(source: DTensorSpec) -> DTensorSpec:
    """How what multiplies the input's gradient is laid out: every rank has its own, so the terms add up."""
    return source.with_placements([Partial() if isinstance(p, Partial) else p for p in source.placements])


def _check_linear(spec: DTensorSpec) -> None:
    for placement in spec.placements:
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise ReductionError(
                f"{spec} is a reduction by {placement.reduce_op}, which has no gradient here; allowed are sum and avg: "
                "redistribute to Replicate under no_grad, or reduce before"
            )

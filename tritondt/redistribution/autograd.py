"""`redistribute`: redistribution of a plain local tensor between two specs, differentiable any number of times."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from tritondt import identity
from tritondt.comm.packing.wire_dtype import Wire, wire_of
from tritondt.errors import LayoutError, ReductionError
from tritondt.errors.arguments import checked
from tritondt.redistribution.given_local import given_local
from tritondt.redistribution.refusals import refuse_redistribution
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard, as_placements, placements_text
from tritondt.sharding.spec import DTensorSpec


@checked
def redistribute(
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    *,
    grad_placements: Sequence[Placement] | None = None,
    wire_dtype: torch.dtype | None = None,
    grad_wire_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Moves this rank's part of a tensor from `source` to `target`: returns the local tensor under `target`.

    `local` has the shape `source.local_shape`; the result has `target.local_shape`. Both specs have the same global
    shape and dtype, and lie on one mesh or on two meshes of one world, which may share ranks. A collective call of all
    ranks of the mesh, or of both meshes. A rank in only one of two meshes gives, or gets, an empty tensor of shape
    (0,); a rank in neither does nothing. The result never aliases `local`, except where nothing changes. If a gradient
    is needed, `local` must require it on all of these ranks, and all must run backward.

    Backward is a redistribution too. `grad_placements` declares the placements of the result's gradient; the default is
    those of `target`, with Replicate for Partial, since every term of a sum has the sum's gradient. The gradient of
    `local` has the layout of `source`, with the same exception. Pass (Partial(),) where ranks use a replicated result
    differently, as in front of a column-parallel matmul: backward is then a reduction.

    With `wire_dtype` messages hold that dtype: bfloat16 or float16 of float32, and float32 too of float64. Every step
    that moves data then rounds all values of the tensor, or terms of a sum, to the wire dtype, to nearest even. Values
    that stay on their rank are rounded too, so that ranks with the same elements have the same bits. Terms are added in
    the tensor's own dtype, and sums that travel further are rounded again. Where nothing moves, nothing is rounded.
    Backward does the same in `grad_wire_dtype` (default: `wire_dtype`; pass the tensor's own dtype for exact
    gradients), and treats the rounding as the identity.

    float32, bfloat16 and float16 may travel as float8_e4m3fn or float8_e5m2. Each box of such a message (a range of
    indices without gaps in any dim) then begins with a float32 scale: the least power of two with which its largest
    finite number fits. Numbers too small for the scale become 0.

    Raises MeshError and LayoutError on all ranks; LocalTensorError and TransportError on the rank whose tensor is at
    fault, and PeerError on the others; MismatchError where ranks call different redistributions; ReductionError in the
    backward of a max, min or product.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharding.mesh import Mesh
    >>> from tritondt.sharding.placement import Shard
    >>> from tritondt.sharding.spec import TensorMeta
    >>> whole = torch.arange(8).view(4, 2)
    >>> def columns_on(rank):
    ...     meta = TensorMeta.contiguous(whole.shape, whole.dtype)
    ...     rows, columns = (DTensorSpec(Mesh((2,)), (Shard(dim),), meta) for dim in (0, 1))
    ...     return redistribute(whole.chunk(2)[rank], rows, columns).tolist()
    >>> run_ranks(2, columns_on)
    [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    """
    try:
        local = given_local(local, "redistribute")
        wire = None
        if wire_dtype is not None or grad_wire_dtype is not None:
            wire = wire_of(source.dtype, source.dtype, wire_dtype, grad_wire_dtype)
        gradient = target if grad_placements is None else wanted_gradient_spec(target, grad_placements)
    except Exception as error:
        refuse_redistribution(source, target, error)
        raise
    if not (torch.is_grad_enabled() and local.requires_grad):
        found = redistribute_local(local, source, target, None if wire is None else wire.forward)
        return found.detach() if found is local else found  # a tensor of its own: requires_grad_ is of the result alone
    if grad_placements is None:
        gradient = gradient_spec(target)
    if source is target and gradient is gradient_spec(source):
        return local.view_as(local)
    result: torch.Tensor = Redistribute.apply(local, source, target, gradient, wire)  # type: ignore[no-untyped-call]
    return result


@lru_cache(maxsize=4096)
def gradient_spec(spec: DTensorSpec) -> DTensorSpec:
    """Spec of the gradient of a tensor under `spec`: its placements, with Replicate for Partial."""
    if not any(isinstance(placement, Partial) for placement in spec.placements):
        return spec
    return spec.with_placements([Replicate() if isinstance(p, Partial) else p for p in spec.placements])


def wanted_gradient_spec(spec: DTensorSpec, grad_placements: Sequence[Placement] | None) -> DTensorSpec:
    """Spec of the gradient of a local tensor under `spec`: that of `grad_placements` where they are given.

    LayoutError where the parts of the gradient are not those of the tensor: they could not be its gradient.
    """
    return gradient_spec(spec) if grad_placements is None else _with_same_parts(spec, as_placements(grad_placements))


@lru_cache(maxsize=4096)
def _with_same_parts(spec: DTensorSpec, grad_placements: tuple[Placement, ...]) -> DTensorSpec:
    wanted = spec.with_placements(grad_placements)
    if _cuts(wanted) != _cuts(spec):
        raise LayoutError(
            f"grad_placements={placements_text(wanted.placements)} were given for a local tensor of {spec}, which has "
            "other parts; allowed are its Shards, with Replicate or Partial on each other axis"
        )
    return wanted


def _cuts(spec: DTensorSpec) -> list[Placement | None]:
    """The Shard of each axis of more than one rank; None for an axis that has none, or one rank."""
    return [
        placement if isinstance(placement, Shard) and size > 1 else None
        for placement, size in zip(spec.placements, spec.mesh.shape, strict=True)
    ]


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
        """Redistributes `local`; `gradient` is the spec in which the gradient of the result will come."""
        ctx.specs, ctx.wire = (source, target, gradient), wire
        result = redistribute_local(local, source, target, None if wire is None else wire.forward)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        """Redistributes the result's gradient to the spec of the input's."""
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
    """Number of terms of the mean that `spec` holds; each has 1/n of the gradient of the mean, which `gradient` holds,
    replicated or as a mean.
    """
    return prod(
        size
        for size, placement, of_gradient in zip(spec.mesh.shape, spec.placements, gradient.placements, strict=True)
        if placement.is_partial("avg") and (of_gradient.is_replicate() or of_gradient.is_partial("avg"))
    )


def num_terms_of(spec: DTensorSpec, gradient: DTensorSpec) -> int:
    """Number of ranks whose terms of one element under `spec` have one gradient, which `gradient` replicates."""
    return prod(
        size
        for size, placement, of_gradient in zip(spec.mesh.shape, spec.placements, gradient.placements, strict=True)
        if placement.is_partial() and of_gradient.is_replicate()
    )


@lru_cache(maxsize=4096)
def cotangent_spec(source: DTensorSpec) -> DTensorSpec:
    """Spec of the factor of the input's gradient: every rank has a factor of its own, so the terms add up."""
    return source.with_placements([Partial() if isinstance(p, Partial) else p for p in source.placements])


def check_linear(spec: DTensorSpec) -> None:
    """Refuses terms of a reduction that has no gradient: all but sum and avg."""
    for placement in spec.placements:
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise ReductionError(
                f"{spec} is a reduction by {placement.reduce_op}, which has no gradient here; allowed are sum and avg: "
                "redistribute to Replicate under no_grad, or reduce before"
            )


identity.on_end(gradient_spec.cache_clear)
identity.on_end(_with_same_parts.cache_clear)
identity.on_end(cotangent_spec.cache_clear)

"""Autograd functions that connect plain local tensors with distributed ones."""

from typing import Any

import torch

from tritondt.comm.packing.wire_dtype import Wire
from tritondt.dtensor.compiled_call import Wrap
from tritondt.dtensor.pending import redistribute_dtensor
from tritondt.redistribution.autograd import check_linear, cotangent_spec, gradient_spec, mean_size, num_terms_of
from tritondt.sharding.spec import DTensorSpec


class FromLocal(torch.autograd.Function):
    """From a local tensor to a distributed one; the gradient comes back as this rank's part."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        wrap: Wrap,
        spec: DTensorSpec,
        gradient: DTensorSpec,
        values: torch.Tensor | None = None,
        num_terms: int = 1,
    ) -> torch.Tensor:
        """Wraps an alias of `local`, or `values` instead; `gradient` is the spec under which the gradient is wanted.

        `num_terms` ranks hold a local tensor that is the same for all, and each gets its part of the gradient.
        """
        ctx.wrap, ctx.spec, ctx.gradient, ctx.num_terms = wrap, spec, gradient, num_terms
        ctx.set_materialize_grads(False)  # torch would make plain zeros where there is no gradient
        return wrap(local.detach() if values is None else values, spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor | None, None, None, None, None, None]:
        """The local part of the gradient under the wanted spec, divided by the axis sizes for a mean."""
        if grad is None:
            return None, None, None, None, None, None
        check_linear(ctx.spec)
        back = grad.redistribute(placements=ctx.gradient.placements, order=ctx.gradient.order)
        local: torch.Tensor
        if torch.is_grad_enabled() and back.requires_grad:
            # What multiplies this gradient is every rank's own: terms add up where the input was terms.
            local = ToLocal.apply(back, ctx.wrap, cotangent_spec(ctx.spec))  # type: ignore[no-untyped-call]
        else:
            local = back._local_tensor
        divisor = mean_size(ctx.spec, ctx.gradient) * ctx.num_terms
        return (local if divisor == 1 else local / divisor), None, None, None, None, None


class ToLocal(torch.autograd.Function):
    """From a distributed tensor to its local one; the gradient becomes a distributed tensor again."""

    @staticmethod
    def forward(ctx: Any, distributed: Any, wrap: Wrap, gradient: DTensorSpec) -> torch.Tensor:
        """An alias of the local tensor; `gradient` is the spec under which the gradient will come."""
        ctx.wrap, ctx.gradient, ctx.source = wrap, gradient, distributed._spec
        ctx.set_materialize_grads(False)
        local: torch.Tensor = distributed._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        """The gradient under the spec that forward was given, times the axis sizes for a mean.

        A term of a mean of n has 1/n of the mean's gradient, as `FromLocal` gives it.
        """
        if grad is None:
            return None, None, None
        check_linear(ctx.source)
        gradient = ctx.gradient
        wrapped: torch.Tensor
        if torch.is_grad_enabled() and grad.requires_grad:
            num_terms = num_terms_of(ctx.source, gradient)
            wrapped = FromLocal.apply(grad, ctx.wrap, gradient, gradient_spec(gradient), None, num_terms)  # type: ignore[no-untyped-call]
        else:
            wrapped = ctx.wrap(grad, gradient)
        factor = mean_size(ctx.source, gradient)
        return (wrapped if factor == 1 else wrapped * factor), None, None


class Redistributed(torch.autograd.Function):
    """Redistribution of a distributed tensor: the identity on the global tensor and on its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        distributed: Any,
        wrap: Wrap,
        target: DTensorSpec,
        backward_dtype: torch.dtype | None,
        async_op: bool = False,
        wire: Wire | None = None,
    ) -> torch.Tensor:
        """The tensor under `target`; with `async_op` the result, and later its gradient, is pending."""
        ctx.source, ctx.backward_dtype, ctx.async_op, ctx.wire = distributed._spec, backward_dtype, async_op, wire
        ctx.set_materialize_grads(False)
        return redistribute_dtensor(
            distributed, wrap, target, async_op=async_op, wire_dtype=None if wire is None else wire.forward
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor | None, None, None, None, None, None]:
        """The gradient under the source's placements, with Partial as Replicate."""
        if grad is None:
            return None, None, None, None, None, None
        wanted = gradient_spec(ctx.source)
        if ctx.backward_dtype is not None:
            grad = grad.to(ctx.backward_dtype)
        back = grad.redistribute(
            placements=wanted.placements,
            order=wanted.order,
            async_op=ctx.async_op,
            wire_dtype=None if ctx.wire is None else ctx.wire.backward,
        )
        return (back if back.dtype is ctx.source.dtype else back.to(ctx.source.dtype)), None, None, None, None, None

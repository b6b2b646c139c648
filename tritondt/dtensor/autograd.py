"""Autograd functions that connect plain local tensors with distributed ones."""

from functools import partial
from typing import Any

import torch

from tritondt.comm.packing.wire_dtype import Wire
from tritondt.dtensor.operator_call import Wrap
from tritondt.dtensor.pending import convert_and_redistribute
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
            # One device clones such a gradient before it adds to it, and this one's strides do not tell.
            shares_elements = torch._debug_has_internal_overlap(grad) == 1
            wrapped = ctx.wrap(grad.contiguous() if shares_elements else grad, gradient)
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
        dtype: torch.dtype,
        backward_dtype: torch.dtype | None,
        async_op: bool = False,
        wire: Wire | None = None,
    ) -> torch.Tensor:
        """The tensor under `target` in `dtype`; with `async_op` the result, and later its gradient, is pending."""
        ctx.source, ctx.backward_dtype, ctx.async_op, ctx.wire = distributed._spec, backward_dtype, async_op, wire
        ctx.set_materialize_grads(False)
        wire_dtype = None if wire is None else wire.forward
        result = convert_and_redistribute(distributed, wrap, target, dtype, async_op=async_op, wire_dtype=wire_dtype)
        # Torch would take an argument that is returned for a view of all of it.
        return wrap(result._local_tensor, result._spec) if result is distributed else result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor | None, None, None, None, None, None, None]:
        """The gradient under the source's placements, with Partial as Replicate."""
        back = _gradient_for(ctx.source, ctx.backward_dtype, ctx.async_op, ctx.wire, grad)
        return back, None, None, None, None, None, None


def alias_with_gradient(
    distributed: torch.Tensor, backward_dtype: torch.dtype | None, async_op: bool, wire: Wire | None
) -> torch.Tensor:
    """A view of all of a distributed tensor, whose gradient comes as after a redistribution.

    A view that torch knows of: what is written to either is counted, and has gradients, on both.
    """
    alias: torch.Tensor = torch.ops.aten.alias.default(distributed)
    spec = distributed._spec  # type: ignore[attr-defined]
    alias.register_hook(partial(_gradient_for, spec, backward_dtype, async_op, wire))
    return alias


def _gradient_for(
    source: DTensorSpec, backward_dtype: torch.dtype | None, async_op: bool, wire: Wire | None, grad: Any
) -> torch.Tensor | None:
    """The gradient, if there is one, under the placements of `source`, with Partial as Replicate, and in its dtype.

    Terms are added up in `backward_dtype`, or else in the dtype of `source`, whatever the result's dtype was.
    """
    if grad is None:
        return None
    wanted = gradient_spec(source)
    if grad.is_complex() and not source.dtype.is_complex:
        grad = grad.real
    dtype = backward_dtype or source.dtype
    back: torch.Tensor = grad.redistribute(
        wanted.mesh,
        placements=wanted.placements,
        order=wanted.order,
        async_op=async_op,
        forward_dtype=dtype,
        backward_dtype=dtype,
        wire_dtype=None if wire is None else wire.backward,
    )
    return back if back.dtype is source.dtype else back.to(source.dtype)

"""Tensors that cross a module's boundary: one node of the autograd graph on the way in, one on the way out.

Going in, the input is moved and the parameters are shown as local tensors; going out, the output is moved, a bias added
and a distributed tensor made. Each step as a node of its own would be up to six nodes of 15 us a module.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritondt.dtensor.autograd import ToLocal
from tritondt.dtensor.tensor import DTensor
from tritondt.dtensor.views.copied_views import refresh
from tritondt.parallel.boundary import InputPlan, OutputPlan
from tritondt.parallel.gradients import as_distributed, is_differentiated, open_pass, summed_gradients
from tritondt.redistribution.autograd import Redistribute, cotangent_spec, redistribute
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.spec import DTensorSpec

# Where a distributed tensor keeps the part that the layers share which take it in.
_PART = "_tritondt_shared_part"


class Parameters(NamedTuple):
    """Distributed parameters of a module, and the specs of their parts' gradients: terms, at the places in `terms`.

    `others` are those whose gradients are no terms.
    """

    tensors: list[DTensor]
    gradients: list[DTensorSpec]
    terms: list[int]
    others: "Parameters | None"

    @classmethod
    def of(cls, tensors: list[DTensor], gradients: list[DTensorSpec], terms: list[int]) -> "Parameters":
        """Parameters, and among them the others."""
        if not terms:
            return cls(tensors, gradients, terms, None)
        places = [place for place in range(len(tensors)) if place not in terms]
        others = cls([tensors[place] for place in places], [gradients[place] for place in places], [], None)
        return cls(tensors, gradients, terms, others)


def enter(plan: InputPlan, x: torch.Tensor, parameters: Parameters) -> Sequence[torch.Tensor]:
    """Local part of the input under `plan.target`, then those of the parameters."""
    tensors, gradients, terms, others = parameters
    if others is not None and torch.is_grad_enabled() and (current := open_pass()) is not None:
        summed = current.parts_of([tensors[place] for place in terms], [gradients[place] for place in terms])
        if summed is not None:
            found = list(_enter(plan, x, others))
            for place, part in zip(terms, summed, strict=True):
                found.insert(1 + place, part)
            return found
    return _enter(plan, x, parameters)


def _enter(plan: InputPlan, x: torch.Tensor, parameters: Parameters) -> Sequence[torch.Tensor]:
    if plan.as_terms:
        x = redistribute(x, plan.source, plan.target, grad_placements=plan.gradient.placements)
        plan = InputPlan(plan.target, plan.target, plan.gradient, plan.gradient, False, False, False)
    if torch.is_grad_enabled() and (x.requires_grad or any(tensor.requires_grad for tensor in parameters.tensors)):
        if plan.is_shared and x.requires_grad and not x.is_leaf:
            return (_shared_part(x, plan.gradient), *ExposeParameters.apply(parameters, *parameters.tensors))  # type: ignore[no-untyped-call]
        found: Sequence[torch.Tensor] = EnterModule.apply(plan, parameters, x, *parameters.tensors)  # type: ignore[no-untyped-call]
        return found
    if isinstance(x, DTensor):
        refresh(x)
    local = x._local_tensor if isinstance(x, DTensor) else x
    part = redistribute_local(local, plan.source, plan.target) if plan.moves else local
    return (part, *[tensor._local_tensor for tensor in parameters.tensors])


def _shared_part(x: Any, gradient: DTensorSpec) -> torch.Tensor:
    """Local part of `x`, one tensor for all layers that take `x` in.

    The layers' gradients of `x` are added in place, as plain tensors, and their sum is made a distributed tensor once.
    Three distributed gradients of 1.5 MB take two additions that allocate, 1 ms each.
    """
    known = x.__dict__.get(_PART)
    # An in-place operator gives `x` another history, which the part would not have.
    if known is not None and known[:2] == (gradient, x._version):
        part: torch.Tensor = known[2]
        return part
    part = ToLocal.apply(x, DTensor, gradient)  # type: ignore[no-untyped-call]
    setattr(x, _PART, (gradient, x._version, part))
    return part


class ExposeParameters(torch.autograd.Function):
    """Parameters of a module as local tensors."""

    @staticmethod
    def forward(ctx: Any, parameters: Parameters, *tensors: DTensor) -> tuple[torch.Tensor, ...]:
        """Aliases of the local parts."""
        return _exposed(ctx, parameters, ctx.needs_input_grad[1:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Distributed gradients, laid out as `Parameters.gradients` says."""
        return None, *_gradients(ctx, grads)


def _exposed(
    ctx: Any, parameters: Parameters, needed: Sequence[bool], *others: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Results of an autograd function: `others`, then aliases of the parameters; without a gradient where none is
    needed.
    """
    ctx.parameters = parameters
    ctx.set_materialize_grads(False)
    found = (*others, *[tensor._local_tensor.detach() for tensor in parameters.tensors])
    if not all(needed):
        ctx.mark_non_differentiable(*[tensor for tensor, needs in zip(found, needed, strict=True) if not needs])
    return found


def _gradients(ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[Any]:
    """Distributed gradients of the parameters, the last inputs of the function of `ctx`; terms are summed."""
    parameters: Parameters = ctx.parameters
    found = [
        grad if grad is None or place in parameters.terms else as_distributed(grad, parameters.gradients[place])
        for place, grad in enumerate(grads)
    ]
    if parameters.terms:
        specs = [parameters.gradients[place] for place in parameters.terms]
        sums = summed_gradients([grads[place] for place in parameters.terms], specs)
        for place, summed in zip(parameters.terms, sums, strict=True):
            found[place] = summed
    return found


class EnterModule(torch.autograd.Function):
    """Input and parameters of a module as local tensors."""

    @staticmethod
    def forward(
        ctx: Any, plan: InputPlan, parameters: Parameters, x: torch.Tensor, *tensors: DTensor
    ) -> tuple[torch.Tensor, ...]:
        """Redistributes the input, and exposes the parameters where they lie."""
        ctx.plan, ctx.is_distributed = plan, isinstance(x, DTensor)
        if isinstance(x, DTensor):
            refresh(x)
            local = x._local_tensor
            part = redistribute_local(local, plan.source, plan.target) if plan.moves else local.detach()
        else:
            part = redistribute_local(x, plan.source, plan.target) if plan.moves else x.view_as(x)
        return _exposed(ctx, parameters, ctx.needs_input_grad[2:], part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Gradient of the input as the input came, or as the gradient is where nothing moved; then those of the
        parameters.
        """
        plan: InputPlan = ctx.plan
        of_input: Any = None
        if grad is not None and ctx.needs_input_grad[2]:
            if not ctx.is_distributed:
                of_input = _plain_gradient(grad, plan)
            elif plan.moves:
                of_input = _distributed_gradient(grad, plan)
            else:
                of_input = as_distributed(grad, plan.gradient)
        return None, None, of_input, *_gradients(ctx, grads)


def _distributed_gradient(grad: torch.Tensor, plan: InputPlan) -> torch.Tensor:
    if is_differentiated(grad):
        wrapped = as_distributed(grad, plan.gradient)
        result: torch.Tensor = wrapped.redistribute(placements=plan.gradient_of_source.placements)
        return result
    local = redistribute_local(grad, plan.gradient, plan.gradient_of_source)
    return DTensor(local, plan.gradient_of_source)


def _plain_gradient(grad: torch.Tensor, plan: InputPlan) -> torch.Tensor:
    target = plan.gradient_of_source
    if target is plan.gradient:
        return grad
    if is_differentiated(grad):
        result: torch.Tensor = Redistribute.apply(grad, plan.gradient, target, cotangent_spec(plan.source))  # type: ignore[no-untyped-call]
        return result
    return redistribute_local(grad, plan.gradient, target)


def leave(plan: OutputPlan, local: torch.Tensor, bias: torch.Tensor | None, *, use_local_output: bool) -> torch.Tensor:
    """Output under `plan.target` with its part of the bias; a distributed tensor unless `use_local_output`."""
    if plan.as_terms:
        return _leave_as_terms(plan, local, bias, use_local_output=use_local_output)
    if use_local_output and bias is None and not plan.moves:
        return local
    if torch.is_grad_enabled() and (local.requires_grad or (bias is not None and bias.requires_grad)):
        found: torch.Tensor = LeaveModule.apply(plan, use_local_output, local, bias)  # type: ignore[no-untyped-call]
        return found
    return _redistributed_output(plan, use_local_output, local, bias)


def _redistributed_output(
    plan: OutputPlan, use_local_output: bool, local: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    result = local.contiguous()
    if plan.moves:
        result = redistribute_local(result, plan.source, plan.target)
    if bias is not None:
        # A redistributed tensor is ours alone. Under autocast the matmul's dtype is not the bias's.
        result = result.add_(bias) if plan.moves else result + bias.to(result.dtype)
    elif not plan.moves:
        result = result.detach() if not use_local_output else result.view_as(result)
    return result if use_local_output else DTensor(result, plan.target)


class LeaveModule(torch.autograd.Function):
    """Output of a module, redistributed and with its bias."""

    @staticmethod
    def forward(
        ctx: Any, plan: OutputPlan, use_local_output: bool, local: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Redistributed output, a local tensor or a distributed one."""
        ctx.plan, ctx.use_local_output, ctx.bias_dtype = plan, use_local_output, None if bias is None else bias.dtype
        return _redistributed_output(plan, use_local_output, local, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """Gradient of the output as its terms or parts have it; the bias's is the sum over all positions held here."""
        plan: OutputPlan = ctx.plan
        wanted = plan.gradient_of_target
        if not ctx.use_local_output and ctx.bias_dtype is None and not is_differentiated(grad):
            # Nothing reads the gradient as the output is laid out: terms are scattered, and not added on all ranks.
            return None, None, _redistributed_part(grad, plan.gradient_of_source), None
        if not ctx.use_local_output:
            distributed = (
                grad if grad._spec.layout is wanted.layout else grad.redistribute(placements=wanted.placements)
            )
            if is_differentiated(distributed):
                grad = ToLocal.apply(distributed, DTensor, cotangent_spec(plan.target))  # type: ignore[no-untyped-call]
            else:
                grad = distributed._local_tensor
        of_bias = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
            of_bias = (grad.sum(tuple(range(grad.ndim - 1))) if grad.ndim > 1 else grad).to(ctx.bias_dtype)
        if not ctx.needs_input_grad[2]:
            return None, None, None, of_bias
        if is_differentiated(grad):
            # Alike on all ranks, it is multiplied by each one's own weights: its gradient comes as terms.
            terms = cotangent_spec(plan.source)
            return None, None, Redistribute.apply(grad, wanted, plan.gradient_of_source, terms), of_bias  # type: ignore[no-untyped-call]
        if plan.gradient_of_source is wanted:
            return None, None, grad, of_bias
        return None, None, redistribute_local(grad, wanted, plan.gradient_of_source), of_bias


def _redistributed_part(grad: Any, spec: DTensorSpec) -> torch.Tensor:
    """This rank's part of a distributed gradient under another layout."""
    if grad._spec.layout is not spec.layout:
        grad = grad.redistribute(placements=spec.placements)
    local: torch.Tensor = grad._local_tensor
    return local


def _leave_as_terms(
    plan: OutputPlan, local: torch.Tensor, bias: torch.Tensor | None, *, use_local_output: bool
) -> torch.Tensor:
    """Output of which every rank has terms, a rare case; the bias is among them."""
    terms = redistribute(local.contiguous(), plan.source, plan.target)
    terms = terms if bias is None else terms + bias.to(terms.dtype)
    if use_local_output:
        return terms
    spec = plan.target
    return DTensor.from_local(terms, spec.mesh, spec.placements, shape=spec.shape, stride=spec.tensor_meta.stride)

"""Reduction of gradients that come as terms of a sum to the layout of their parameters, all in one exchange.

A parameter that every rank holds whole, but uses on its own part of the sequence, has terms of its gradient on each
rank. The parameters of all modules that run in one forward pass are inputs of one autograd function: its backward runs
once the terms of all are there, adds them up and only then hands gradients on. Every reader of gradients, be that hooks
on tensors, hooks on gradient accumulators, or DistributedDataParallel, sees sums.
"""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from tritondt.dtensor.autograd import FromLocal
from tritondt.dtensor.tensor import DTensor
from tritondt.parallel.boundary import activation_spec
from tritondt.redistribution.autograd import gradient_spec
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Partial, Replicate
from tritondt.sharding.spec import DTensorSpec


class Terms(NamedTuple):
    """A replicated parameter, and the spec under which its gradient comes: terms of a sum."""

    parameter: DTensor
    spec: DTensorSpec


class SumGradients(torch.autograd.Function):
    """Replicated parameters as local tensors that ranks use differently."""

    @staticmethod
    def forward(ctx: Any, specs: Sequence[DTensorSpec], *tensors: DTensor) -> tuple[torch.Tensor, ...]:
        """Aliases of the local parts; without a gradient where none is needed."""
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        found = tuple(tensor._local_tensor.detach() for tensor in tensors)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*[part for part, needs in zip(found, needed, strict=True) if not needs])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Sums over the ranks; None for what this pass did not use."""
        return None, *summed_gradients(grads, ctx.specs)


def summed_gradients(terms: Sequence[torch.Tensor | None], specs: Sequence[DTensorSpec]) -> list[Any]:
    """Distributed gradients, replicated, of this rank's terms; those of one mesh and dtype in one exchange."""
    found: list[Any] = [None] * len(terms)
    groups: dict[object, list[int]] = {}
    for place, (term, spec) in enumerate(zip(terms, specs, strict=True)):
        if term is None:
            continue
        if is_differentiated(term):
            found[place] = as_distributed(term, spec).redistribute(placements=gradient_spec(spec).placements)
        else:
            groups.setdefault((spec.mesh, spec.dtype), []).append(place)
    for places in groups.values():
        given: list[Any] = [terms[place] for place in places]
        for place, summed in zip(places, _sums(given, specs[places[0]]), strict=True):
            found[place] = DTensor(summed, gradient_spec(specs[place]))
    return found


def _sums(terms: list[torch.Tensor], spec: DTensorSpec) -> list[torch.Tensor]:
    """Sums of terms of one dtype on one mesh of one axis, reduced as one flat tensor."""
    flat = torch.cat([term.reshape(-1) for term in terms])
    source, target = (activation_spec(spec.mesh, kind, flat.shape, spec.dtype) for kind in (Partial(), Replicate()))
    pieces = redistribute_local(flat, source, target).split([term.numel() for term in terms])
    return [piece.view(term.shape) for piece, term in zip(pieces, terms, strict=True)]


def is_differentiated(grad: torch.Tensor) -> bool:
    """Whether a gradient will have a gradient itself."""
    return torch.is_grad_enabled() and grad.requires_grad


def as_distributed(grad: torch.Tensor, spec: DTensorSpec) -> Any:
    """Distributed tensor of a gradient's part, which may be differentiated again."""
    if is_differentiated(grad):
        return FromLocal.apply(grad, DTensor, spec, gradient_spec(spec))  # type: ignore[no-untyped-call]
    return DTensor(grad, spec)


class ForwardPass:
    """One forward pass of a tree of modules: the local parts of its replicated parameters, made on first use.

    `terms` lists the parameters then. Parameters with hooks of their own are left out: a hook would be called with None
    where the pass does not use its parameter.
    """

    def __init__(self, owner: object, terms: Callable[[], Iterable[Terms]], before: "ForwardPass | None") -> None:
        self.owner, self.before = owner, before
        self._terms = terms
        self._parts: dict[int, tuple[DTensor, DTensorSpec, torch.Tensor]] | None = None

    def parts_of(self, parameters: Sequence[DTensor], specs: Sequence[DTensorSpec]) -> list[torch.Tensor] | None:
        """Local parts whose gradients are summed together; None where the pass does not know all, as they are now."""
        if self._parts is None:
            self._parts = self._made()
        found = []
        for parameter, spec in zip(parameters, specs, strict=True):
            known = self._parts.get(id(parameter))
            if known is None or known[1] != spec or known[2].requires_grad != parameter.requires_grad:
                return None
            found.append(known[2])
        return found

    def _made(self) -> dict[int, tuple[DTensor, DTensorSpec, torch.Tensor]]:
        listed = {id(terms.parameter): terms for terms in self._terms() if not terms.parameter._backward_hooks}
        parameters, specs = ([terms[place] for terms in listed.values()] for place in (0, 1))
        parts: Sequence[torch.Tensor] = SumGradients.apply(specs, *parameters)  # type: ignore[no-untyped-call]
        return {id(known[0]): known for known in zip(parameters, specs, parts, strict=True)}  # type: ignore[misc]


_open: ContextVar[ForwardPass | None] = ContextVar("forward pass of parallelized modules", default=None)


def open_pass() -> ForwardPass | None:
    """The forward pass that runs in this thread."""
    return _open.get()


def begin_pass(owner: object, terms: Callable[[], Iterable[Terms]], *, is_apart: bool = False) -> None:
    """Begins the pass of a tree of modules; nothing within that of another tree, which this one is part of.

    With `is_apart` the tree has a pass of its own there, whose gradients come before the others are done.
    """
    found = _open.get()
    if found is None or found.owner is owner or is_apart:
        _open.set(ForwardPass(owner, terms, found))


def end_pass(owner: object) -> None:
    """Ends the pass that `owner` began last."""
    found = _open.get()
    if found is not None and found.owner is owner:
        _open.set(found.before)

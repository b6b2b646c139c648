"""Brings gradients that come as terms of a sum to the layout of their parameters, all of them in one exchange.

A parameter that every rank holds whole, but uses on its own part of the sequence, has a Partial gradient on each. The
sums are taken when the backward pass ends, so that no optimizer finds a Partial and none is exchanged on its own.
"""

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from tritondt.dtensor import DTensor
from tritondt.execute import redistribute_local
from tritondt.parallel.boundary import activation_spec
from tritondt.placement import Partial, Replicate
from tritondt.spec import DTensorSpec

_numbers = count()


class _Held:
    """Parameters of one backward pass whose gradients are terms, each with the gradient that it had before.

    Kept alive by the callback that ends the pass; goes with the pass where that fails.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, tuple[DTensor, Any]] = {}

    def reduce(self) -> None:
        """Every gradient in the layout of its parameter, added to what was there."""
        with torch.no_grad():
            entries = [self.parameters[number] for number in sorted(self.parameters)]
            found = [(parameter, before) for parameter, before in entries if parameter.grad is not None]
            for parameter, before in entries:
                if parameter.grad is None:  # asked for by torch.autograd.grad, which accumulates nothing
                    parameter.grad = before
            for (parameter, before), grad in zip(found, _reduced([p for p, _ in found]), strict=True):
                parameter.grad = grad if before is None else before.add_(grad)


_held: "WeakValueDictionary[int, _Held]" = WeakValueDictionary()


class _Hold:
    """A parameter's hook: puts off the sum of its gradient's terms until the backward pass ends."""

    def __init__(self, parameter: DTensor) -> None:
        self._parameter = weakref.ref(parameter)
        # Ranks make their hooks in one order; autograd does not promise to run them in one.
        self._number = next(_numbers)

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        parameter = self._parameter()
        if parameter is None or not isinstance(grad, DTensor) or not _is_partial(grad):
            return None
        if torch.is_grad_enabled() and grad.requires_grad:  # create_graph: the sum is part of the graph
            return grad.redistribute(placements=parameter.placements)
        task = torch._C._current_graph_task_id()
        held = _held.get(task)
        if held is None:
            held = _held[task] = _Held()
            torch.autograd.Variable._execution_engine.queue_callback(held.reduce)
        # Accumulating into what is there would reduce this gradient on its own.
        held.parameters[self._number] = (parameter, parameter.grad)
        parameter.grad = None
        return None


def _is_partial(grad: DTensor) -> bool:
    return any([type(placement) is Partial for placement in grad._spec.placements])  # noqa: C419  half the time


def reduce_after_backward(parameter: DTensor) -> None:
    """From now on the parameter's gradient is reduced when a backward pass ends; once for each parameter.

    To be called at every forward pass: a copy of a parameter has no hooks.
    """
    hooks = parameter._backward_hooks
    if hooks is None or not any(type(hook) is _Hold for hook in hooks.values()):
        parameter.register_hook(_Hold(parameter))  # type: ignore[no-untyped-call]


def _reduced(parameters: Sequence[DTensor]) -> list[torch.Tensor]:
    """The parameters' gradients under the parameters' placements."""
    grads: list[Any] = [parameter.grad for parameter in parameters]
    groups: dict[tuple[object, ...], list[int]] = {}
    results: list[Any] = [None] * len(grads)
    for place, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        spec: DTensorSpec = grad._spec
        if spec.placements == (Partial(),) and parameter.placements == (Replicate(),):
            groups.setdefault((spec.mesh, spec.dtype), []).append(place)
        else:
            results[place] = grad.redistribute(placements=parameter.placements)
    for places in groups.values():
        for place, summed in zip(places, _sums([grads[place] for place in places]), strict=True):
            results[place] = summed
    return results


def _sums(grads: Sequence[DTensor]) -> list[torch.Tensor]:
    """Gradients of one dtype on one mesh of one axis, reduced as one flat tensor."""
    mesh, dtype = grads[0]._spec.mesh, grads[0]._spec.dtype
    flat = torch.cat([grad._local_tensor.reshape(-1) for grad in grads])
    terms, summed = (activation_spec(mesh, placement, flat.shape, dtype) for placement in (Partial(), Replicate()))
    whole = redistribute_local(flat, terms, summed)
    pieces = whole.split([grad._local_tensor.numel() for grad in grads])
    return [
        DTensor(piece.view(grad.shape), activation_spec(mesh, Replicate(), grad.shape, dtype))
        for piece, grad in zip(pieces, grads, strict=True)
    ]

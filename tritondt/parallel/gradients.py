"""Brings gradients that come as terms of a sum to the layout of their parameters, all of them in one exchange.

A parameter that every rank holds whole, but uses on its own part of the sequence, has a Partial gradient on each. The
sums are taken when the backward pass ends, so that no optimizer finds a Partial and none is exchanged on its own.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from tritondt.dtensor import DTensor
from tritondt.execute import redistribute_local
from tritondt.parallel.boundary import activation_spec
from tritondt.placement import Partial, Replicate


class _Held:
    """Parameters of one backward pass whose gradients are terms, each with the gradient that it had before.

    In the order in which autograd came to their modules, that of the forward pass reversed: the same on all ranks. Kept
    alive by the callback that ends the pass; goes with the pass where that fails.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, tuple[DTensor, Any]] = {}

    def reduce(self) -> None:
        """Every gradient in the layout of its parameter, added to what was there."""
        with torch.no_grad():
            entries = list(self.parameters.values())
            found = [(parameter, before) for parameter, before in entries if parameter.grad is not None]
            for parameter, before in entries:
                if parameter.grad is None:  # asked for by torch.autograd.grad, which accumulates nothing
                    parameter.grad = before
            for (parameter, before), grad in zip(found, _reduced([p for p, _ in found]), strict=True):
                parameter.grad = grad if before is None else before.add_(grad)


_held: "WeakValueDictionary[int, _Held]" = WeakValueDictionary()


def reduce_after_backward(parameters: Sequence[DTensor]) -> None:
    """Has the gradients that these parameters are about to get reduced when the backward pass that runs now ends."""
    task = torch._C._current_graph_task_id()
    held = _held.get(task)
    if held is None:
        held = _held[task] = _Held()
        torch.autograd.Variable._execution_engine.queue_callback(held.reduce)
    known = held.parameters
    for parameter in parameters:
        if id(parameter) not in known:
            # Accumulating into what is there would reduce this gradient on its own.
            known[id(parameter)] = (parameter, parameter.grad)
            parameter.grad = None


def _reduced(parameters: Sequence[DTensor]) -> list[torch.Tensor]:
    """The parameters' gradients under the parameters' placements."""
    grads: list[Any] = [parameter.grad for parameter in parameters]
    groups: dict[object, list[int]] = {}
    results: list[Any] = [None] * len(grads)
    for place, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        if grad._spec.placements == (Partial(),) and parameter._spec.placements == (Replicate(),):
            groups.setdefault((grad._spec.mesh, grad._spec.dtype), []).append(place)
        else:
            results[place] = grad.redistribute(placements=parameter.placements)
    for places in groups.values():
        for place, summed in zip(places, _sums([grads[place] for place in places]), strict=True):
            results[place] = summed
    return results


def _sums(grads: Sequence[DTensor]) -> list[torch.Tensor]:
    """Gradients of one dtype on one mesh of one axis, reduced as one flat tensor."""
    mesh, dtype = grads[0]._spec.mesh, grads[0]._spec.dtype
    parts = [grad._local_tensor.reshape(-1) for grad in grads]
    flat = torch.cat(parts)
    terms, summed = (activation_spec(mesh, placement, flat.shape, dtype) for placement in (Partial(), Replicate()))
    whole = redistribute_local(flat, terms, summed)
    pieces = whole.split([part.shape[0] for part in parts])
    return [
        DTensor(piece.view(grad._spec.shape), activation_spec(mesh, Replicate(), grad._spec.shape, dtype))
        for piece, grad in zip(pieces, grads, strict=True)
    ]

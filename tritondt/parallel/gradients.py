"""Reduction of gradients that come as terms of a sum to the layout of their parameters, all in one exchange.

A parameter that every rank holds whole, but uses on its own part of the sequence, has terms of its gradient on each.
They are kept as local tensors while the backward pass runs; when it ends they are added up and made gradients.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch

from tritondt.dtensor.tensor import DTensor
from tritondt.parallel.boundary import activation_spec
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Partial, Replicate
from tritondt.sharding.spec import DTensorSpec


class _Pass:
    """One backward pass: replicated parameters with this rank's terms of their gradients, and the specs of the terms.

    In the order in which autograd came to their modules, that of the forward pass reversed: the same on all ranks. Kept
    alive by the callback that ends the pass; goes with the pass where that fails.
    """

    def __init__(self) -> None:
        self.terms: dict[int, tuple[DTensor, torch.Tensor, DTensorSpec]] = {}

    def end(self) -> None:
        """Accumulates the sums into the parameters' gradients."""
        groups: dict[object, list[tuple[DTensor, torch.Tensor, DTensorSpec]]] = {}
        for entry in self.terms.values():
            groups.setdefault((entry[2].mesh, entry[2].dtype), []).append(entry)
        self.terms = {}
        with torch.no_grad():
            for entries in groups.values():
                sums = _sums([grad for _, grad, _ in entries], entries[0][2])
                for (parameter, _, _), summed in zip(entries, sums, strict=True):
                    before: Any = parameter.grad
                    parameter.grad = summed if before is None else before.add_(summed)


_passes: "WeakValueDictionary[int, _Pass]" = WeakValueDictionary()


def can_wait(parameter: torch.Tensor, node: Any) -> bool:
    """Whether nobody sees the parameter's gradient before the backward pass ends.

    `node` is what accumulates it. torch.autograd.grad wants it at once, and so do hooks.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks or type(node).__name__ != "AccumulateGrad":
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # how torch says that this is torch.autograd.grad
        return False


def add_when_backward_ends(parameter: DTensor, grad: torch.Tensor, spec: DTensorSpec) -> None:
    """Keeps this rank's terms of a gradient, which are added up when the current backward pass ends."""
    task = torch._C._current_graph_task_id()
    found = _passes.get(task)
    if found is None:
        found = _passes[task] = _Pass()
        torch.autograd.Variable._execution_engine.queue_callback(found.end)
    known = found.terms.get(id(parameter))
    found.terms[id(parameter)] = (parameter, grad if known is None else known[1] + grad, spec)


def _sums(terms: list[torch.Tensor], spec: DTensorSpec) -> list[torch.Tensor]:
    """Gradients of one dtype on one mesh of one axis, reduced as one flat tensor."""
    mesh, dtype = spec.mesh, spec.dtype
    flat = torch.cat([term.reshape(-1) for term in terms])
    source, target = (activation_spec(mesh, placement, flat.shape, dtype) for placement in (Partial(), Replicate()))
    pieces = redistribute_local(flat, source, target).split([term.numel() for term in terms])
    return [
        DTensor(piece.view(term.shape), activation_spec(mesh, Replicate(), term.shape, dtype))
        for piece, term in zip(pieces, terms, strict=True)
    ]

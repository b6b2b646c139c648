"""Composite operators of torch that make plain tensors of their own beside their arguments.

A causal mask, the classes of one_hot, the positions of quantiles: torch makes them of shapes and numbers, alike on
every rank, where no Python sees them come. These operators come here first when an argument is of a subclass, and the
plain tensors that they make beside distributed tensors count as replicated. A plain tensor of the user's is refused as
ever.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from tritondt.dtensor.operator_call import Wrap
from tritondt.ops.propagation.replication import as_replicated, implicit_replication
from tritondt.sharding.mesh import Mesh

aten = torch.ops.aten

_MAKING = (
    *("_scaled_dot_product_attention_math", "one_hot", "combinations", "istft"),
    *("quantile", "quantile.scalar", "nanquantile", "nanquantile.scalar"),
    *("linalg_matrix_power", "linalg_matrix_rank", "linalg_matrix_rank.tol_tensor"),
    *("linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.atol_rtol_float"),
)
# Make their result where an argument has no elements.
_MAKING_EMPTY = ("scaled_dot_product_attention",)
# Fill what they make, so that the result is row-major; of distributed tensors it is compared into being.
_FILLING = ("one_hot",)
# Read the values of their second argument, which decide how many results there are.
_READING = ("tensor_split.tensor_indices_or_sections",)
# In graphs torch takes Python forms of them, which index by places and compare with classes that they make.
_MAKING_IN_GRAPHS = (
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("multi_margin_loss", "multilabel_margin_loss_forward", "istft"),
)
# Taken apart by torch's Python form outside graphs too: the C++ form makes a view of memory, which gathers every cut.
_IN_PYTHON = ("stft.center",)
# Of the keys that torch looks at before it decomposes a composite, one that subclasses have, and modes.
_OF_SUBCLASSES = DispatchKey.PythonTLSSnapshot
_BELOW: DispatchKeySet = torch._C._dispatch_keyset_full_after(_OF_SUBCLASSES)


def _powers(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:  # noqa: N803
    """vander: the powers 0 to N - 1 of each element, the highest first; torch writes them to a plain tensor."""
    width = x.numel() if N is None else N
    if x.ndim != 1 or width < 0:
        raise RuntimeError(
            f"vander takes a tensor of one dim and at least 0 powers, got {x.ndim} dims and {width} powers"
        )
    column = (x if x.is_floating_point() or x.is_complex() else x.long()).unsqueeze(1)
    rising = torch.cat([torch.ones_like(column), column.expand(-1, max(width - 1, 0)).cumprod(1)], 1)[:, :width]
    return rising.clone() if increasing else rising.flip(1)


def _row_major_max_pool1d(x: torch.Tensor, *window: Any, **named: Any) -> torch.Tensor:
    """max_pool1d: of plain tensors that need no gradient torch has a kernel; its other form gives a view."""
    pooled: torch.Tensor = aten.max_pool1d_with_indices(x, *window, **named)[0]
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    return pooled if needs_gradient else pooled.clone(memory_format=torch.contiguous_format)


# In terms of operators that give new tensors: torch's own form would write to a plain one, or give a view.
_FORMS: Mapping[str, Callable[..., torch.Tensor]] = {"vander": _powers, "max_pool1d": _row_major_max_pool1d}

_library = torch.library.Library("aten", "IMPL")


def let_composites_make_tensors(tensor_class: type[torch.Tensor], wrap: Wrap) -> None:
    """Takes tensors that composites make for replicated beside tensors of `tensor_class`; called once in a process."""
    in_graphs = (name + overload for name in _MAKING_IN_GRAPHS for overload in ("", ".vec"))
    for name in dict.fromkeys((*_MAKING, *_MAKING_EMPTY, *_READING, *_FORMS, *_IN_PYTHON, *in_graphs)):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is not None:
            kernel = _Kernel(op, tensor_class, wrap, reads=name in _READING, form=_FORMS.get(name))
            _library.impl(name, kernel, _OF_SUBCLASSES.name, with_keyset=True)


class _Kernel:
    """Kernel of one composite operator, called before torch's own."""

    def __init__(
        self,
        op: OpOverload,
        tensor_class: type[torch.Tensor],
        wrap: Wrap,
        *,
        reads: bool,
        form: Callable[..., torch.Tensor] | None,
    ) -> None:
        self._op, self._class, self._wrap, self._reads, self._form = op, tensor_class, wrap, reads, form
        self._makes_empty_only = op._schema.name.removeprefix("aten::") in _MAKING_EMPTY
        self._is_filling = op._schema.name.removeprefix("aten::") in _FILLING
        self._makes_in_graphs = op._schema.name.removeprefix("aten::") in _MAKING_IN_GRAPHS
        self._makes_only_there = self._makes_in_graphs and op._schema.name.removeprefix("aten::") not in _MAKING
        in_python = op._schema.name.removeprefix("aten::") in {name.partition(".")[0] for name in _IN_PYTHON}
        self._python_form = op.py_kernels.get(DispatchKey.CompositeImplicitAutograd) if in_python else None

    def __call__(self, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        mesh = next((tensor._spec.mesh for tensor in tensors if isinstance(tensor, self._class)), None)  # type: ignore[attr-defined]
        left = keys & _BELOW
        in_graph = keys.has(DispatchKey.PythonDispatcher)
        if self._makes_only_there and (mesh is None or not in_graph):
            return self._op.redispatch(left, *args, **kwargs)
        if mesh is None:
            # What is handed to Python has to come through the kernel that this one stands before.
            if left.highestPriorityTypeId() == DispatchKey.Python:  # before torch 2.13 no two keys are one object
                return self._decompose(args, kwargs)
            return self._op.redispatch(left, *args, **kwargs)
        if self._form is not None:
            return self._form(*args, **kwargs)
        if self._reads:
            tensor, values, *rest = args
            if isinstance(values, self._class):
                # How many results there are is known outside the mesh too, as far as the shape tells.
                outside = torch.ones(values.shape, dtype=values.dtype)
                values = values.full_tensor() if mesh.coordinate is not None else outside  # type: ignore[attr-defined]
            return self._decompose((tensor, values, *rest), kwargs)
        has_plain = any(tensor.ndim and not isinstance(tensor, self._class) for tensor in tensors)
        if self._makes_in_graphs and in_graph:
            with nullcontext() if has_plain else implicit_replication():
                return self._op.redispatch(left, *args, **kwargs)
        if has_plain:
            return self._decompose(args, kwargs)
        if self._makes_empty_only and all(tensor.numel() for tensor in tensors):
            return self._decompose(args, kwargs)
        with implicit_replication():
            found = self._distributed(self._decompose(args, kwargs), mesh)
            return found.contiguous() if self._is_filling else found

    def _decompose(self, args: Any, kwargs: Any) -> Any:
        """Results by torch's C++ kernel, or a Python form; the Python forms of most composites are for graphs only."""
        if self._python_form is not None:
            return self._python_form(*args, **kwargs)
        return self._op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    def _distributed(self, results: Any, mesh: Mesh) -> Any:
        """Results that depend on shapes only, such as the rank of a matrix without rows, as distributed tensors."""

        def distributed(found: torch.Tensor) -> torch.Tensor:
            return found if isinstance(found, self._class) else self._wrap(*as_replicated(found, mesh))

        return tree_map_only(torch.Tensor, distributed, results)

"""Views that autograd has recorded, of tensors that are then changed into another shape in place: refused.

Torch makes a view's gradient function again once its base was written to: for tensors without memory of their own by
the view's operator on the base, which has other dims by then. Which views are alive is not alike on all ranks; whether
one was ever recorded is. A tensor without gradients may change, and may then not be told to take some.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import is_grad_enabled

from tritondt.dtensor.operator_call import CompiledCall, Kind, Wrap
from tritondt.dtensor.writes import CHANGED, RECORDED
from tritondt.errors import PropagationError
from tritondt.ops.propagation.schema import OpSchema
from tritondt.ops.rules.views import VIEW_OF

_requires_grad_: Any = torch.Tensor.requires_grad_
# Autograd records no view by it.
_DETACH = torch.ops.aten.detach.default


def noting_views(schema: OpSchema, found: CompiledCall, wrap: Wrap) -> CompiledCall:
    """A compiled call that notes what it views, or refuses to change dims of a viewed tensor; others as they are."""
    if schema.op in VIEW_OF:
        return CompiledCall(Kind.GENERAL, general=_checked(schema, partial(found.run, wrap)))
    if not schema.is_view or schema.op is _DETACH:
        return found

    def viewed(
        local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if is_grad_enabled() and args:
            tensor = args[0]
            base = tensor._base
            (tensor if base is None else base).__dict__[RECORDED] = True
        return found.run(wrap, local_args, local_kwargs, args, kwargs)

    is_one = found.kind in (Kind.ONE, Kind.VIEW)
    return found._replace(kind=Kind.VIEW if is_one else Kind.GENERAL, general=viewed)


def _checked(schema: OpSchema, run: Callable[..., Any]) -> Callable[..., Any]:
    def reshape(
        local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        tensor = args[0]
        is_viewed = RECORDED in tensor.__dict__ and tensor._base is None
        if is_viewed and tensor.requires_grad:
            raise PropagationError(
                f"{schema.op} would change the dims of {tensor._spec}, which has views that take gradients: torch "
                f"would take them again of the other dims; make a new tensor by {VIEW_OF[schema.op]}, or take such "
                "views under no_grad or of x.detach()"
            )
        result = run(local_args, local_kwargs, args, kwargs)
        if is_viewed:
            tensor.__dict__[CHANGED] = str(schema.op)
        return result

    return reshape


def requires_grad_(tensor: Any, requires_grad: bool = True) -> Any:
    """`torch.Tensor.requires_grad_`; PropagationError where views would take gradients with dims that no longer
    exist."""
    changed_by = tensor.__dict__.get(CHANGED)
    if requires_grad and changed_by is not None:
        raise PropagationError(
            f"requires_grad_() of {tensor._spec}, which had views when {changed_by} changed its dims: torch would take "
            "their gradients of the other dims; use x.detach().requires_grad_(), which has no such views, or take "
            "them under no_grad or afterwards"
        )
    return _requires_grad_(tensor, requires_grad)

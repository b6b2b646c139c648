"""Views that autograd has recorded, of tensors that are then changed into another shape in place: refused.

Torch makes a view's gradient function again once its base was written to: for tensors without memory of their own by
the view's operator on the base, which has other dims by then. Which views are alive is not alike on all ranks; whether
one was ever recorded is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import is_grad_enabled

from tritondt.errors import PropagationError
from tritondt.ops.propagation.schema import OpSchema
from tritondt.ops.rules.views import VIEW_OF

# A tensor's attribute, there once autograd has recorded a view of it.
_RECORDED = "_tritondt_recorded_view"
# Autograd records no view by it.
_DETACH = torch.ops.aten.detach.default


def noting_views(schema: OpSchema, found: tuple[Any, Any], wrap: Callable[..., Any]) -> tuple[Any, Any]:
    """A compiled call that notes what it views, or refuses to change dims of a viewed tensor; others as they are."""
    if schema.op in VIEW_OF:
        return _checked(schema, found[0]), None
    if not schema.is_view or schema.op is _DETACH:
        return found
    run, spec = found

    def viewed(
        local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        # In this order: the second question takes 0.12 us of a distributed tensor, and backward need not ask it.
        if is_grad_enabled() and args and (tensor := args[0]).requires_grad:
            base = tensor._base
            (tensor if base is None else base).__dict__[_RECORDED] = True
        if spec is None:
            return run(local_args, local_kwargs, args, kwargs)
        return wrap(run(*local_args, **local_kwargs), spec)

    return viewed, None


def _checked(schema: OpSchema, run: Callable[..., Any]) -> Callable[..., Any]:
    def reshape(
        local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        tensor = args[0]
        if _RECORDED in tensor.__dict__ and tensor._base is None and tensor.requires_grad:
            raise PropagationError(
                f"{schema.op} would change the dims of {tensor._spec}, which has views that take gradients: torch "
                f"would take them again of the other dims; make a new tensor by {VIEW_OF[schema.op]}, or take such "
                "views under no_grad or of x.detach()"
            )
        return run(local_args, local_kwargs, args, kwargs)

    return reshape

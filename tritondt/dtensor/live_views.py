"""Views with a gradient of a tensor that is about to be reshaped in place, which would take it from other elements.

Torch makes the gradient function of a view again once its base was written to: on one device from the memory that the
view has, for tensors without memory of their own by the view's operator, on a base that has other dims by then. The
second row of a transposed matrix is its second column, and so the gradient went where the column's belongs.
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.dtensor.compiled_call import Compiled
from tritondt.errors import PropagationError
from tritondt.ops.propagation.schema import OpSchema, OutputSpecs
from tritondt.ops.rules.views import VIEW_OF

# References to a tensor while an operator runs on it: its Python object, and what torch passes it by. A view with a
# gradient holds two more, so that others are looked for only where there may be one.
_NUM_REFERENCES = 3


def keeps_views(schema: OpSchema, output: OutputSpecs, run: Compiled) -> Compiled:
    """A compiled call that reshapes in place, refused where a view takes gradients; others as they are."""
    op = schema.op
    if op not in VIEW_OF or output is schema.args_spec[0]:
        return run

    def reshape(
        local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if args[0]._use_count() > _NUM_REFERENCES:
            _check_no_views(op, args[0])
        return run(local_args, local_kwargs, args, kwargs)

    return reshape


def _check_no_views(op: OpOverload, tensor: Any) -> None:
    """Raises PropagationError where a view of the tensor takes gradients."""
    for other in gc.get_objects():
        if issubclass(type(other), torch.Tensor) and other.requires_grad and other._base is tensor:
            raise PropagationError(
                f"{op} would give {tensor._spec} other dims, of which a view of shape {tuple(other.shape)} takes "
                "gradients: they would reach other elements; make a new tensor, as x = x.transpose(0, 1), or detach "
                "the view before: view = view.detach()"
            )

"""Operators computed in terms of others: composites by torch's own form, the rest by propagation's decompositions."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagation.decompositions import written_by_functional
from tritondt.ops.propagation.fallback import decomposition_of, is_replicated
from tritondt.ops.propagation.outputs import ResizedOuts, out_shapes
from tritondt.ops.propagation.replication import implicit_replication
from tritondt.ops.propagation.schema import OpSchema
from tritondt.ops.propagation.tensor_meta import SHAPES_UNKNOWN


def decompose(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of a call in terms of other operators; NotImplemented where there is no such form, or no need."""
    # Plain tensors that come up on the way are made of shapes and numbers: no other came with the arguments.
    with implicit_replication():
        if _is_composite(schema.op):
            return _decompose_composite(schema.op, args, kwargs)
        decomposition = None if is_replicated(schema) else decomposition_of(schema.op)
        if decomposition is None and schema.is_out_variant and not _shapes_are_known(schema):
            # The operator itself would give this rank's part of out another shape, and nobody would know.
            decomposition = written_by_functional(schema.op)
        return NotImplemented if decomposition is None else decomposition(*args, **kwargs)


def outs_to_fit(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ResizedOuts:
    """The tensors that a call writes its results to, and the shapes that these have."""
    try:
        shapes = out_shapes(schema)
    except SHAPES_UNKNOWN:
        raise PropagationError(
            f"{schema} writes results to out whose shapes only values tell; call it without out"
        ) from None
    return ResizedOuts(schema, shapes, args, kwargs)


def _shapes_are_known(schema: OpSchema) -> bool:
    try:
        out_shapes(schema)
    except SHAPES_UNKNOWN:
        return False
    return True


def _is_composite(op: OpOverload) -> bool:
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _decompose_composite(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of a composite operator, which comes to dispatch only under inference_mode.

    The key that makes results views and counts writes has been left by then, without having acted on most composites.
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    if op.has_kernel_for_dispatch_key(key):  # narrow and chunk: it has acted, and makes the result a view itself
        return op.decompose(*args, **kwargs)
    with torch._C._SetExcludeDispatchKeyGuard(key, False):
        return op.decompose(*args, **kwargs)

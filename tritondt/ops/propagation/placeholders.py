"""Placeholders on a rank outside the mesh, which runs no operator: specs where only values tell shapes, and numbers.

A length that only values tell is 0, a number is nan where its dtype has that and else 0: nothing is sent to ranks that
hold nothing, and none of them raises alone.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode, UnsupportedOperatorException

from tritondt.ops.propagation.schema import OpSchema, OutputSpecs
from tritondt.ops.propagation.tensor_meta import fake_arguments, meta_of
from tritondt.sharding.placement import Replicate
from tritondt.sharding.spec import DTensorSpec, TensorMeta

aten = torch.ops.aten


def placeholder_specs(schema: OpSchema) -> OutputSpecs:
    """Replicated specs of results whose lengths only values tell, those lengths being 0."""
    whole = [Replicate()] * schema.mesh.ndim
    kinds = list(_kinds(schema.op))
    if not any("Tensor" in kind for kind in kinds):
        return None
    found = [None if meta is None else DTensorSpec(schema.mesh, whole, meta) for meta in _metas(schema)]
    return found[0] if kinds == ["Tensor"] else found


def _metas(schema: OpSchema) -> Sequence[TensorMeta | None]:
    known = _KNOWN.get(schema.op)
    if known is not None:
        return known(schema)
    try:
        results = _run_with_open_lengths(schema)
    except (DynamicOutputShapeException, UnsupportedOperatorException, RuntimeError):
        # Nobody has said how many dims there are.
        unknown = TensorMeta.contiguous((0,), schema.args_spec[0].dtype)
        return [unknown if kind == "Tensor" else None for kind in _kinds(schema.op)]
    several = results if isinstance(results, list | tuple) else [results]
    return [_closed(meta_of(item)) if isinstance(item, torch.Tensor) else None for item in several]


def _run_with_open_lengths(schema: OpSchema) -> Any:
    """The fake results of a call, in which lengths that only values tell are symbols."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: PLC0415  0.5 s, on ranks outside a mesh alone

    mode = FakeTensorMode(shape_env=ShapeEnv())
    mode.cache_enabled = False
    with mode, torch.inference_mode(False), torch.no_grad():
        args, kwargs = fake_arguments(schema)
        return schema.op(*args, **kwargs)


def _closed(meta: TensorMeta) -> TensorMeta:
    return TensorMeta.contiguous([length if isinstance(length, int) else 0 for length in meta.shape], meta.dtype)


def _least_squares(schema: OpSchema) -> list[TensorMeta]:
    """Solution, residuals, rank and singular values of linalg_lstsq, which has no fake form."""
    rows, right = schema.args_spec[:2]
    dtype, batch, width = rows.dtype, rows.shape[:-2], rows.shape[-1]
    columns = right.shape[-1:] if right.ndim >= rows.ndim else ()
    shapes = ((*batch, width, *columns), (0,), (0,) if schema.argument(3, "driver") == "gels" else batch, (0,))
    dtypes = (dtype, dtype.to_real(), torch.int64, dtype.to_real())
    return [TensorMeta.contiguous(shape, of) for shape, of in zip(shapes, dtypes, strict=True)]


def _alignment_losses(schema: OpSchema) -> list[TensorMeta]:
    """Losses of a batch and the sums over alignments of _ctc_loss, as many as the longest target may ask for."""
    scores, targets = schema.args_spec[:2]
    batch = scores.shape[1:-1]
    shapes = (batch, (*(batch or (1,)), scores.shape[0], 2 * targets.shape[-1] + 1))
    return [TensorMeta.contiguous(shape, scores.dtype) for shape in shapes]


_KNOWN = {
    aten.linalg_lstsq.default: _least_squares,
    aten._ctc_loss.default: _alignment_losses,
    aten._ctc_loss.Tensor: _alignment_losses,
}


def placeholder_numbers(schema: OpSchema) -> tuple[Any, ...]:
    """A number for every result of a call that is one, None for the others.

    >>> _number("Scalar", torch.float32), _number("Scalar", torch.int64), _number("bool", torch.float32)
    (nan, 0, True)
    """
    dtype = schema.args_spec[0].dtype
    return tuple(_number(kind, dtype) for kind in _kinds(schema.op))


def _kinds(op: OpOverload) -> Iterator[str]:
    return (str(result.type) for result in op._schema.returns)


def _number(kind: str, dtype: torch.dtype) -> Any:
    if kind == "bool":  # whether tensors are equal: those that hold nothing are
        return True
    if kind == "float" or (kind in _OF_DTYPE and dtype.is_floating_point):
        return float("nan")
    if kind in _OF_DTYPE and dtype.is_complex:
        return complex("nan+nanj")
    if kind in _OF_DTYPE and dtype is torch.bool:
        return False
    return 0 if kind in ("int", "SymInt", *_OF_DTYPE) else None


# How schemas of operators, and torch's text of them, call a number of the tensor's dtype.
_OF_DTYPE = ("Scalar", "number")

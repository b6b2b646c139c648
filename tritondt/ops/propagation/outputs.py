"""Tensors that a call writes its results to (`out=`): their shapes, and another shape where they have none that fits.

As on one device a tensor of another shape is resized, with a warning where it had elements. Its placements stay.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from tritondt.errors import LayoutError, PropagationError
from tritondt.ops.propagation.schema import OpSchema
from tritondt.ops.propagation.tensor_meta import META_ERRORS, keyword_shapes
from tritondt.sharding.placement import Replicate, placements_text
from tritondt.sharding.spec import DTensorSpec, TensorMeta


def out_shapes(schema: OpSchema) -> dict[str, Any]:
    """The shapes of the results by the name of the `out` argument that takes each, in a list where that is one.

    DynamicOutputShapeException where only values tell the shapes.
    """
    if torch.Tag.generated in schema.op.tags:
        # What torch has generated runs the functional operator, whose results fakes then take for empty.
        functional = functional_of(schema.op)
        if functional is not None and torch.Tag.dynamic_output_shape in functional.tags:
            raise DynamicOutputShapeException(schema.op)
    outs = {argument.name for argument in schema.op._schema.arguments if argument.is_out}
    given = {name: _empty(value) if name in outs else value for name, value in schema.kwargs_schema.items()}
    empty = replace(schema, kwargs_schema=given, found_metas=[])
    if schema.op.namespace == "aten":
        found = keyword_shapes(empty)
        return {name: shape for name, shape in found.items() if name in outs}
    return _shapes_of_users(schema, empty, outs)


def _shapes_of_users(schema: OpSchema, empty: OpSchema, outs: Collection[str]) -> dict[str, Any]:
    """The shapes where users have written the operator: those that it was given, unless it resizes what is empty."""
    given = {name: _shape_of(schema.kwargs_schema[name]) for name in outs if name in schema.kwargs_schema}
    try:
        found = keyword_shapes(empty)
    except META_ERRORS:
        # Whatever else is wrong is raised here again.
        keyword_shapes(schema)
        return given
    return {name: _resized(given[name], found[name]) for name in given}


def _resized(given: Any, found: Any) -> Any:
    if isinstance(given, list):
        return [_resized(*pair) for pair in zip(given, found, strict=True)]
    return given if found == (0,) else found


def _shape_of(spec: Any) -> Any:
    return [_shape_of(item) for item in spec] if isinstance(spec, list | tuple) else spec.shape


def functional_of(op: OpOverload) -> OpOverload | None:
    """The operator that gives new tensors where `op` writes to its `out` arguments."""
    outs = {argument.name for argument in op._schema.arguments if argument.is_out}
    return same_without(op, op._schema.name.partition("::")[2], outs)


def same_without(op: OpOverload, name: str, left_out: Collection[str]) -> OpOverload | None:
    """The operator `name` that takes what `op` takes, but for some arguments, and writes nothing."""
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in left_out]
    for overload in () if packet is None else packet.overloads():
        found: OpOverload = getattr(packet, overload)
        arguments = found._schema.arguments
        if [(a.name, str(a.type)) for a in arguments] == wanted and not any(a.alias_info for a in arguments):
            return found
    return None


def _empty(spec: Any) -> Any:
    """The spec of a tensor without elements, which takes any shape."""
    if isinstance(spec, list | tuple):
        return [_empty(item) for item in spec]
    return DTensorSpec(spec.mesh, [Replicate()] * spec.mesh.ndim, TensorMeta((0,), (1,), spec.dtype))


class ResizedOuts:
    """The tensors that a call writes its results to, in the shapes of these: a context that a failing call leaves.

    `any` is whether one had another shape. If the call raises, each is given its own shape and elements again.
    """

    def __init__(
        self, schema: OpSchema, shapes: Mapping[str, Any], args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._op, self._inputs = schema.op, [*args, *(kwargs[name] for name in kwargs.keys() - shapes.keys())]
        self._wanted = [
            (out, of)
            for name, shape in shapes.items()
            for out, of in _paired(kwargs[name], shape)
            if tuple(out.shape) != of
        ]
        self._were: list[tuple[torch.Tensor, torch.Size, torch.Tensor | None]] = []

    @property
    def any(self) -> bool:
        """Whether a tensor had another shape."""
        return bool(self._wanted)

    def __enter__(self) -> None:
        try:
            for out, shape in self._wanted:
                self._were.append((out, out.shape, out.detach().clone() if out.numel() else None))
                resize_out(self._op, out, shape, self._inputs)
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._give_back()

    def _give_back(self) -> None:
        with torch.no_grad():
            for out, shape, elements in self._were:
                if out.shape == shape:  # refused before it was resized
                    continue
                out.resize_([0] * max(len(shape), 1)).resize_(shape)
                if elements is not None:
                    out.copy_(elements)


def _paired(outs: Any, shapes: Any) -> Iterable[tuple[torch.Tensor, tuple[int, ...]]]:
    return zip(outs, shapes, strict=True) if isinstance(outs, list | tuple) else [(outs, shapes)]


def resize_out(op: OpOverload, out: torch.Tensor, shape: tuple[int, ...], inputs: Iterable[Any]) -> None:
    """Gives one tensor that a call writes to another shape, without its elements.

    PropagationError, on all ranks, for a view, for what is read as well, and where its placements do not fit the shape.
    """
    begin = f"{op} gives shape {shape}, and out has {tuple(out.shape)}"
    if out._base is not None:
        raise PropagationError(f"{begin}; a view cannot be resized: give an out of that shape, or an empty one")
    if any(argument is out for argument in inputs):
        raise PropagationError(f"{begin}; what is read as well cannot be resized: give another tensor as out")
    if out.numel():
        warnings.warn(f"{begin} with elements, which are lost: it is resized, as on one device", stacklevel=2)
        nothing = [0] * max(len(shape), 1)
        if _has_layout(out, nothing) and not _has_layout(out, shape):
            # Without its elements it could not be given back as it was.
            raise PropagationError(
                f"{begin}, for which {placements_text(out._spec.placements)} is no layout; give an out of that shape, "  # type: ignore[attr-defined]
                "or an empty one"
            )
        out.resize_(nothing)
    out.resize_(shape)


def _has_layout(out: Any, shape: Sequence[int]) -> bool:
    """Whether the placements of a tensor are a layout of another shape as well."""
    spec: DTensorSpec = out._spec
    try:
        DTensorSpec(spec.mesh, spec.placements, TensorMeta.contiguous(shape, spec.dtype), spec.order)
    except LayoutError:
        return False
    return True

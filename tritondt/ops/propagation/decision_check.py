"""The check that every decision about an operator of users passes before anything runs, whatever form it came in.

Specs get shape, stride and dtype of the tensors that they are for: those of the arguments, and those that the operator
gives for tensors of global shape. Everything else is refused: other numbers of specs, another mesh, layouts
that the tensors cannot have, and local results that are not the part that a spec says.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tritondt.errors import LayoutError, PropagationError, ReductionError
from tritondt.ops.propagation.schema import OpSchema, OutputSharding, OutputSpecs
from tritondt.ops.propagation.tensor_meta import META_ERRORS, SHAPES_UNKNOWN, propagate_tensor_meta
from tritondt.sharding.placement import Replicate, placements_text
from tritondt.sharding.spec import DTensorSpec, TensorMeta


def checked(decision: object, schema: OpSchema) -> OutputSharding:
    """The decision with complete specs; PropagationError, alike on all ranks, where it does not fit the call."""
    if not isinstance(decision, OutputSharding):
        raise PropagationError(
            f"the decision about {schema} is a {type(decision).__name__}; allowed is an OutputSharding, an OpStrategy, "
            "a TupleStrategy or a list of AxisStrategy"
        )
    inputs = None if decision.input_specs is None else _inputs(decision.input_specs, schema)
    if decision.data_dependent and decision.output_spec is None:
        return replace(decision, input_specs=inputs)
    moves = inputs is not None and any(given is not it for given, it in zip(schema.args_spec, inputs, strict=True))
    has_values = decision.use_val_from_redistribute_schema
    suggested = decision.redistribute_schema if has_values else schema
    completed = replace(
        decision,
        input_specs=inputs if moves or has_values else None,
        needs_redistribute=False,  # follows from the specs
        redistribute_schema=suggested.with_specs(inputs) if inputs and suggested and (moves or has_values) else None,
        output_spec=_outputs(decision.output_spec, schema),
    )
    _check_local_results(completed, schema)
    return completed


def _inputs(given: Sequence[Any], schema: OpSchema) -> tuple[DTensorSpec, ...]:
    """The specs that the arguments must have, with the arguments' shapes, strides and dtypes."""
    if len(given) != len(schema.args_spec):
        raise PropagationError(
            f"the decision about {schema} has specs for {len(given)} arguments; allowed are {len(schema.args_spec)}, "
            "one for each tensor, those in lists and named ones too"
        )
    return tuple(
        _completed(spec, argument.tensor_meta, argument, f"argument {place}", schema)
        for place, (spec, argument) in enumerate(zip(given, schema.args_spec, strict=True))
    )


def _outputs(given: Any, schema: OpSchema) -> OutputSpecs:
    try:
        metas = propagate_tensor_meta(schema)
    except SHAPES_UNKNOWN:
        return _unknown_outputs(given, schema)
    if metas is None or isinstance(metas, TensorMeta):
        return _lone_output(given, metas, schema)
    if not isinstance(given, list | tuple) or len(given) != len(metas):
        raise PropagationError(
            f"the decision about {schema} has {_count(given)}, but the operator gives {len(metas)} results; "
            "allowed is a list with one spec for each, None for what is no tensor"
        )
    return [
        _result(spec, meta, f"result {place}", schema)
        for place, (spec, meta) in enumerate(zip(given, metas, strict=True))
    ]


def _lone_output(given: Any, meta: TensorMeta | None, schema: OpSchema) -> OutputSpecs:
    if meta is None:
        if given is not None:
            raise PropagationError(f"the decision about {schema} has {_count(given)}, but the operator gives no tensor")
        return None
    if isinstance(given, list | tuple):
        raise PropagationError(
            f"the decision about {schema} has {_count(given)}, but the operator gives one tensor; allowed is its spec"
        )
    return _result(given, meta, "the result", schema)


def _result(spec: Any, meta: TensorMeta | None, name: str, schema: OpSchema) -> DTensorSpec | None:
    if meta is None:
        return None
    if spec is None:
        raise PropagationError(
            f"the decision about {schema} has no spec for {name}, a tensor of {meta.shape}; allowed is a DTensorSpec, "
            "as DTensorSpec(mesh, placements)"
        )
    return _completed(spec, meta, None, name, schema)


def _unknown_outputs(given: Any, schema: OpSchema) -> OutputSpecs:
    """Specs as they were given, for an operator that nobody has said the shapes of; they must be complete."""
    for spec in given if isinstance(given, list | tuple) else (given,):
        if isinstance(spec, DTensorSpec) and spec.tensor_meta is None:
            raise PropagationError(
                f"the decision about {schema} has {spec}, and nobody has said which shape {schema.op} gives; register "
                "that (torch.library.register_fake), or give the spec a TensorMeta"
            )
    found: OutputSpecs = given
    return found


def _completed(spec: Any, meta: TensorMeta, argument: DTensorSpec | None, name: str, schema: OpSchema) -> DTensorSpec:
    if not isinstance(spec, DTensorSpec):
        raise PropagationError(
            f"the decision about {schema} has a {type(spec).__name__} for {name}; allowed is tritondt's DTensorSpec"
        )
    if spec.mesh is not schema.mesh:
        raise PropagationError(
            f"the decision about {schema} has {name} on {spec.mesh}; allowed is the mesh of the arguments, "
            f"{schema.mesh}"
        )
    # Placements alone say nothing of the cut order: an argument keeps its own.
    keeps_order = argument is not None and spec.tensor_meta is None and spec.order == tuple(range(spec.mesh.ndim))
    order = argument.order if argument is not None and keeps_order else spec.order
    try:
        return DTensorSpec(spec.mesh, spec.placements, meta, order)
    except (LayoutError, ReductionError) as error:
        raise PropagationError(
            f"the decision about {schema} has {placements_text(spec.placements)} for {name}, of {meta.shape} "
            f"{meta.dtype}: {error}"
        ) from error


def _count(given: Any) -> str:
    if given is None:
        return "no spec for what comes out"
    return f"{len(given)} specs" if isinstance(given, list | tuple) else "one spec"


def _check_local_results(decision: OutputSharding, schema: OpSchema) -> None:
    """Refuses specs of results that have other shapes than the operator gives for the parts of the first coordinate.

    The first coordinate stands for all, so that all ranks refuse alike. A local function may look at values, so it is
    believed.
    """
    is_plain = decision.local is None or decision.use_val_from_redistribute_schema
    if not is_plain or decision.output_spec is None or schema.op._schema.is_mutable:
        return
    first = (0,) * schema.mesh.ndim
    running = decision.redistribute_schema or schema
    parts = [_part(spec, first) for spec in running.args_spec]
    try:
        metas = propagate_tensor_meta(running.with_specs(parts))
    except (*SHAPES_UNKNOWN, *META_ERRORS):
        return  # the call itself raises this of the parts it runs on
    several: Sequence[TensorMeta | None] = [metas] if metas is None or isinstance(metas, TensorMeta) else metas
    specs = decision.output_spec
    for spec, meta in zip(specs if isinstance(specs, list | tuple) else [specs], several, strict=False):
        if isinstance(spec, DTensorSpec) and meta is not None and spec.layout.local_shape(first) != meta.shape:
            placed = ", ".join(placements_text(argument.placements) for argument in running.args_spec)
            raise PropagationError(
                f"the decision about {schema} calls a result {spec}, of which coordinate {first} holds "
                f"{spec.layout.local_shape(first)}, but {schema.op} gives {meta.shape} there of arguments laid out as "
                f"{placed}; give the result the placements of what the operator makes, or the arguments others"
            )


def _part(spec: DTensorSpec, coordinate: tuple[int, ...]) -> DTensorSpec:
    meta = TensorMeta.contiguous(spec.layout.local_shape(coordinate), spec.dtype)
    return DTensorSpec(spec.mesh, [Replicate()] * spec.mesh.ndim, meta)

"""Views of a tensor's memory: other shapes, orders of dims, other elements, and the same in place.

Reshapes keep the shards where a layout of the new shape says who holds what; permutations, squeezes and expansions keep
the cuts of the dims that stay. Complex numbers as pairs and conjugates keep the layout; bits as another dtype need
reduced values.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tritondt.errors import LayoutError, PropagationError
from tritondt.ops.propagation.homomorphisms import ADDITIVE, CONJUGATE, NONE
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import LocalOp, OpSchema, OutputSharding
from tritondt.ops.rules.reshape_layouts import possible_units, reshaped
from tritondt.ops.rules.view_layouts import cuts_of, expanded, inserted, permuted, real_cuts, with_cuts
from tritondt.ops.rules.views import VIEW_OF, dim_of, meta_of_view, require_passing, rule_of, spec_of_view, view_of
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import placements_code
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten


@rule_of([aten.view.default, aten._reshape_alias.default])
def viewed(schema: OpSchema) -> OutputSharding:
    """A view of local sizes."""
    return _reshaped(schema, copying=False)


@rule_of([aten._unsafe_view.default])
def viewed_or_copied(schema: OpSchema) -> OutputSharding:
    """A view of local sizes, or a copy where strides allow none: nobody else knows the argument."""
    return _reshaped(schema, copying=True)


@rule_of([aten.view_copy.default])
def copied(schema: OpSchema) -> OutputSharding:
    """A copy in another shape, whose elements may move first."""
    decision = _reshaped(schema, copying=True, is_refused=False)
    assert isinstance(decision.output_spec, DTensorSpec), f"{schema.op} gives one tensor"
    shape = decision.output_spec.local_shape
    return replace(decision, local=lambda local, *_: local.reshape(shape).clone())


def _reshaped(schema: OpSchema, *, copying: bool, is_refused: bool = True) -> OutputSharding:
    meta = meta_of_view(schema)

    def units(layout: Layout, dim: int) -> Sequence[int]:
        return possible_units(layout, meta.shape, dim)

    spec = spec_of_view(schema, meta, lambda layout: reshaped(layout, meta.shape), units, is_refused=is_refused)
    local = _local_reshape(spec)
    return OutputSharding(spec, None, local) if copying else OutputSharding(spec, None, local, is_viewed=True)


def _local_reshape(spec: DTensorSpec) -> LocalOp:
    shape = spec.local_shape
    return lambda local, *_: local.reshape(shape)


@rule_of([aten.permute.default])
def permutation(schema: OpSchema) -> OutputSharding:
    """Dims in another order, each cut as before."""
    ndim = schema.args_spec[0].ndim
    dims = [dim % ndim for dim in schema.argument(1, "dims")]
    return view_of(schema, lambda layout: permuted(layout, dims))


@rule_of([aten.transpose.int])
def transposition(schema: OpSchema) -> OutputSharding:
    """Two dims exchanged."""
    return _exchanged(schema, dim_of(schema, 1, "dim0"), dim_of(schema, 2, "dim1"))


@rule_of([aten.t.default])
def matrix_transposition(schema: OpSchema) -> OutputSharding:
    """The dims of a matrix exchanged; a tensor of fewer dims stays."""
    return _exchanged(schema, 0, max(schema.args_spec[0].ndim - 1, 0))


def _exchanged(schema: OpSchema, first: int, second: int) -> OutputSharding:
    # The whole tensor's meta is asked for first, which checks the dims.
    dims = list(range(schema.args_spec[0].ndim))
    if dims and max(first, second) < len(dims):
        dims[first], dims[second] = second, first
    return view_of(schema, lambda layout: permuted(layout, dims))


@rule_of([aten.unsqueeze.default])
def unsqueezed(schema: OpSchema) -> OutputSharding:
    """A new dim of length 1, whole on every rank."""
    dim = dim_of(schema, 1, "dim", ndim=schema.args_spec[0].ndim + 1)
    return view_of(schema, lambda layout: inserted(layout, dim))


@rule_of([aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims])
def squeezed(schema: OpSchema) -> OutputSharding:
    """A view without dims of length 1 of the global tensor, not of a part."""
    shape, ndim = schema.args_spec[0].shape, max(schema.args_spec[0].ndim, 1)
    asked = schema.argument(1, "dim", range(ndim))
    given = [dim % ndim for dim in ([asked] if isinstance(asked, int) else asked)]
    gone = [dim for dim, length in enumerate(shape) if length == 1 and dim in given]
    kept = [dim for dim in range(len(shape)) if dim not in gone]

    def view_layout(layout: Layout) -> Layout:
        cuts = cuts_of(layout)
        if any(real_cuts(layout, cuts[dim]) for dim in gone):
            return reshaped(layout, [shape[dim] for dim in kept])
        return with_cuts(layout, [shape[dim] for dim in kept], [cuts[dim] for dim in kept])

    def local(spec: DTensorSpec) -> LocalOp:
        def squeeze(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            # Where a dim that goes is cut, ranks that hold nothing of it have length 0 there.
            return aten.squeeze.dims(tensor, gone) if tensor.numel() else tensor.view(spec.local_shape)

        return squeeze

    return view_of(schema, view_layout, local)


@rule_of([aten.expand.default])
def expansion(schema: OpSchema) -> OutputSharding:
    """New dims in front, and dims of length 1 repeated without a copy."""
    meta = meta_of_view(schema)
    spec = spec_of_view(schema, meta, lambda layout: expanded(layout, meta.shape))
    shape = spec.local_shape
    return OutputSharding(spec, None, lambda local, *_, **__: local.expand(shape))


@rule_of([aten.view_as_real.default])
def as_pairs(schema: OpSchema) -> OutputSharding:
    """A view with a new last dim of real and imaginary part, which add one by one."""
    require_passing(schema, ADDITIVE, schema.args_spec[0].dtype.to_real())
    return view_of(schema, lambda layout: inserted(layout, len(layout.shape), 2))


@rule_of([aten.view_as_complex.default])
def as_numbers(schema: OpSchema) -> OutputSharding:
    """A view without the last dim, of real and imaginary part, which must be whole and add one by one."""
    require_passing(schema, ADDITIVE, schema.args_spec[0].dtype.to_complex())

    def view_layout(layout: Layout) -> Layout:
        cuts = cuts_of(layout)
        for axis, shard in real_cuts(layout, cuts[-1]):
            raise LayoutError(f"axis {axis} cuts the dim of real and imaginary part by {shard!r}")
        return with_cuts(layout, layout.shape[:-1], cuts[:-1])

    return view_of(schema, view_layout)


@rule_of([aten._conj.default])
def conjugated(schema: OpSchema) -> OutputSharding:
    """A view with the argument's layout."""
    require_passing(schema, CONJUGATE, schema.args_spec[0].dtype)
    return view_of(schema, lambda layout: layout)


@rule_of([aten._neg_view.default])
def negated(schema: OpSchema) -> OutputSharding:
    """A view with the argument's layout; terms of a sum stay terms."""
    require_passing(schema, ADDITIVE, schema.args_spec[0].dtype)
    return view_of(schema, lambda layout: layout)


@rule_of([aten.view.dtype])
def as_bits(schema: OpSchema) -> OutputSharding:
    """A view as another dtype of the same size; terms are reduced first, whose bits are none of their sum."""
    (spec,) = schema.args_spec
    if schema.argument(1, "dtype").itemsize != spec.dtype.itemsize:
        raise PropagationError(f"{schema} views elements as others of another size; copy them: x.to(dtype)")
    meta = meta_of_view(schema)
    require_passing(schema, NONE, meta.dtype)
    return OutputSharding(DTensorSpec(spec.mesh, spec.placements, meta, spec.order))


def changed_in_place(schema: OpSchema) -> OutputSharding:
    """The decision of the view with the same arguments; PropagationError where elements would have to move.

    Others may know the tensor's memory, which it would leave.
    """
    view = VIEW_OF[schema.op]
    decision = propagator.propagate(OpSchema(view, schema.args_schema, schema.kwargs_schema))
    if decision.input_specs is not None:
        call = f"x.redistribute(placements={placements_code(decision.input_specs[0].placements)})"
        raise PropagationError(f"{schema} would have to move what it changes in place; ask for it first: x = {call}")
    return OutputSharding(decision.output_spec, None, decision.local or view._op)


for _op in VIEW_OF:
    propagator.set_rule(_op, changed_in_place)

"""Views of the same memory as other elements: complex numbers as pairs, conjugates, and bits as another dtype."""

import torch

from tritondt.errors import LayoutError, PropagationError
from tritondt.layout import Layout
from tritondt.ops.schema import LocalOp, OpSchema, OutputSharding
from tritondt.ops.view_layouts import cuts_of, inserted, real_cuts, with_cuts
from tritondt.ops.viewing import meta_of_view, rule_of, view_of
from tritondt.placement import Partial, Replicate
from tritondt.spec import DTensorSpec

aten = torch.ops.aten


@rule_of([aten.view_as_real.default])
def as_pairs(schema: OpSchema) -> OutputSharding:
    """A new dim of real and imaginary part at the end; terms stay terms."""

    def local(spec: DTensorSpec) -> LocalOp:
        return lambda numbers: torch.view_as_real(numbers.resolve_conj())

    return view_of(schema, lambda layout: inserted(layout, len(layout.shape), 2), local)


@rule_of([aten.view_as_complex.default])
def as_numbers(schema: OpSchema) -> OutputSharding:
    """The last dim, of real and imaginary part, goes, and must be whole."""

    def lay_out(layout: Layout) -> Layout:
        cuts = cuts_of(layout)
        for axis, shard in real_cuts(layout, cuts[-1]):
            raise LayoutError(f"axis {axis} cuts the dim of real and imaginary part by {shard!r}")
        return with_cuts(layout, layout.shape[:-1], cuts[:-1])

    return view_of(schema, lay_out)


@rule_of([aten._conj.default, aten._neg_view.default])
def conjugated(schema: OpSchema) -> OutputSharding:
    """Laid out as it was; terms of a sum stay terms of one."""
    return view_of(schema, lambda layout: layout)


@rule_of([aten.view.dtype])
def as_bits(schema: OpSchema) -> OutputSharding:
    """Elements of the same size; terms are added up first, bits of terms are none of their sum."""
    (spec,) = schema.args_spec
    if schema.argument(1, "dtype").itemsize != spec.dtype.itemsize:
        raise PropagationError(f"{schema} views elements as others of another size; copy them: x.to(dtype)")
    meta = meta_of_view(schema)
    source = spec.with_placements([Replicate() if isinstance(p, Partial) else p for p in spec.placements])
    output = DTensorSpec(spec.mesh, source.placements, meta, source.order)
    return OutputSharding(output) if source is spec else OutputSharding(output, (source,), follows=True)

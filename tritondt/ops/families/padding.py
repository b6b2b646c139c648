"""Padding by a number: whoever holds an end of a dim pads it, so that nothing moves."""

from collections.abc import Sequence
from typing import Any

import torch

from tritondt.errors import LayoutError
from tritondt.ops.propagation.homomorphisms import filling
from tritondt.ops.propagation.schema import LocalOp, OpSchema, OutputSharding
from tritondt.ops.rules.view_layouts import cuts_of, real_cuts, shard_of_sizes, with_cuts
from tritondt.ops.rules.views import meta_of_view, require_passing, rule_of, view_of
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten

# How much longer a dim becomes in front and at the end; less than 0 where it becomes shorter.
Ends = tuple[int, int]


@rule_of([aten.constant_pad_nd.default])
def padded(schema: OpSchema) -> OutputSharding:
    """The decision about padding: cuts stay, with longer first and last pieces; terms of a sum are padded by 0 only."""
    (spec,) = schema.args_spec
    meta_of_view(schema)
    require_passing(schema, filling(schema.argument(2, "value", 0), spec), spec.dtype)
    pads, value = schema.argument(1, "pad"), schema.argument(2, "value", 0)
    ends = [(0, 0)] * spec.ndim
    for place in range(len(pads) // 2):
        ends[spec.ndim - 1 - place] = (pads[2 * place], pads[2 * place + 1])

    def local(output: DTensorSpec) -> LocalOp | None:
        if spec.coordinate is None:
            return None
        own = [_own_ends(spec.layout, output.layout, dim, ends[dim], spec.coordinate) for dim in range(spec.ndim)]
        flat = [length for pair in reversed(own) for length in pair]
        return lambda x, *_, **__: aten.constant_pad_nd.default(x, flat, value)

    return view_of(schema, lambda layout: _longer(layout, ends), local)


def _longer(layout: Layout, ends: Sequence[Ends]) -> Layout:
    """The layout after dims become longer or shorter at their ends."""
    shape = [length + before + after for length, (before, after) in zip(layout.shape, ends, strict=True)]
    cuts: list[list[Any]] = []
    for dim, of_dim in enumerate(cuts_of(layout)):
        real = real_cuts(layout, of_dim)
        if ends[dim] == (0, 0) or not real:
            cuts.append([*of_dim] if ends[dim] == (0, 0) else [(axis, Shard(dim)) for axis, _ in of_dim])
            continue
        if len(real) > 1 or not real[0][1].is_one_run:
            raise LayoutError(f"dim {dim} is cut into several pieces on a rank, and only its ends can be padded")
        ((axis, shard),) = real
        layout.check_known(dim)  # explicit sizes, which are ints
        sizes = [stop - start for start, stop in _pieces(layout, dim, axis, ends[dim])]
        idle = [(other, Shard(dim)) for other, _ in of_dim if other != axis]
        cuts.append([(axis, shard_of_sizes(dim, sizes, shard.unit)), *idle])
    return with_cuts(layout, shape, cuts)


def _pieces(layout: Layout, dim: int, axis: int, ends: Ends) -> list[tuple[int, int]]:
    """Bounds of each coordinate's piece of the new dim; the outermost pieces include the padding."""
    length, cut = layout.shape[dim], layout.cut(axis)
    new = length + sum(ends)
    bounds = [cut.bounds(length, index) for index in range(cut.parts)]
    moved = [tuple(min(max(bound + ends[0], 0), new) for bound in piece) for piece in bounds]
    last = max((index for index, (start, stop) in enumerate(bounds) if stop > start), default=0)
    found = []
    for index, (start, stop) in enumerate(moved):
        begin = 0 if index == 0 else start
        end = new if index == last else stop
        found.append((begin, end) if index <= last else (new, new))
    return found


def _own_ends(source: Layout, target: Layout, dim: int, ends: Ends, coordinate: Sequence[int]) -> Ends:
    """Padding of this rank's part at either end."""
    if not real_cuts(source, cuts_of(source)[dim]):
        return ends
    if ends == (0, 0):
        return 0, 0
    (start, stop), (new_start, new_stop) = (_held(layout, dim, coordinate) for layout in (source, target))
    if start == stop or new_start == new_stop:
        return new_stop - new_start - (stop - start), 0
    return start + ends[0] - new_start, new_stop - (stop + ends[0])


def _held(layout: Layout, dim: int, coordinate: Sequence[int]) -> tuple[int, int]:
    held = layout.intervals(dim, tuple(coordinate))
    return (held[0][0], held[-1][1]) if held else (0, 0)

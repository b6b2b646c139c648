"""Operators that put tensors next to each other: cat, stack, repeat."""

from collections.abc import Iterator, Sequence

import torch

from tritondt.ops.propagation.homomorphisms import SELECTIVE, term_strategies
from tritondt.ops.propagation.registration import strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, OpSchema, OutputSharding
from tritondt.ops.propagation.selection import decide
from tritondt.ops.rules.view_layouts import cuts_of, real_cuts, shard_of_sizes, tiled
from tritondt.ops.rules.views import dim_of, meta_of_view, rule_of, view_of
from tritondt.sharding.placement import Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten


@rule_of([aten.cat.default])
def concatenation(schema: OpSchema) -> OutputSharding:
    """The decision about cat: other dims stay cut; the joined dim too where a rank's parts are its part of the whole.

    So it is for the gradients of slices of one dim, and for equal blocks that are cut alike. Otherwise the tensors are
    gathered along the joined dim.
    """
    ndim = len(meta_of_view(schema).shape)
    dim, specs = dim_of(schema, 1, "dim", ndim=ndim), schema.args_spec
    # A tensor of shape (0,) may stand among tensors of any number of dims.
    offered = [
        AxisStrategy(tuple(Shard(other) if spec.ndim == ndim else Replicate() for spec in specs), (Shard(other),))
        for other in range(ndim)
        if other != dim
    ]
    offered += [*_whole(specs), *_terms(schema)]
    return decide([[*_along(specs, dim, axis), *offered] for axis in range(schema.mesh.ndim)], schema)


def _whole(specs: Sequence[DTensorSpec]) -> list[AxisStrategy]:
    return [AxisStrategy((Replicate(),) * len(specs), (Replicate(),))]


def _terms(schema: OpSchema) -> list[AxisStrategy]:
    """Strategies with all tensors terms of one reduction."""
    return term_strategies(schema, [SELECTIVE.at(*range(len(schema.args_spec)))])


def _along(specs: Sequence[DTensorSpec], dim: int, axis: int) -> Iterator[AxisStrategy]:
    """The strategies that leave `axis` as it cuts the joined dim of every tensor."""
    joined = [spec for spec in specs if spec.ndim > dim and spec.shape[dim]]
    shards = [
        placement for spec in joined if isinstance(placement := spec.placements[axis], Shard) and placement.dim == dim
    ]
    if not joined or len(shards) < len(joined):
        return
    # What has no elements to join must not be cut along another dim either, and goes anywhere at no cost.
    current: tuple[Placement, ...] = tuple(
        spec.placements[axis] if spec in joined or spec.placements[axis].is_shard(dim) else Replicate()
        for spec in specs
    )
    if joined[0].mesh.shape[axis] == 1:
        yield AxisStrategy(current, (Shard(dim),), exact=True)
        return
    blocks = [(spec.shape[dim] // s.repeats, s.unit, s.sizes) for spec, s in zip(joined, shards, strict=True)]
    if all(block == blocks[0] for block in blocks):  # lengths that a graph leaves open have no hash
        _, unit, sizes = blocks[0]
        repeats = sum(shard.repeats for shard in shards)
        yield AxisStrategy(current, (Shard(dim, unit, sizes, repeats),), exact=True)
        return
    in_turn = _sizes_in_turn(joined, dim, axis)
    if in_turn is not None:
        units = {shard.unit for shard in shards}
        unit = units.pop() if len(units) == 1 else 1
        yield AxisStrategy(current, (shard_of_sizes(dim, in_turn, unit),), exact=True)


def _sizes_in_turn(joined: Sequence[DTensorSpec], dim: int, axis: int) -> list[int] | None:
    """Lengths of the joined dim that each coordinate holds; None where they are no single piece, or two axes cut it."""
    sizes = [0] * joined[0].mesh.shape[axis]
    last = 0
    for spec in joined:
        cuts = real_cuts(spec.layout, cuts_of(spec.layout)[dim])
        if [by for by, _ in cuts] != [axis] or cuts[0][1].repeats > 1:
            return None
        cut = spec.layout.cut(axis)
        for index in range(cut.parts):
            start, stop = cut.bounds(spec.shape[dim], index)
            if stop > start and index < last:
                return None
            last = index if stop > start else last
            sizes[index] += stop - start
    return sizes


@strategy_of([aten.stack.default])
def stacking(schema: OpSchema) -> list[AxisStrategy]:
    """The dims of the tensors stay cut, and the new one is whole."""
    specs = schema.args_spec
    dim, count = dim_of(schema, 1, "dim", ndim=specs[0].ndim + 1), len(specs)
    sharded = [AxisStrategy((Shard(of),) * count, (Shard(of if of < dim else of + 1),)) for of in range(specs[0].ndim)]
    return [*sharded, *_whole(specs), *_terms(schema)]


@rule_of([aten.repeat.default])
def repetition(schema: OpSchema) -> OutputSharding:
    """The decision about repeat: every rank repeats its part, so that a dim becomes blocks that are cut alike."""
    return view_of(schema, lambda layout: tiled(layout, schema.argument(1, "repeats")))

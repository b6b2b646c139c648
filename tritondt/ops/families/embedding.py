"""Embedding and its gradient: sharded as the indices are, by feature, or by the vocabulary.

Of a sharded vocabulary every rank looks up the rows that it holds, and the results add up.
"""

import torch

from tritondt.ops.propagation.homomorphisms import LINEAR, SELECTIVE, term_strategies
from tritondt.ops.propagation.registration import strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.ops.rules.positions import check_indices, positions_among
from tritondt.sharding.intervals import total
from tritondt.sharding.placement import Partial, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten


def _local_lookup(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The look-up in this rank's rows; rows that other ranks hold come out as zeros."""
    weight = schema.args_spec[0]
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    if not weight.layout.axes_of_dim[0] or weight.coordinate is None:
        return None
    held, length, shape = weight.layout.intervals(0, weight.coordinate), weight.shape[0], outputs.local_shape

    def look_up(table: torch.Tensor, indices: torch.Tensor, *_: object) -> torch.Tensor:
        check_indices(indices, length, "embedding index")
        if not total(held):
            return table.new_zeros(shape)
        rows, missing = positions_among(held, indices)
        return torch.embedding(table, rows).masked_fill_(missing.unsqueeze(-1), 0)

    return look_up


@strategy_of([aten.embedding.default], localize=_local_lookup)
def embedding(schema: OpSchema) -> list[AxisStrategy]:
    """The result is sharded as the indices are or by feature; a cut vocabulary leaves a term on every rank."""
    _, indices = schema.args_spec
    found = [
        AxisStrategy((Replicate(), Replicate()), (Replicate(),)),
        AxisStrategy((Shard(1), Replicate()), (Shard(indices.ndim),)),
        AxisStrategy((Shard(0), Replicate()), (Partial(),)),
    ]
    found += [AxisStrategy((Replicate(), Shard(dim)), (Shard(dim),)) for dim in range(indices.ndim)]
    return [*found, *term_strategies(schema, [SELECTIVE.at(0)])]


@strategy_of([aten.embedding_dense_backward.default])
def embedding_backward(schema: OpSchema) -> list[AxisStrategy]:
    """Every rank has a term of the table's gradient where positions are sharded."""
    _, indices = schema.args_spec
    found = [AxisStrategy((Shard(indices.ndim), Replicate()), (Shard(1),))]
    found += term_strategies(schema, [LINEAR.at(0)])
    scale_grad_by_freq = schema.argument(4, "scale_grad_by_freq", False)
    if not scale_grad_by_freq:  # frequencies are counted over all positions
        found += [AxisStrategy((Shard(dim), Shard(dim)), (Partial(),)) for dim in range(indices.ndim)]
    return [*found, AxisStrategy((Replicate(), Replicate()), (Replicate(),))]


def _local_renorm(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The renormalization of those rows among the indices that this rank holds."""
    weight = schema.args_spec[0]
    if not weight.layout.axes_of_dim[0] or weight.coordinate is None:
        return None
    held, length = weight.layout.intervals(0, weight.coordinate), weight.shape[0]

    def renormalize(table: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float) -> torch.Tensor:
        check_indices(indices, length, "embedding index")
        if not total(held):
            return table
        rows, missing = positions_among(held, indices)
        found: torch.Tensor = torch.embedding_renorm_(table, rows[~missing], max_norm, norm_type)
        return found

    return renormalize


@strategy_of([aten.embedding_renorm_.default], localize=_local_renorm)
def embedding_renorm(schema: OpSchema) -> list[AxisStrategy]:
    """Rows are whole, for their norms, and every replica is given all indices."""
    return [
        AxisStrategy((Replicate(), Replicate()), (Replicate(),)),
        AxisStrategy((Shard(0), Replicate()), (Shard(0),)),
    ]

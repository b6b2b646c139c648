"""Attention over a sequence that is cut over ranks, by heads: one all-to-all before it and one after (Ulysses)."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from tritondt.dtensor.many import redistribute_many
from tritondt.dtensor.tensor import DTensor
from tritondt.errors.arguments import checked
from tritondt.parallel.context.sequence_cut import AttentionParts, SequenceCut, axis_mesh
from tritondt.parallel.feature_cut import FeatureCut
from tritondt.redistribution.refusals import refuse_redistribution, refusing_redistributions
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta

_HEADS, _SEQUENCE = 1, 2
# All three go in one exchange, however many bytes they are.
_ANY_BYTES = 1 << 62


@checked
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    device_mesh: "DeviceMesh | Mesh",
    *,
    length: int,
    key_length: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Scaled dot product attention of this rank's queries over all keys; every rank computes some of the heads.

    Shapes are those of `ring_attention`, and parts are runs of torch.chunk; `key_length` is the number of keys in cross
    attention. Heads and key heads are cut evenly, whole groups of queries together: 6 heads over 4 ranks are 2, 2, 1
    and 1. With fewer key heads than ranks some ranks idle; in `ring_attention` none does. A collective call of all
    ranks of the mesh of one axis, forward and backward: one exchange before and one after. Raises LocalTensorError for
    parts of other lengths, and MeshError.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.context.sequence_cut import context_parallel_shard
    >>> x = torch.arange(24.0).view(1, 3, 4, 2)
    >>> expected = F.scaled_dot_product_attention(x, x, x)
    >>> def attended(rank):
    ...     part = context_parallel_shard(x, Mesh((2,)), 2)
    ...     found = ulysses_attention(part, part, part, Mesh((2,)), length=4)
    ...     return (found - expected[:, :, 2 * rank : 2 * rank + 2]).abs().max().item() < 1e-5
    >>> run_ranks(2, attended)
    [True, True]
    """
    mesh, rank = axis_mesh(device_mesh, "ulysses_attention")
    cut = SequenceCut(length, mesh.shape[0])
    key_cut = cut if key_length is None else SequenceCut(key_length, mesh.shape[0])
    by_positions, by_heads = _specs(mesh, max(length, key_cut.length))
    with refusing_redistributions((by_positions, by_heads), (by_heads, by_positions)):
        AttentionParts(query, key, value, cut, key_cut).check(ulysses_attention, rank)
    try:
        whole = _attended((query, key, value), (cut, key_cut, key_cut), mesh, is_causal=is_causal, scale=scale)
    except Exception as error:  # all that is before the exchange of results has been told
        refuse_redistribution(by_heads, by_positions, error)
        raise
    return whole.redistribute(placements=[Shard(_SEQUENCE)]).to_local()


def _specs(mesh: Mesh, length: int) -> tuple[DTensorSpec, DTensorSpec]:
    """Specs by positions and by heads of a tensor that goes in as many exchanges as any other."""
    meta = TensorMeta.contiguous((1, mesh.shape[0], length, 1))
    return DTensorSpec(mesh, [Shard(_SEQUENCE)], meta), DTensorSpec(mesh, [Shard(_HEADS)], meta)


def _attended(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cuts: tuple[SequenceCut, SequenceCut, SequenceCut],
    mesh: Mesh,
    *,
    is_causal: bool,
    scale: float | None,
) -> DTensor:
    """The results of all queries, by heads."""
    query, key, value = parts
    moves = []
    group = max(1, query.shape[_HEADS] // max(1, key.shape[_HEADS]))
    for local, part_of, unit in zip(parts, cuts, (group, 1, 1), strict=True):
        shape = (*local.shape[:_SEQUENCE], part_of.length, local.shape[-1])
        part = DTensor.from_local(
            local, mesh, [Shard(_SEQUENCE)], shape=shape, stride=torch.empty(shape, device="meta").stride()
        )
        by_heads = FeatureCut(unit, balanced=True).shard(_HEADS, local.shape[_HEADS], mesh.shape[0])
        moves.append((part, [by_heads]))
    queries, keys, values = (x.to_local() for x in redistribute_many(moves, bucket_bytes=_ANY_BYTES))
    if queries.shape[_HEADS]:
        grouped = queries.shape[_HEADS] != keys.shape[_HEADS]
        found = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    else:  # no heads are here, and all three still get their gradients, on this rank like on the others
        found = queries @ keys.transpose(-1, -2) @ values
    shape = (*query.shape[:_SEQUENCE], cuts[0].length, value.shape[-1])
    return DTensor.from_local(found, mesh, moves[0][1], shape=shape, stride=torch.empty(shape, device="meta").stride())

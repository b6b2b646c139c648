"""flex_attention over a sequence that is cut over ranks: each rank's queries meet the keys of all, gathered at once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LocalTensorError
from tritondt.errors.arguments import check_types, checked
from tritondt.parallel.context.sequence_cut import AttentionParts, SequenceCut, axis_mesh, gathered_specs, whole_order
from tritondt.redistribution.refusals import refusing_redistributions
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Replicate, Shard

_SEQUENCE = 2
_Mod = Callable[..., torch.Tensor]


@checked
def context_parallel_block_mask(
    mask_mod: _Mod,
    B: int | None,  # noqa: N803  torch's name
    H: int | None,  # noqa: N803
    device_mesh: "DeviceMesh | Mesh",
    *,
    length: int,
    key_length: int | None = None,
    balanced: bool = False,
    BLOCK_SIZE: int | tuple[int, int] = 128,  # noqa: N803
) -> BlockMask | None:
    """The block mask of this rank's queries, for `context_parallel_flex_attention`; not a collective call.

    None on a rank without queries.

    `mask_mod`, `B`, `H` and `BLOCK_SIZE` are those of torch.nn.attention.flex_attention.create_block_mask. `mask_mod`
    gets positions in the whole sequence of `length` queries and `key_length` keys (default: `length`). The sequence is
    cut as `context_parallel_shard` cuts it. Raises MeshError for a mesh of several axes or a rank outside of it.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def shape(rank):
    ...     causal = lambda b, h, q, k: q >= k
    ...     return context_parallel_block_mask(causal, None, None, Mesh((2,)), length=5).shape  # of 3 queries and of 2
    >>> run_ranks(2, shape)
    [(1, 1, 3, 5), (1, 1, 2, 5)]
    """
    mesh, rank = axis_mesh(device_mesh, "context_parallel_block_mask")
    cut = SequenceCut(length, mesh.shape[0], balanced)
    if not cut.sizes[rank]:
        return None  # torch makes no mask without queries
    num_keys = length if key_length is None else key_length
    place = _query_in_whole_sequence(cut, rank, mesh.device_type)

    # torch counts the arguments to tell such a function from one of scores.
    def in_whole_sequence(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return mask_mod(b, h, place(q), k)

    return torch_flex.create_block_mask(
        in_whole_sequence, B, H, cut.sizes[rank], num_keys, device=mesh.device_type, BLOCK_SIZE=BLOCK_SIZE
    )


@checked
def context_parallel_flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    device_mesh: "DeviceMesh | Mesh",
    *,
    length: int,
    key_length: int | None = None,
    balanced: bool = False,
    score_mod: _Mod | None = None,
    block_mask: BlockMask | None = None,
    **options: Any,
) -> torch.Tensor:
    """flex_attention of this rank's queries over all keys of a sequence that is cut over ranks.

    Shapes, `length`, `key_length` and `balanced` are those of `ring_attention`. `score_mod` gets positions in the whole
    sequence; `block_mask` comes from `context_parallel_block_mask`, for the same lengths. `options` are torch's: scale,
    enable_gqa, kernel_options. One exchange gathers keys and values, and one sums and cuts their gradients; every rank
    holds all keys meanwhile. A collective call of all ranks of the mesh of one axis, forward and backward. Raises
    LocalTensorError for parts of other shapes, and MeshError for a mesh of several axes or a rank outside of it.
    Source: Dong et al., Flex Attention (2024), https://arxiv.org/abs/2412.05496.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.context.sequence_cut import context_parallel_shard
    >>> x = torch.eye(4).view(1, 1, 4, 4)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> def attended(rank):
    ...     part = context_parallel_shard(x, Mesh((2,)), 2)
    ...     found = context_parallel_flex_attention(part, part, part, Mesh((2,)), length=4)
    ...     return (found - expected[:, :, 2 * rank : 2 * rank + 2]).abs().max().item() < 1e-6
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # torch's, for a call that is not compiled
    ...     run_ranks(2, attended)
    [True, True]
    """
    mesh, rank = axis_mesh(device_mesh, "context_parallel_flex_attention")
    cut = SequenceCut(length, mesh.shape[0], balanced)
    key_cut = cut if key_length is None else SequenceCut(key_length, mesh.shape[0], balanced)
    with refusing_redistributions(gathered_specs(mesh, key_cut)):
        AttentionParts(query, key, value, cut, key_cut).check(context_parallel_flex_attention, rank)
        check_types(context_parallel_flex_attention, score_mod=score_mod, block_mask=block_mask)
        if block_mask is not None and block_mask.shape[-2:] != (cut.sizes[rank], key_cut.length):
            raise LocalTensorError(
                f"context_parallel_flex_attention got a block mask of {block_mask.shape[-2:]} queries and keys on rank "
                f"{rank} of the mesh, which has {cut.sizes[rank]} queries of {key_cut.length} keys; "
                "context_parallel_block_mask makes it"
            )
    gathered = _gathered(torch.cat([key, value], -1), mesh, key_cut)
    keys, values = gathered.split([key.shape[-1], value.shape[-1]], -1)
    if not query.shape[_SEQUENCE]:
        # Keys get the gradient zero here, on this rank like on the others.
        group = query.shape[1] // max(1, key.shape[1])
        empty: torch.Tensor = query @ keys.repeat_interleave(group, 1).mT @ values.repeat_interleave(group, 1)
        return empty
    whole = None if score_mod is None else _scores_in_whole_sequence(score_mod, cut, rank, query.device)
    found: torch.Tensor = torch_flex.flex_attention(
        query, keys, values, score_mod=whole, block_mask=block_mask, **options
    )
    return found


def _gathered(local: torch.Tensor, mesh: Mesh, cut: SequenceCut) -> torch.Tensor:
    """The parts of all ranks by position; every rank's gradient is a term of theirs."""
    shape = (*local.shape[:_SEQUENCE], cut.length, local.shape[-1])
    part = DTensor.from_local(
        local.contiguous(),
        mesh,
        [Shard(_SEQUENCE, sizes=cut.sizes)],
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    whole = part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return whole.index_select(_SEQUENCE, whole_order(cut).to(local.device)) if cut.balanced else whole


def _scores_in_whole_sequence(score_mod: _Mod, cut: SequenceCut, rank: int, device: torch.device) -> _Mod:
    place = _query_in_whole_sequence(cut, rank, device)

    def in_whole_sequence(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return score_mod(score, b, h, place(q), k)

    return in_whole_sequence


def _query_in_whole_sequence(cut: SequenceCut, rank: int, device: "torch.device | str") -> _Mod:
    """The function from the place of a query on this rank to its place in the whole sequence."""
    (start, _), *others = cut.runs(rank)
    if not any(begin < end for begin, end in others):
        return lambda query: query + start
    positions = cut.positions(rank).to(device)
    return lambda query: positions[query]

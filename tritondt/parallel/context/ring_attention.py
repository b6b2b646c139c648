"""Attention over a sequence that is cut over ranks: keys and values go round, and no rank ever holds all of them.

Of n ranks each computes its queries against one part of the keys after another, which its neighbour sends while it
computes; outputs are brought together by their log-sum-exp. Backward goes round once more with keys, values and their
gradients. A part moves on by a redistribution between meshes of the same ranks, rotated by one.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt import identity
from tritondt.comm.work import Work
from tritondt.errors import PeerError
from tritondt.errors.arguments import checked
from tritondt.parallel.context.sequence_cut import AttentionParts, SequenceCut, axis_mesh
from tritondt.redistribution.refusals import refuse_on, refusing_next
from tritondt.redistribution.run import redistribute_local, redistribute_local_async
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta


@checked
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    device_mesh: "DeviceMesh | Mesh",
    *,
    length: int,
    key_length: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    balanced: bool = False,
) -> torch.Tensor:
    """Scaled dot product attention of this rank's queries over all keys, which stay cut.

    `query` is (batch, heads, positions, width); `key` and `value` are (batch, key heads, positions, width). They are
    this rank's part of `length` positions, cut as by `context_parallel_shard`: into runs of torch.chunk, or `balanced`,
    which gives ranks equal work under a causal mask. Parts may be uneven and empty. In cross attention the keys are
    this rank's part of `key_length` positions. A causal mask then hides key j from query i where i < j, as in
    torch.nn.functional.scaled_dot_product_attention. The number of heads must be a multiple of the key heads (grouped
    queries). The result is as `query`. Sums are in float32, or float64 of float64. A collective call of all ranks of
    the mesh of one axis, forward and backward. Raises LocalTensorError for parts of other shapes, and MeshError for a
    mesh of several axes or a rank outside of it.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.context.sequence_cut import context_parallel_shard
    >>> x = torch.eye(4).view(1, 1, 4, 4)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> def attended(rank):
    ...     part = context_parallel_shard(x, Mesh((2,)), 2)
    ...     found = ring_attention(part, part, part, Mesh((2,)), length=4, is_causal=True)
    ...     return (found - expected[:, :, 2 * rank : 2 * rank + 2]).abs().max().item() < 1e-6
    >>> run_ranks(2, attended)
    [True, True]
    """
    mesh, rank = axis_mesh(device_mesh, "ring_attention")
    cut = SequenceCut(length, mesh.shape[0], balanced)
    key_cut = cut if key_length is None else SequenceCut(key_length, mesh.shape[0], balanced)
    with refusing_next(mesh, mesh.shape[0] - 1 if key_cut.length else 0):
        AttentionParts(query, key, value, cut, key_cut).check(ring_attention, rank)
    ring = _Ring(mesh, rank, cut, key_cut, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
    found: torch.Tensor = _RingAttention.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    return found


class _Ring(NamedTuple):
    """The ranks of a ring, this one's place, and what is asked of them."""

    mesh: Mesh
    rank: int
    cut: SequenceCut
    key_cut: SequenceCut
    is_causal: bool
    scale: float

    def spec(self, part: torch.Tensor, step: int) -> DTensorSpec:
        """The spec of keys that have gone on by `step` ranks: rank r holds the part of rank r - step."""
        shape = (*part.shape[:-2], self.key_cut.length, part.shape[-1])
        meta = TensorMeta.contiguous(shape, part.dtype)
        return DTensorSpec(_rotated(self.mesh, step % self.mesh.shape[0]), [Shard(-2, sizes=self.key_cut.sizes)], meta)

    def owner(self, step: int) -> int:
        """The rank whose keys are here at a step."""
        return (self.rank - step) % self.mesh.shape[0]

    def hidden(self, step: int, device: torch.device) -> torch.Tensor | None:
        """Pairs of own queries and of the keys at a step that the mask hides, if there is a mask."""
        if not self.is_causal:
            return None
        queries, keys = self.cut.positions(self.rank), self.key_cut.positions(self.owner(step))
        return (queries[:, None] < keys[None, :]).to(device)


def _await(work: Work, ring: _Ring, num_left: int) -> None:
    """Waits for keys to go on; where a rank has refused that, the other ranks hear it in the steps that are left."""
    try:
        work.wait()
    except PeerError as error:
        refuse_on(ring.mesh, error, num_left)
        raise


@lru_cache(maxsize=256)
def _rotated(mesh: Mesh, step: int) -> Mesh:
    """The mesh on whose index i stands the rank `step` places after that of `mesh`."""
    ranks = mesh.ranks[step:] + mesh.ranks[:step]
    return Mesh(mesh.shape, ranks=ranks, device_type=mesh.device_type) if step else mesh


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, hidden: torch.Tensor | None) -> torch.Tensor:
    """Scaled products (batch, key heads, group, queries, keys), -inf where hidden."""
    scores: torch.Tensor = query @ key.unsqueeze(2).transpose(-1, -2) * scale
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _grouped(query: torch.Tensor, key_heads: int) -> torch.Tensor:
    """(batch, key heads, group, queries, width), in the dtype of sums."""
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    grouped: torch.Tensor = query.to(wide).unflatten(1, (key_heads, query.shape[1] // key_heads))
    return grouped


class _RingAttention(torch.autograd.Function):
    """Attention over parts that go round; its backward goes round once more."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: _Ring) -> torch.Tensor:
        """Own queries over all keys; keeps own parts, the result and its log-sum-exp."""
        grouped, width = _grouped(query, key.shape[1]), key.shape[-1]
        here, steps = torch.cat([key, value], -1).contiguous(), ring.mesh.shape[0]
        out = grouped.new_zeros((*grouped.shape[:-1], value.shape[-1]))
        lse = grouped.new_full(grouped.shape[:-1], -torch.inf)
        for step in range(steps):
            coming, work = here, None
            if step + 1 < steps:
                coming, work = redistribute_local_async(here, ring.spec(here, step), ring.spec(here, step + 1))
            keys, values = here[..., :width].to(grouped.dtype), here[..., width:].to(grouped.dtype)
            scores = _scores(grouped, keys, ring.scale, ring.hidden(step, query.device))
            if scores.numel():
                part = scores.logsumexp(-1)
                both = torch.logaddexp(lse, part)
                # Rows that have seen no key yet have no weights: exp(-inf - -inf) would be NaN.
                shift = both.masked_fill(both == -torch.inf, 0.0).unsqueeze(-1)
                out = out * (lse.unsqueeze(-1) - shift).exp() + (scores - shift).exp() @ values.unsqueeze(2)
                lse = both
            if work is not None:
                _await(work, ring, steps - step - 2)
            here = coming
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, out, lse)
        return out.flatten(1, 2).to(query.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """Gradients of own parts; those of keys and values arrive after a whole round."""
        query, key, value, out, lse = ctx.saved_tensors
        ring, width, steps = ctx.ring, key.shape[-1], ctx.ring.mesh.shape[0]
        grouped, upstream = _grouped(query, key.shape[1]), _grouped(grad, key.shape[1])
        here = torch.cat([key, value], -1).contiguous()
        back = torch.zeros_like(here, dtype=grouped.dtype)
        grad_query, delta = torch.zeros_like(grouped), (upstream * out).sum(-1, keepdim=True)
        shift = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
        for step in range(steps):
            coming, work = here, None
            if step + 1 < steps:
                coming, work = redistribute_local_async(here, ring.spec(here, step), ring.spec(here, step + 1))
            keys, values = here[..., :width].to(grouped.dtype), here[..., width:].to(grouped.dtype)
            weights = (_scores(grouped, keys, ring.scale, ring.hidden(step, query.device)) - shift).exp()
            of_scores = weights * (upstream @ values.unsqueeze(2).transpose(-1, -2) - delta) * ring.scale
            grad_query = grad_query + of_scores @ keys.unsqueeze(2)
            back[..., :width] += (of_scores.transpose(-1, -2) @ grouped).sum(2)
            back[..., width:] += (weights.transpose(-1, -2) @ upstream).sum(2)
            if steps > 1:
                back = redistribute_local(back, ring.spec(back, step), ring.spec(back, step + 1))
            if work is not None:
                work.wait()
            here = coming
        return (
            grad_query.flatten(1, 2).to(query.dtype),
            back[..., :width].to(key.dtype),
            back[..., width:].to(value.dtype),
            None,
        )


identity.on_end(_rotated.cache_clear)

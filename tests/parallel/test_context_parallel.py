"""Attention over sequences that ranks share: outputs and gradients of one process, whatever the lengths."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.parallel import (
    context_parallel_shard,
    context_parallel_unshard,
    ring_attention,
    ulysses_attention,
)
from tritondt.parallel.context.sequence_cut import SequenceCut


def attended(
    function: Any,
    heads: int,
    key_heads: int,
    length: int,
    num_ranks: int,
    *,
    is_causal: bool,
    balanced: bool = False,
    key_length: int | None = None,
) -> None:
    """Holds outputs and gradients against torch's own attention of the whole sequence."""
    generator = torch.Generator().manual_seed(length)
    keys = length if key_length is None else key_length
    shapes = (2, heads, length, 4), (2, key_heads, keys, 4), (2, key_heads, keys, 3 if heads == key_heads else 4)
    wholes = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    leaves = [whole.clone().requires_grad_() for whole in wholes]
    query, key, value = leaves
    grouped = heads != key_heads
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=grouped)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected.backward(upstream)
    options = {"balanced": True} if balanced else {}
    lengths = {"length": length} if key_length is None else {"length": length, "key_length": key_length}

    def body(rank: int) -> None:
        mesh = T.Mesh((num_ranks,))
        parts = [context_parallel_shard(whole, mesh, 2, **options).requires_grad_() for whole in wholes]
        found = function(*parts, mesh, **lengths, is_causal=is_causal, **options)
        torch.testing.assert_close(found, context_parallel_shard(expected.detach(), mesh, 2, **options))
        found.backward(context_parallel_shard(upstream, mesh, 2, **options))
        for part, leaf in zip(parts, leaves, strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(part.grad, context_parallel_shard(leaf.grad, mesh, 2, **options))

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("heads", "key_heads", "length", "num_ranks", "balanced"),
    [(6, 6, 13, 4, True), (4, 2, 9, 4, False), (3, 1, 5, 4, True), (2, 2, 7, 1, True), (2, 1, 8, 3, False)],
)
def test_ring_attention(heads, key_heads, length, num_ranks, balanced, is_causal):
    attended(ring_attention, heads, key_heads, length, num_ranks, is_causal=is_causal, balanced=balanced)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("heads", "key_heads", "length", "num_ranks"), [(6, 6, 13, 4), (4, 2, 9, 3), (8, 2, 6, 4), (2, 2, 7, 1)]
)
def test_ulysses_attention(heads, key_heads, length, num_ranks, is_causal):
    attended(ulysses_attention, heads, key_heads, length, num_ranks, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("function", "heads", "key_heads", "length", "key_length", "balanced"),
    [
        (ring_attention, 4, 2, 7, 11, False),
        (ring_attention, 2, 2, 13, 3, True),
        (ring_attention, 2, 2, 5, 1, False),
        (ring_attention, 2, 2, 2, 9, False),
        (ulysses_attention, 4, 2, 7, 11, False),
        (ulysses_attention, 6, 6, 5, 1, False),
    ],
)
def test_queries_of_one_sequence_attend_to_another(function, heads, key_heads, length, key_length, balanced, is_causal):
    attended(function, heads, key_heads, length, 4, is_causal=is_causal, balanced=balanced, key_length=key_length)


def test_ulysses_is_two_exchanges():
    def body(rank: int) -> int:
        mesh = T.Mesh((4,))
        communicator: Any = world.current().communicator((0, 1, 2, 3))
        part = torch.randn(1, 6, SequenceCut(13, 4).sizes[rank], 4)
        before: int = communicator.sequence
        ulysses_attention(part, part, part, mesh, length=13)
        after: int = communicator.sequence
        return after - before

    assert run_ranks(4, body) == [2] * 4


@pytest.mark.parametrize("seed", range(12))
def test_parts_of_random_cuts_come_together_again(seed):
    chosen = random.Random(seed)
    length, num_ranks, balanced = chosen.randrange(14), chosen.randint(1, 5), chosen.random() < 0.5
    whole = torch.arange(3.0 * length).view(3, length)
    upstream = torch.randn(3, length, generator=torch.Generator().manual_seed(seed))

    def body(rank: int) -> None:
        mesh = T.Mesh((num_ranks,))
        part = context_parallel_shard(whole, mesh, 1, balanced=balanced).requires_grad_()
        found = context_parallel_unshard(part, mesh, 1, length=length, balanced=balanced)
        torch.testing.assert_close(found, whole, rtol=0, atol=0)
        (grad,) = torch.autograd.grad(found, part, upstream)
        expected = context_parallel_shard(upstream, mesh, 1, balanced=balanced)
        torch.testing.assert_close(grad, expected, rtol=0, atol=0)

    run_ranks(num_ranks, body)


def test_balanced_parts_have_equally_many_pairs_under_a_causal_mask():
    cut = SequenceCut(64, 4, balanced=True)
    pairs = [int((cut.positions(rank) + 1).sum()) for rank in range(4)]
    assert len(set(pairs)) == 1
    runs = [int((SequenceCut(64, 4).positions(rank) + 1).sum()) for rank in range(4)]
    assert max(runs) > 6 * min(runs)


@pytest.mark.parametrize("attention", [ring_attention, ulysses_attention])
def test_the_others_hear_of_a_part_that_one_rank_does_not_have(attention):
    def body(rank: int) -> None:
        part = torch.ones(1, 3, 2, 4)
        odd = part[:, :, 1:] if rank == 1 else part
        with pytest.raises(T.LocalTensorError if rank == 1 else T.PeerError, match="query has 1 positions along dim 2"):
            attention(odd, part, part, T.Mesh((3,)), length=6)

    run_ranks(3, body)


def test_parts_that_no_sequence_has_are_refused():
    def body(rank: int) -> None:
        mesh, part = T.Mesh((2,)), torch.ones(1, 2, 3, 4)
        with pytest.raises(
            T.LocalTensorError, match=r"query has 3 positions along dim 2 on rank \d of the mesh; a cut"
        ):
            ring_attention(part, part, part, mesh, length=8)
        with pytest.raises(T.LocalTensorError, match="allowed are 4 dims: batch, heads, positions, width"):
            ring_attention(part[0], part, part, mesh, length=6)
        with pytest.raises(T.LocalTensorError, match=r"got 2 heads, key .* one batch and number of heads that divides"):
            ring_attention(part, part.repeat(1, 2, 1, 1), part.repeat(1, 2, 1, 1), mesh, length=6)
        with pytest.raises(T.LocalTensorError, match="key has 2 positions along dim 2"):
            ulysses_attention(part, part[:, :, 1:], part, mesh, length=6)
        with pytest.raises(
            T.MeshError, match=r"ring_attention takes a mesh of one axis, got Mesh.*; give it one slice"
        ):
            ring_attention(part, part, part, T.Mesh((2, 1)), length=6)

    run_ranks(2, body)

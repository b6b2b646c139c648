"""flex_attention of tensors that are cut by batch, heads or sequence: outputs and gradients of one process."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.parallel import context_parallel_block_mask, context_parallel_flex_attention, context_parallel_shard

_BATCH, _LENGTH, _WIDTH = 3, 12, 4
# torch warns of any call that is not compiled, and of what its compiler asks of tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]
R, S = T.Replicate(), T.Shard
# Its overloads take no list of arguments.
flex_attention: Callable[..., Any] = torch_flex.flex_attention


@pytest.fixture(autouse=True)
def _gradients_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch refuses a backward pass on the CPU before it calls its operator, which has one there."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q >= k) | ((b + h) % 3 == 0)


class _Attention:
    """Attention of one process whose scores and mask differ by batch entry, head and position."""

    def __init__(self, heads: int, key_heads: int, length: int = _LENGTH, key_length: int = _LENGTH) -> None:
        self.shape = heads, key_heads, length, key_length
        generator = torch.Generator().manual_seed(heads + length)

        def drawn(num_heads: int, positions: int) -> torch.Tensor:
            return torch.randn(_BATCH, num_heads, positions, _WIDTH, generator=generator, dtype=torch.float64)

        self.wholes = [drawn(heads, length), drawn(key_heads, key_length), drawn(key_heads, key_length)]
        self.slopes = torch.arange(1.0, heads + 1, dtype=torch.float64) / heads
        leaves = [whole.clone().requires_grad_() for whole in self.wholes]
        mask = create_block_mask(_mask, _BATCH, heads, length, key_length, device="cpu", BLOCK_SIZE=4)
        self.block_mask = mask
        self.expected = flex_attention(*leaves, score_mod=self.score, block_mask=mask, enable_gqa=True)
        self.upstream = torch.randn(self.expected.shape, generator=generator, dtype=torch.float64)
        self.expected.backward(self.upstream)
        self.gradients = [leaf.grad for leaf in leaves]

    def score(
        self, score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return score + self.slopes[h] * (q - k) + b


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    ("mesh_shape", "heads", "key_heads", "query", "keys", "is_compiled"),
    [
        ((4,), 6, 2, [S(1, unit=3)], [S(1)], False),
        ((4,), 6, 2, [S(1, unit=3)], [S(1)], True),
        ((4,), 3, 1, [S(1)], [R], False),
        ((4,), 2, 2, [S(0)], [S(0)], True),
        ((2, 2), 4, 4, [S(0), S(1)], [S(0), S(1)], False),
        ((2, 2), 6, 3, [S(1), S(1)], [R, R], True),
        ((2,), 2, 2, [R], [R], False),
    ],
)
def test_batch_and_heads(
    mesh_shape: tuple[int, ...],
    heads: int,
    key_heads: int,
    query: Sequence[T.Placement],
    keys: Sequence[T.Placement],
    is_compiled: bool,
) -> None:
    """Some ranks have no head, or no batch entry; nothing is sent in the forward pass."""
    one = _Attention(heads, key_heads)
    attend = _compiled(flex_attention) if is_compiled else flex_attention

    def body(rank: int) -> None:
        mesh = T.Mesh(mesh_shape)
        given = [
            T.distribute_tensor(whole, mesh, placements).requires_grad_()
            for whole, placements in zip(one.wholes, (query, keys, keys), strict=True)
        ]
        with CommDebugMode() as comm, T.implicit_replication():
            found = attend(*given, score_mod=one.score, block_mask=one.block_mask, enable_gqa=True)
        assert comm.get_total_counts() == 0
        assert found.placements == tuple(query)
        torch.testing.assert_close(found.full_tensor(), one.expected.detach())
        found.backward(T.distribute_tensor(one.upstream, mesh, query))
        for tensor, expected in zip(given, one.gradients, strict=True):
            assert isinstance(tensor.grad, T.DTensor)
            torch.testing.assert_close(tensor.grad.full_tensor(), expected)

    run_ranks(math.prod(mesh_shape), body)


@pytest.mark.parametrize(
    ("length", "key_length", "num_ranks", "balanced"), [(13, 13, 4, True), (3, 7, 4, False), (9, 9, 2, False)]
)
def test_a_sequence(length: int, key_length: int, num_ranks: int, balanced: bool) -> None:
    """Runs and balanced cuts, ranks without a query, keys of another sequence."""
    one = _Attention(4, 2, length, key_length)

    def body(rank: int) -> None:
        mesh = T.Mesh((num_ranks,))
        parts = [context_parallel_shard(whole, mesh, 2, balanced=balanced).requires_grad_() for whole in one.wholes]
        lengths: dict[str, Any] = {"length": length, "key_length": key_length, "balanced": balanced}
        mask = context_parallel_block_mask(_mask, _BATCH, 4, mesh, **lengths, BLOCK_SIZE=4)
        query, key, value = parts
        found = context_parallel_flex_attention(
            query, key, value, mesh, **lengths, score_mod=one.score, block_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(found, context_parallel_shard(one.expected.detach(), mesh, 2, balanced=balanced))
        found.backward(context_parallel_shard(one.upstream, mesh, 2, balanced=balanced))
        for part, whole in zip(parts, one.gradients, strict=True):
            assert whole is not None
            torch.testing.assert_close(part.grad, context_parallel_shard(whole, mesh, 2, balanced=balanced))

    run_ranks(num_ranks, body)


def test_plain_tensors_are_left_to_torch() -> None:
    """A graph of gradients has its fake tensors, though a kernel of this library is asked first."""
    one = _Attention(2, 2)
    leaves = [whole.clone().requires_grad_() for whole in one.wholes]
    found = _compiled(flex_attention)(*leaves, score_mod=one.score, block_mask=one.block_mask)
    torch.testing.assert_close(found, one.expected, rtol=0, atol=0)
    found.backward(one.upstream)
    for leaf, expected in zip(leaves, one.gradients, strict=True):
        torch.testing.assert_close(leaf.grad, expected)


def test_the_log_sum_exp_is_cut_as_the_query_is() -> None:
    one = _Attention(3, 3)
    _, expected = flex_attention(*one.wholes, return_aux=torch_flex.AuxRequest(lse=True))

    def body(rank: int) -> None:
        given = [T.distribute_tensor(whole, T.Mesh((2,)), [S(1)]) for whole in one.wholes]
        _, found = flex_attention(*given, return_aux=torch_flex.AuxRequest(lse=True))
        assert found.lse.placements == (S(1),)
        torch.testing.assert_close(found.lse.full_tensor(), expected.lse)

    run_ranks(2, body)


def test_what_would_have_to_move_is_refused() -> None:
    one = _Attention(2, 2)
    key = one.wholes[1]

    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        by_heads, by_position = ([T.distribute_tensor(x, mesh, [S(dim)]) for x in one.wholes] for dim in (1, 2))
        with pytest.raises(Exception, match=r"got query under \(S2\).*query\.redistribute\(placements=.*sequences"):
            flex_attention(*by_position)
        with pytest.raises(Exception, match="flex_attention got a plain key beside distributed tensors; make it"):
            flex_attention(by_heads[0], key, by_heads[2])
        mask = context_parallel_block_mask(_mask, None, None, mesh, length=9, key_length=_LENGTH)
        part = context_parallel_shard(key, mesh, 2)
        with pytest.raises(T.LocalTensorError, match=r"block mask of \([45], 12\) .* 6 queries of 12 keys; context_pa"):
            context_parallel_flex_attention(part, part, part, mesh, length=_LENGTH, block_mask=mask)

    run_ranks(2, body)

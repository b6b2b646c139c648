"""Mixtures of experts: tokens travel to the ranks of their experts and back, in any numbers, and so do gradients."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.errors import LocalTensorError, ParallelizeError
from tritondt.parallel import ExpertParallel, ReplicateParallel, parallelize_module, token_combine, token_dispatch

EXPERTS, CHOICES, WIDTH, HIDDEN, TOKENS = 6, 2, 8, 12, 37
X, WANTED = (torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


class Weights(nn.Module):
    """Two matrices for each expert."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN, dtype=dtype) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH, dtype=dtype) / 3)


class Experts(Weights):
    """Tokens come sorted by expert, and each expert takes its own, one by one."""

    def forward(self, tokens: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        parts = tokens.split(num_tokens_per_expert.tolist())
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)])


class GroupedExperts(Weights):
    """All experts at once."""

    def forward(self, tokens: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        offsets = num_tokens_per_expert.cumsum(0).to(torch.int32)
        hidden = torch._grouped_mm(tokens, self.up, offs=offsets)
        return torch._grouped_mm(F.gelu(hidden), self.down, offs=offsets)


class IndexedExperts(Weights):
    """Experts that look for their tokens, as those of transformers do."""

    def forward(self, tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(tokens)
        for expert in indices.unique().tolist():
            rows, choices = torch.where(indices == expert)
            result = F.gelu(tokens[rows] @ self.up[expert]) @ self.down[expert]
            found.index_add_(0, rows, result * weights[rows, choices, None])
        return found


class Mixture(nn.Module):
    """A router, experts, and a norm before them."""

    def __init__(self, experts: type[Weights], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=dtype)
        self.experts = experts(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        weights, indices = self.router(x).softmax(-1).topk(CHOICES)
        if isinstance(self.experts, IndexedExperts):
            return cast(torch.Tensor, self.experts(x, indices, weights))
        order = indices.flatten().argsort(stable=True)
        counts = torch.bincount(indices.flatten(), minlength=EXPERTS)
        found = self.experts(x[order // CHOICES], counts) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // CHOICES, found)


def train(model: nn.Module, x: torch.Tensor, wanted: torch.Tensor) -> tuple[list[float], list[float]]:
    """Losses of these tokens, and gradient norms, of three steps."""
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), wanted, reduction="sum") / (TOKENS * WIDTH)
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
        norms.append((norm.full_tensor() if isinstance(norm, T.DTensor) else norm).item())
    return losses, norms


PLAN = {"experts": ExpertParallel(), "": ReplicateParallel(input_layouts=T.Shard(0))}


# The last has ranks without experts; of 37 tokens the second rank has none.
@pytest.mark.parametrize(
    ("num_ranks", "experts", "sizes", "held"),
    [
        (4, Experts, None, (2, 2, 1, 1)),
        (8, IndexedExperts, None, (1, 1, 1, 1, 1, 1, 0, 0)),
        (4, GroupedExperts, (3, 0, 1, 2), (3, 0, 1, 2)),
        (4, IndexedExperts, (3, 0, 1, 2), (3, 0, 1, 2)),
        (8, Experts, None, (1, 1, 1, 1, 1, 1, 0, 0)),
        (3, GroupedExperts, None, (2, 2, 2)),
        (1, Experts, None, (6,)),
    ],
)
def test_three_steps_are_those_of_one_process(num_ranks, experts, sizes, held):
    dtype = torch.float32 if experts is GroupedExperts else torch.float64
    single, x, wanted = Mixture(experts, dtype), X.to(dtype), WANTED.to(dtype)
    losses, norms = train(single, x, wanted)
    lengths = [0 if rank == 1 else TOKENS // num_ranks for rank in range(num_ranks)]
    lengths[-1] += TOKENS - sum(lengths)

    def body(rank: int) -> tuple[list[float], int]:
        plan = {**PLAN, "experts": ExpertParallel(sizes=sizes)}
        model = parallelize_module(Mixture(experts, dtype), T.Mesh((num_ranks,)), plan)
        found, found_norms = train(model, x.split(lengths)[rank], wanted.split(lengths)[rank])
        torch.testing.assert_close(found_norms, norms)
        for name, parameter in single.named_parameters():
            mine: Any = model.get_parameter(name)
            torch.testing.assert_close(mine.full_tensor(), parameter)
        return found, len(cast(T.DTensor, model.get_parameter("experts.up")).to_local())

    results = run_ranks(num_ranks, body)
    assert tuple(number for _, number in results) == held
    torch.testing.assert_close([sum(losses) for losses in zip(*(found for found, _ in results), strict=True)], losses)


@pytest.mark.parametrize("seed", range(4))
def test_dispatched_rows_are_those_of_all_ranks_by_expert_and_come_back(seed):
    generator = torch.Generator().manual_seed(seed)
    num_ranks, num_experts = (4, 6) if seed % 2 else (3, 2)
    counts = torch.randint(4, (num_ranks, num_experts), generator=generator)
    counts[0] = 0
    counts[:, -1] *= seed // 2
    rows = [torch.randn(int(own.sum()), 3, 2, generator=generator) for own in counts]
    by_expert = [
        torch.cat(parts)
        for parts in zip(*(r.split(c.tolist()) for r, c in zip(rows, counts, strict=True)), strict=True)
    ]
    sizes = [num_experts // num_ranks + (rank < num_experts % num_ranks) for rank in range(num_ranks)]

    def body(rank: int) -> None:
        mesh = T.Mesh((num_ranks,), ranks=range(num_ranks)[::-1])
        place = num_ranks - 1 - rank
        own = rows[place].clone().requires_grad_()
        found = token_dispatch(own, counts[place], mesh)
        first = sum(sizes[:place])
        mine = by_expert[first : first + sizes[place]]
        expected = torch.cat([torch.zeros(0, 3, 2), *mine])
        torch.testing.assert_close(found.tokens.detach(), expected, rtol=0, atol=0)
        assert found.num_tokens_per_expert.tolist() == [len(part) for part in mine]
        back = token_combine(found.tokens * 2, found)
        torch.testing.assert_close(back.detach(), own.detach() * 2, rtol=0, atol=0)
        (grad,) = torch.autograd.grad((back * back.detach()).sum(), own)
        torch.testing.assert_close(grad, own.detach() * 4, rtol=0, atol=0)

    run_ranks(num_ranks, body)


def test_a_layer_moves_tokens_in_one_message_for_a_pair_of_ranks_each_way():
    def body(rank: int) -> None:
        model = parallelize_module(Mixture(Experts, torch.float64), T.Mesh((4,)), PLAN)
        x = X.double().split([10, 9, 9, 9])[rank].requires_grad_()
        with CommDebugMode() as comm:
            out = model(x)
        # Counts, then tokens there and back.
        assert comm.get_comm_counts()["(S0) -> (R)"] == 1
        assert comm.get_comm_counts()[torch.ops.c10d_functional.all_to_all_single] == 2
        assert comm.get_total_counts() == 3
        with CommDebugMode() as comm:
            out.sum().backward()
        assert comm.get_comm_counts()[torch.ops.c10d_functional.all_to_all_single] == 2

    run_ranks(4, body)


def test_experts_without_tokens_have_gradients_of_zeros_and_backward_ends():
    def body(rank: int) -> list[float]:
        experts = parallelize_module(IndexedExperts(torch.float64), T.Mesh((3,)), ExpertParallel())
        indices = torch.full((4, 1), 1)  # all to the second expert, on the first rank
        experts(X[:4].double(), indices, torch.ones(4, 1)).sum().backward()
        grad: Any = cast(T.DTensor, experts.up).grad
        return [float(part.abs().sum()) for part in grad.to_local()]

    first, *others = run_ranks(3, body)
    assert first[0] == 0
    assert first[1] > 0
    assert others == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([3, 1, 1], r"counts \[3, 1, 1\] for 4 tokens on rank 1; allowed is a list of integers"),
        ([5, -1, 0], r"counts \[5, -1, 0\] for 4 tokens on rank 1"),
        ([1.0, 1.0, 2.0], r"counts \[-1, -1, -1\] for 4 tokens on rank 1"),
    ],
)
def test_counts_that_are_not_the_tokens_are_refused_on_all_ranks(counts, message):
    def body(rank: int) -> None:
        given = torch.tensor(counts) if rank == 1 else torch.tensor([2, 1, 1])
        with pytest.raises(LocalTensorError, match=message):
            token_dispatch(torch.ones(4, 2), given, T.Mesh((2,)))

    run_ranks(2, body)


def test_rows_and_sizes_that_do_not_fit_are_refused():
    def body(rank: int) -> None:
        mesh, counts = T.Mesh((2,)), torch.tensor([2, 1, 1])
        with pytest.raises(LocalTensorError, match=r"got sizes=\(1, 1\) for 3 experts on 2 ranks; allowed is a number"):
            token_dispatch(torch.ones(4, 2), counts, mesh, sizes=(1, 1))
        found = token_dispatch(torch.ones(4, 2), counts, mesh)
        with pytest.raises(LocalTensorError, match=rf"of shape \(1, 2\) on rank {rank}; allowed is a row for each"):
            token_combine(torch.ones(1, 2), found)

    run_ranks(2, body)


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2, 2))


class Narrowing(Weights):
    def forward(self, tokens: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return tokens[:, :1]


@pytest.mark.parametrize(
    ("make", "style", "message"),
    [
        (Ragged, ExpertParallel(), r"has \{'up': \(3, 2\), 'down': \(2, 2\)\}; name the module whose parameters are"),
        (nn.ReLU, ExpertParallel(), "ReLU has none of its own; name the module"),
        (
            lambda: Experts(torch.float32),
            ExpertParallel(sizes=(6,)),
            r"sizes=\(6,\) was given for 6 experts on 2 ranks",
        ),
    ],
)
def test_layers_that_have_no_such_experts_are_refused_before_anything_changes(make, style, message):
    def body(rank: int) -> None:
        module = make()
        with pytest.raises(ParallelizeError, match=message):
            parallelize_module(module, T.Mesh((2,)), style)
        assert not any(isinstance(parameter, T.DTensor) for parameter in module.parameters())

    run_ranks(2, body)


def test_calls_that_experts_do_not_take_are_refused():
    def body(rank: int) -> None:
        mesh, counts = T.Mesh((2,)), torch.tensor([4, 0, 0, 0, 0, 4])
        experts = parallelize_module(Experts(torch.float32), mesh, ExpertParallel())
        x = torch.ones(8, WIDTH)
        with pytest.raises(ParallelizeError, match=r"called with \(Tensor\); allowed are plain tensors, \(tokens, num"):
            experts(x)
        with pytest.raises(ParallelizeError, match=r"called with \(DTensor, Tensor\); allowed"):
            experts(T.distribute_tensor(x, mesh, [T.Shard(0)]), counts)
        narrowing = parallelize_module(Narrowing(torch.float32), mesh, ExpertParallel())
        with pytest.raises(ParallelizeError, match=r"got tokens \(8, 8\) of torch.float32 and gave \(8, 1\)"):
            narrowing(x, counts)
        # Names of arguments are kept, and what was refused is forgotten.
        found = experts(tokens=x, num_tokens_per_expert=counts)
        assert found.shape == x.shape

    run_ranks(2, body)

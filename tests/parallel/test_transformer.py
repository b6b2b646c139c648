"""A transformer block as people write it, trained on ranks that its heads, features and positions do not divide."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

HEADS, HEAD_WIDTH, SEQUENCE, VOCABULARY = 6, 4, 7, 11
WIDTH = HEADS * HEAD_WIDTH
TOKENS = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))
FOLLOWING = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(6))
BY_POSITION, WHOLE = T.Shard(1), T.Replicate()


class Attention(nn.Module):
    """With the number of heads written out: it is that of all ranks together."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        query, key, value = (
            project(x).view(batch, sequence, HEADS, HEAD_WIDTH).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(torch.Tensor, self.wo(mixed.transpose(1, 2).reshape(batch, sequence, width)))


class Model(nn.Module):
    """One block; the embedding is the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 10, dtype=torch.float64)
        self.down = nn.Linear(10, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        x = x + self.down(F.gelu(self.up(x)))
        return cast(torch.Tensor, self.head(x))


def plan() -> dict[str, ParallelStyle]:
    return {
        "embed": RowwiseParallel(output_layouts=BY_POSITION, use_local_output=False),
        "norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=BY_POSITION, desired_input_layouts=WHOLE),
        "attention.w[qkv]": ColwiseParallel(unit=HEAD_WIDTH, use_local_output=False),
        "attention.wo": RowwiseParallel(unit=HEAD_WIDTH, output_layouts=BY_POSITION, use_local_output=False),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=BY_POSITION, use_local_output=False),
        "head": ColwiseParallel(use_local_output=False),
    }


def train(model: nn.Module, following: torch.Tensor, **options: Any) -> list[float]:
    """Losses and gradient norms of three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), following.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=options.get("foreach"))
        optimizer.step()
        for number in (loss.detach(), norm):
            found.append((number.full_tensor() if isinstance(number, T.DTensor) else number).item())
    return found


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(4, {"foreach": True}), (3, {"fused": True}), (4, {"foreach": False}), (1, {"foreach": True})],
    ids=str,
)
def test_losses_norms_and_weights_of_three_steps(num_ranks, options):
    single = Model()
    expected = train(single, FOLLOWING, **options)

    def body(rank: int) -> None:
        mesh = T.Mesh((num_ranks,))
        model = parallelize_module(Model(), mesh, plan())
        following = T.distribute_tensor(FOLLOWING, mesh, [WHOLE])
        with CommDebugMode() as comm:
            found = train(model, following, **options)
        torch.testing.assert_close(found, expected)
        # The optimizer finds every gradient as its parameter is.
        assert not [op for op, _ in comm.get_implicit_counts() if "_foreach" in op or "_fused" in op]
        for name, parameter in single.named_parameters():
            mine: Any = model.get_parameter(name)
            torch.testing.assert_close(mine.full_tensor(), parameter)

    run_ranks(num_ranks, body)


def test_heads_stay_whole_and_nothing_moves_within_attention():
    def body(rank: int) -> None:
        mesh = T.Mesh((4,))
        model = parallelize_module(Attention(), mesh, {
            "w[qkv]": ColwiseParallel(unit=HEAD_WIDTH, use_local_output=False),
            "wo": RowwiseParallel(unit=HEAD_WIDTH, use_local_output=False),
        })  # fmt: skip
        weight: Any = model.get_parameter("wq.weight")
        assert weight.to_local().shape == ((2, 2, 2, 0)[rank] * HEAD_WIDTH, WIDTH)
        x = torch.randn(2, SEQUENCE, WIDTH, dtype=torch.float64)
        with CommDebugMode() as comm:
            model(T.DTensor.from_local(x, mesh, [WHOLE]))
        assert set(comm.by_module()) == {"Attention.wo"}
        assert comm.get_implicit_counts() == {}

    run_ranks(4, body)

"""Dropout of heads that ranks have different numbers of, and of what all ranks have, on processes with equal seeds."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.interop.transformers import parallelize

HEADS, HEAD_DIM, HIDDEN = 4, 2, 6  # over 3 ranks: 2, 1 and 1 heads
NAMES = {
    "attention.q_proj": "colwise",
    "attention.k_proj": "colwise",
    "attention.v_proj": "colwise",
    "attention.o_proj": "rowwise",
}


class Attention(nn.Module):
    """Attention as transformers has it, with dropout of the heads' weights and then of the output."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.head_dim, self.attention_dropout, self.fails = HEAD_DIM, p, False
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, HEADS * HEAD_DIM) for _ in range(3))
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for each in projections)
        p = self.attention_dropout if self.training else 0.0
        if self.fails:
            raise OverflowError("between the projections")
        attended = scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2)
        return dropout(self.o_proj(attended), 0.5, self.training)


class Layer(nn.Module):
    """A model with one attention."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.attention = Attention(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x)
        return found


def outputs_of(rank: int, p: float) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Outputs of two forward passes in training, the state of random numbers behind them, and one in eval mode."""
    torch.manual_seed(5)
    layer = parallelize(Layer(p), T.Mesh((3,)), NAMES)
    x = torch.randn(2, 5, HIDDEN)
    torch.manual_seed(9)
    with torch.no_grad():
        found = [layer(x), layer(x)]
        state = torch.get_rng_state()
        return found, state, layer.eval()(x)


def drawn_after_a_failure(rank: int) -> torch.Tensor:
    """Numbers that a rank draws once its attention has raised between the projections."""
    torch.manual_seed(5)
    layer: Any = parallelize(Layer(0.5), T.Mesh((3,)), NAMES)
    layer.attention.fails = True
    with pytest.raises(OverflowError):
        layer(torch.ones(2, 5, HIDDEN))
    return torch.rand(3)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(3) as ranks:
        yield ranks


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_ranks_of_different_heads_drop_alike_what_all_of_them_have(p, three_ranks):
    found: Any = three_ranks.run(outputs_of, p)
    (first, second), state, whole = found[0]
    for outputs, others_state, others_whole in found[1:]:
        torch.testing.assert_close(outputs, [first, second], rtol=0, atol=0)
        assert torch.equal(others_state, state)
        torch.testing.assert_close(others_whole, whole, rtol=0, atol=0)
    assert not torch.equal(first == 0, second == 0), "each pass drops others"
    if p:
        kept = (first != 0) & (second != 0)
        assert not torch.equal(first[kept], second[kept]), "heads were dropped, too"


def test_ranks_whose_attention_raised_draw_alike_again(three_ranks):
    first, second, third = three_ranks.run(drawn_after_a_failure)
    torch.testing.assert_close([second, third], [first, first], rtol=0, atol=0)

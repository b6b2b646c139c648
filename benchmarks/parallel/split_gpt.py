"""The demo's GPT with a matrix each for queries, keys and values, which torch's own plans can cut by heads."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tritondt.cli.demo.model import GPT, Attention, Model, make_gpt


class SplitAttention(nn.Module):
    """Causal self-attention with a matrix each for queries, keys and values."""

    def __init__(self, whole: Attention) -> None:
        super().__init__()
        self.head_width = whole.head_width
        width = whole.wo.in_features
        self.wq, self.wk, self.wv = (nn.Linear(width, width) for _ in range(3))
        parts = zip((self.wq, self.wk, self.wv), whole.qkv.weight.chunk(3), whole.qkv.bias.chunk(3), strict=True)
        for projection, weight, bias in parts:
            projection.load_state_dict({"weight": weight, "bias": bias})
        self.wo = whole.wo

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, sequence, width) in and out."""
        batch, sequence = x.shape[:2]
        # As many heads as there are features for: a rank's projections give those of its own heads.
        query, key, value = (
            project(x).view(batch, sequence, -1, self.head_width).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return result


def make_split_gpt(sizes: Model, seed: int) -> GPT:
    """Model with the weights that `make_gpt` draws, and q, k and v as matrices apart."""
    gpt = make_gpt(sizes, seed)
    blocks: Any = gpt.blocks
    for block in blocks:
        block.attention = SplitAttention(block.attention)
    return gpt

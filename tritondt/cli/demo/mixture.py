"""A mixture of experts for the demo's GPT: a router, and experts of which each takes the tokens that chose it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tritondt.cli.demo.model import Model

# Experts of one token.
_CHOICES = 2


class Experts(nn.Module):
    """Two matrices with a GELU between them for each expert."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(sizes.experts, sizes.width, sizes.hidden))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, sizes.width))

    def forward(self, tokens: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Shapes: (tokens sorted by expert, width) in and out."""
        parts = tokens.split(num_tokens_per_expert.tolist())
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)])


class Mixture(nn.Module):
    """Two experts for each token, chosen and weighted by a router."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.num_experts, self.choices = sizes.experts, min(_CHOICES, sizes.experts)
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = Experts(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, sequence, width) in and out."""
        tokens = x.flatten(0, 1)
        scores, indices = self.router(tokens).topk(min(self.choices + 1, self.num_experts))
        # How far a score is above the first that was not chosen: where rounding decides between two, the chosen one
        # counts for nothing. With softmax for that, 60 steps on 4 ranks and on one process came 9e-5 apart.
        weights = scores[:, : self.choices] - scores[:, self.choices :].sum(-1, keepdim=True)
        indices = indices[:, : self.choices]
        order = indices.flatten().argsort(stable=True)
        places = order // self.choices
        counts = torch.bincount(indices.flatten(), minlength=self.num_experts)
        found = self.experts(tokens[places], counts) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, places, found).view_as(x)

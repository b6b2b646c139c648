"""A mixture of experts for the demo's GPT: experts that each take some of the tokens, and a router."""

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
    """Two experts for each token, which its byte chooses and a router weights.

    A router that chooses does so by rounding where two scores are alike, and the optimizer makes that grow: 60 steps on
    4 ranks and on one process came 1e-4 apart.
    """

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.num_experts, self.choices = sizes.experts, min(_CHOICES, sizes.experts)
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = Experts(sizes)

    def forward(self, x: Tensor, bytes_read: Tensor) -> Tensor:
        """Shapes: (batch, sequence, width) and (batch, sequence) in, the first out."""
        tokens, chosen = x.flatten(0, 1), bytes_read.flatten()
        first = chosen % self.num_experts
        # Another than the first, for bytes of one first choice any of them.
        others = first + 1 + chosen // self.num_experts % max(1, self.num_experts - 1)
        indices = torch.stack([first, others % self.num_experts], 1)[:, : self.choices]
        weights = self.router(tokens).gather(1, indices).softmax(-1)
        order = indices.flatten().argsort(stable=True)
        places = order // self.choices
        counts = torch.bincount(indices.flatten(), minlength=self.num_experts)
        found = self.experts(tokens[places], counts) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, places, found).view_as(x)

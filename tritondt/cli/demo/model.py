"""The demo's byte-level GPT as people write one, and the plan that lays it over the ranks without changing a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritondt as T
from tritondt.cli.demo.data import VOCABULARY
from tritondt.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

_DEVIATION = 0.02
# Experts of one token.
_CHOICES = 2


@dataclass(frozen=True)
class Model:
    """Sizes of the GPT; `width` must be a multiple of `heads`."""

    heads: int
    layers: int
    width: int
    sequence: int
    # Of each block, in place of one MLP; 0 for none.
    experts: int = 0

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Features inside the MLP: 4 * width + 2, so that four ranks cannot share them evenly; of experts half of it,
        for two see each token.
        """
        return (2 if self.experts else 4) * self.width + 2


class Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        # Where ranks share the sequence, attention over it takes its place.
        self.attend: Callable[..., Tensor] = F.scaled_dot_product_attention
        self.head_width = sizes.head_width
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.wo = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, sequence, width) in and out."""
        found = self.qkv(x)
        # As many heads as there are features for: a rank's projection gives those of its own heads.
        heads = found.shape[-1] // (3 * self.head_width)
        query, key, value = found.view(*x.shape[:2], 3, heads, self.head_width).permute(2, 0, 3, 1, 4)
        mixed = self.attend(query, key, value, is_causal=True)
        result: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, sequence, width) in and out."""
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


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


class Block(nn.Module):
    """Attention and MLP, or experts, each normalized before and added to its input."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.mlp = Mixture(sizes) if sizes.experts else MLP(sizes)

    def forward(self, x: Tensor, *chosen_by: Tensor) -> Tensor:
        """Shapes: (batch, sequence, width) in and out; `chosen_by`, for experts, are the bytes (batch, sequence)."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x), *chosen_by)
        return result


class GPT(nn.Module):
    """Scores of the byte after each token."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.position_embedding = nn.Embedding(sizes.sequence, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.has_experts = bool(sizes.experts)
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Shapes: tokens (batch, sequence), positions (sequence,); result (batch, sequence, 256)."""
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x, tokens) if self.has_experts else block(x)
        result: Tensor = self.head(self.norm(x))
        return result


def make_gpt(sizes: Model, seed: int) -> GPT:
    """Model with whole weights in float32, drawn from one generator: equal on every rank and on one process."""
    generator, gpt = torch.Generator().manual_seed(seed), GPT(sizes)
    # Two sums enter the residual per layer; scaled so that its variance does not grow with depth.
    residual_deviation = _DEVIATION / (2 * sizes.layers) ** 0.5
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm." in name:
                parameter.fill_(1.0)
            else:
                enters_residual = name.endswith((".wo.weight", ".down.weight", ".down"))
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * (residual_deviation if enters_residual else _DEVIATION))
    return gpt


def make_plan(sizes: Model) -> dict[str, ParallelStyle]:
    """Plan that cuts heads and hidden features over the ranks, and the sequence wherever positions are independent.

    Activations are (batch, own part of the sequence, width) between the layers.
    """
    sequence, whole = T.Shard(1), T.Replicate()
    # Whole heads only: 6 heads over 4 ranks are 2, 2, 2 and 0.
    head = sizes.head_width
    return {
        "": PrepareModuleInput(input_layouts=(whole, whole), desired_input_layouts=(sequence, T.Shard(0))),
        "token_embedding": SequenceParallel(),
        "position_embedding": SequenceParallel(sequence_dim=0),
        "blocks.*.*_norm": SequenceParallel(),
        # Queries, keys and values are three blocks of heads, each cut alike.
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=sequence, unit=head, repeats=3),
        "blocks.*.attention.wo": RowwiseParallel(unit=head, output_layouts=sequence, use_local_output=False),
        "blocks.*.mlp.up": ColwiseParallel(input_layouts=sequence),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=sequence, use_local_output=False),
        "norm": SequenceParallel(),
        "head": SequenceParallel(),
    }

"""The demo's GPT as people write one, and the plan that lays it over the ranks without changing a line."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

import tritondt as T
from tritondt.cli.demo.data import VOCABULARY
from tritondt.cli.demo.mixture import Mixture
from tritondt.cli.demo.model import Model, initial_weights
from tritondt.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


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
        batch, sequence = x.shape[:2]
        # As many heads as there are features for: a rank's projection gives those of its own heads.
        query, key, value = self.qkv(x).view(batch, sequence, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)
        mixed = self.attend(query, key, value, is_causal=True)
        result: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return result


class SplitAttention(nn.Module):
    """Causal self-attention with a matrix each for queries, keys and values."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.head_width = sizes.head_width
        self.wq = nn.Linear(sizes.width, sizes.width)
        self.wk = nn.Linear(sizes.width, sizes.width)
        self.wv = nn.Linear(sizes.width, sizes.width)
        self.wo = nn.Linear(sizes.width, sizes.width)

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


class Block(nn.Module):
    """Attention and MLP, or experts, each normalized before and added to its input."""

    def __init__(self, sizes: Model, attention: Callable[[Model], nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = attention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.mlp = Mixture(sizes) if sizes.experts else MLP(sizes)

    def forward(self, x: Tensor, *chosen_by: Tensor) -> Tensor:
        """Shapes: (batch, sequence, width) in and out; `chosen_by`, for experts, are the bytes (batch, sequence)."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x), *chosen_by)
        return result


class GPT(nn.Module):
    """Scores of the byte after each token."""

    def __init__(self, sizes: Model, attention: Callable[[Model], nn.Module] = Attention) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.position_embedding = nn.Embedding(sizes.sequence, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes, attention) for _ in range(sizes.layers)])
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


def make_gpt(sizes: Model, seed: int, *, split: bool = False) -> GPT:
    """Model with the weights that `model.initial_weights` draws; with `split` q, k and v are matrices apart."""
    weights = initial_weights(sizes, seed)
    state: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for before, after in ((".attention.norm.", ".attention_norm."), (".mlp.norm.", ".mlp_norm.")):
            name = name.replace(before, after)
        if ".qkv." in name and not split:
            state[name] = weight.flatten(0, 1)
        elif ".qkv." in name:
            state |= {name.replace("qkv", f"w{part}"): weight[place] for place, part in enumerate("qkv")}
        elif name.endswith("_embedding"):
            state[f"{name}.weight"] = weight
        else:
            state[name.replace(".attention.out.", ".attention.wo.")] = weight
    gpt = GPT(sizes, SplitAttention if split else Attention)
    gpt.load_state_dict(state)
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

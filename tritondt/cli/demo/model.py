"""A byte-level GPT as one function of named weights, and the cut of each weight over the ranks.

`Boundaries` moves all tensors that go between ranks: with one process, both of its functions are the identity.
Every sharded matmul here is an ordinary one on the local piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tritondt.cli.demo.data import VOCABULARY
from tritondt.sharding.placement import Placement, Replicate, Shard


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


@dataclass(frozen=True)
class Parameter:
    """One weight: its whole shape, its placement on the axis of ranks, and how it starts.

    `deviation` is the standard deviation of the normal draw; None starts it at `constant` instead.
    """

    name: str
    shape: tuple[int, ...]
    placement: Placement
    deviation: float | None = None
    constant: float = 0.0

    @property
    def numel(self) -> int:
        """Elements of the whole weight."""
        return prod(self.shape)


class Boundaries(Protocol):
    """Redistributions of the activations where a block begins and ends.

    Shapes: (batch, own part of the sequence, width) outside a block, (batch, sequence, width) in it.
    """

    def gather(self, x: Tensor) -> Tensor:
        """Whole sequence, from the part that each rank holds."""

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sequence, summed over every rank's contribution."""


def parameters(model: Model) -> tuple[Parameter, ...]:
    """Weights of the model, in the order in which they are drawn and updated."""
    width, deviation = model.width, 0.02
    blocks = tuple(parameter for layer in range(model.layers) for parameter in _block_parameters(model, layer))
    return (
        Parameter("token_embedding", (VOCABULARY, width), Replicate(), deviation),
        Parameter("position_embedding", (model.sequence, width), Replicate(), deviation),
        *blocks,
        *_norm_parameters("norm", width),
        Parameter("head.weight", (VOCABULARY, width), Replicate(), deviation),
    )


def _block_parameters(model: Model, layer: int) -> tuple[Parameter, ...]:
    width = model.width
    prefix = f"blocks.{layer}"
    deviation = 0.02
    # Two sums enter the residual per layer; scaled so that its variance does not grow with depth.
    residual_deviation = deviation / (2 * model.layers) ** 0.5
    # Whole heads only: 6 heads over 4 ranks are 2, 2, 2 and 0.
    by_head = Shard(1, unit=model.head_width)
    return (
        *_norm_parameters(f"{prefix}.attention.norm", width),
        Parameter(f"{prefix}.attention.qkv.weight", (3, width, width), by_head, deviation),
        Parameter(f"{prefix}.attention.qkv.bias", (3, width), by_head),
        Parameter(f"{prefix}.attention.out.weight", (width, width), by_head, residual_deviation),
        Parameter(f"{prefix}.attention.out.bias", (width,), Replicate()),
        *_norm_parameters(f"{prefix}.mlp.norm", width),
        *_mlp_parameters(model, prefix, deviation, residual_deviation),
    )


def _mlp_parameters(model: Model, prefix: str, deviation: float, residual_deviation: float) -> tuple[Parameter, ...]:
    width, hidden, experts = model.width, model.hidden, model.experts
    if experts:
        return (
            Parameter(f"{prefix}.mlp.router.weight", (experts, width), Replicate(), deviation),
            Parameter(f"{prefix}.mlp.experts.up", (experts, width, hidden), Shard(0), deviation),
            Parameter(f"{prefix}.mlp.experts.down", (experts, hidden, width), Shard(0), residual_deviation),
        )
    return (
        Parameter(f"{prefix}.mlp.up.weight", (hidden, width), Shard(0), deviation),
        Parameter(f"{prefix}.mlp.up.bias", (hidden,), Shard(0)),
        Parameter(f"{prefix}.mlp.down.weight", (width, hidden), Shard(1), residual_deviation),
        Parameter(f"{prefix}.mlp.down.bias", (width,), Replicate()),
    )


def _norm_parameters(prefix: str, width: int) -> tuple[Parameter, ...]:
    return (
        Parameter(f"{prefix}.weight", (width,), Replicate(), constant=1.0),
        Parameter(f"{prefix}.bias", (width,), Replicate()),
    )


def initial_weights(model: Model, seed: int) -> dict[str, Tensor]:
    """Whole weights in float32, from one generator: equal on every rank and on one process."""
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: Parameter) -> Tensor:
        if parameter.deviation is None:
            return torch.full(parameter.shape, parameter.constant)
        return torch.randn(parameter.shape, generator=generator) * parameter.deviation

    return {parameter.name: draw(parameter) for parameter in parameters(model)}


def next_byte_logits(
    model: Model,
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    positions: slice,
    boundaries: Boundaries,
) -> Tensor:
    """Scores of the byte after each token, for this rank's part of the sequence.

    Shapes: tokens (batch, length) with length = positions.stop - positions.start;
    result (batch, length, 256).
    """
    x = F.embedding(tokens, weights["token_embedding"])
    x = x + weights["position_embedding"][positions]
    for layer in range(model.layers):
        x = x + _attention(model, weights, f"blocks.{layer}.attention", x, boundaries)
        x = x + _mlp(weights, f"blocks.{layer}.mlp", x, boundaries)
    return F.linear(_norm(weights, "norm", x), weights["head.weight"])


def _attention(model: Model, weights: Mapping[str, Tensor], prefix: str, x: Tensor, boundaries: Boundaries) -> Tensor:
    x = boundaries.gather(_norm(weights, f"{prefix}.norm", x))
    batch, sequence, _ = x.shape
    weight, bias = weights[f"{prefix}.qkv.weight"], weights[f"{prefix}.qkv.bias"]
    own_width = weight.shape[1]
    qkv = F.linear(x, weight.flatten(0, 1), bias.flatten())
    heads = own_width // model.head_width
    qkv = qkv.view(batch, sequence, 3, heads, model.head_width)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    mixed = mixed.transpose(1, 2).reshape(batch, sequence, own_width)
    partial_sum = F.linear(mixed, weights[f"{prefix}.out.weight"])
    return boundaries.scatter(partial_sum) + weights[f"{prefix}.out.bias"]


def _mlp(weights: Mapping[str, Tensor], prefix: str, x: Tensor, boundaries: Boundaries) -> Tensor:
    x = boundaries.gather(_norm(weights, f"{prefix}.norm", x))
    x = F.gelu(F.linear(x, weights[f"{prefix}.up.weight"], weights[f"{prefix}.up.bias"]))
    partial_sum = F.linear(x, weights[f"{prefix}.down.weight"])
    return boundaries.scatter(partial_sum) + weights[f"{prefix}.down.bias"]


def _norm(weights: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

"""Operators that torch's modules call in evaluation, whole layers in one, in terms of their parts."""

from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F

# torch's numbers for a mask of (rows, columns), of (batch, columns), and of (batch, heads, rows, columns).
_OF_KEYS = 1


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """nn.MultiheadAttention: (batch, length, embed_dim) each; elements of a mask that are not 0 are left out."""
    given = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (F.linear(x, w, b).unflatten(-1, (num_heads, -1)).transpose(1, 2) for x, w, b in given)
    scores = q @ k.transpose(-2, -1) / sqrt(embed_dim / num_heads)
    if mask is not None:
        left_out = mask.bool()
        scores = scores.masked_fill(left_out[:, None, None] if mask_type == _OF_KEYS else left_out, float("-inf"))
    weights = scores.softmax(-1)
    result = F.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.mean(1) if average_attn_weights else weights


def encoder_layer(
    x: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    *rest: Any,
) -> torch.Tensor:
    """nn.TransformerEncoderLayer: attention and a feed-forward network, with a norm before or after each."""
    norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, weight_1, bias_1, weight_2, bias_2, *masks = rest
    mask, mask_type = (*masks, None, None)[:2]

    def attended(y: torch.Tensor) -> torch.Tensor:
        weights = qkv_weight, qkv_bias, proj_weight, proj_bias
        return attention(y, y, y, embed_dim, num_heads, *weights, mask, False, mask_type=mask_type)[0]

    def fed(y: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(y, weight_1, bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), weight_2, bias_2)

    def first(y: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(y, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(y: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(y, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = x + attended(first(x))
        return x + fed(second(x))
    x = first(x + attended(x))
    return second(x + fed(x))

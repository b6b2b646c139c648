"""Small models of transformers with random weights, of 6 heads and 3 key heads, and steps of training."""

from typing import Any

import torch
from torch import nn

import tritondt as T

VOCABULARY, HIDDEN, POSITIONS = 37, 24, 9
TOKENS = torch.randint(VOCABULARY, (2, POSITIONS), generator=torch.Generator().manual_seed(4))
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 34,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def causal_lm(kind: Any, **options: Any) -> nn.Module:
    """A model of a class of transformers, with the same random weights each time."""
    torch.manual_seed(3)
    model: nn.Module = kind(kind.config_class(**{**_SIZES, **options}))
    return model


def train(model: nn.Module, num_steps: int = 3) -> list[float]:
    """Losses and norms of gradients of steps of AdamW on the same tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += [loss.item(), (norm.full_tensor() if isinstance(norm, T.DTensor) else norm).item()]
    return found

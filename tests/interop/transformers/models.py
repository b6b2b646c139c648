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
# What models of other families call these, and more of their sizes; no dropout, which would differ by rank.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True},
    "gpt2": {"n_inner": 34, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
_UNKNOWN = {
    "gpt2": ("intermediate_size", "num_key_value_heads", "head_dim"),
    "bert": ("num_key_value_heads", "head_dim"),
}


def model_of(kind: Any, **options: Any) -> Any:
    """A model of a class of transformers, with the same random weights each time."""
    torch.manual_seed(3)
    family = kind.config_class.model_type
    sizes = {name: value for name, value in _SIZES.items() if name not in _UNKNOWN.get(family, ())}
    model: nn.Module = kind(kind.config_class(**{**sizes, **_OF_FAMILY.get(family, {}), **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases of zeros would hide that they are added once too often
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def train(model: nn.Module, num_steps: int = 3) -> list[float]:
    """Losses and norms of gradients of steps of AdamW on the same tokens."""
    # With the default, 1e-8, elements whose gradient is all rounding are moved by a hundredth of the rate and more.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=True)
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += [loss.item(), (norm.full_tensor() if isinstance(norm, T.DTensor) else norm).item()]
    return found

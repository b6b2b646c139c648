"""Small models as people write them, whose heads and features no number of ranks divides."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH, HEAD = 21, 6, 24, 4


class Attention(nn.Module):
    """Grouped queries with rotary positions; the code takes as many heads as there are features for."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, heads * HEAD, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, key_heads * HEAD, bias=False) for _ in range(2))
        self.query_norm = nn.RMSNorm(HEAD)
        self.wo = nn.Linear(heads * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (project(x).view(batch, length, -1, HEAD) for project in (self.wq, self.wk, self.wv))
        query = self.query_norm(query)
        query, key, value = ((each * turns).transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return cast(Tensor, self.wo(mixed.transpose(1, 2).reshape(batch, length, -1)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 10, bias=False), nn.Linear(WIDTH, 10, bias=False)
        self.down = nn.Linear(10, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class LlamaBlock(nn.Module):
    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(heads, key_heads), Gated()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return cast(Tensor, x + self.mlp(self.norm(x)))


class Llama(nn.Module):
    """Some blocks; the table of tokens is the head's weight where it is `tied`."""

    def __init__(self, heads: int = 6, key_heads: int = 2, *, length: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([LlamaBlock(heads, key_heads) for _ in range(length)])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        turns = torch.cos(torch.arange(tokens.shape[1])[:, None, None] / torch.arange(1, HEAD + 1))
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, turns)
        return cast(Tensor, self.head(self.norm(x)))


class WrittenOut(nn.Module):
    """Attention whose code has the number of all heads in it, over a table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return cast(Tensor, x + self.wo(mixed.transpose(1, 2).reshape(batch, length, width)))


class Scaled(nn.Module):
    """Features between two layers that a parameter of the model itself scales, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.tensor([0.5]))
        self.up, self.down, self.twice = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(F.relu(self.up(x)) * self.scale)
        return cast(Tensor, self.twice(F.relu(self.twice(x))))


class Pictures(nn.Module):
    """Convolutions, then a normalization of channels, then linear layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norm = nn.GroupNorm(2, 8)
        self.rest = nn.Sequential(
            nn.Linear(8, 18), nn.ReLU(inplace=True), nn.Linear(18, 10), nn.ReLU(), nn.Linear(10, 7)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x))))
        return cast(Tensor, self.rest(self.norm(x).mean((2, 3))))


class DroppingBlock(nn.Module):
    """A block that hands its sum on in a tuple, and draws random numbers for it where it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = OwnNorm(), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, float]:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x))))) * scale, scale


class OwnNorm(nn.Module):
    """A norm as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class BlocksInTuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DroppingBlock() for _ in range(3)]).eval()
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x, 0.5)
        return cast(Tensor, self.head(x))


class NormLast(nn.Module):
    """A block as BERT's: what is read beside its sums is not normalized before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.norm: nn.Module = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm(x + self.down(F.gelu(self.up(x)))))


class NormsLast(nn.Sequential):
    """A list whose class makes its blocks."""

    def __init__(self) -> None:
        super().__init__(*(NormLast() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, super().forward(x))


class Running(nn.Module):
    """A layer whose positions know of those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) * self.weight


def tokens_of(part: int = 0, length: int = LENGTH) -> Tensor:
    """Tokens of one rank of the data axis, of shape (2, length)."""
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(part))


def features_of(part: int = 0, length: int = LENGTH) -> Tensor:
    """Features of one rank of the data axis, of shape (2, length, WIDTH)."""
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(part))


def pictures_of(part: int = 0) -> Tensor:
    """Pictures of one rank of the data axis."""
    return torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(part))


def seeded(make: Callable[[], nn.Module]) -> Any:
    """The model with weights that are alike on all ranks, which nothing else draws between."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()

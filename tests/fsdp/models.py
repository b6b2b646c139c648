"""A small model whose sizes do not divide, the plan that cuts it over a tensor axis, and its training."""

from typing import Any, NamedTuple

import torch
from torch import nn

import tritondt as T
from tritondt.fsdp import fully_shard
from tritondt.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module

BATCH, LENGTH, STEPS = 8, 5, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


class DataAxes(NamedTuple):
    """Names of axes, as torch's DataParallelMeshDims has them."""

    shard: str | tuple[str, ...]
    replicate: str | tuple[str, ...] | None = None


def plan() -> dict[str, ParallelStyle]:
    sequence = T.Shard(1)
    return {
        "embedding": RowwiseParallel(output_layouts=sequence, use_local_output=False),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=sequence),
        "blocks.*.down": RowwiseParallel(output_layouts=sequence, use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=T.Replicate()),
    }


def layout(kind: str, rank: int) -> tuple[nn.Module, dict[str, Any], int, int]:
    """The model, the arguments of fully_shard, and the number and position of this rank's part of the batch."""
    model = Net()
    if kind == "fsdp":
        return model, {"mesh": T.Mesh((4,), ("dp",))}, 4, rank
    if kind == "hsdp":
        return model, {"mesh": T.Mesh((2, 2), ("replicate", "dp"))}, 4, rank
    if kind == "fsdp+tp":
        whole, shape = T.Mesh((2, 2), ("dp", "tp")), (rank // 2 * 2, rank // 2 * 2 + 1)
        parallelize_module(model, T.Mesh((2,), ("tp",), ranks=shape), plan(), src_data_rank=None)
        return model, {"mesh": whole, "dp_mesh_dims": DataAxes("dp")}, 2, rank // 2
    assert kind in ("hsdp+tp", "hsdp+tp of 2"), kind  # on 4 ranks and on 8
    width = 2 if kind.endswith("2") else 1
    whole, first = T.Mesh((2, 2, width), ("replicate", "dp", "tp")), rank // width * width
    mesh = T.Mesh((width,), ("tp",), ranks=range(first, first + width))
    parallelize_module(model, mesh, plan(), src_data_rank=None)
    return model, {"mesh": whole, "dp_mesh_dims": DataAxes("dp", "replicate")}, 4, rank // width


def sharded(kind: str, rank: int, **options: Any) -> tuple[Any, int, int]:
    model, arguments, num_parts, part = layout(kind, rank)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **arguments, **options)
    return fully_shard(model, **arguments, **options), num_parts, part


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (BATCH, LENGTH), generator=generator)
    return tokens, torch.randint(0, 7, (BATCH, LENGTH), generator=generator)


def loss_of(model: nn.Module, step: int, num_parts: int = 1, part: int = 0) -> torch.Tensor:
    tokens, answers = (each.chunk(num_parts)[part] for each in batch(step))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), answers.flatten())


def train(model: nn.Module, num_parts: int = 1, part: int = 0, **options: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, num_parts, part)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses

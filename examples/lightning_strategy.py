"""Lightning's ModelParallelStrategy over 2 x 2 ranks, with 3 heads: `python examples/lightning_strategy.py`.

The package lightning must be installed; it starts the ranks itself. An argument names another number of heads.
"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

import tritondt as T
from tritondt.fsdp import fully_shard
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HEADS, HEAD_DIM = int(sys.argv[1]) if len(sys.argv) > 1 else 3, 8


class Attention(nn.Module):
    """Causal self-attention with as many heads as its weights have rows for."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM) for _ in range(4))

    def forward(self, x):
        """Mix the positions of x, (batch, length, features)."""
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Model(lightning.LightningModule):
    """Attention that learns to give its input back."""

    def configure_model(self):
        """Make the model and lay it out; Lightning calls this once the mesh is there."""
        torch.manual_seed(0)
        self.model = Attention()
        plan = {name: ColwiseParallel(unit=HEAD_DIM) for name in "qkv"} | {"out": RowwiseParallel(unit=HEAD_DIM)}
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        """Mean squared difference between a batch and what the model makes of it."""
        loss = (self.model(batch[0]) - batch[0]).square().mean()
        self.print(f"loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        """AdamW of all parameters."""
        return torch.optim.AdamW(self.model.parameters(), lr=0.05)


if __name__ == "__main__":
    torch.manual_seed(1)  # alike on every rank
    rows = torch.utils.data.TensorDataset(torch.randn(16, 5, HEADS * HEAD_DIM))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2, process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=4, strategy=strategy, max_epochs=2, logger=False, enable_progress_bar=False
    )
    with T.answer_clients("lightning", "lightning_fabric"):  # they look for torch's DTensor to find and save the model
        trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=4))

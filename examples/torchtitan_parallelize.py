"""A Llama laid out as torchtitan's parallelize function does, with 3 heads on 2 x 2 ranks.

torchrun --nproc-per-node 4 examples/torchtitan_parallelize.py

Tensor and sequence parallelism over one axis of the mesh, recomputed activations, and parameters sharded over the
other. An argument names another number of heads.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tritondt import Replicate, Shard, init_device_mesh
from tritondt.fsdp import MixedPrecisionPolicy, fully_shard
from tritondt.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

HEADS, HEAD_DIM, VOCABULARY = int(sys.argv[1]) if len(sys.argv) > 1 else 3, 8, 100
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    """Causal self-attention with as many heads as the rows of its weights."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, mask):
        """Mix the positions of x, (batch, length, WIDTH)."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        """Transform each position of x."""
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward layer, each behind a norm."""

    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x, mask):
        """Transform x, (batch, length, WIDTH)."""
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Language model that knows nothing of ranks."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): TransformerBlock() for index in range(2)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        """Logits of the next token at each position of tokens, (batch, length)."""
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, mask)
        return self.output(self.norm(x))


def parallelize_llama(model, world_mesh):
    """Lay a model out over the axes "dp" and "tp"."""
    apply_tp(model, world_mesh["tp"])
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(block)
    apply_fsdp(model, world_mesh["dp"])


def apply_tp(model, tp_mesh):
    """Cut matrices by features, and positions between them by the sequence."""
    model_plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, tp_mesh, model_plan)
    layer_plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(unit=HEAD_DIM),
        "attention.wk": ColwiseParallel(unit=HEAD_DIM),
        "attention.wv": ColwiseParallel(unit=HEAD_DIM),
        "attention.wo": RowwiseParallel(unit=HEAD_DIM, output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    for block in model.layers.values():
        parallelize_module(block, tp_mesh, layer_plan)


def apply_fsdp(model, dp_mesh):
    """Shard what tensor parallelism left of each parameter over the data axis."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in model.layers.values():
        fully_shard(block, mesh=dp_mesh, mp_policy=policy)
    fully_shard(model, mesh=dp_mesh, mp_policy=policy)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = Transformer()
parallelize_llama(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())  # each data-parallel group has its own batch
tokens = torch.randint(VOCABULARY, (2, 11), generator=generator)
for _ in range(3):
    with loss_parallel():
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
dist.destroy_process_group()

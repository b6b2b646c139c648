"""Training that goes on from its last checkpoint after a rank has died, on as many ranks as there are then.

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/elastic.py

Started again with another number of ranks, it goes on from there, too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tritondt as T
from tritondt.interop.checkpoint_folder import CheckpointFolder
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

NUM_STEPS, SAVE_EVERY = 20, 5

dist.init_process_group("gloo")
torch.manual_seed(0)  # all ranks make one model, of which each keeps its part
model = nn.Sequential(nn.Linear(20, 50), nn.GELU(), nn.Linear(50, 1))
model = parallelize_module(model, T.Mesh((dist.get_world_size(),)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def state():
    """Tensors of the model and the optimizer."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


checkpoints = CheckpointFolder("checkpoints", keep=2)
first = checkpoints.latest() or 0
if first:
    found = state()  # of this world's ranks, whoever saved it
    checkpoints.load(found)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

for step in range(first, NUM_STEPS):
    batch = torch.Generator().manual_seed(step)  # what a step sees follows from its number alone
    x = torch.randn(32, 20, generator=batch)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % SAVE_EVERY == 0:
        checkpoints.save(state(), step + 1)
if dist.get_rank() == 0:
    end = f"loss {loss.item():.6f}" if first < NUM_STEPS else "trained before"
    print(f"steps {first} to {NUM_STEPS} on {dist.get_world_size()} ranks, {end}")
T.close()
dist.destroy_process_group()

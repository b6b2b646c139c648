"""accelerate over the backend BACKEND: accumulated, clipped gradients and gathered losses."""

import json
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed

import tritondt  # noqa: F401  registers the backend


def main() -> None:
    """Trains for two epochs; rank 0 prints the losses."""
    dist.init_process_group(os.environ["BACKEND"])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    if dist.get_rank() == 0:
        sys.stdout.write(f"LOSSES {json.dumps(losses)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

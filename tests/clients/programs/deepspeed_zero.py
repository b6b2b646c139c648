"""DeepSpeed's ZeRO, stages 1 to 3, over the backend BACKEND."""

import json
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

import tritondt  # noqa: F401  registers the backend


def losses_of(stage: int) -> list[float]:
    """Mean losses of the ranks over ten micro-batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config=config,
        dist_init_required=False,
    )
    generator, rank = torch.Generator().manual_seed(7), dist.get_rank()
    x, y = torch.randn(10, 2, 4, 6, generator=generator), torch.randint(0, 3, (10, 2, 4), generator=generator)
    losses = []
    for step in range(10):
        loss = torch.nn.functional.cross_entropy(engine(x[step, rank]), y[step, rank])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def main() -> None:
    """Trains with each stage; rank 0 prints the losses one after the other."""
    dist.init_process_group(os.environ["BACKEND"])
    losses = [loss for stage in (1, 2, 3) for loss in losses_of(stage)]
    if dist.get_rank() == 0:
        sys.stdout.write(f"LOSSES {json.dumps(losses)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

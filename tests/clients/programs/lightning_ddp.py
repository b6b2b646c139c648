"""Lightning's Trainer with DistributedDataParallel over the backend BACKEND: accumulated, clipped gradients."""

import json
import os
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

import tritondt  # noqa: F401  registers the backend


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """Two linear layers, whose mean loss over the ranks is kept for each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        self.losses: list[float] = []

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """The loss of this rank's batch."""
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        gathered: Any = self.all_gather(loss.detach())
        self.losses.append(gathered.mean().item())
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW of all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    """Trains for two epochs; rank 0 prints the losses."""
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
    classifier = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=os.environ["BACKEND"]),
        max_epochs=2,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
    )
    trainer.fit(classifier, torch.utils.data.DataLoader(data, batch_size=4))
    if trainer.global_rank == 0:
        sys.stdout.write(f"LOSSES {json.dumps(classifier.losses)}\n")


if __name__ == "__main__":
    main()

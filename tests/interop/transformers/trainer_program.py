"""A tiny Llama trained by Trainer of transformers on the ranks that started it: trainer_program.py FOLDER DATA...

DATA ranks share the data out, the others of the world the model; each rank writes the batches and losses that it saw.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import tritondt as T
from tests.interop.transformers import models
from tritondt.errors import ParallelizeError
from tritondt.fsdp import fully_shard
from tritondt.interop.transformers import from_pretrained, make_trainer, parallelize

NUM_STEPS, ROWS_A_STEP = 4, 4


class Rows(torch.utils.data.Dataset):
    """Rows of tokens, which are their own labels."""

    rows = torch.randint(models.VOCABULARY, (16, models.POSITIONS), generator=torch.Generator().manual_seed(6))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[place], "labels": self.rows[place]}


def refused_or_made(mesh: Any) -> Any:
    """make_trainer, after what it and Trainer refuse has been seen."""

    def make(model: Any, **options: Any) -> Any:
        with pytest.raises(ParallelizeError, match=r"a batch of its own, and \d ranks with a parallelized model need"):
            transformers.Trainer(model=model, **options)
        with pytest.raises(ParallelizeError, match="a LlamaForCausalLM that is not laid out over ranks of torch"):
            make_trainer(models.model_of(transformers.LlamaForCausalLM), **options)
        if mesh["dp"].size() > 1:
            alone = parallelize(models.model_of(transformers.LlamaForCausalLM), mesh["tp"])
            with pytest.raises(ParallelizeError, match="a model on 2 of 4 ranks: nothing adds up the gradients"):
                make_trainer(alone, **options)
            across = parallelize(models.model_of(transformers.LlamaForCausalLM), mesh["dp"])
            with pytest.raises(
                ParallelizeError, match=r"the model is laid over ranks \d, \d; allowed is the last axis"
            ):
                make_trainer(across, **options)
        return make_trainer(model, **options)

    return make


def main(data_size: int, folder: Path) -> None:
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model = models.model_of(transformers.LlamaForCausalLM)
    if num_ranks > 1:
        mesh = T.init_device_mesh("cpu", (data_size, num_ranks // data_size), mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh["tp"])
        if data_size > 1:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
    batches: list[Any] = []
    model.register_forward_pre_hook(
        lambda _, args, given: batches.append(given["input_ids"].tolist()), with_kwargs=True
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=ROWS_A_STEP // data_size,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        # Recomputed on ranks, and not on one process: both train alike.
        gradient_checkpointing=num_ranks > 1,
    )
    make = transformers.Trainer if num_ranks == 1 else refused_or_made(mesh)
    trainer = make(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    if num_ranks > 1:
        loaded = from_pretrained(folder / "saved", mesh["tp"])
        for name, value in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name].full_tensor(), value.full_tensor(), rtol=0, atol=0)
    losses = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "grad_norm" in entry]
    found = {"batches": batches[:NUM_STEPS], "losses": losses, "evaluated": trainer.evaluate()["eval_loss"]}
    (folder / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    for size in map(int, sys.argv[2:]):
        of_size = Path(sys.argv[1]) / str(size)
        of_size.mkdir(exist_ok=True)
        main(size, of_size)
    if "WORLD_SIZE" in os.environ:
        dist.destroy_process_group()

"""Trainer of transformers with gradient checkpointing, DistributedDataParallel over the backend BACKEND, and LoRA."""

import json
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tritondt  # noqa: F401  registers the backend

_WORDS, _LENGTH = 31, 9


def losses_of(model: Any, *, reentrant: bool) -> list[float]:
    """Losses of five steps, means over the ranks."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, _WORDS, (24, _LENGTH), generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            max_steps=5,
            logging_steps=1,
            learning_rate=1e-2,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def made() -> Any:
    """A Llama of two layers and three heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Trains all weights with checkpoints of both kinds, and adapters; rank 0 prints the losses."""
    dist.init_process_group(os.environ["BACKEND"])
    losses = [loss for reentrant in (False, True) for loss in losses_of(made(), reentrant=reentrant)]
    torch.manual_seed(2)
    adapters = get_peft_model(made(), LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
    losses += losses_of(adapters, reentrant=False)
    if dist.get_rank() == 0:
        sys.stdout.write(f"LOSSES {json.dumps(losses)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

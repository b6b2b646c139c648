"""trl's SFTTrainer on a Llama of 3 heads, DistributedDataParallel over the backend BACKEND."""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import tritondt  # noqa: F401  registers the backend

_WORDS = 29


def texts() -> list[str]:
    """Sentences of 4 to 11 words."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (24,), generator=generator).tolist()
    drawn = (torch.randint(0, _WORDS, (length,), generator=generator).tolist() for length in lengths)
    return [" ".join(f"w{word}" for word in words) for words in drawn]


def main() -> None:
    """Trains for five steps; rank 0 prints the losses."""
    dist.init_process_group(os.environ["BACKEND"])
    special = ["<pad>", "<eos>", "<unk>"]
    words = {word: place for place, word in enumerate([*special, *(f"w{word}" for word in range(_WORDS))])}
    by_words = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    by_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=by_words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
    )
    options = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=5,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        fp16=False,
        save_strategy="no",
        disable_tqdm=True,
        max_length=16,
        learning_rate=0.01,
        seed=3,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=options,
        train_dataset=Dataset.from_dict({"text": texts()}),
        processing_class=tokenizer,
    )
    trainer.train()
    if dist.get_rank() == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        sys.stdout.write(f"LOSSES {json.dumps(losses)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

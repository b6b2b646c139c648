"""A Llama of Hugging Face with 6 heads over 4 ranks: `torchrun --nproc-per-node 4 examples/hugging_face.py`.

Loaded, trained for three steps, saved in files of transformers, and asked to generate.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from tritondt import init_device_mesh
from tritondt.interop.transformers import from_pretrained, save_pretrained

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

# A checkpoint as one process writes it, with random weights; a folder that you have takes its place.
folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folders)
folder = Path(folders[0])
if dist.get_rank() == 0:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6, head_dim=8
    )
    LlamaForCausalLM(config).save_pretrained(folder / "whole")
dist.barrier()

model = from_pretrained(folder / "whole", mesh)  # each rank reads its own part: 2, 2, 1 and 1 heads
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
tokens = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))  # alike on all ranks
for _ in range(3):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")

save_pretrained(model, folder / "trained")  # files of transformers, written in parts
model.eval()
generated = model.generate(tokens[:1, :4], max_new_tokens=5, do_sample=False)
if dist.get_rank() == 0:
    alone = LlamaForCausalLM.from_pretrained(folder / "trained")
    expected = alone.generate(tokens[:1, :4], max_new_tokens=5, do_sample=False)
    print("as one process:", torch.equal(generated, expected))
dist.destroy_process_group()

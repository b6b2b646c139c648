"""A language model of one block, compiled over lengths that change: fully sharded, tensor-parallel, and both."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tritondt as T
from tests.harness.torch_versions import GRAPHS, needs_torch
from tests.ops.sharded import distribute, whole
from tritondt.comm.transports.threads import run_ranks

pytestmark = needs_torch("2.12", GRAPHS)

NUM_TOKENS, WIDTH, HEADS = 13, 8, 2
LENGTHS = (4, 5, 6, 7, 9, 10, 11, 14, 17, 18, 22)


class Block(nn.Module):
    """Attention and a perceptron, with norms of both kinds in front."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        heads = [project(normed).unflatten(-1, (-1, WIDTH // HEADS)) for project in (self.q, self.k, self.v)]
        q, k, v = (head.transpose(1, 2) for head in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        down: torch.Tensor = self.down(F.gelu(self.up(self.second_norm(x))))
        return x + down


class Model(nn.Module):
    """Embedding, block, norm and output layer, with the loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(NUM_TOKENS, WIDTH), Block()
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, NUM_TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.output(self.norm(self.block(self.embedding(tokens))))
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(0, 1))


# How each parameter is cut over the axis of the tensor-parallel ranks, and over that of the data.
OF_TENSOR_AXIS = {"q": 0, "k": 0, "v": 0, "up": 0, "out": 1, "down": 1}


def _lengths(changing: str, num_rows: int) -> tuple[int, int]:
    """Batch and sequence, of which one changes."""
    return (num_rows, 3) if changing == "batch" else (8, num_rows)


def _compare(eager: Any, compiled: Any, modules: list[Any], given: Any, changing: str) -> None:
    for length in LENGTHS:
        shape, found = _lengths(changing, length), []
        for run, model in zip((eager, compiled), modules, strict=True):
            model.zero_grad()
            tokens = torch.randint(NUM_TOKENS, shape, generator=torch.Generator().manual_seed(length))
            loss = run(*given(tokens), *given((tokens + 1) % NUM_TOKENS))
            loss.backward()
            gradients = {name: whole(of.grad) for name, of in model.named_parameters()}
            found.append((whole(loss) if isinstance(loss, T.DTensor) else loss.detach(), gradients))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.in_core(1)
@pytest.mark.parametrize(
    ("form", "changing"),
    [
        pytest.param("fully sharded", "batch", marks=pytest.mark.soak),  # by itself in tests/fsdp/test_compiled.py
        pytest.param("fully sharded", "sequence", marks=pytest.mark.soak),
        ("tensor-parallel", "batch"),
        pytest.param("tensor-parallel", "sequence", marks=pytest.mark.soak),
        ("both", "batch"),
        pytest.param("both", "sequence", marks=pytest.mark.soak),
    ],
)
def test_a_model_of_distributed_tensors_takes_three_compilations_at_most(form, changing):
    def body(rank):
        mesh = T.Mesh((2, 2) if form == "both" else (2,))

        def placements(name: str) -> str:
            cut = OF_TENSOR_AXIS.get(name.split(".")[-2]) if name.endswith("weight") or ".up." in name else None
            tensor = "R" if cut is None else f"S{cut}"
            return {"fully sharded": "S0", "tensor-parallel": tensor, "both": f"S0, {tensor}"}[form]

        models = []
        for _ in range(2):
            torch.manual_seed(4)
            models.append(Model())
            for prefix, module in list(models[-1].named_modules()):
                for name, parameter in list(module.named_parameters(recurse=False)):
                    text = placements(f"{prefix}.{name}")
                    setattr(module, name, nn.Parameter(distribute(parameter.detach(), mesh, text)))
        tokens_cut = {"fully sharded": "S0", "tensor-parallel": "R", "both": "S0, R"}[form]
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(models[1], backend=graphs, fullgraph=True)
        # Rank threads share the graphs of a function, and each has its own limit on them.
        with torch._dynamo.config.patch(recompile_limit=64):
            _compare(models[0], compiled, models, lambda tokens: [distribute(tokens, mesh, tokens_cut)], changing)
        return graphs.frame_count

    torch._dynamo.reset()
    assert max(run_ranks(4 if form == "both" else 2, body)) <= 3

"""torch.compile of blocks of a fully sharded model, before and after fully_shard, with a tensor axis and without."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.transports.threads import run_ranks
from tritondt.fsdp import fully_shard
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# Torch's compiler asks for it where a graph ends between a module and its hook.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

LENGTHS = range(4, 26, 2)


class Block(nn.Module):
    """A norm and a multi-layer perceptron beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + down


class Model(nn.Module):
    """Two blocks and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block(), Block()]), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return cast(torch.Tensor, self.out(x))


def model_of(mesh: T.Mesh, order: str, backend: Any) -> nn.Module:
    """The sharded model, compiled as `order` says; over the axis tp, where the mesh has one, by styles."""
    torch.manual_seed(0)
    model, options = Model(), dict[str, Any](mesh=mesh)
    if mesh.ndim == 2:
        assert mesh.coordinate is not None
        row = mesh.ranks[2 * mesh.coordinate[0] : 2 * mesh.coordinate[0] + 2]
        plan: Any = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(model, T.Mesh((2,), ("tp",), ranks=row), plan)
        options["dp_mesh_dims"] = SimpleNamespace(shard="dp", replicate=None)
    if order == "compile, shard":
        _compile(model.blocks, backend)
    for module in (*model.blocks, model):
        fully_shard(module, **options)
    if order == "shard, compile":
        _compile(model.blocks, backend)
    if order == "model":
        model.compile(backend=backend)
    return cast(nn.Module, torch.compile(model, backend=backend)) if order == "around" else model


def _compile(blocks: Any, backend: Any) -> None:
    for block in blocks:
        block.compile(backend=backend)


def trained(mesh: T.Mesh, order: str, backend: Any, lengths: Any) -> list[torch.Tensor]:
    """Losses and gradients of a few steps on batches of the given lengths."""
    model = model_of(mesh, order, backend)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), list[torch.Tensor]()
    for step, length in enumerate(lengths):
        assert mesh.coordinate is not None
        torch.manual_seed(10 * step + mesh.coordinate[0])
        loss = model(torch.randn(length, 8)).square().mean()
        loss.backward()
        found.append(loss.detach())
        found += [parameter.grad.full_tensor().clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.in_core(1)
@pytest.mark.parametrize(
    ("order", "shape"),
    [
        *((order, (2,)) for order in ("compile, shard", "shard, compile", "model", "around")),
        *((order, (2, 2)) for order in ("compile, shard", "shard, compile")),
    ],
)
def test_compiled_blocks_train_as_those_that_are_not(order, shape):
    def body(rank):
        mesh = T.Mesh(shape, ("dp", "tp")[: len(shape)])
        graphs = CompileCounterWithBackend("aot_eager")
        found = trained(mesh, order, graphs, [4, 4])
        torch.testing.assert_close(found, trained(mesh, "eager", graphs, [4, 4]))
        return graphs.frame_count

    torch._dynamo.reset()
    assert min(run_ranks(2 ** len(shape), body)) >= 2


def graphs_of(rank: int) -> tuple[int, int]:
    """Graphs that one length takes, and that eleven lengths take, with losses and gradients as without a compiler."""
    mesh, (one, many) = T.Mesh((2, 2), ("dp", "tp")), (CompileCounterWithBackend("aot_eager") for _ in range(2))
    trained(mesh, "shard, compile", one, LENGTHS[:1])
    torch._dynamo.reset()
    torch.testing.assert_close(trained(mesh, "shard, compile", many, LENGTHS), trained(mesh, "eager", None, LENGTHS))
    return one.frame_count, many.frame_count


@pytest.mark.extended
def test_eleven_lengths_take_three_compilations_of_a_graph_at_most() -> None:
    with GlooRanks(4) as ranks:
        assert all(1 <= one <= many <= 3 * one for one, many in ranks.run(graphs_of, timeout_s=600))

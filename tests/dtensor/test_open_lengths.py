"""Lengths that torch.compile leaves open in distributed tensors: few compilations, results as without a compiler."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import tritondt as T
from tests.dtensor.test_compiled import Block
from tests.harness.torch_versions import GRAPHS, needs_torch
from tests.ops.sharded import distribute, whole
from tritondt.comm.transports.threads import run_ranks

pytestmark = needs_torch("2.12", GRAPHS)

W = torch.arange(96.0).reshape(12, 8) / 50
# Functions of a batch and a weight; the batch has any number of rows.
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "elementwise": lambda x, w: (x * 2 + 1).relu(),
    "row sums": lambda x, w: (x * 2).sum(1),
    "loss": lambda x, w: F.linear(F.gelu(F.linear(F.layer_norm(x, (8,)), w)), w.t()).square().mean(),
    "gathered": lambda x, w: (x.redistribute(placements=[T.Replicate()]) * 2).relu(),
    "columns": lambda x, w: (x.redistribute(placements=[T.Shard(1)]) * 2).sum(0),
    "heads": lambda x, w: F.scaled_dot_product_attention(*[x.view(-1, 2, 2, 2)] * 3).flatten(1),
    "softmax": lambda x, w: x.softmax(-1),
    "repeated": lambda x, w: x.unsqueeze(1).expand(-1, 3, -1) * 1,
    "sizes asked for": lambda x, w: x.new_zeros(x.shape) + x * x.shape[0],
    "drawn": lambda x, w: torch.dropout(x, 0.5, True),
}


def _compare(run: Any, compiled: Any, mesh: T.Mesh, num_rows: int, placements: str = "S0") -> None:
    torch.manual_seed(num_rows)
    full, found = torch.randn(num_rows, 8), []
    for function in (run, compiled):
        torch.manual_seed(1)
        x, w = distribute(full, mesh, placements).requires_grad_(), distribute(W, mesh, "R").requires_grad_()
        result = function(x, w)
        result.square().sum().backward()
        found.append([whole(result), *(whole(tensor.grad) for tensor in (x, w) if tensor.grad is not None)])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.in_core(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_eleven_lengths_take_two_compilations(name):
    def body(rank):
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(FUNCTIONS[name], backend=graphs, fullgraph=True)
        for num_rows in range(4, 26, 2):
            _compare(FUNCTIONS[name], compiled, T.Mesh((2,)), num_rows)
        return graphs.frame_count

    torch._dynamo.reset()
    assert run_ranks(2, body) == [2, 2]


@pytest.mark.in_core(2)
@pytest.mark.parametrize("name", ["loss", "columns", "drawn"])
@pytest.mark.parametrize("placements", ["S0", "R", "S1"])
def test_lengths_that_do_not_divide_are_marked_dynamic(name, placements):
    def body(rank):
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(FUNCTIONS[name], backend=graphs, fullgraph=True)

        def marked(x: Any, w: Any) -> Any:
            torch._dynamo.mark_dynamic(x, 0)
            return compiled(x, w)

        for num_rows in (7, 8, 5, 12):
            _compare(FUNCTIONS[name], marked, T.Mesh((2,)), num_rows, placements)
        return graphs.frame_count

    torch._dynamo.reset()
    assert run_ranks(2, body) == [1, 1]


@pytest.mark.in_core(1)
@pytest.mark.parametrize("name", ["beside one another", "norm of columns", "transposed"])
def test_what_asks_for_lengths_is_a_graph_for_each(name):
    function: Any = {
        "beside one another": lambda x, w: torch.cat([x, x]) * 2,
        "norm of columns": lambda x, w: x.norm(dim=0),
        "transposed": lambda x, w: x.view(-1, 2, 4).transpose(0, 1).flatten(1),
    }[name]

    def body(rank):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for num_rows in (4, 6, 8):
            _compare(function, compiled, T.Mesh((2,)), num_rows)

    torch._dynamo.reset()
    run_ranks(2, body)


@pytest.mark.extended
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_a_sharded_block_of_a_transformer_takes_three_compilations_at_most(shape):
    def body(rank):
        torch.manual_seed(4)
        block, mesh = Block(), T.Mesh(shape)
        rest = ", ".join("R" for _ in shape[1:])
        cuts = {"up.weight": "S0", "up.bias": "S0", "down.weight": "S1"} if rest else {}
        for prefix, module in block.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                text = f"R, {cuts.get(f'{prefix}.{name}', 'R')}" if rest else "R"
                setattr(module, name, torch.nn.Parameter(distribute(parameter.detach(), mesh, text)))
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(block, backend=graphs, fullgraph=True)
        for num_rows in range(4, 26, 2):
            full, found = torch.randn(num_rows, 5, 8), []
            for run in (block, compiled):
                block.zero_grad()
                x = distribute(full, mesh, f"S0, {rest}" if rest else "S0").requires_grad_()
                result: Any = run(x)
                result.square().sum().backward()
                found.append([whole(result), *(whole(of.grad) for of in (x, *block.parameters()))])  # type: ignore[arg-type]
            torch.testing.assert_close(found[1], found[0])
        return graphs.frame_count

    torch._dynamo.reset()
    assert max(run_ranks(2 ** len(shape), body)) <= 3

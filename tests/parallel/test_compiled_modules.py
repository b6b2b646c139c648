"""torch.compile of modules with parallel styles: the same results, with communication between the graphs."""

import json
from typing import cast

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.ops.sharded import distribute
from tests.parallel.test_overlapped_styles import X, gradients_of, mlp
from tritondt.parallel import chunked_matmul


def compiled_on(rank: int, overlap: bool) -> tuple[int, int, int]:
    """Compares a compiled module with itself; matmuls in chunks and graphs of a step, and graphs of the next."""
    chunked, graphs = list[None](), CompileCounterWithBackend("aot_eager")
    gather = chunked_matmul.__dict__["gather"]
    chunked_matmul.__dict__["gather"] = lambda *arguments: chunked.append(gather(*arguments))
    mesh = T.Mesh((2,))
    module = mlp(mesh, overlap)
    expected = gradients_of(module, mesh)
    chunked.clear()
    compiled = cast(nn.Module, torch.compile(module, backend=graphs))
    torch.testing.assert_close(gradients_of(compiled, mesh), expected)
    num_chunked, num_graphs = len(chunked), graphs.frame_count
    torch.testing.assert_close(gradients_of(compiled, mesh), expected)
    whole = torch.compile(module, backend="eager", fullgraph=True)
    sentence = "a module with a parallel style or sharded parameters communicates at its boundary, outside of graphs: c"
    with pytest.raises(Unsupported, match=sentence):
        whole(distribute(X, mesh, "S1"))
    torch.testing.assert_close(gradients_of(module, mesh), expected)
    return num_chunked, num_graphs, graphs.frame_count


@pytest.mark.extended
@pytest.mark.slow
def test_compiled_modules_give_the_same_and_communicate_between_graphs():
    prices = {"host": {"latency_s": 1e-7, "bandwidth": 1e6, "busy_share": 0}, "flop_rate": 1e6}
    with GlooRanks(2, {"TRITONDT_COSTS": json.dumps(prices)}) as ranks:
        # A gather forward and one backward; the graph is what lies between the layers. Without, layers are graphs too.
        assert ranks.run(compiled_on, True, timeout_s=250) == [(2, 1, 1)] * 2
        assert ranks.run(compiled_on, False, timeout_s=250) == [(0, 3, 3)] * 2

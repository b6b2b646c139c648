"""Lengths that torch.compile leaves open in distributed tensors: few compilations, results as without a compiler."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd

import tritondt as T
from tests.harness.torch_versions import GRAPHS, needs_torch
from tests.ops.sharded import distribute, whole
from tritondt.comm.transports.threads import run_ranks

pytestmark = needs_torch("2.12", GRAPHS)

Function = Callable[[Any, Any], Any]


def _causal(heads: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


# Eleven lengths; none is a length of another dim, for which an operator may have another layout.
LENGTHS = (4, 5, 6, 7, 9, 10, 11, 14, 17, 18, 22)
W = torch.arange(96.0).reshape(12, 8) / 50
# Functions of x, (n, 8), and a weight.
FAMILIES: dict[str, Function] = {
    "elementwise": lambda x, w: torch.where(x > 0, x * 2 + 1, 0.0).relu(),
    "in place": lambda x, w: torch.zeros_like(x).copy_(x).masked_fill_(x > 1, 0.0),
    "loss of a perceptron": lambda x, w: F.linear(F.gelu(F.linear(F.layer_norm(x, (8,)), w)), w.t()).square().mean(),
    "redistributed": lambda x, w: (x.redistribute(placements=[T.Replicate()]) * 2).relu(),
    "columns": lambda x, w: (x.redistribute(placements=[T.Shard(1)]) * 2).sum(0),
    "cat": lambda x, w: torch.cat([x, x]) * 2,
    "cat of columns": lambda x, w: torch.cat([x, x * 3], 1),
    "stack": lambda x, w: torch.stack([x, x * 2]),
    "repeat": lambda x, w: x.repeat(2, 1),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w[0]),
    "group_norm": lambda x, w: F.group_norm(x, 2),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "normalize": lambda x, w: F.normalize(x),
    "max_pool": lambda x, w: F.max_pool1d(x.unsqueeze(1), 2),
    "interpolate": lambda x, w: F.interpolate(x.view(-1, 2, 2, 2), scale_factor=2.0),
    "interpolate exactly": lambda x, w: F.interpolate(x.view(-1, 2, 2, 2), (3, 5), mode="nearest-exact"),
    "interpolate between": lambda x, w: F.interpolate(x.view(-1, 2, 2, 2), (3, 5), mode="bilinear"),
    "interpolate cubically": lambda x, w: F.interpolate(x.view(-1, 2, 2, 2), scale_factor=1.5, mode="bicubic"),
    "interpolate lines": lambda x, w: F.interpolate(x.unsqueeze(1), 5, mode="linear"),
    "interpolate volumes": lambda x, w: F.interpolate(x.view(-1, 1, 2, 2, 2), scale_factor=2.0),
    "interpolate areas": lambda x, w: F.interpolate(x.view(-1, 2, 2, 2), (1, 2), mode="area"),
    "multi_margin_loss": lambda x, w: F.multi_margin_loss(x, x.detach().argmax(1)),
    "multilabel_margin_loss": lambda x, w: F.multilabel_margin_loss(x, (x.detach() > 0).long()),
    "cross_entropy": lambda x, w: F.cross_entropy(x, x.detach().argmax(1)),
    "nll_loss": lambda x, w: F.nll_loss(x.log_softmax(1), x.detach().argmax(1)),
    "mse_loss": lambda x, w: F.mse_loss(x, x.detach() * 2),
    "binary cross entropy": lambda x, w: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "kl_div": lambda x, w: F.kl_div(x.log_softmax(1), x.detach().softmax(1), reduction="batchmean"),
    "embedding": lambda x, w: F.embedding(x.detach().argmax(1), w),
    "one_hot": lambda x, w: F.one_hot(x.detach().argmax(1), 8) * x,
    "softmax": lambda x, w: x.softmax(-1),
    "softmax over rows": lambda x, w: x.softmax(0),
    "logsumexp": lambda x, w: x.logsumexp(1),
    "attention": lambda x, w: F.scaled_dot_product_attention(*[x.view(-1, 2, 2, 2)] * 3).flatten(1),
    "drawn": lambda x, w: torch.dropout(x, 0.5, True),
    "slice of columns": lambda x, w: x[:, 1:-2] * x[:, 3:4],
    "split columns": lambda x, w: torch.cat(x.split(4, 1)[::-1], 1),
    "unbind": lambda x, w: torch.stack(x.unbind(1)[::-1]),
    "index_select": lambda x, w: x.index_select(0, x.detach().argmax(1) % 2),
    "index_select of columns": lambda x, w: x.index_select(1, w[:, 0].detach().argmax(0, keepdim=True) % 8),
    "index_add": lambda x, w: torch.zeros_like(w).index_add(0, x.detach().argmax(1), x),
    "gather": lambda x, w: x.gather(1, x.detach().argmax(1, keepdim=True)),
    "scatter": lambda x, w: torch.zeros_like(x).scatter(1, x.detach().argmax(1, keepdim=True), x[:, :1]),
    "pad": lambda x, w: F.pad(x, (1, 2)),
    "transpose": lambda x, w: x.view(-1, 2, 4).transpose(0, 1).flatten(1),
    "t": lambda x, w: x.t() * 2,
    "permute": lambda x, w: x.view(-1, 2, 4).permute(2, 0, 1).contiguous() * 2,
    "expand": lambda x, w: x.unsqueeze(1).expand(-1, 3, -1) * 1,
    "expand to the length": lambda x, w: w[0].expand(x.shape[0], 8) * x,
    "flatten": lambda x, w: x.unflatten(1, (2, 4)).flatten() * 2,
    "matmul": lambda x, w: x @ w.t(),
    "products of rows": lambda x, w: (x @ x.t()).tril(),
    "products over rows": lambda x, w: x.t() @ x,
    "bmm": lambda x, w: torch.bmm(x.view(-1, 2, 4), x.view(-1, 4, 2)),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "addmm": lambda x, w: torch.addmm(w[:, 0], x, w.t()),
    "sum": lambda x, w: x.sum(0) + x.mean(),
    "sum of rows": lambda x, w: x.sum(1),
    "amax": lambda x, w: x.amax(0) + x.max(0).values,
    "var": lambda x, w: x.var(0),
    "norm": lambda x, w: x.norm(dim=0) + x.norm(),
    "prod": lambda x, w: x.prod(1),
    "sizes asked for": lambda x, w: x.new_zeros(x.shape) + x * x.shape[0],
    "new_full": lambda x, w: x.new_full((x.shape[0], 8), 2.0) * x,
    "topk": lambda x, w: x.topk(2, 1).values,
    "sort": lambda x, w: x.sort(1).values,
    "sort over rows": lambda x, w: x.sort(0).values,
    "cumsum": lambda x, w: x.cumsum(0) + x.cumsum(1),
    "flip and roll": lambda x, w: x.flip(0).roll(1, 0),
}
# Of a dim that is whole on every rank.
OF_WHOLE_DIMS: dict[str, Function] = {
    "slice": lambda x, w: x[1:] * 2,
    "slice from the end": lambda x, w: x[-3:-1] * x[:2],
    "narrow": lambda x, w: x.narrow(0, 0, x.shape[0] - 1),
    "last": lambda x, w: x[-1] * x[0],
    "pad rows": lambda x, w: F.pad(x, (0, 0, 1, 2)),
    "causal attention": lambda x, w: _causal(x.view(1, -1, 2, 4).transpose(1, 2)),
    "diagonal": lambda x, w: (x @ x.t()).diagonal() * 1,
}
# Of the columns of rows that are cut evenly.
OF_COLUMNS: dict[str, Function] = {
    "flatten": lambda x, w: x.flatten() * 2,
    "there and back": lambda x, w: x.flatten().view(8, x.shape[1]) * x,
    "flatten within": lambda x, w: x.view(4, 2, x.shape[1]).flatten(1) * 2,
    "rows of several dims": lambda x, w: F.linear(x.unflatten(1, (-1, 1)), w[:, :1]).flatten(0, 1).softmax(1),
    "softmax": lambda x, w: x.softmax(1) * x.shape[1],
}
# A graph for each length, with the reason.
OF_ONE_LENGTH: dict[str, tuple[str, Function]] = {
    "slice": ("the layout of a part of a cut dim has its sizes", lambda x, w: x[1:] * 2),
    "split": ("the layout of a part of a cut dim has its sizes", lambda x, w: x.split(2)[1] * 2),
    "number of pieces": ("a graph has a number of results", lambda x, w: torch.cat(x.split(2, 0)[::-1])),
    "last": ("the rank that holds the index sends it", lambda x, w: x[-1] * 2),
    "pad rows": ("the layout of a longer cut dim has its sizes", lambda x, w: F.pad(x, (0, 0, 1, 1))),
    "diagonal": ("the layout of a diagonal is found among lengths", lambda x, w: (x @ x.t()).diagonal() * 1),
}


class Runs:
    """A backend of torch.compile that counts graphs, and notes which exchanges every run of one has, in order."""

    def __init__(self) -> None:
        self.num_graphs, self.exchanges = 0, list[Any]()
        self.backend: Any = aot_autograd(fw_compiler=self._forward, bw_compiler=self._noting)

    def _forward(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.num_graphs += 1
        return self._noting(graph, inputs)

    def _noting(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = []
        for node in graph.graph.nodes:
            if any("tritondt" in name for name in (str(node.target), *map(str, node.args))):
                texts = [argument for argument in node.args if isinstance(argument, str)]
                calls.append([text for text in texts if not text.startswith("[")])

        def run(*given: Any) -> Any:
            self.exchanges.append(calls)
            return graph.forward(*given)

        return make_boxed_func(run)


def _compare(run: Any, compiled: Any, mesh: T.Mesh, shape: tuple[int, int], placements: str = "S0") -> None:
    torch.manual_seed(sum(shape))
    full, found = torch.randn(shape), []
    for function in (run, compiled):
        torch.manual_seed(1)
        x, w = distribute(full, mesh, placements).requires_grad_(), distribute(W, mesh, "R").requires_grad_()
        result = function(x, w)
        result.square().sum().backward()
        gradients = [whole(tensor.grad) for tensor in (x, w) if tensor.grad is not None]
        # Where the length inside a dim is open, its equal pieces have no unit: other placements of the same elements.
        boxes = result._spec.layout.boxes(mesh.coordinate)
        layout = result.placements if shape[1] == 8 else boxes
        found.append((layout, result.stride(), [whole(result), *gradients]))
    assert found[1][:2] == found[0][:2]
    torch.testing.assert_close(found[1][2], found[0][2])


def _num_graphs(
    function: Function, num_ranks: int, placements: str, lengths: Any = LENGTHS, *, of_rows: bool = True
) -> list[tuple[int, Any]]:
    """How many graphs every rank compiled, and the exchanges of all their runs; lengths of rows, or of columns."""

    def body(rank):
        runs = Runs()
        compiled = torch.compile(function, backend=runs.backend, fullgraph=True)
        # Rank threads share the graphs of a function, and each has its own limit on them.
        with torch._dynamo.config.patch(recompile_limit=64):
            for length in lengths:
                shape = (length, 8) if of_rows else (8, length)
                _compare(function, compiled, T.Mesh((num_ranks,)), shape, placements)
        return runs.num_graphs, runs.exchanges

    torch._dynamo.reset()
    return run_ranks(num_ranks, body)


@pytest.mark.in_core(6)
@pytest.mark.in_ci(40)
@pytest.mark.parametrize("name", FAMILIES)
def test_eleven_lengths_take_three_compilations_at_most(name):
    found = _num_graphs(FAMILIES[name], 2, "S0")
    assert max(num_graphs for num_graphs, _ in found) <= 3
    assert found[1][1] == found[0][1]


@pytest.mark.in_core(3)
@pytest.mark.parametrize("name", OF_WHOLE_DIMS)
def test_eleven_lengths_of_a_whole_dim_take_three_compilations_at_most(name):
    found = _num_graphs(OF_WHOLE_DIMS[name], 2, "R")
    assert max(num_graphs for num_graphs, _ in found) <= 3
    assert found[1][1] == found[0][1]


@pytest.mark.in_core(2)
@pytest.mark.parametrize("name", OF_COLUMNS)
def test_eleven_lengths_inside_a_cut_dim_take_three_compilations_at_most(name):
    found = _num_graphs(OF_COLUMNS[name], 2, "S0", of_rows=False)
    assert max(num_graphs for num_graphs, _ in found) <= 3
    assert found[1][1] == found[0][1]


@pytest.mark.in_core(2)
@pytest.mark.parametrize("name", OF_ONE_LENGTH)
def test_what_is_laid_out_by_lengths_is_a_graph_for_each(name):
    _, function = OF_ONE_LENGTH[name]
    first, second = _num_graphs(function, 2, "S0", (4, 6, 10))
    assert first[0] >= 3
    assert first[1] == second[1]


@pytest.mark.in_core(4)
@pytest.mark.in_ci(24)
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_that_become_empty_exchange_what_the_others_do(name):
    # Of 4 ranks the last has no rows of 5 and 9, and one of 7 and 10.
    first, *others = _num_graphs(FAMILIES[name], 4, "S0", (8, 11, 5, 9, 7, 10))
    assert all(exchanges == first[1] for _, exchanges in others)


def test_a_class_out_of_range_is_an_error_of_the_graph():
    def body(rank):
        scores = distribute(torch.zeros(4, 8), T.Mesh((2,)), "S0")
        targets = distribute(torch.tensor([0, 9, 0, 9]), T.Mesh((2,)), "S0")
        with pytest.raises(RuntimeError, match=r"target class is out of range: allowed are 0\.\.7"):
            torch.compile(F.cross_entropy, backend="aot_eager", fullgraph=True)(scores, targets)

    torch._dynamo.reset()
    run_ranks(2, body)

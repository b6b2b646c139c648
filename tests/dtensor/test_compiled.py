"""Functions of distributed tensors, compiled: what travels is alike on all ranks, and what cannot be says so."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import tritondt as T
from tests.harness.torch_versions import GRAPHS, needs_torch
from tests.ops.sharded import distribute, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode

X = torch.arange(24.0).reshape(4, 6)


def _one_row(x: Any) -> Any:
    y = x.clone()
    y[0] = 5.0
    return y


def _view_written(x: Any) -> Any:
    y = x.clone()
    view = y[1]
    view.add_(1)
    view.mul_(2)
    return y + view


def _one_row_of_two(x: Any) -> Any:
    y = x * 2
    return y[0] + y[3], y[0] * 2


def _dropped_twice(x: Any) -> Any:
    return torch.dropout(x, 0.5, True), torch.dropout(x, 0.5, True)


def _prefetched(x: Any) -> Any:
    T.prefetch(x, [T.Replicate()])
    return x.redistribute(placements=[T.Replicate()]) * 2


@pytest.mark.parametrize("run", [_one_row, _view_written, _one_row_of_two, _dropped_twice, _prefetched])
def test_a_graph_moves_on_every_rank_what_another_needs(run):
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        found = []
        for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
            torch.manual_seed(3)
            results = function(x)
            several = results if isinstance(results, tuple) else (results,)
            found.append([result.full_tensor() for result in several])
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
        if run is _dropped_twice:
            assert not torch.equal(*found[1])

    run_ranks(2, body)


@needs_torch("2.12", GRAPHS)
def test_forward_and_backward_of_a_graph_move_what_eager_ones_move():
    def block(x: Any, weight: Any) -> Any:
        hidden = F.linear(x, weight.redistribute(placements=[T.Replicate()])).relu()
        return F.linear(hidden, weight.redistribute(placements=[T.Replicate()])).sum()

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    in_checkpoint = torch.compile(
        lambda *args: checkpoint(block, *args, use_reentrant=False), backend=CompileCounterWithBackend("aot_eager")
    )

    def body(rank):
        mesh = T.Mesh((2,))
        found = []
        for function in (block, compiled, in_checkpoint):
            weight = distribute(torch.arange(36.0).reshape(6, 6) - 17, mesh, "S0").requires_grad_()
            x = distribute(X - 11, mesh, "S0").requires_grad_()
            with CommDebugMode() as traffic:
                function(x, weight).backward()
            found.append([traffic.get_total_counts(), *(whole(of.grad) for of in (x, weight) if of.grad is not None)])
        torch.testing.assert_close(found[1][1:], found[0][1:], rtol=0, atol=0)
        torch.testing.assert_close(found[2][1:], found[0][1:], rtol=0, atol=0)
        return [steps for steps, *_ in found]

    eager, graph, recomputed = zip(*run_ranks(2, body), strict=True)
    assert graph == eager
    assert len(set(recomputed)) == 1


def test_blocks_within_checkpoints_are_graphs():
    def body(rank):
        graphs = CompileCounterWithBackend("aot_eager")
        block = torch.compile(lambda x: (x * 2).relu(), backend=graphs)
        x = distribute(X, T.Mesh((2,)), "S0").requires_grad_()
        checkpoint(block, x, use_reentrant=False).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(whole(x.grad), (X > 0) * 2.0, rtol=0, atol=0)
        return graphs.frame_count

    assert run_ranks(2, body) == [1, 1]


@needs_torch("2.11", "what does not go into a graph is refused in other words")
def test_plain_tensors_that_count_as_replicated_go_into_a_graph_from_outside():
    def shifted(x: Any) -> Any:
        return x + torch.ones(6)

    def shifted_within(x: Any) -> Any:
        with T.implicit_replication():
            return x + torch.ones(6)

    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        graphs = CompileCounterWithBackend("aot_eager")
        with T.implicit_replication():
            found: Any = torch.compile(shifted, backend=graphs, fullgraph=True)(x)
        torch.testing.assert_close(found.full_tensor(), X + 1, rtol=0, atol=0)
        assert graphs.frame_count == 1
        sentence = r"implicit_replication\(\) does not go into a graph: enter it around the call of the compiled"
        with pytest.raises(Unsupported, match=sentence):
            torch.compile(shifted_within, backend="aot_eager", fullgraph=True)(x)

    run_ranks(2, body)

    def broken(rank):
        graphs = CompileCounterWithBackend("aot_eager")
        found: Any = torch.compile(shifted_within, backend=graphs)(distribute(X, T.Mesh((2,)), "S0"))
        torch.testing.assert_close(found.full_tensor(), X + 1, rtol=0, atol=0)
        return graphs.frame_count

    torch._dynamo.reset()
    assert set(run_ranks(2, broken)) <= {0, 1}  # dispatch itself is no graph


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_refuses_to_lose_a_redistribution(mode):
    def gathered(x: Any) -> Any:
        return x.redistribute(placements=[T.Replicate()]).sum()

    def body(rank):
        mesh = T.Mesh((2,))
        x = distribute(X, mesh, "S0")

        def of_local(local: Any) -> Any:
            return gathered(T.DTensor.from_local(local, mesh, [T.Shard(0)])).to_local()

        of = "with real tensors" if mode == "real" else "for a distributed argument"
        shape = r"\(.*\)" if mode == "symbolic" else r"\(4, 6\)"
        sentence = rf"a redistribution of \(S0\) of {shape} float32 to \(R\) cannot be traced by make_fx {of}: trace a"
        with pytest.raises(T.TransportError, match=sentence):
            make_fx(gathered, tracing_mode=mode)(x)
        if mode == "fake":
            graph = make_fx(of_local, tracing_mode=mode)(torch.zeros(2, 6))
            assert graph(x.to_local()) == X.sum()

    run_ranks(2, body)


def _with_zeros_in_two_columns(x):
    y = x.clone()
    y[:, [1, 3]] = 0
    return y


def test_a_list_as_an_index_ends_the_graph():
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        compiled = torch.compile(lambda x: x[:, [1, 3]] * 2, backend="aot_eager")
        torch.testing.assert_close(whole(compiled(x)), X[:, [1, 3]] * 2, rtol=0, atol=0)
        written = torch.compile(_with_zeros_in_two_columns, backend="aot_eager")
        torch.testing.assert_close(whole(written(x)), _with_zeros_in_two_columns(X), rtol=0, atol=0)

    torch._dynamo.reset()
    run_ranks(2, body)


def _sums_of_units(a, mesh):
    sums: Any = T.DTensor.from_local(a, mesh, [T.Shard(1, unit=3)]).sum(0)
    return sums.full_tensor()


FROM_LOCAL: dict[str, Any] = {
    "replicas": lambda a, mesh: T.DTensor.from_local(a, mesh).to_local() * a,
    "rows": lambda a, mesh: T.DTensor.from_local(a, mesh, [T.Shard(0)]).redistribute(placements=[T.Replicate()]),
    "terms": lambda a, mesh: T.DTensor.from_local(a, mesh, [T.Partial()], grad_placements=[T.Replicate()]).relu(),
    "columns": lambda a, mesh: T.DTensor.from_local(a, mesh, (T.Shard(-1),), shape=(4, 12), order=["tp"]),
    "units": _sums_of_units,
}  # fmt: skip


@needs_torch("2.12", GRAPHS)
@pytest.mark.parametrize("case", FROM_LOCAL)
def test_from_local_goes_into_a_graph(case):
    def body(rank):
        mesh, found = T.Mesh((2,), ("tp",)), []
        compiled = torch.compile(FROM_LOCAL[case], backend="aot_eager", fullgraph=True)
        for run in (FROM_LOCAL[case], compiled):
            local = (X + rank).requires_grad_()
            result: Any = run(local, mesh)
            result.sum().backward()
            found.append([result.to_local() if isinstance(result, T.DTensor) else result, local.grad])
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)

    torch._dynamo.reset()
    run_ranks(2, body)


class Block(nn.Module):
    """A transformer's block, whose parameters are distributed by whoever takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(8), nn.Linear(8, 24)
        self.out, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(self.norm(x)).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        down: torch.Tensor = self.down(F.gelu(self.up(x)))
        return x + down


@pytest.mark.extended
def test_a_block_of_a_transformer_is_one_graph():
    def body(rank):
        torch.manual_seed(4)
        block, mesh = Block(), T.Mesh((2,))
        for module in block.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(distribute(parameter.detach(), mesh, "R")))
        x = distribute(torch.randn(4, 5, 8), mesh, "S0")
        found = []
        for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
            block.zero_grad()
            result: Any = run(x)
            result.square().sum().backward()
            found.append([result.full_tensor(), *(parameter.grad.full_tensor() for parameter in block.parameters())])  # type: ignore[union-attr]
        torch.testing.assert_close(found[1], found[0])

    run_ranks(2, body)


def test_no_frame_of_dispatch_becomes_a_graph():
    def body(rank):
        graphs = CompileCounterWithBackend("aot_eager")

        @torch.compile(backend=graphs)
        def broken(x: Any) -> Any:
            torch._dynamo.graph_break()
            return eval("x.t() @ x", {"x": x})  # runs outside of the graphs

        x = distribute(X, T.Mesh((2,)), "S0")
        torch.testing.assert_close(broken(x).full_tensor(), X.t() @ X, rtol=0, atol=0)
        return graphs.frame_count

    assert run_ranks(2, body) == [0, 0]

"""torch.func.vmap and grad, and torch.compile, of distributed tensors."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.ops.sharded import compare, distribute
from tritondt.comm.transports.threads import run_ranks


def test_vmap_and_grad():
    whole = torch.arange(35.0).reshape(7, 5)

    def body(rank):
        x = distribute(whole, T.Mesh((2,)), "S0")
        for function, in_dims in (
            (lambda row: row * 2 + 1, 0),
            (lambda column: column.sum(), 1),
            (lambda row: torch.softmax(row, 0), 0),
            (lambda row: row.reshape(5, 1).expand(5, 2).mean(1), 0),
        ):
            found = torch.func.vmap(function, in_dims=in_dims)(x)
            assert isinstance(found, T.DTensor)
            torch.testing.assert_close(found.full_tensor(), torch.func.vmap(function, in_dims=in_dims)(whole))
        found = torch.func.grad(lambda y: (y * y).sum())(x)
        torch.testing.assert_close(found.full_tensor(), 2 * whole, rtol=0, atol=0)
        found = torch.func.vmap(torch.func.grad(lambda row: (row * row).sum()))(x)
        torch.testing.assert_close(found.full_tensor(), 2 * whole, rtol=0, atol=0)
        with pytest.raises(
            T.MixedTensorsError, match=r"got a distributed tensor \(S0\) of \(7, 5\) float32 and a plain"
        ):
            torch.func.vmap(torch.add)(x, whole)

    run_ranks(2, body)


# None of these sends anything within: levels of forward derivatives are the process's, which rank threads share.
DERIVED = {
    "cube": lambda x: (x**3).sum(),
    "linear": lambda x: (x * 3).sum(),  # the second derivative is one of torch's tensors of zeros without memory
    "relu": lambda x: torch.relu(x - 0.3).square().sum(),
    # A constant's tangent comes to the product as zeros, which are plain.
    "matmul": lambda x: (x.mT @ x.detach()).sum(),
}


# The first takes 4 s: torch imports its compiler. Torch makes its formulas of forward derivatives with it.
@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("text", ["S0", "R"])
@pytest.mark.parametrize("name", DERIVED)
def test_forward_and_second_derivatives(name, text):
    whole, function = torch.arange(6.0).reshape(3, 2) / 4, DERIVED[name]

    def body(rank):
        x = distribute(whole, T.Mesh((2,)), text)
        for found, expected in zip(derivatives(x), derivatives(whole), strict=True):
            compare(found, expected)

    def derivatives(x):
        tangent = torch.func.jvp(function, (x,), (x * 2,))
        return [*tangent, torch.func.hessian(function)(x), torch.func.jacfwd(function)(x)]

    run_ranks(2, body)


def compiled_on(rank):
    """A layer whose weights are cut and whose gradients travel, compiled and not; and shapes that change."""
    torch.manual_seed(1)
    mesh = T.init_device_mesh("cpu", (2,))
    layer = nn.Linear(5, 7)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, T.distribute_tensor(parameter, mesh, [T.Shard(0)]))

    def loss(x):
        hidden = layer(x).relu().redistribute(placements=[T.Shard(0)])
        return (torch.softmax(hidden, -1) * torch.linalg.vector_norm(hidden)).sum()

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        results = []
        for rows in (3, 4, 5):
            total: Any = function(T.distribute_tensor(torch.randn(rows, 5, generator=_seeded(rows)), mesh))
            total.backward()
            results.append(total.full_tensor().item())
        grads = [parameter.grad for parameter in layer.parameters()]
        found.append((results, [(grad._spec, grad.to_local()) for grad in grads]))  # type: ignore[union-attr]
    (eager, eager_grads), (graph, graph_grads) = found
    torch.testing.assert_close(graph, eager)
    for (_, of_graph), (_, of_eager) in zip(graph_grads, eager_grads, strict=True):
        torch.testing.assert_close(of_graph, of_eager)
    make = torch.compile(
        lambda local: T.DTensor.from_local(local, mesh, [T.Shard(0)]).to_local() * 2, backend="aot_eager"
    )
    assert make(torch.ones(3)).tolist() == [2.0] * 3
    check_what_draws_within_composites(mesh)
    check_forward_derivatives_of_views(mesh)
    return dropped(mesh)


# Views that move on one layout or the other, and lie elsewhere in the memory of each than in that of their derivatives.
VIEWS = {
    "row": lambda x: (x[1] ** 2).sum(),
    "rows": lambda x: x[1:] ** 2,
    "column": lambda x: x[:, 1] ** 2,
    "parts": lambda x: x.split(2)[1] ** 2 + x.chunk(2, 1)[1].squeeze(1)[:1],
    "windows": lambda x: x.unfold(0, 2, 1)[1] ** 2,
    "product": lambda x: (x[1:2].expand(3, 2) * x).t()[1],
}


def check_forward_derivatives_of_views(mesh):
    whole = torch.arange(6.0).reshape(3, 2) / 4
    for placement in (T.Shard(0), T.Shard(1)):
        x = T.distribute_tensor(whole, mesh, [placement])
        for function in VIEWS.values():
            for derive in (torch.func.jacfwd, torch.func.hessian):
                compare(derive(function)(x), derive(function)(whole))
            tangent = x.redistribute(placements=[T.Replicate()]) * 2
            found = torch.func.jvp(function, (x,), (tangent,))
            for part, expected in zip(found, torch.func.jvp(function, (whole,), (whole * 2,)), strict=True):
                compare(part, expected)


def check_what_draws_within_composites(mesh):
    """Attention with a mask and weights of torch's own, and choices, in a graph without a break."""
    x = T.distribute_tensor(torch.linspace(-1, 1, 120).reshape(1, 4, 5, 6), mesh, [T.Shard(1)])

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.3)

    def choose(x):
        return torch.multinomial(x.flatten(0, 2).abs(), 2)

    for function in (attend, choose):
        found = []
        for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
            torch.manual_seed(5)
            result: Any = run(x)
            found.append(result.full_tensor())
        torch.testing.assert_close(found[1], found[0])


def dropped(mesh):
    """What dropout leaves of whole and of cut ones in a graph without a break, where it draws what it draws outside."""

    def drop(x):
        return torch.dropout(x, 0.5, True)

    found = []
    for function in (drop, torch.compile(drop, backend="aot_eager", fullgraph=True)):
        for placements in ([T.Replicate()], [T.Shard(0)]):
            torch.manual_seed(3)
            ones = T.ones(65, device_mesh=mesh, placements=placements)
            masks: list[Any] = [function(ones) for _ in range(2)]
            found.append([mask.full_tensor().tolist() for mask in masks])
    assert found[0] == found[1] == found[2] == found[3]
    first, second = found[0]
    assert first != second, "one mask for all calls"
    return first


def _seeded(number):
    return torch.Generator().manual_seed(number)


@pytest.mark.slow
def test_compiled_graphs_redistribute_and_give_the_same_and_views_have_forward_derivatives():
    with GlooRanks(2) as ranks:
        first, second = ranks.run(compiled_on, timeout_s=250)
    assert first == second  # replicas drop the same

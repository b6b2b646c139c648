"""Graphs of torch.compile on ranks with and without elements: every rank has the same exchanges, in both passes."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tritondt as T
from tests.harness.torch_versions import GRAPHS, needs_torch
from tests.ops.families.test_gradcheck import FAMILIES, FAMILIES_ONCE
from tests.ops.sharded import distribute, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode

pytestmark = needs_torch("2.12", GRAPHS)

NUM_RANKS = 4
# Of lengths 1 to 3 the last of four ranks has none.
CASES = {
    "norm of a column": (lambda b: b.norm(dim=-1, keepdim=True) * 1, [torch.arange(4.0)[:, None] + 1], ["S1"]),
    **FAMILIES,
    **FAMILIES_ONCE,
}
# A view that four ranks could not hold is refused.
del CASES["views"]


class Exchanges:
    """A backend of torch.compile that notes which exchanges the graphs of a rank have, in order."""

    def __init__(self, partition: Any) -> None:
        self.found: list[tuple[str, list[Any]]] = []
        compilers = {"fw_compiler": partial(self._noted, "forward"), "bw_compiler": partial(self._noted, "backward")}
        self.backend: Any = aot_autograd(**compilers, partition_fn=partition)

    def _noted(self, which: str, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = []
        for node in graph.graph.nodes:
            names = [str(node.target), *map(str, node.args)]
            if any("tritondt" in name for name in names):
                calls.append([argument for argument in node.args if isinstance(argument, str)])
        self.found.append((which, calls))
        return make_boxed_func(graph.forward)


@pytest.mark.in_core(4)
@pytest.mark.in_ci(24)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("partition", [min_cut_rematerialization_partition, default_partition])
def test_graphs_of_all_ranks_have_the_same_exchanges(partition, name):
    function, tensors, placements = CASES[name]

    def body(rank):
        mesh, exchanges = T.Mesh((NUM_RANKS,)), Exchanges(partition)
        found = []
        for run in (function, torch.compile(function, backend=exchanges.backend)):
            given = [
                distribute(full, mesh, re.sub(r"\(.*\)", "", text)).requires_grad_(full.is_floating_point())
                for full, text in zip(tensors, placements, strict=True)
            ]
            result: Any = run(*given)
            (result.abs() if result.is_complex() else result).sum().backward()
            found.append([whole(result), *(whole(tensor.grad) for tensor in given if tensor.grad is not None)])
        torch.testing.assert_close(found[1], found[0])
        return exchanges.found

    torch._dynamo.reset()
    first, *others = run_ranks(NUM_RANKS, body)
    assert [which for which, _ in first] == ["forward", "backward"]
    assert all(found == first for found in others)


def _saving_products(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [None, _saving_products])
def test_a_checkpoint_in_a_graph_keeps_what_was_exchanged_and_drawn(policy):
    options: dict[str, Any] = {"use_reentrant": False}
    if policy is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    def block(x: Any, weight: Any) -> Any:
        hidden = nn.functional.linear(x, weight.redistribute(placements=[T.Replicate()])).relu()
        hidden = torch.dropout(hidden, 0.5, True)
        rows = nn.functional.linear(hidden, weight).norm(dim=-1)
        return rows.redistribute(placements=[T.Replicate()]).sum()

    def body(rank):
        mesh = T.Mesh((NUM_RANKS,))
        compiled = torch.compile(lambda *given: checkpoint(block, *given, **options), backend="aot_eager")
        found = []
        for run in (block, compiled):
            torch.manual_seed(3)
            weight = distribute(torch.arange(36.0).reshape(6, 6) - 17, mesh, "S0").requires_grad_()
            x = distribute(torch.arange(18.0).reshape(3, 6) - 9, mesh, "S0").requires_grad_()
            with CommDebugMode() as traffic:
                loss = run(x, weight)
                loss.backward()
            found.append([traffic.get_total_counts(), whole(loss), whole(x.grad), whole(weight.grad)])  # type: ignore[arg-type]
        assert found[1][0] == found[0][0]
        torch.testing.assert_close(found[1][1:], found[0][1:])

    torch._dynamo.reset()
    run_ranks(NUM_RANKS, body)

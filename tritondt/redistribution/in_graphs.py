"""Calls that a graph of torch.compile keeps as they are, in the pass in which they were traced."""

from itertools import count, islice
from typing import Any

import torch
from torch.fx.traceback import get_current_meta
from torch.utils.checkpoint import CheckpointPolicy

# Numbers of calls in graphs, which are never merged into one.
_calls = count(1)
_RECOMPUTE = "recompute"
_SEEN = "_tritondt_lengths_of_forward"


class _KeptMeta(dict[str, Any]):
    """Torch's notes on a node whose result is kept for backward, whatever is said of it later."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key != _RECOMPUTE:
            super().__setitem__(key, value)


def call_in_graph(op: Any, *arguments: Any) -> torch.Tensor:
    """The result of an operator of `dtensor/graph_ops.py` in a graph that torch traces; `call` gets a number.

    What forward gives is kept for backward, within a checkpoint too: that marks all that has run to be run again, from
    tensors of which ranks keep different ones, so that not all would run what the others wait for.
    """
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or get_current_meta().get("partitioner_tag") == "is_backward":
        return op(*arguments, call=next(_calls))  # type: ignore[no-any-return]
    graph = mode.tracer.graph
    num_before = len(graph.nodes)
    found: torch.Tensor = op(*arguments, call=next(_calls))
    for node in islice(reversed(graph.nodes), len(graph.nodes) - num_before):
        node.meta = _KeptMeta({**node.meta, _RECOMPUTE: CheckpointPolicy.MUST_SAVE})
    return found


def prefer_lengths_of_forward() -> None:
    """Lets torch take a length that forward and backward are both given from what forward is given.

    Lengths that are computed anew torch (2.13) looks up by their symbol, where the last argument that has it counts:
    a gradient, so that forward would need what backward gets.
    """
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or _SEEN in mode.tracer.__dict__:
        return
    tracer = mode.tracer
    tracer.__dict__[_SEEN] = True
    by_symbol = tracer.sympy_expr_tracker
    for node, proxy in reversed(tracer.symnode_tracker.sym_node_dict.items()):
        if node.expr in by_symbol:
            by_symbol[node.expr] = type(by_symbol[node.expr])(proxy, torch.SymInt(node))

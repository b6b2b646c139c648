"""Calls that a graph of torch.compile keeps as they are, in the pass in which they were traced."""

import sys
from itertools import count, islice
from typing import Any

import torch
from torch.fx.traceback import get_current_meta
from torch.utils.checkpoint import CheckpointPolicy

# Numbers of calls in graphs, which are never merged into one.
_calls = count(1)
_RECOMPUTE = "recompute"
_HELD = "_tritondt_lengths_at_hand"


class _KeptMeta(dict[str, Any]):
    """Torch's notes on a node whose result is kept for backward, whatever is said of it later."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key != _RECOMPUTE:
            super().__setitem__(key, value)


def call_in_graph(op: Any, *arguments: Any) -> torch.Tensor:
    """The result of an operator of `dtensor/graph_ops.py` in a graph that torch traces; `call` gets a number.

    The result of forward is kept for backward, within a checkpoint too. A checkpoint marks all operators that have run
    to be run again, from tensors of which ranks keep different ones. Not all ranks would then run the operator that the
    others wait for.
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


def hold_for_lengths_at_hand() -> None:
    """Has torch.compile trace a call anew, for the lengths at hand, if both passes of its graph are being traced.

    A graph that has left lengths open in forward cannot take them for known in backward (torch 2.13), where the first
    operator may be that is decided by values.
    """
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    compilation = torch._guards.CompileContext.try_get()
    if mode is None or compilation is None or holds_for_lengths_at_hand():
        return
    compilation.__dict__[_HELD] = True
    # Of the reasons to trace again it is the one that torch takes from what compiles a graph.
    raise sys.modules["torch._dynamo.exc"].TensorifyScalarRestartAnalysis("backward asks for a length")


def holds_for_lengths_at_hand() -> bool:
    """Whether the call that torch.compile traces now is traced for the lengths at hand."""
    compilation = torch._guards.CompileContext.try_get()
    return compilation is not None and _HELD in compilation.__dict__


class _FirstKept(dict[Any, Any]):
    """The values that give the lengths in a graph, by symbol; the first one of each length stays."""

    def __setitem__(self, symbol: Any, given: Any) -> None:
        self.setdefault(symbol, given)


def prefer_lengths_of_forward() -> None:
    """Lets torch take a length that forward and backward are both given from what forward is given.

    Lengths that are computed anew torch (2.13) looks up by their symbol, where the last that has it counts: that of a
    gradient, so that forward would need what backward gets, or one computed from what is being looked up.
    """
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or isinstance(mode.tracer.sympy_expr_tracker, _FirstKept):
        return
    tracer = mode.tracer
    by_symbol, first = tracer.sympy_expr_tracker, _FirstKept()
    for node, proxy in tracer.symnode_tracker.sym_node_dict.items():
        if node.expr in by_symbol:
            first[node.expr] = type(by_symbol[node.expr])(proxy, torch.SymInt(node))
    tracer.sympy_expr_tracker = first

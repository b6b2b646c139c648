"""Execution of what happens at a module's boundary outside the graphs of torch.compile.

Within one it would be traced, down to the locks and sockets of the communicator.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_of_graphs(run: Callable[P, R]) -> Callable[P, R]:
    """`run` unchanged, for code that is being traced: the graph ends before the call, and another begins after it.

    With fullgraph=True torch raises, and says why.
    """
    torch._dynamo.graph_break(
        msg="a module with a parallel style or sharded parameters communicates at its boundary, outside of graphs: "
        "compile without fullgraph=True, or compile the modules inside"
    )
    return torch.compiler.disable(run)  # type: ignore[no-any-return]

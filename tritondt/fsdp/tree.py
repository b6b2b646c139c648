"""Sharded modules of one tree: the order in which they run, and the end of a backward pass."""

import weakref
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import Variable


class ShardedModule(Protocol):
    """State of the modules of one call of `fully_shard`, as the tree sees it."""

    tree: "ShardedTree"

    def reduce_late(self) -> None:
        """Reduces gradients that nothing has told of."""

    def end_backward(self, *, creates_graph: bool) -> None:
        """Ends a backward pass, of which a graph of gradients may be made."""

    def abandon_backward(self) -> None:
        """Ends a backward pass that raised."""


def is_in_backward() -> bool:
    """Whether autograd runs a backward pass on the calling thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class ShardedTree:
    """States of a tree of sharded modules; `root` is that of the outermost.

    The order in which modules ran in the last forward pass tells what to gather ahead: alike on all ranks, since each
    gather is a collective call.
    """

    def __init__(self, root: ShardedModule) -> None:
        self.root = root
        self.states: list[ShardedModule] = [root]
        self._running: list[ShardedModule] = []
        self._order: list[ShardedModule] = []
        self._order_before: list[ShardedModule] = []
        self._awaits_end = False
        # Whether the end of a backward pass waits for the gradients.
        self.is_last_backward = True
        # What autograd calls at the end of the pass; it lets go of it when the pass has gone, also by an error.
        self._callback: weakref.ref[Any] | None = None
        # Whether gradients of the pass that runs have a graph of their own.
        self._creates_graph = False

    def take_over(self, other: "ShardedTree") -> None:
        """Makes the states of another tree, below the root, states of this one."""
        for state in other.states:
            state.tree = self
            self.states.append(state)

    def enter(self, state: ShardedModule) -> None:
        """Notes that a module's forward begins; outside of all others a pass begins with it."""
        if is_in_backward():
            return
        if not self._running:
            self._order_before, self._order = self._order, []
        self._running.append(state)
        if state not in self._order:
            self._order.append(state)

    def leave(self, state: ShardedModule) -> None:
        """Notes that a module's forward has ended."""
        if state in self._running and not is_in_backward():
            self._running.remove(state)

    def following(self, state: ShardedModule) -> ShardedModule | None:
        """The state that ran after this one in the last pass."""
        order = self._order_before
        if state not in order or state is order[-1]:
            return None
        return order[order.index(state) + 1]

    def preceding(self, state: ShardedModule) -> ShardedModule | None:
        """The state that ran before this one in this pass, whose backward comes after its own."""
        order = self._order
        if state not in order or state is order[0]:
            return None
        return order[order.index(state) - 1]

    def await_end(self, *, creates_graph: bool = False) -> None:
        """Lets the pass that runs now end with `_end`; with `creates_graph` its gradients have a graph of their own."""
        self._creates_graph |= creates_graph
        if not self._awaits_end:
            self._awaits_end = True
            engine: Any = Variable._execution_engine
            callback = partial(self._end)
            self._callback = weakref.ref(callback)
            engine.queue_callback(callback)

    def _end(self) -> None:
        """Reduces what no module has, waits for all gradients, and frees what is still there."""
        self._awaits_end = False
        for state in (*reversed(self._order), *[state for state in self.states if state not in self._order]):
            state.reduce_late()
        creates_graph, self._creates_graph = self._creates_graph, False
        for state in self.states:
            state.end_backward(creates_graph=creates_graph)

    def forget_failure(self) -> None:
        """Forgets a backward pass that raised, and so did not end, with the gradients that it has left behind."""
        if self._awaits_end and not is_in_backward():
            self._awaits_end = self._creates_graph = False
            for state in self.states:
                state.abandon_backward()

    def forget_failure_before_reading(self) -> None:
        """Forgets a backward pass that raised, before parameters are read; other threads may read while one runs."""
        if self._callback is None or self._callback() is None:
            self.forget_failure()

"""The part of a process group that Gloo carries on the CPU, by its own operations: TRITONDT_TRANSPORT=gloo."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from tritondt.comm.process_world import ProcessWorld
from tritondt.process_group.cpu_collectives import Asked, Call, run_alone
from tritondt.process_group.cpu_works import FinishedWork
from tritondt.process_group.gloo_connection import GlooConnection, GlooWork
from tritondt.process_group.group_on_cpu import GroupOnCpu
from tritondt.process_group.staging import NewCopies, as_real, copy_back, flattened, is_plain, staged

# Collectives whose complex tensors torch does not take apart beforehand, as others', and of which Gloo knows none.
_NOT_TAKEN_APART = frozenset({"gather", "allgather_into_tensor_coalesced"})
# Collectives whose tensors may have any shapes of so many elements, which Gloo compares.
_BY_ELEMENTS = frozenset(
    {
        *("_allgather_base", "_reduce_scatter_base"),
        *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    }
)
_CHANGED = _NOT_TAKEN_APART | _BY_ELEMENTS


class GlooGroup(GroupOnCpu[GlooConnection]):
    """One rank's part in a process group; `ranks` are the group's, as ranks of the world."""

    @property
    def timeout(self) -> timedelta:
        """How long an operation may take."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._carrier is not None:
            self._carrier.set_timeout(timeout)

    def run(self, kind: str, call: Call, asked: Asked, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """The Work of a collective, a method of torch's group over Gloo with these arguments, the options last."""
        if not call.steps or len(self._ranks) == 1:
            self._check_open(asked)
            run_alone(call, self._own, len(self._ranks))
            return FinishedWork(call.results)
        copies: NewCopies = []
        memory = arguments if kind == "barrier" else _memory_of(kind, arguments, copies, self._own)
        keys = call.steps[0].key if len(call.steps) == 1 else tuple(step.key for step in call.steps)
        with self._turn:
            connection = self._current(asked)
            operation = connection.begin(kind, memory, (kind, keys), asked, timeout_s)
        if getattr(arguments[-1], "asyncOp", True):
            return GlooWork(connection, operation, call.results, copies)
        connection.wait_for(operation)
        if not copies and operation.native.is_completed():
            return operation.native  # which has run, and tells as much
        copy_back(copies)
        return FinishedWork(call.results)

    def message(self, kind: str, tensors: Sequence[torch.Tensor], peer: int, tag: int, asked: Asked) -> Any:
        """The Work of a message: `kind` is "send", "recv" or "recv_anysource"."""
        arguments = (tensors, tag) if kind == "recv_anysource" else (tensors, peer, tag)
        copies: NewCopies = []
        memory = _memory_of(kind, arguments, copies, self._own)
        others = tuple(rank for number, rank in enumerate(self._ranks) if number != self._own)
        peers = others if kind == "recv_anysource" else (self._ranks[peer],)
        with self._turn:
            connection = self._current(asked)
            return connection.message(kind, memory, (tensors, copies), asked, peers)

    def refuse(self, error: Exception, asked: Asked) -> None:
        """Tells the others why this rank takes no part in the next collective, which counts as run."""
        if len(self._ranks) > 1:
            with self._turn:
                self._current(asked).refuse(error)

    def _connected(self, found: ProcessWorld, name: str) -> GlooConnection:
        with found.joining(name, tuple(sorted(self._ranks)), self._timeout) as context:
            return GlooConnection(context, self._ranks, self._own)


def _memory_of(kind: str, arguments: tuple[Any, ...], copies: NewCopies, own: int) -> tuple[Any, ...]:
    """The arguments as Gloo takes them, which looks at the memory of tensors and not at their strides."""
    if kind not in _CHANGED and _are_plain(arguments):
        return arguments
    root = getattr(arguments[-1], "rootRank", -1)
    is_only_read = (kind == "reduce" and own != root) or (kind == "broadcast" and own == root) or kind == "send"
    memory = staged(arguments, None if is_only_read else copies)
    if kind in _NOT_TAKEN_APART:
        memory = as_real(memory)
    return flattened(memory) if kind in _BY_ELEMENTS else memory


def _are_plain(found: Any) -> bool:
    """Whether all tensors of an argument, or of lists of them, are plain memory."""
    if isinstance(found, torch.Tensor):
        return is_plain(found)
    return not isinstance(found, list | tuple) or all(map(_are_plain, found))

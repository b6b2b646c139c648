"""The part of a process group whose ranks, all on one machine, read each other's memory: collectives on the CPU."""

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from tritondt.comm import world
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.transports.arenas import share_arenas
from tritondt.comm.transports.direct import DirectCommunicator
from tritondt.errors import WorldError
from tritondt.process_group import shared_memory_calls as calls
from tritondt.process_group.naming import op_name
from tritondt.process_group.shared_memory_calls import Members, flat
from tritondt.process_group.shared_memory_work import SharedMemoryWork

Move = Callable[[DirectCommunicator, Any], None]
_groups: "WeakSet[SharedMemoryGroup]" = WeakSet()


def _after_fork() -> None:
    for group in list(_groups):
        group.disown()


os.register_at_fork(after_in_child=_after_fork)


class Call(NamedTuple):
    """A collective: a key under which its exchanges are kept, how they are made, and what runs them."""

    key: Hashable
    make: Callable[[Members, str], Any]
    move: Move
    results: Sequence[torch.Tensor]


class SharedMemoryGroup:
    """One rank's part in a process group; `ranks` are the group's, as ranks of the world."""

    def __init__(self, name: str, ranks: tuple[int, ...], group_rank: int, timeout: timedelta) -> None:
        self._name, self._ranks, self._own, self.timeout = name, ranks, group_rank, timeout
        self._turn = threading.Lock()
        self._runner = 0  # the communicator's thread, while it runs what was issued and what follows from that
        self._world: ProcessWorld | None = None
        self._communicator: DirectCommunicator | None = None
        self._made: dict[Hashable, Any] = {}
        self._timeout_s = timeout.total_seconds()
        self._ended = ""
        _groups.add(self)

    def run(
        self, kind: str, describe: Callable[..., str], arguments: tuple[Any, ...], timeout_s: float
    ) -> SharedMemoryWork | None:
        """The Work of a collective, which has run unless it was asked for asynchronously; None where Gloo runs it."""
        find = _CALLS.get(kind)
        call = None if find is None else find(self._own, len(self._ranks), *arguments)
        if call is None:
            return None
        text = describe(*arguments)
        if threading.get_ident() == self._runner:  # a callback of a future, whose thread nobody else can have
            return self._put(call, text, timeout_s, is_async=False)
        with self._turn:
            return self._put(call, text, timeout_s, is_async=bool(getattr(arguments[-1], "asyncOp", True)))

    def _put(self, call: Call, text: str, timeout_s: float, *, is_async: bool) -> SharedMemoryWork | None:
        communicator = self._current(text)
        if communicator is None:
            return None
        work = SharedMemoryWork(text, call.results)
        move = partial(self._move, communicator, call, text, timeout_s)
        if is_async:
            communicator.issue(partial(self._run, work, move), text)
        else:
            communicator.in_order(partial(work.run, move), text)
            work.wait()
        return work

    def _run(self, work: SharedMemoryWork, move: Callable[[], None]) -> None:
        self._runner = threading.get_ident()
        try:
            work.run(move)
        finally:
            self._runner = 0

    def _move(self, communicator: DirectCommunicator, call: Call, text: str, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:
            communicator.set_timeout(timeout_s)
            self._timeout_s = timeout_s
        made = self._made.get(call.key)
        if made is None:
            members = Members(self._ranks, self._own, world.current().costs_for("cpu"))
            made = self._made[call.key] = call.make(members, text)
        call.move(communicator, made)

    def _current(self, text: str) -> DirectCommunicator | None:
        """The communicator, made by the first call of all ranks; None where they share no memory."""
        if self._ended:
            raise WorldError(f"{text} was asked of {self._name}, which {self._ended}; make a new one")
        if self._world is None or self._world.is_closed:
            found = world.current()
            if not isinstance(found, ProcessWorld):
                raise WorldError("a process group was used by a rank that is a thread; it connects processes")
            context = found.join(f"{self._name} in shared memory", tuple(sorted(self._ranks)), self.timeout)
            arenas = share_arenas(context)
            self._communicator = None if arenas is None else DirectCommunicator(context, arenas)
            self._world, self._timeout_s = found, self.timeout.total_seconds()
            self._made.clear()
            if self._communicator is not None:
                found.keep(self._name, _Part(self._communicator))
        return self._communicator

    def disown(self) -> None:
        """Closes this process's connections, which a fork copied: the others must notice when the parent dies."""
        self._turn, self._ended = threading.Lock(), "is the parent's of this process, which was forked from it"
        if self._communicator is not None:
            self._communicator.disown(WorldError(f"{self._name} {self._ended}"))

    def abort(self) -> None:
        """Ends the group without waiting for the others."""
        self._ended = "was aborted"
        if self._communicator is not None:
            self._communicator.abort()

    def close(self) -> None:
        """Waits for all that was issued, and ends the group."""
        self._ended = self._ended or "was destroyed"
        if self._communicator is not None:
            _Part(self._communicator).close()


class _Part:
    """A communicator that ends with its world without meeting the others: what it sent can be read without it."""

    def __init__(self, communicator: DirectCommunicator) -> None:
        self._communicator = communicator

    def close(self) -> None:
        """Waits for what was issued, and ends the communicator."""
        if self._communicator.is_usable:
            self._communicator.settle()
        self._communicator.abort()

    def abort(self) -> None:
        """Ends the communicator without the other ranks."""
        self._communicator.abort()

    def end_with_process(self, limit_s: float) -> None:
        """Ends the communicator with the process."""
        self._communicator.end_with_process(limit_s)


def _all_reduce(own: int, size: int, tensors: Sequence[torch.Tensor], opts: Any) -> Call | None:
    given = flat(tensors[0]) if len(tensors) == 1 else None
    if given is None or given.numel() == 0 or not calls.reduces(given.dtype, opts.reduceOp):
        return None
    numel, dtype, op = given.numel(), given.dtype, opts.reduceOp
    return Call(
        ("all_reduce", op_name(op), dtype, numel),
        lambda members, text: calls.all_reduce_transfers(members, numel, dtype, op, text),
        lambda communicator, transfers: calls.all_reduce(communicator, transfers, given),
        tensors,
    )


def _reduce_scatter_base(own: int, size: int, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Call | None:
    whole, part = flat(given), flat(output)
    if whole is None or part is None or whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        return None
    return _reduced_part(lambda: whole, part, size, opts, [output])


def _reduce_scatter(
    own: int, size: int, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
) -> Call | None:
    if len(outputs) != 1 or len(inputs) != 1 or len(inputs[0]) != size:
        return None
    part, given = flat(outputs[0]), [flat(tensor) for tensor in inputs[0]]
    if part is None or any(each is None or (each.numel(), each.dtype) != (part.numel(), part.dtype) for each in given):
        return None
    return _reduced_part(lambda: torch.cat(given), part, size, opts, outputs)  # type: ignore[arg-type]


def _reduced_part(
    whole: Callable[[], torch.Tensor], part: torch.Tensor, size: int, opts: Any, results: Sequence[torch.Tensor]
) -> Call | None:
    numel, dtype, op = part.numel() * size, part.dtype, opts.reduceOp
    if numel == 0 or not calls.reduces(dtype, op):
        return None

    def move(communicator: DirectCommunicator, transfers: Any) -> None:
        reduced = torch.empty_like(part)  # the part may lie in what is read
        communicator.exchange([whole()], [reduced], transfers[0])
        part.copy_(reduced)

    return Call(
        ("reduce_scatter", op_name(op), dtype, numel),
        lambda members, text: calls.reduce_scatter_transfers(members, numel, dtype, op, text),
        move,
        results,
    )


def _all_gather_base(own: int, size: int, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Call | None:
    whole = flat(output)
    if whole is None or whole.numel() != given.numel() * size:
        return None
    return _gathered(own, [given], list(whole.chunk(size)) if whole.numel() else [], [output])


def _all_gather(
    own: int, size: int, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
) -> Call | None:
    if len(outputs) != 1 or len(inputs) != 1 or len(outputs[0]) != size:
        return None
    found = [flat(tensor) for tensor in outputs[0]]
    if any(each is None for each in found):
        return None
    return _gathered(own, inputs, found, outputs[0])  # type: ignore[arg-type]


def _gathered(
    own: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> Call | None:
    given = flat(inputs[0])
    if given is None or not outputs or any(each.dtype != given.dtype for each in outputs):
        return None
    sent, written = given.view(torch.uint8), [each.view(torch.uint8) for each in outputs]
    sizes = tuple(each.numel() for each in written)
    if sizes[own] != sent.numel() or not any(sizes):
        return None
    return Call(
        ("all_gather", sizes),
        lambda members, text: calls.all_gather_transfer(members, sizes, text),
        lambda communicator, transfer: communicator.exchange([sent] * len(written), written, transfer),
        results,
    )


def _broadcast(own: int, size: int, tensors: Sequence[torch.Tensor], opts: Any) -> Call | None:
    given = flat(tensors[0]) if len(tensors) == 1 else None
    root = opts.rootRank
    if given is None or given.numel() == 0 or not 0 <= root < size or opts.rootTensor != 0:
        return None
    moved = given.view(torch.uint8)
    return Call(
        ("broadcast", root, moved.numel()),
        lambda members, text: calls.broadcast_transfer(members, moved.numel(), root, text),
        lambda communicator, transfer: communicator.exchange([moved], [moved], transfer),
        tensors,
    )


def _barrier(own: int, size: int, opts: Any) -> Call:
    call = _gathered(own, [torch.zeros(1, dtype=torch.uint8)], list(torch.zeros(size, 1, dtype=torch.uint8)), [])
    assert call is not None, "a byte of each rank is gathered"
    return call._replace(key="barrier")


# By the name of the method of torch's group over Gloo; what is not here runs on Gloo.
_CALLS: dict[str, Callable[..., Call | None]] = {
    "allreduce": _all_reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "_allgather_base": _all_gather_base,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_base,
    "barrier": _barrier,
}

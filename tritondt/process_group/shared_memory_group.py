"""The part of a process group whose ranks, all on one machine, read each other's memory: collectives on the CPU."""

import os
import threading
from collections.abc import Callable, Hashable
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

from tritondt.comm import world
from tritondt.comm.packing.arena_transfer import ProgramTransfer
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.transports.arenas import map_arenas
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator
from tritondt.errors import ForkedError, WorldError
from tritondt.planning.exchange import Exchange
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.process_group.cpu_works import FinishedWork, SharedMemoryWork
from tritondt.process_group.shared_memory_moves import MOVES, no_moves
from tritondt.process_group.shared_memory_programs import Members
from tritondt.process_group.shared_memory_reductions import REDUCTIONS
from tritondt.process_group.shared_memory_steps import Call, Step
from tritondt.process_group.staging import copy_back

# By the name of the method of torch's group over Gloo; what is not here runs on Gloo.
_CALLS = {**MOVES, **REDUCTIONS}
# Memory of a rank in a group: two slots that hold a chunk for each of 15 others, and shorter ones for more.
_ARENA_BYTES = 16 << 20
# Programs that are kept, the latest ones: some kilobytes each.
_MOST_PROGRAMS = 1024
_NOTHING = Exchange((), (), ())
_groups: "WeakSet[SharedMemoryGroup]" = WeakSet()


def _after_fork() -> None:
    for group in list(_groups):
        group.disown()


os.register_at_fork(after_in_child=_after_fork)


class SharedMemoryGroup:
    """One rank's part in a process group; `ranks` are the group's, as ranks of the world."""

    def __init__(self, name: str, ranks: tuple[int, ...], group_rank: int, timeout: timedelta) -> None:
        self._name, self._ranks, self._own, self.timeout = name, ranks, group_rank, timeout
        self._size = len(ranks)
        self._turn = threading.Lock()
        self._runner = 0  # the thread that runs what was issued, and what follows from that
        self._world: ProcessWorld | None = None
        self._communicator: SharedMemoryCommunicator | None = None
        self._made: dict[Hashable, ProgramTransfer] = {}
        self._timeout_s = timeout.total_seconds()
        self._ended = ""
        _groups.add(self)

    def run(self, kind: str, describe: Callable[..., str], arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """The Work of a collective, which has run unless it was asked for asynchronously; None where Gloo runs it."""
        find = _CALLS.get(kind)
        call = None if find is None else find(self._own, self._size, *arguments)
        if call is None:
            return None
        return self._run_call(call, partial(describe, *arguments), arguments[-1], timeout_s)

    def pass_by(self, describe: Callable[..., str], arguments: tuple[Any, ...], timeout_s: float) -> None:
        """Counts a collective in which this rank has no elements, and so no messages.

        Ranks that have some, against the rules, find out in what follows: else they would take that for this one.
        """
        text = describe(*arguments)
        nothing = Call((Step((no_moves, text), (), ()),), ())
        self._run_call(nothing, lambda: text, arguments[-1], timeout_s)

    def _run_call(self, call: Call, text: Callable[[], str], options: Any, timeout_s: float) -> Any:
        if threading.get_ident() == self._runner:  # a callback of a future, while its thread runs the queue
            return self._run_now(call, text, timeout_s)
        is_async = getattr(options, "asyncOp", True)
        with self._turn:
            return self._issue(call, text, timeout_s) if is_async else self._run_now(call, text, timeout_s)

    def refuse(self, error: Exception, text: str) -> None:
        """Tells the others why this rank takes no part in the next collective, which counts as run."""
        with self._turn:
            communicator = self._current(lambda: text)
            if communicator is not None and communicator.is_usable:
                communicator.refuse(error)

    def _run_now(self, call: Call, text: Callable[[], str], timeout_s: float) -> FinishedWork | None:
        communicator = self._current(text)
        if communicator is None:
            return None
        if len(call.steps) == 1 and timeout_s == self._timeout_s and not communicator.has_queued:
            # What follows does, in the calls that small collectives need: their time is that of Python.
            (step,) = call.steps
            transfer = self._transfer(communicator, step.key, step, text)
            communicator.exchange(step.sources, step.targets, transfer)
            if step.copies:
                _copy(call)
            return FinishedWork(call.results)
        transfers = self._transfers(communicator, call, text)
        communicator.drain()  # what is under way has the timeout that it was issued with, and sets it when it runs
        move = partial(self._move, communicator, call, transfers, timeout_s)
        communicator.in_order(move, transfers[0].description)
        return FinishedWork(call.results)

    def _issue(self, call: Call, text: Callable[[], str], timeout_s: float) -> SharedMemoryWork | None:
        communicator = self._current(text)
        if communicator is None:
            return None
        transfers = self._transfers(communicator, call, text)
        work = SharedMemoryWork(transfers[0].description, call.results)
        move = partial(self._move, communicator, call, transfers, timeout_s)
        work.issued = communicator.issue(partial(self._run, work, move), transfers[0].description)
        return work

    def _transfers(
        self, communicator: SharedMemoryCommunicator, call: Call, text: Callable[[], str]
    ) -> list[ProgramTransfer]:
        # Of several steps the text is all of theirs, which the keys do not say.
        texts = (text(),) if len(call.steps) > 1 else ()
        return [self._transfer(communicator, (*step.key, *texts), step, text) for step in call.steps]

    def _run(self, work: SharedMemoryWork, move: Callable[[], None]) -> None:
        outer, self._runner = self._runner, threading.get_ident()  # an outer one where a callback waits for this
        try:
            work.run(move)
        finally:
            self._runner = outer

    def _move(
        self, communicator: SharedMemoryCommunicator, call: Call, transfers: list[ProgramTransfer], timeout_s: float
    ) -> None:
        if timeout_s != self._timeout_s:
            communicator.set_timeout(timeout_s)
            self._timeout_s = timeout_s
        for step, transfer in zip(call.steps, transfers, strict=True):
            communicator.exchange(step.sources, step.targets, transfer)
        _copy(call)

    def _transfer(
        self, communicator: SharedMemoryCommunicator, key: Hashable, step: Step, text: Callable[[], str]
    ) -> ProgramTransfer:
        """The program of a step, made where it has not been lately."""
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= _MOST_PROGRAMS:
                del self._made[next(iter(self._made))]
            description = text()
            places = tuple(communicator.ranks.index(rank) for rank in self._ranks)
            fingerprint = exchange_fingerprint(f"{description} {self._ranks}")
            plan = step.program(Members(places, self._own, communicator.slot_bytes, communicator.num_cores))
            found = ProgramTransfer(_NOTHING, (), (), (), (), fingerprint, description, plan=plan)
            self._made[key] = found
        return found

    def _current(self, text: Callable[[], str]) -> SharedMemoryCommunicator | None:
        """The communicator, made by the first call of all ranks; None where they share no memory."""
        if self._ended:
            raise WorldError(f"{text()} was asked of {self._name}, which {self._ended}; make a new one")
        if self._world is None or self._world.is_closed:
            found = world.current()
            if not isinstance(found, ProcessWorld):
                raise WorldError("a process group was used by a rank that is a thread; it connects processes")
            name, ranks = f"{self._name} in shared memory", tuple(sorted(self._ranks))
            with found.joining(name, ranks, self.timeout) as context:
                arenas = map_arenas(context, "collectives go over Gloo", _ARENA_BYTES)
                self._communicator = None if arenas is None else SharedMemoryCommunicator(context, arenas)
            self._world, self._timeout_s = found, self.timeout.total_seconds()
            self._made.clear()
            if self._communicator is not None:
                found.keep(self._name, _Part(self._communicator))
        return self._communicator

    def disown(self) -> None:
        """Closes this process's connections, which a fork copied: the others must notice when the parent dies."""
        self._turn, self._ended = threading.Lock(), "is the parent's of this process, which was forked from it"
        if self._communicator is not None:
            self._communicator.disown(ForkedError(f"{self._name} {self._ended}"))

    def abort(self) -> None:
        """Ends the group without waiting for the others."""
        self._ended = self._ended or "was aborted"
        if self._communicator is not None:
            self._communicator.abort()
        self._forget()

    def close(self) -> None:
        """Waits for all that was issued, and ends the group."""
        self._ended = self._ended or "was destroyed"
        if self._communicator is not None:
            _Part(self._communicator).close()
        self._forget()

    def _forget(self) -> None:
        """Lets go of what has ended: a program may make and destroy groups for as long as its world lasts."""
        if self._world is not None:
            self._world.forget(self._name)


def _copy(call: Call) -> None:
    """Copies what is not written in place, after all exchanges."""
    for step in call.steps:
        copy_back(step.copies)


class _Part:
    """A communicator that ends with its world without meeting the others: what it sent can be read without it."""

    def __init__(self, communicator: SharedMemoryCommunicator) -> None:
        self._communicator = communicator

    def close(self) -> None:
        """Waits for what was issued, and ends the communicator."""
        if self._communicator.is_usable:
            self._communicator.settle()
        self._communicator.abort()
        self._communicator.release()

    def abort(self) -> None:
        """Ends the communicator without the other ranks."""
        self._communicator.abort()

    def end_with_process(self, limit_s: float) -> None:
        """Ends the communicator with the process."""
        self._communicator.end_with_process(limit_s)

"""The part of a process group that carries tensors on the CPU: through shared memory, or over sockets."""

import os
import threading
from collections.abc import Callable, Hashable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

from tritondt.comm import world
from tritondt.comm.packing.arena_transfer import ProgramTransfer
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.store import presence
from tritondt.comm.transports import table as transport_table
from tritondt.comm.transports.arenas import share_arenas
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator
from tritondt.comm.transports.sockets import SocketCommunicator
from tritondt.errors import ForkedError, WorldError
from tritondt.planning.exchange import Exchange
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.process_group import shared_memory_programs, socket_programs
from tritondt.process_group.collective import Collective, nothing
from tritondt.process_group.cpu_collectives import Asked, Call, Step
from tritondt.process_group.cpu_works import FinishedWork, QueuedCollective
from tritondt.process_group.shared_memory_programs import Members
from tritondt.process_group.staging import as_bytes, copy_back

# Memory of a rank in a group: two slots that hold a chunk for each of 15 others, and shorter ones for more.
_ARENA_BYTES = 16 << 20
# Programs that are kept, the latest ones: some kilobytes each.
_MOST_PROGRAMS = 1024
_NOTHING = Exchange((), (), ())
_groups: "WeakSet[CpuGroup]" = WeakSet()


def _after_fork() -> None:
    for group in list(_groups):
        group.disown()


os.register_at_fork(after_in_child=_after_fork)


class _Part(NamedTuple):
    """One exchange of a step; it sends what an earlier one has written where it `reads_targets`."""

    transfer: ProgramTransfer
    reads_targets: bool


class CpuGroup:
    """One rank's part in a process group; `ranks` are the group's, as ranks of the world."""

    def __init__(self, name: str, ranks: tuple[int, ...], group_rank: int, timeout: timedelta) -> None:
        self._name, self._ranks, self._own, self.timeout = name, ranks, group_rank, timeout
        self._size = len(ranks)
        self._turn = threading.Lock()
        self._runner = 0  # the thread that runs what was issued, and what follows from that
        self._world: ProcessWorld | None = None
        self._communicator: SocketCommunicator | None = None
        self._made: dict[Hashable, list[_Part]] = {}
        self._timeout_s = timeout.total_seconds()
        self._ended = ""
        _groups.add(self)

    def run(self, call: Call, asked: Asked, timeout_s: float, *, is_async: bool) -> Any:
        """The Work of a collective, which has run unless it was asked for asynchronously."""
        if self._size == 1:
            self._check_open(asked)
            run_alone(call, self._own, self._size)
            return FinishedWork(call.results)
        if not call.steps:  # counted: ranks that have elements, against the rules, would take the next for this one
            call = call._replace(steps=(Step((nothing, str(asked)), (), ()),))
        if threading.get_ident() == self._runner:  # a callback of a future, while its thread runs the queue
            return self._run_now(call, asked, timeout_s)
        with self._turn:
            return self._issue(call, asked, timeout_s) if is_async else self._run_now(call, asked, timeout_s)

    def refuse(self, error: Exception, asked: Asked) -> None:
        """Tells the others why this rank takes no part in the next collective, which counts as run."""
        if self._size == 1:
            return
        with self._turn:
            communicator = self._current(asked)
            if communicator.is_usable:
                communicator.refuse(error)

    def _run_now(self, call: Call, asked: Asked, timeout_s: float) -> FinishedWork:
        communicator = self._current(asked)
        if len(call.steps) == 1 and timeout_s == self._timeout_s and not communicator.has_queued:
            # What follows does, in the calls that small collectives need: their time is that of Python.
            (step,) = call.steps
            parts = self._parts(communicator, step.key, step, asked)
            if len(parts) == 1:
                communicator.exchange(step.sources, step.targets, parts[0].transfer)
                if step.copies:
                    _copy(call)
                return FinishedWork(call.results)
        parts_of_steps = self._parts_of_steps(communicator, call, asked)
        communicator.drain()  # what is under way has the timeout that it was issued with, and sets it when it runs
        move = partial(self._move, communicator, call, parts_of_steps, timeout_s)
        communicator.in_order(move, parts_of_steps[0][0].transfer.description)
        return FinishedWork(call.results)

    def _issue(self, call: Call, asked: Asked, timeout_s: float) -> QueuedCollective:
        communicator = self._current(asked)
        parts_of_steps = self._parts_of_steps(communicator, call, asked)
        description = parts_of_steps[0][0].transfer.description
        work = QueuedCollective(description, call.results)
        move = partial(self._move, communicator, call, parts_of_steps, timeout_s)
        work.issued = communicator.issue(partial(self._run, work, move), description)
        return work

    def _parts_of_steps(self, communicator: SocketCommunicator, call: Call, asked: Asked) -> list[list[_Part]]:
        # Of several steps the text is all of theirs, which the keys do not say.
        texts = (str(asked),) if len(call.steps) > 1 else ()
        return [self._parts(communicator, (*step.key, *texts), step, asked) for step in call.steps]

    def _run(self, work: QueuedCollective, move: Callable[[], None]) -> None:
        outer, self._runner = self._runner, threading.get_ident()  # an outer one where a callback waits for this
        try:
            work.run(move)
        finally:
            self._runner = outer

    def _move(
        self, communicator: SocketCommunicator, call: Call, parts_of_steps: list[list[_Part]], timeout_s: float
    ) -> None:
        if timeout_s != self._timeout_s:
            communicator.set_timeout(timeout_s)
            self._timeout_s = timeout_s
        for step, parts in zip(call.steps, parts_of_steps, strict=True):
            for transfer, reads_targets in parts:
                communicator.exchange(step.targets if reads_targets else step.sources, step.targets, transfer)
        _copy(call)

    def _parts(self, communicator: SocketCommunicator, key: Hashable, step: Step, asked: Asked) -> list[_Part]:
        """The exchanges of a step, made where they have not been lately."""
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= _MOST_PROGRAMS:
                del self._made[next(iter(self._made))]
            found = self._made[key] = self._compiled(communicator, step.collective(self._own, self._size), str(asked))
        return found

    def _compiled(self, communicator: SocketCommunicator, collective: Collective, description: str) -> list[_Part]:
        places = tuple(communicator.ranks.index(rank) for rank in self._ranks)
        fingerprint = exchange_fingerprint(f"{description} {self._ranks}")

        def part(plan: Any, number: int = 0, *, reads_targets: bool = False) -> _Part:
            transfer = ProgramTransfer(_NOTHING, (), (), (), (), fingerprint + number, description, plan=plan)
            return _Part(transfer, reads_targets)

        if isinstance(communicator, SharedMemoryCommunicator):
            members = Members(places, communicator.slot_bytes, communicator.num_cores)
            return [part(shared_memory_programs.compiled(collective, members))]
        return [
            part(exchange.plan, number, reads_targets=exchange.reads_targets)
            for number, exchange in enumerate(socket_programs.compiled(collective, places))
        ]

    def _check_open(self, asked: Asked) -> None:
        if self._ended:
            raise WorldError(f"{asked} was asked of {self._name}, which {self._ended}; make a new one")

    def _current(self, asked: Asked) -> SocketCommunicator:
        """The communicator, made by the first call of all ranks."""
        self._check_open(asked)
        if self._world is None or self._world.is_closed or self._communicator is None:
            found = world.current()
            if not isinstance(found, ProcessWorld):
                raise WorldError("a process group was used by a rank that is a thread; it connects processes")
            name, ranks = f"{self._name}{presence.PART_OF_GROUP}the CPU", tuple(sorted(self._ranks))
            with found.joining(name, ranks, self.timeout) as context:
                asks = transport_table.chosen("cpu").groups_share_memory
                arenas = share_arenas(context, "collectives go over sockets", _ARENA_BYTES, asks_for_arenas=asks)
                made = SocketCommunicator(context) if arenas is None else SharedMemoryCommunicator(context, arenas)
            self._communicator, self._world, self._timeout_s = made, found, self.timeout.total_seconds()
            self._made.clear()
            found.keep(self._name, _Member(made))
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
            _Member(self._communicator).close()
        self._forget()

    def _forget(self) -> None:
        """Lets go of what has ended: a program may make and destroy groups for as long as its world lasts."""
        if self._world is not None:
            self._world.forget(self._name)


def _copy(call: Call) -> None:
    """Copies what is not written in place, after all exchanges."""
    for step in call.steps:
        copy_back(step.copies)


def run_alone(call: Call, own: int, size: int) -> None:
    """Runs a collective of one rank, or of steps that are none: what it sends itself is there."""
    for step in call.steps:
        described = step.collective(own, size)
        for (source, start, num_bytes), (target, first, _) in described.keeps:
            sent = as_bytes(step.sources[source])[start : start + num_bytes]
            as_bytes(step.targets[target])[first : first + num_bytes].copy_(sent)
    _copy(call)


class _Member:
    """A communicator that ends with its world without meeting the others: what it sent can be read without it."""

    def __init__(self, communicator: SocketCommunicator) -> None:
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

"""The part of a process group that carries tensors on the CPU: through shared memory, or over sockets."""

import threading
from collections.abc import Callable, Hashable
from datetime import timedelta
from functools import partial
from typing import Any

from tritondt.comm.process_world import ProcessWorld
from tritondt.process_group import levels
from tritondt.process_group.collective import nothing
from tritondt.process_group.cpu_collectives import Asked, Call, Step, run_alone, write_copies
from tritondt.process_group.cpu_works import FinishedWork, QueuedCollective
from tritondt.process_group.group_on_cpu import GroupOnCpu
from tritondt.process_group.levels import Levels, Program

# Programs that are kept, the latest ones: some kilobytes each.
_MOST_PROGRAMS = 1024


class CpuGroup(GroupOnCpu[Levels]):
    """One rank's part in a process group; `ranks` are the group's, as ranks of the world."""

    def __init__(self, name: str, ranks: tuple[int, ...], group_rank: int, timeout: timedelta) -> None:
        super().__init__(name, ranks, group_rank, timeout)
        self._size = len(ranks)
        self._runner = 0  # the thread that runs what was issued, and what follows from that
        self._made: dict[Hashable, Program] = {}
        self._timeout_s = timeout.total_seconds()

    def run(self, _kind: str, call: Call, asked: Asked, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """The Work of a collective, which has run unless the options, `arguments`' last, ask for it asynchronously."""
        if self._size == 1:
            self._check_open(asked)
            run_alone(call, self._own, self._size)
            return FinishedWork(call.results)
        if not call.steps:  # counted: ranks that have elements, against the rules, would take the next for this one
            call = call._replace(steps=(Step((nothing, str(asked)), (), ()),))
        if threading.get_ident() == self._runner:  # a callback of a future, while its thread runs the queue
            return self._run_now(call, asked, timeout_s)
        is_async = getattr(arguments[-1], "asyncOp", True)
        with self._turn:
            return self._issue(call, asked, timeout_s) if is_async else self._run_now(call, asked, timeout_s)

    def refuse(self, error: Exception, asked: Asked) -> None:
        """Tells the others why this rank takes no part in the next collective, which counts as run."""
        if self._size == 1:
            return
        if threading.get_ident() == self._runner:  # in a callback, whose thread may have the turn
            self._refuse_now(error, asked)
            return
        with self._turn:
            self._refuse_now(error, asked)

    def _refuse_now(self, error: Exception, asked: Asked) -> None:
        found = self._current(asked)
        if found.whole.is_usable:
            found.refuse(error)

    def _run_now(self, call: Call, asked: Asked, timeout_s: float) -> FinishedWork:
        found = self._current(asked)
        communicator = found.whole
        if len(call.steps) == 1 and timeout_s == self._timeout_s and not communicator.has_queued:
            # What follows does, in the calls that small collectives need: their time is that of Python.
            (step,) = call.steps
            program = self._program(found, step.key, step, asked)
            if len(program.parts) == 1 and not found.is_numbered:
                communicator.exchange(step.sources, step.targets, program.parts[0].transfer)
                if step.copies:
                    write_copies(call)
                return FinishedWork(call.results)
        programs = self._programs(found, call, asked)
        communicator.drain()  # what is under way has the timeout that it was issued with, and sets it when it runs
        move = partial(self._move, found, call, programs, timeout_s)
        communicator.in_order(move, programs[0].description)
        return FinishedWork(call.results)

    def _issue(self, call: Call, asked: Asked, timeout_s: float) -> QueuedCollective:
        found = self._current(asked)
        programs = self._programs(found, call, asked)
        work = QueuedCollective(programs[0].description, call.results)
        move = partial(self._move, found, call, programs, timeout_s)
        work.issued = found.whole.issue(partial(self._run, work, move), work.text)
        return work

    def _programs(self, found: Levels, call: Call, asked: Asked) -> list[Program]:
        # Of several steps the text is all of theirs, which the keys do not say.
        texts = (str(asked),) if len(call.steps) > 1 else ()
        return [self._program(found, (*step.key, *texts), step, asked) for step in call.steps]

    def _run(self, work: QueuedCollective, move: Callable[[], None]) -> None:
        outer, self._runner = self._runner, threading.get_ident()  # an outer one where a callback waits for this
        try:
            work.run(move)
        finally:
            self._runner = outer

    def _move(self, found: Levels, call: Call, programs: list[Program], timeout_s: float) -> None:
        if timeout_s != self._timeout_s:
            found.set_timeout(timeout_s)
            self._timeout_s = timeout_s
        for step, program in zip(call.steps, programs, strict=True):
            found.run(step.sources, step.targets, program)
        write_copies(call)

    def _program(self, found: Levels, key: Hashable, step: Step, asked: Asked) -> Program:
        """The exchanges of a step, made where they have not been lately."""
        program = self._made.get(key)
        if program is None:
            if len(self._made) >= _MOST_PROGRAMS:
                del self._made[next(iter(self._made))]
            num_tensors = len(step.sources), len(step.targets)
            described = step.collective(self._own, self._size)
            program = self._made[key] = found.compiled(described, num_tensors, str(asked))
        return program

    def _connected(self, found: ProcessWorld, name: str) -> Levels:
        made = levels.connect(found, name, self._ranks, self._own, self.timeout)
        self._timeout_s = self.timeout.total_seconds()
        self._made.clear()
        return made

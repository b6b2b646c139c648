"""Recording of a process's operators, exchanges, collectives and waits.

Steps of exchanges are the extension's to note, which does so while `StepTimes` listens. Operators, collectives and
waits are recorded by functions that stand in for those of their classes while a recording is on; nothing is looked up,
or called, while it is off.

recording = Recording()
recording.begin()
...
recording.end()
record = recording.record(rank, num_ranks)
"""

import functools
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic_ns
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from tritondt._C import StepTimes, record_calls
from tritondt.comm.communicator import Transfer
from tritondt.comm.transports import threads
from tritondt.comm.transports.ordered import OrderedCommunicator
from tritondt.comm.work import Work
from tritondt.debug.tracing.exchanges import Exchange, exchanges_of
from tritondt.debug.tracing.explanations import Compiled, explained
from tritondt.debug.tracing.record import RankRecord, Redistribution, Span
from tritondt.dtensor.tensor import DTensor
from tritondt.dtensor.views.copied_views import copied_view_class
from tritondt.process_group.router import Router
from tritondt.process_group.work import NcclWork
from tritondt.redistribution import compile as compiling
from tritondt.redistribution.compile import costs_of, hosts_of
from tritondt.redistribution.compiled_step import CompiledPlan
from tritondt.sharding.spec import DTensorSpec

# A span takes 140 bytes here, and 100 in the file.
MOST_SPANS = 2_000_000
_SPAN_VALUES = len(Span._fields)

_eval_frame: Any = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameAction.SKIP


class _Layers:
    """A function of a class, and what recordings have put over it.

    Rank threads that record each for itself end in any order, so the function is made anew at each beginning and end:
    restoring what a recording had found would leave another one's layer in place forever, 2 kB a step.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._found, self._below = owner.__dict__[name], getattr(owner, name)
        self.layers: list[Callable[[Any], Any]] = []  # the innermost first

    def rebuild(self) -> None:
        function = functools.reduce(lambda below, layer: layer(below), self.layers, self._below)
        if not self.layers:
            function = self._found
        elif isinstance(self._found, staticmethod):
            function = staticmethod(function)
        setattr(self._owner, self._name, function)


# Of functions that recordings are on for.
_layers: dict[tuple[Any, str], _Layers] = {}
_layers_held = threading.Lock()


def _put_over(owner: Any, name: str, layer: Callable[[Any], Any]) -> None:
    with _layers_held:
        found = _layers.setdefault((owner, name), _Layers(owner, name))
        found.layers.append(layer)
        found.rebuild()


def _take_away(owner: Any, name: str, layer: Callable[[Any], Any]) -> None:
    with _layers_held:
        found = _layers[owner, name]
        found.layers.remove(layer)
        found.rebuild()
        if not found.layers:
            del _layers[owner, name]


class Recording:
    """Recording of this process; where ranks are threads of it, of all of them.

    Where ranks are threads, `begin` comes before their first communicator, by which they are told apart.
    """

    def __init__(self) -> None:
        self._spans: list[Any] = []  # kind, subject, start, end and thread of each
        self._marks: list[tuple[int, int, bool]] = []  # time, thread, whether the program itself has set it
        self._plans: dict[Transfer, Compiled] = {}
        self._exchanges: list[Exchange] = []
        self._threads: dict[int, int] = {}  # rank of each thread that is one, or has exchanged
        self._undo: list[Callable[[], object]] = []
        self._dropped = 0

    def begin(self) -> None:
        """Puts the functions that record in the places of those that do not."""
        compiling.compile_plan.cache_clear()  # so that all that is compiled is heard of
        self._append_to(threads.on_started, self._note_rank)
        self._append_to(compiling.on_compiled, self._keep_plan)
        for tensor_class in (DTensor, copied_view_class(DTensor)):
            self._put_over(tensor_class, "__torch_dispatch__", self._dispatch_of)
        for name in ("run", "message"):
            self._put_over(Router, name, self._collective_of)
        for work in (c10d.Work, NcclWork):
            self._put_over(work, "wait", self._wait_of)
        self._put_over(Work, "wait", self._own_wait_of)
        self._put_over(OrderedCommunicator, "in_order", self._in_order_of)
        steps = StepTimes(MOST_SPANS)
        self._undo.append(lambda: self._take(steps))
        self._undo.append(register_optimizer_step_post_hook(self._after_optimizer).remove)
        record_calls(True)
        self._undo.append(lambda: record_calls(False))
        _active.append(self)

    def end(self) -> None:
        """Puts everything back as it was."""
        if self in _active:
            _active.remove(self)
        while self._undo:
            self._undo.pop()()

    def record(self, rank: int, num_ranks: int, failure: str = "") -> RankRecord:
        """The record of a rank: all of this process, where its ranks are no threads that share it."""
        shared = len(set(self._threads.values())) > 1
        own = {thread for thread, number in self._threads.items() if number == rank}

        def is_own(thread: int) -> bool:
            return not shared or thread in own

        exchanges = [found for found in self._exchanges if not shared or found.rank == rank]
        spans = [
            Span(kind, str(subject), start, end, thread)
            for kind, subject, start, end, thread in _rows(self._spans, _SPAN_VALUES)
            if is_own(thread)
        ]
        spans += (span for found in exchanges for span in found.spans)
        queues = {found.thread for found in exchanges if found.is_queued}
        asked = [time for time, thread, by_program in self._marks if is_own(thread) and by_program]
        return RankRecord(
            rank=rank,
            num_ranks=num_ranks,
            host=_boot_id(),
            process=os.getpid(),
            spans=spans,
            sends=[message for found in exchanges for message in found.sends],
            receives=[message for found in exchanges for message in found.receives],
            redistributions=self._redistributions({found.name: found.site for found in reversed(exchanges)}, rank),
            program_threads=sorted({span.thread for span in spans} - queues),
            marks_ns=asked or [time for time, thread, _ in self._marks if is_own(thread)],
            dropped=self._dropped,
            failure=failure,
        )

    def mark_step(self, by_program: bool = True) -> None:
        """Notes the end of a step of the calling thread."""
        self._marks.append((monotonic_ns(), threading.get_ident(), by_program))

    def _after_optimizer(self, *_: Any) -> None:
        self.mark_step(by_program=False)

    def _append_to(self, hooks: list[Any], hook: Callable[..., object]) -> None:
        hooks.append(hook)
        self._undo.append(lambda: hooks.remove(hook))

    def _put_over(self, owner: Any, name: str, layer: Callable[[Any], Any]) -> None:
        _put_over(owner, name, layer)
        self._undo.append(lambda: _take_away(owner, name, layer))

    def _adder(self) -> Callable[[str, Any, int], int]:
        """Function that adds a span of the calling thread, until now, and returns its end; bound, for it runs often."""
        spans, now, ident, most = self._spans, monotonic_ns, threading.get_ident, MOST_SPANS * _SPAN_VALUES
        extend = spans.extend

        def add(kind: str, subject: Any, started: int) -> int:
            ended = now()
            if len(spans) < most:
                extend((kind, subject, started, ended, ident()))
            else:
                self._dropped += 1
            return ended

        return add

    def _note_rank(self, rank: int) -> None:
        self._threads[threading.get_ident()] = rank

    def _take(self, steps: StepTimes) -> None:
        """Takes what the extension has noted."""
        steps.close()
        self._exchanges = exchanges_of(steps)
        self._dropped += steps.num_dropped
        self._threads.update((found.thread, found.rank) for found in self._exchanges)

    def _dispatch_of(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        """Dispatch of a tensor class, recorded; without a call of its own, for this runs for every operator."""
        spans, now, ident, most = self._spans, monotonic_ns, threading.get_ident, MOST_SPANS * _SPAN_VALUES
        extend = spans.extend

        def recorded(op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            started = now()
            try:
                return dispatch(op, types, args, kwargs)
            finally:
                if len(spans) < most:
                    extend(("op", op, started, now(), ident()))
                else:
                    self._dropped += 1

        # As for dispatch itself (dtensor/wiring.py): torch.compile is not to look into it where a graph breaks.
        _eval_frame.set_code_exec_strategy(recorded.__code__, _eval_frame._FrameExecStrategy(_SKIP, _SKIP))
        return recorded

    def _collective_of(self, run: Callable[..., Any]) -> Callable[..., Any]:
        add = self._adder()

        def recorded(router: Router, kind: Any, *arguments: Any) -> Any:
            started = monotonic_ns()
            try:
                return run(router, kind, *arguments)
            finally:
                add("collective", getattr(kind, "gloo", kind), started)

        return recorded

    def _wait_of(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        add = self._adder()

        def recorded(work: Any, *arguments: Any, **named: Any) -> Any:
            started = monotonic_ns()
            try:
                return wait(work, *arguments, **named)
            finally:
                add("wait", "a collective of torch.distributed", started)

        return recorded

    def _keep_plan(
        self, source: DTensorSpec, target: DTensorSpec, wire_dtype: torch.dtype | None, plan: CompiledPlan
    ) -> None:
        found = Compiled(source, target, wire_dtype, costs_of(source), hosts_of(source, target, wire_dtype))
        for step in plan.steps:
            if step.transfer is not None and step.communicator is not None:
                self._plans[step.transfer] = found

    def _own_wait_of(self, wait: Callable[[Work], None]) -> Callable[[Work], None]:
        add = self._adder()

        def recorded(work: Work) -> None:
            if work._finished:
                wait(work)
                return
            started = monotonic_ns()
            try:
                wait(work)
            finally:
                add("wait", work.description, started)

        return recorded

    def _in_order_of(self, in_order: Callable[..., None]) -> Callable[..., None]:
        add = self._adder()

        def recorded(communicator: OrderedCommunicator, run: Any, description: str) -> None:
            started = monotonic_ns()
            try:
                in_order(communicator, run, description)
            finally:
                add("redistribution", description, started)

        return recorded

    def _redistributions(self, sites: dict[str, str], rank: int) -> dict[str, Redistribution]:
        """Facts about exchanges by their names; `sites` are the lines of the program that asked for them."""
        found = {name: Redistribution(site) for name, site in sites.items()}
        for transfer, compiled in self._plans.items():
            if transfer.description in sites and compiled.source.mesh.identity.rank == rank:
                found[transfer.description] = explained(compiled, sites[transfer.description])
        return found


# Recordings that are on; several where rank threads record each for itself.
_active: list[Recording] = []


def mark_step() -> None:
    """Marks the end of a training step for `python -m tritondt trace`; does nothing without a trace.

    Not a collective call, but all ranks should call it. Without it, every call of an optimizer's `step` ends a step of
    the summary.

    >>> mark_step()
    """
    for recording in _active:
        recording.mark_step()


def _rows(values: Sequence[Any], width: int) -> Iterator[tuple[Any, ...]]:
    """Rows of so many values each; a tuple for each span would be one more object for the garbage collector to visit.

    >>> list(_rows([1, 2, 3, 4], 2))
    [(1, 2), (3, 4)]
    """
    columns = iter(values)
    return zip(*[columns] * width, strict=True)


def _boot_id() -> str:
    """A text that is equal in processes that read one clock: the name of this start of the machine, else its name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return platform.node()

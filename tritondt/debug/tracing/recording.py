"""Recording of a process's operators, exchanges, collectives and waits, by functions that stand in for others while it
is on; nothing is looked up, or called, while it is off.

recording = Recording(rank, num_ranks)
recording.begin()
...
record = recording.end()
"""

import os
import platform
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, cast

import torch
from torch._C import _distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from tritondt._C import record_calls
from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.messages import MessageBuffers
from tritondt.comm.transports import announced
from tritondt.comm.transports.base import PackedCommunicator
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator
from tritondt.comm.work import QUEUE_THREAD
from tritondt.debug.tracing.arena_steps import ArenaSteps
from tritondt.debug.tracing.explanations import Compiled, explained
from tritondt.debug.tracing.flat_lists import messages_of_rank, rows
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


class Recording:
    """Recording of this process; where ranks are threads of it, of all of them.

    Where ranks are threads, `begin` comes before their first communicator, by which they are told apart.
    """

    def __init__(self) -> None:
        self._spans: list[Any] = []  # kind, subject, start, end and thread of each
        self._sends: list[Any] = []  # fields of an Exchanged for each exchange
        self._receives: list[Any] = []
        self._marks: list[tuple[int, int, bool]] = []  # time, thread, whether the program itself has set it
        self._plans: dict[Transfer, Compiled] = {}
        self._sites: dict[str, str] = {}
        self._threads: dict[int, int] = {}  # rank of each thread that has made a communicator, or exchanged
        self._queues: set[int] = set()  # threads of communicators that run what was issued
        self._undo: list[Callable[[], object]] = []
        self._dropped = 0
        self._arenas = ArenaSteps(self._add_span, self._sends, self._receives)

    def begin(self) -> None:
        """Puts the functions that record in the places of those that do not."""
        compiling.compile_plan.cache_clear()  # so that all that is compiled is heard of
        for found in tuple(announced.made):
            self._observe(found)
        self._append_to(announced.on_made, self._observe_new)
        self._append_to(compiling.on_compiled, self._keep_plan)
        for tensor_class in (DTensor, copied_view_class(DTensor)):
            self._replace(tensor_class, "__torch_dispatch__", staticmethod(self._dispatch_of(tensor_class)))
        for name in ("run", "message"):
            self._replace(Router, name, self._collective_of(getattr(Router, name)))
        for work in (c10d.Work, NcclWork):
            self._replace(work, "wait", self._wait_of(work.wait))
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
        threads = {thread for thread, number in self._threads.items() if number == rank}

        def is_own(thread: int) -> bool:
            return not shared or thread in threads

        spans = [
            Span(kind, _name(kind, subject), start, end, thread)
            for kind, subject, start, end, thread in rows(self._spans, _SPAN_VALUES)
            if is_own(thread)
        ]
        asked = [time for time, thread, by_program in self._marks if is_own(thread) and by_program]
        return RankRecord(
            rank=rank,
            num_ranks=num_ranks,
            host=_boot_id(),
            process=os.getpid(),
            spans=spans,
            sends=messages_of_rank(self._sends, rank),
            receives=messages_of_rank(self._receives, rank),
            redistributions=self._redistributions({span.name for span in spans if span.kind == "exchange"}, rank),
            program_threads=sorted({span.thread for span in spans} - self._queues),
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

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        before = owner.__dict__[name]
        setattr(owner, name, function)
        self._undo.append(lambda: setattr(owner, name, before))

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

    def _add_span(self, kind: str, subject: Any, started: int, ended: int) -> None:
        """Adds a span of the calling thread."""
        if len(self._spans) < MOST_SPANS * _SPAN_VALUES:
            self._spans.extend((kind, subject, started, ended, threading.get_ident()))
        else:
            self._dropped += 1

    def _dispatch_of(self, tensor_class: Any) -> Callable[..., Any]:
        """Dispatch of a tensor class, recorded; without a call of its own, for this runs for every operator."""
        dispatch, spans, now, ident = tensor_class.__torch_dispatch__, self._spans, monotonic_ns, threading.get_ident
        extend, most = spans.extend, MOST_SPANS * _SPAN_VALUES

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

    def _observe_new(self, communicator: PackedCommunicator) -> None:
        self._threads.setdefault(threading.get_ident(), communicator._rank)
        self._observe(communicator)

    def _observe(self, communicator: PackedCommunicator) -> None:
        """Records a communicator's exchanges, by functions that hide those of its class."""
        for kind, has_work in (("pack", _packs), ("keep", _keeps), ("unpack", _unpacks)):
            self._hide(communicator, f"_{kind}", self._phase(getattr(communicator, f"_{kind}"), kind, has_work))
        if isinstance(communicator, SharedMemoryCommunicator):
            communicator.time_steps(True)
            self._undo.append(lambda: communicator.time_steps(False))
            self._hide(communicator, "_exchange", self._arenas.exchange_of(communicator))
        self._hide(communicator, "_exchange", self._exchange_of(communicator))
        self._hide(communicator, "in_order", self._in_order_of(communicator.in_order))
        self._hide(communicator, "start", self._messages_of(communicator, communicator.start, "send"))
        self._hide(communicator, "finish", self._messages_of(communicator, communicator.finish, "wait"))
        self._hide(communicator._queue, "wait_for", self._wait_for_of(communicator._queue.wait_for))

    def _hide(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        setattr(owner, name, function)
        self._undo.append(lambda: owner.__dict__.pop(name, None))

    def _phase(self, run: Callable[..., None], kind: str, has_work: Callable[[Any], bool]) -> Callable[..., None]:
        add, now = self._adder(), monotonic_ns

        def recorded(plan: Any, *arguments: Any) -> None:
            if not has_work(plan):
                run(plan, *arguments)
                return
            started = now()
            run(plan, *arguments)
            add(kind, kind, started)

        return recorded

    def _exchange_of(self, communicator: PackedCommunicator) -> Callable[..., None]:
        exchange, rank = communicator._exchange, communicator._rank
        add, now, ident, threads, sites = self._adder(), monotonic_ns, threading.get_ident, self._threads, self._sites

        def recorded(sources: Any, targets: Any, transfer: Transfer, site: int) -> None:
            started = now()
            try:
                exchange(sources, targets, transfer, site)
            finally:
                add("exchange", transfer, started)
                thread = ident()
                threads[thread] = rank
                if threading.current_thread().name == QUEUE_THREAD:  # not who waits, and runs the queue meanwhile
                    self._queues.add(thread)
                if transfer.description not in sites:
                    sites[transfer.description] = communicator._recorder.site_text(site) if site >= 0 else ""

        return recorded

    def _in_order_of(self, in_order: Callable[..., None]) -> Callable[..., None]:
        add = self._adder()

        def recorded(run: Any, description: str) -> None:
            started = monotonic_ns()
            try:
                in_order(run, description)
            finally:
                add("redistribution", description, started)

        return recorded

    def _messages_of(
        self, communicator: PackedCommunicator, run: Callable[..., None], kind: str
    ) -> Callable[..., None]:
        add, now, ident, sends_messages = self._adder(), monotonic_ns, threading.get_ident, kind == "send"
        extend = (self._sends if sends_messages else self._receives).extend

        def recorded(record: Any, receives: MessageBuffers, sends: MessageBuffers) -> None:
            started = now()
            try:
                run(record, receives, sends)
            finally:
                ended = add(kind, record.text, started)
                slices = sends.slices if sends_messages else receives.slices
                extend((communicator, communicator.sequence, slices, started, ended, ident(), record.text))

        return recorded

    def _wait_for_of(self, wait_for: Callable[..., None]) -> Callable[..., None]:
        add = self._adder()

        def recorded(work: Any) -> None:
            started = monotonic_ns()
            try:
                wait_for(work)
            finally:
                add("wait", work.description, started)

        return recorded

    def _redistributions(self, names: set[str], rank: int) -> dict[str, Redistribution]:
        found = {name: Redistribution(self._sites.get(name, "")) for name in names}
        for transfer, compiled in self._plans.items():
            if transfer.description in names and compiled.source.mesh.identity.rank == rank:
                found[transfer.description] = explained(compiled, self._sites.get(transfer.description, ""))
        return found


# Recordings that are on; one, but for tests of a recording within another.
_active: list[Recording] = []


def mark_step() -> None:
    """Marks the end of a training step for `python -m tritondt trace`; does nothing without a trace.

    Not a collective call, but all ranks should call it. Without it, every call of an optimizer's `step` ends a step of
    the summary.

    >>> mark_step()
    """
    for recording in _active:
        recording.mark_step()


def _name(kind: str, subject: Any) -> str:
    return cast("Transfer", subject).description if kind == "exchange" else str(subject)


def _packs(plan: Any) -> bool:
    return plan.pack is not None


def _keeps(plan: Any) -> bool:
    return plan.keep is not None


def _unpacks(plan: Any) -> bool:
    return plan.unpack is not None or bool(plan.reduces)


def _boot_id() -> str:
    """A text that is equal in processes that read one clock: the name of this start of the machine, else its name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return platform.node()

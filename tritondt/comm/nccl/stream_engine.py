"""The stream engine of a communicator: where its calls go, what each waits for, and who waits for each.

Ranks must give a communicator's calls to NCCL in one order, and the device must run them in that order, whichever
streams they go into: each begins when the one before it has ended, and what its caller has put before it. Where a call
goes into the stream of the one before, the stream itself keeps the order.

A call that the caller waits for at once goes into the caller's stream, as in torch, without the events between the two;
others go into the engine's own. A call in a CUDA graph goes into the engine's own stream always, which keeps the order
of the graph's calls: the events of a graph are no other call's.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import torch

from tritondt.comm.monitor.watch import Wait
from tritondt.comm.nccl import aborts
from tritondt.comm.nccl.streams import Event, Stream, Streams, answered, follow_in_graph
from tritondt.comm.packing.messages import Slice

_PAUSE_S = 0.0005


class Issued(Protocol):
    """A thing that was put into a stream: it ends at `event`, in `stream`, and the stream `caller` asked for it."""

    event: Event | None
    stream: Stream | None
    caller: Stream | None

    def release(self) -> None:
        """Lets go of the tensors that are kept until it has run."""
        ...


class InFlight:
    """An operation in flight: as the stream has it, as the watch looks at it, and as the flight recorder names it.

    Number `sequence` of its communicator, asked for at the line `site` and `started` then, is the recorder's entry
    `record`; the entry ends with `sent_bytes` and `received_bytes`. `messages` are those it is made of, where it is
    made of some; `late` is how the watch knows it, which few operations live to see. What it reads is `held` until it
    has run, or somebody whose stream comes after it has waited; `error` is why its results will not be right.
    """

    __slots__ = (
        *("event", "stream", "caller", "held", "error"),
        *("text", "fingerprint", "sequence", "record", "site", "started", "timeout_s"),
        *("messages", "sent_bytes", "received_bytes", "late"),
    )

    def __init__(
        self, text: str, fingerprint: int, site: int, timeout_s: float, held: Sequence[torch.Tensor] = ()
    ) -> None:
        self.text, self.fingerprint, self.site, self.timeout_s, self.held = text, fingerprint, site, timeout_s, held
        self.event: Event | None = None
        self.stream: Stream | None = None
        self.caller: Stream | None = None
        self.error: BaseException | None = None
        self.late: Wait | None = None
        self.sequence, self.record, self.started = 0, -1, 0.0
        self.messages: tuple[Sequence[Slice], ...] = ()
        self.sent_bytes = self.received_bytes = 0

    def begin(self, sequence: int, record: int) -> None:
        """Notes that the operation goes into the stream now, by its number and the recorder's entry."""
        self.sequence, self.record, self.started = sequence, record, time.monotonic()

    def is_over(self) -> bool:
        """Whether the stream has been given all of the operation and has come past it, which lets go of its tensors."""
        event = self.event
        is_over = event is not None and event.query()
        if is_over:
            self.held = ()
        return is_over

    def release(self) -> None:
        """Lets go of the operation's tensors."""
        self.held = ()

    def fail(self, error: BaseException) -> None:
        """Notes why the operation's results will not be right."""
        self.error = self.error or error


class StreamEngine:
    """The order of one communicator's calls in the streams of a device.

    `stream` is the engine's own. `target` is the stream that what is put now goes to, and `is_capturing` whether it
    only records that, into a graph. `passed` is the end of the last call that was seen to have run: whatever else ends
    with it needs not ask again.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.stream: Stream = streams.make()
        self.target: Stream = self.stream
        self.is_capturing = False
        self.passed: Event | None = None
        # The latest call: its stream, its end, and another stream that waits for that already: a pair, so that a thread
        # that waits for a call and one that makes the next need no lock between them.
        self._latest: Stream | None = None
        self._end: Event | None = None
        self._wait: tuple[Stream | None, Event | None] = (None, None)

    def begin(self, call: Issued, *, is_synchronous: bool = False, ready: Event | None = None) -> Stream:
        """The stream that a call goes into, which has been given waits for all that the call comes after.

        The call comes after `ready` where that is given, else after what the calling thread's stream has been given.
        """
        streams, own = self.streams, self.stream
        self.is_capturing = is_capturing = streams.is_capturing()
        if ready is not None and not is_capturing:
            own.wait_event(ready)
            self.let_wait(own)
            return own
        caller = call.caller = streams.current()
        if is_capturing:
            follow_in_graph(own, caller)
            return own
        if is_synchronous:
            self.let_wait(caller)
            return caller
        streams.follow(own, caller)
        if not self._comes_after(caller):
            self.let_wait(own)
        return own

    def end(self, call: Issued, stream: Stream) -> None:
        """Notes that `stream` has been given all of a call, and nothing after it so far."""
        call.stream = stream
        call.event = event = self.streams.record(stream)
        if not self.is_capturing:
            self._latest, self._end = stream, event

    def wait(self, call: Issued) -> None:
        """Lets the calling thread's current stream wait for a call, which is in a stream; the host does not."""
        waiter, event = self.streams.current(), call.event
        if waiter is not call.stream:
            waiter.wait_event(event)
            if event is self._end:
                self._wait = (waiter, event)
        # Waited for on another stream than the issuer's, what is freed could be written to before it has been read.
        if waiter is call.caller:
            call.release()

    def note_end(self) -> Event:
        """The end so far of the call that is put into `target`, for a call that has no other."""
        event = self.target.record_event()
        self._latest, self._end = self.target, event
        return event

    def _comes_after(self, stream: Stream) -> bool:
        """Whether what `stream` is given now begins after the latest call's end by itself."""
        if self._end is None or stream is self._latest:
            return True
        waiter, end = self._wait
        return stream is waiter and end is self._end

    def let_wait(self, stream: Stream) -> None:
        """Lets `stream` wait for the latest call's end."""
        if not self._comes_after(stream):
            stream.wait_event(self._end)
            self._wait = (stream, self._end)

    def synchronize(self) -> None:
        """Returns when all calls have run, whichever streams they are in."""
        self.let_wait(self.stream)
        self.stream.synchronize()

    def synchronize_aborted(self) -> bool:
        """Whether all calls have run within `aborts.LIMIT_S`: an abort may never end."""
        self.let_wait(self.stream)
        end, ends_at = self.stream.record_event(), time.monotonic() + aborts.LIMIT_S
        while not answered(end.query) and time.monotonic() < ends_at:
            time.sleep(_PAUSE_S)
        return answered(end.query)

    def synchronous(self) -> "Synchronous":
        """Context of a call that the caller's next operators come after: it goes into the caller's stream."""
        return Synchronous(self)


class Synchronous:
    """Context in which the calling thread's operators, and what the engine is given, come in order with a call.

    In a graph they go to the engine's own stream, and the caller's operators afterwards wait for them.
    """

    __slots__ = ("_before", "_context", "_engine", "caller", "event", "stream")

    def __init__(self, engine: StreamEngine) -> None:
        self._engine, self._before = engine, engine.target
        self.event: Event | None = None
        self.stream: Stream | None = None
        self.caller: Stream | None = None

    def release(self) -> None:
        """Holds nothing: the caller has it."""

    def __enter__(self) -> None:
        engine = self._engine
        stream = engine.begin(self, is_synchronous=True)
        self._context = engine.streams.on(stream, self.caller)
        self._context.__enter__()
        engine.target = stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        engine = self._engine
        engine.target = self._before
        self._context.__exit__(kind, error, trace)
        if engine.is_capturing:
            follow_in_graph(self.caller, engine.stream)

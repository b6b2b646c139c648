"""The stream engine of a communicator: where its calls go, what each waits for, and who waits for each.

Ranks must give a communicator's calls to NCCL in one order, and the device must run them in that order, whichever
streams they go into: each begins when the one before it has ended, and what its caller has put before it. Where a call
goes into the stream of the one before, the stream itself keeps the order.

A call that the caller waits for at once goes into the caller's stream, as in torch, without the events between the two;
others go into the engine's own. A call in a CUDA graph goes into the engine's own stream always, which keeps the order
of the graph's calls: the events of a graph are no other call's.
"""

import time
from types import TracebackType

from tritondt._C import FlightRecorder
from tritondt._C import InFlight as InFlight
from tritondt._C import StreamEngine as NativeEngine
from tritondt.comm.nccl import aborts
from tritondt.comm.nccl.streams import Streams, answered, follow_in_graph

_PAUSE_S = 0.0005


class StreamEngine(NativeEngine):
    """The order of one communicator's calls in the streams of a device, and those that are watched.

    `stream` is the engine's own. `target` is the stream that what is put now goes to, and `is_capturing` whether it
    only records that, into a graph. `passed` is the end of the last call that was seen to have run: whatever else ends
    with it needs not ask again. `on_late` is told of operations that are over and that the watch had looked at.

    The extension asks `streams` by their methods, so that a test's are asked as CUDA's are.
    """

    streams: Streams

    def __new__(cls, streams: Streams, recorder: FlightRecorder | None = None) -> "StreamEngine":
        """An engine with a stream of its own; `recorder` hears of operations that are over."""
        return super().__new__(cls, streams, streams.make(), recorder)

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

    __slots__ = ("_before", "_call", "_context", "_engine")

    def __init__(self, engine: StreamEngine) -> None:
        self._engine, self._before = engine, engine.target
        self._call = InFlight("a synchronous call", 0, -1, 0.0)

    def __enter__(self) -> None:
        engine = self._engine
        stream = engine.begin(self._call, True)
        self._context = engine.streams.on(stream, self._call.caller)
        self._context.__enter__()
        engine.target = stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        engine = self._engine
        engine.target = self._before
        self._context.__exit__(kind, error, trace)
        if engine.is_capturing:
            follow_in_graph(self._call.caller, engine.stream)

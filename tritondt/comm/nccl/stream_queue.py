"""A queue that puts what is issued into a stream at once: the host waits for nothing, and other streams by events.

Between the caller's stream and this one there is an event either way: what is issued begins when the caller's operators
before it have run, and what the caller does after a wait begins when it has ended. Tensors are kept until then by the
Work, or by the queue where that was dropped, so that the allocator needs not be told (`record_stream`).
"""

import threading
from collections import deque
from collections.abc import Collection, Sequence

import torch

from tritondt.comm import read_guard
from tritondt.comm.nccl.stream_engine import InFlight, StreamEngine, Synchronous
from tritondt.comm.nccl.streams import Stream, answered
from tritondt.comm.work import IssueQueue, Run, Work, torn, versions, without_frames
from tritondt.errors import WorldError
from tritondt.kernels.memory import allocate

_never_over: list[object] = []
# Staging memory that a queue keeps; an allocation takes the host 1 us or more, which few exchanges above notice.
_LEAST_BYTES, _KEPT_BYTES = 1 << 12, 1 << 20


class StreamWork(Work):
    """Work in a stream: waiting for it lets the calling thread's current stream wait, and not the host."""

    __slots__ = ("_addresses", "_versions", "in_flight")

    def __init__(self, queue: "StreamQueue", description: str, held: Sequence[torch.Tensor], run: Run) -> None:
        # As Work's: a call takes longer, and one of `versions` for a single tensor too.
        self.description, self._queue, self._issuer = description, queue, queue.issuer
        self._finished = self._is_seen = False
        self._error = None
        self.in_flight = InFlight(description, 0, -1, 0.0, (held, run))
        is_one = len(held) == 1 and not held[0].is_inference()
        self._versions = [held[0]._version] if is_one else versions(held)
        self._addresses: Collection[int] | None = read_guard.begin(held, self.settle)

    def is_completed(self) -> bool:
        """Whether the work has run, well or not."""
        if self._finished or self._queue.is_disowned:
            return self._finished
        return self.in_flight.is_over()

    def check_sources(self) -> None:
        """Notes an error where a source was written to without a wait."""
        held = self.in_flight.held
        if held is None or self._error is not None:
            return
        sources = held[0]
        now = versions(sources)
        if now != self._versions:
            pairs = zip(sources, now, self._versions, strict=True)
            source = next(source for source, version, before in pairs if version != before)
            self._error = WorldError(torn(source, self.description))

    def release(self) -> None:
        """Lets go of the work's tensors: a write to them now comes after it."""
        self.in_flight.release()
        if self._addresses is not None:
            read_guard.end(self._addresses, self.settle)
            self._addresses = None

    def fail(self, error: BaseException) -> None:
        """Notes why the work's results will not be right."""
        self._error = self._error or error


class StreamQueue(IssueQueue):
    """The queue of a communicator whose work runs in a stream."""

    runs_at_once = True

    def __init__(self, engine: StreamEngine) -> None:
        super().__init__()
        self.engine = engine
        self.stream: Stream = engine.stream
        self.ending: list[InFlight] = []  # operations that end with the work that is being put into the stream
        self._under_way: deque[StreamWork] = deque()
        self.kept: torch.Tensor | None = None  # memory for messages of what is issued
        self.is_through = False  # it has been closed, and nothing of it is in a stream any more

    def submit(self, run: Run, description: str, sources: Sequence[torch.Tensor] = (), *, sources_ready: bool) -> Work:
        """Runs `run` now, on the stream, after what the current stream has been given and the calls before."""
        engine, work = self.engine, StreamWork(self, description, sources, run)
        self.thread_id = threading.get_ident()
        try:
            stream = engine.begin(work.in_flight)
            if not engine.is_capturing:  # nobody may ask then
                self._let_go_ended()
            with engine.streams.on(stream, work.in_flight.caller):
                try:
                    run()
                except BaseException as error:  # noqa: BLE001  whoever waits for it raises it
                    # What was put into the stream before is still to run.
                    work.fail(without_frames(error))
                    self._failed = self._failed or work
            self.thread_id = None
            engine.end(work.in_flight, stream)
        finally:
            self.thread_id = None
            if work.in_flight.event is None:  # nothing of it is in the stream
                work.release()
        for ended in self.ending:
            ended.event = work.in_flight.event
        self.ending.clear()
        if not engine.is_capturing:  # a graph's events cannot be asked for; who waits within it keeps the work
            self._under_way.append(work)
        return work

    def wait_for(self, work: Work) -> None:
        """Lets the calling thread's current stream wait for `work`."""
        assert isinstance(work, StreamWork), "work of a queue of streams"
        if self._disowned is not None:
            self._check_owned(work)
        operation = work.in_flight
        if operation.event is None:
            return  # it asks for itself while it is put into the stream
        held, before = operation.held, work._versions
        # Of one source, as nearly always, the question takes less than the call.
        if held is not None and (len(before) != 1 or before[0] is None or held[0][0]._version != before[0]):
            work.check_sources()
        self.engine.wait(operation)
        if operation.held is None and work._addresses is not None:  # as `release`, which is a call
            read_guard.end(work._addresses, work.settle)
            work._addresses = None

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        self.let_go()
        return bool(self._under_way)

    def let_go(self) -> None:
        """Lets go of the works that have run."""
        if self._under_way and not self.engine.streams.is_capturing():  # nobody may ask then
            self._let_go_ended()

    def _let_go_ended(self) -> None:
        under_way = self._under_way
        while under_way and self._disowned is None and under_way[0].in_flight.is_over():
            work = under_way.popleft()
            self.engine.passed = work.in_flight.event
            if work._addresses is not None:  # nobody has waited for it
                work.release()
            work._finished = True

    def staging(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory for the messages of an exchange, in the order of the stream that it is put into.

        Exchanges of the queue's own thread get the same memory each time, up to a size: the queue's stream comes to the
        next exchange when it is through with the one before. Memory of a graph is the graph's.
        """
        if num_bytes > _KEPT_BYTES or self.engine.is_capturing or not self.is_own_thread():
            return allocate((num_bytes,), torch.uint8, device)
        kept = self.kept
        if kept is None or kept.numel() < num_bytes:
            kept = self.kept = allocate((max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()),), torch.uint8, device)
        return kept

    def fail(self, error: BaseException) -> None:
        """Marks all works that have not run as failed."""
        for work in list(self._under_way):
            if not answered(work.is_completed):
                work.fail(error)
                self._failed = self._failed or work

    def drain(self) -> None:
        """Does nothing: what comes next is put behind in the stream."""

    def close(self) -> None:
        """Returns when all that was issued has run."""
        if self.is_disowned:
            return
        self.engine.synchronize()
        self.is_through = True
        self.let_go()

    def close_aborted(self) -> None:
        """Returns when the stream is through, or has been given time for that: an abort may never end.

        The works that are in it still keep their tensors for as long as there is the process.
        """
        if self.is_disowned:
            return
        self.is_through = self.engine.synchronize_aborted()
        if self.is_through:
            self.let_go()
        else:
            _never_over.append((list(self._under_way), self.kept))

    def mark_end(self, ended: InFlight) -> None:
        """Sets the event of `ended`: the end of the work that is being put into the stream, or its end so far."""
        if self.is_own_thread():
            self.ending.append(ended)
        else:
            ended.event = self.engine.note_end()

    def mark_break(self) -> None:
        """Lets what ends the queue wait for what a broken call has put into another stream."""
        if not self.is_own_thread() and not self.engine.is_capturing:
            self.engine.note_end()

    def mark_step(self) -> None:
        """Ends here what was to end with the work: what is put into the stream next comes after it."""
        if self.ending:
            event = self.stream.record_event()
            for ended in self.ending:
                ended.event = event
            self.ending.clear()

    def synchronous(self) -> Synchronous:
        """Context of a call that the caller's next operators come after; see `StreamEngine.synchronous`."""
        return self.engine.synchronous()

"""The order of a communicator's calls in several streams: each begins when the one before it has ended.

Ranks must give a communicator's calls to NCCL in one order, and the device must run them in that order, whichever
streams they go into. Where a call goes into the stream of the one before, the stream itself keeps it.
"""

from tritondt.comm.nccl.streams import Event, Stream


class CallOrder:
    """The latest call of a communicator: its stream, its end, and another stream that waits for that already."""

    __slots__ = ("_end", "_stream", "_wait")

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._end: Event | None = None
        # A pair, so that a thread that waits for a call and one that makes the next need no lock between them.
        self._wait: tuple[Stream | None, Event | None] = (None, None)

    def comes_after(self, stream: Stream) -> bool:
        """Whether what `stream` is given now begins after the latest call's end by itself."""
        if self._end is None or stream is self._stream:
            return True
        waiter, end = self._wait
        return stream is waiter and end is self._end

    def let_wait(self, stream: Stream) -> None:
        """Lets `stream` wait for the latest call's end."""
        if not self.comes_after(stream):
            stream.wait_event(self._end)
            self._wait = (stream, self._end)

    def note_end(self, stream: Stream, end: Event) -> None:
        """Notes the end of a call in `stream`, which is the latest from now on."""
        self._stream, self._end = stream, end

    def note_wait(self, stream: Stream, event: Event) -> None:
        """Notes that `stream` waits for `event`, which may be the latest call's end."""
        if event is self._end:
            self._wait = (stream, event)

"""What torch.distributed gives for an operation that is under way on NCCL: its Work."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from tritondt.backend.operation import Operation
from tritondt.comm.streams import Event, Stream, Streams
from tritondt.comm.work import again
from tritondt.errors import PeerError

_AT_ALL = timedelta(0)  # torch's word for no timeout of its own
_PAUSE_S = 0.0005


class NcclWork(Work):
    """An operation in a stream: waiting for it lets the calling thread's current stream wait, and not the host.

    It keeps the tensors until somebody has waited for it or it has run, so that the allocator needs not be told.
    """

    def __init__(self, operation: Operation, streams: Streams, seen: Callable[[], None]) -> None:
        super().__init__()
        self.text, self._results, self._source = operation.text, operation.results, operation.source
        self._waits_on_host = operation.waits_on_host
        self._streams, self._seen = streams, seen
        self._held: Sequence[torch.Tensor] = operation.tensors
        self._stream: Stream | None = None
        self._event: Event | None = None
        self._error: BaseException | None = None
        self._put = threading.Event()

    def was_put(self, stream: Stream) -> None:
        """Notes that `stream` has been given all of it, and no more so far."""
        self._stream, self._event = stream, stream.record_event()
        self._put.set()

    def fail(self, error: BaseException) -> None:
        """Notes why what is in the stream will not be right, or why nothing is."""
        self._error = self._error or error
        self._put.set()

    def is_over(self) -> bool:
        """Whether the stream has come past it, which lets go of its tensors."""
        is_over = self._event is not None and self._event.query()
        if is_over:
            self._held = ()
        return is_over

    def is_completed(self) -> bool:
        """Whether it has run, well or not."""
        return self._error is not None or self.is_over()

    def is_success(self) -> bool:
        """Whether it has run well."""
        return self._error is None and self.is_over()

    def exception(self) -> BaseException | None:
        """Why it failed; None where it did not, or is under way."""
        return self._error

    def wait(self, timeout: timedelta = _AT_ALL) -> bool:
        """Lets the current stream wait; with a timeout, or for a barrier, the host.

        Raises what it failed with, and PeerError where it is not over within `timeout`.
        """
        limit = timeout if timeout > _AT_ALL else None
        if not self._put.wait(None if limit is None else limit.total_seconds()):
            raise self._late(timeout)
        if self._event is not None:
            if limit is not None or self._waits_on_host:
                self._wait_on_host(limit)
            self._streams.current().wait_event(self._event)
        if self._error is not None:
            self._seen()
            raise again(self._error) from self._error
        self._held = ()
        return True

    def _wait_on_host(self, limit: timedelta | None) -> None:
        started = time.monotonic()
        while not self.is_completed():
            if limit is not None and time.monotonic() - started > limit.total_seconds():
                raise self._late(limit)
            time.sleep(_PAUSE_S)

    def _late(self, limit: timedelta) -> PeerError:
        return PeerError(f"{self.text} was waited for {limit.total_seconds():g} s, as asked, and is still under way")

    def synchronize(self) -> None:
        """Lets the current stream wait."""
        self.wait()

    def block_current_stream(self) -> None:
        """Lets the current stream wait."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """What was written."""
        return list(self._results)

    def get_future(self) -> Any:
        """A torch.futures.Future of the list of what is written."""
        self._put.wait()
        if self._event is None:
            made: torch.futures.Future[Any] = torch.futures.Future()
            made.set_exception(self._error)
            return made
        return self._streams.future(self._stream, self._results, self.exception)

    def _source_rank(self) -> int:
        return self._source

    def source_rank(self) -> int:
        """Where a message came from, as a rank of the group; -1 for what is none."""
        return self._source

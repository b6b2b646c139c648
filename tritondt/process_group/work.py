"""The Work that torch.distributed gives for an operation under way on NCCL."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Work

from tritondt._C import InFlight, wait_method
from tritondt.comm.nccl.streams import Event, Streams
from tritondt.comm.work import again
from tritondt.errors import PeerError
from tritondt.process_group.futures import fail, is_list_of_cpp_asked_for, list_of_cpp
from tritondt.process_group.operation import Operation

_NO_TIMEOUT = timedelta(0)  # as torch says it
_PAUSE_S = 0.0005


class Asked(NamedTuple):
    """An operation, the streams of the device that it runs on, and who is told when its error was raised."""

    operation: Operation
    streams: Streams
    on_raised: Callable[[], None]


class NcclWork(Work):
    """An operation in a stream: waiting for it lets the calling thread's current stream wait, and not the host.

    It keeps what it writes for whoever asks for its result; `in_flight` keeps what it reads until somebody has waited
    for it or it has run, so that the allocator needs not be told. `ready` is what the stream waits for where that is
    not the caller's stream as it is. The extension makes it without `__init__`.
    """

    __slots__ = ("__dict__", "_asked", "_results", "in_flight")
    _asked: Asked
    _results: Sequence[torch.Tensor]
    in_flight: InFlight

    ready: Event | None = None
    is_synchronous = False  # whether the caller waits at once: it goes into the caller's stream
    _issued: threading.Event | None = None  # where the operation may have to wait for its stream

    def __init__(
        self,
        operation: Operation,
        tensors: Sequence[torch.Tensor],
        streams: Streams,
        on_raised: Callable[[], None],
        site: int,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._asked = Asked(operation, streams, on_raised)
        self.in_flight = InFlight(operation.text, operation.fingerprint, site, timeout_s, tensors)
        self._results = tensors[operation.results]

    @property
    def operation(self) -> Operation:
        """The operation that runs."""
        return self._asked.operation

    def defer(self) -> None:
        """Notes that there is no stream yet; another thread will say when the operation is in one, or why not."""
        streams = self._asked.streams
        self.ready, self._issued = streams.record(streams.current()), threading.Event()

    def was_put(self) -> None:
        """Notes that the operation is in a stream, or has failed before."""
        if self._issued is not None:
            self._issued.set()

    def fail(self, error: BaseException) -> None:
        """Notes why the operation's results will not be right, or why it is in no stream."""
        self.in_flight.fail(error)
        if self._issued is not None:
            self._issued.set()

    def is_completed(self) -> bool:
        """Whether the operation has run, well or not."""
        return self.in_flight.error is not None or self.in_flight.is_over()

    def is_success(self) -> bool:
        """Whether the operation has run well."""
        return self.in_flight.error is None and self.in_flight.is_over()

    def exception(self) -> BaseException | None:
        """The operation's error; None where it has none, or is under way."""
        return self.in_flight.error

    @wait_method
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Lets the current stream wait; with a timeout, or for a barrier, the host.

        Raises what the operation failed with, and PeerError where it is not over within `timeout`.
        """
        limit_s = timeout.total_seconds() if timeout > _NO_TIMEOUT else None
        if self._issued is not None and not self._issued.wait(limit_s):
            raise self._overdue(timeout.total_seconds())
        operation = self.in_flight
        if operation.event is not None:
            if limit_s is not None or self.operation.waits_on_host:
                self._wait_on_host(limit_s)
            assert operation.engine is not None, "an operation in a stream has an engine"
            operation.engine.wait(operation)
        if operation.error is not None:
            self._asked.on_raised()
            raise again(operation.error) from operation.error
        return True

    def _wait_on_host(self, limit_s: float | None) -> None:
        started = time.monotonic()
        while not self.is_completed():
            if limit_s is not None and time.monotonic() - started > limit_s:
                raise self._overdue(limit_s)
            time.sleep(_PAUSE_S)

    def _overdue(self, limit_s: float) -> PeerError:
        return PeerError(f"{self.operation.text} was waited for {limit_s:g} s, as asked, and is still under way")

    def synchronize(self) -> None:
        """Lets the current stream wait."""
        self.wait()

    def block_current_stream(self) -> None:
        """Lets the current stream wait."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors that are written."""
        return list(self._results)

    def get_future(self) -> Any:
        """A torch.futures.Future of the list of tensors that are written; see `is_list_of_cpp_asked_for`."""
        if is_list_of_cpp_asked_for(self._results):
            self.wait()
            return list_of_cpp(self._results)
        if self._issued is not None:
            self._issued.wait()
        operation = self.in_flight
        if operation.event is None:
            assert operation.error is not None, "an operation that is in no stream has failed"
            made: torch.futures.Future[Any] = torch.futures.Future()
            fail(made, self._results, operation.error)
            return made
        return self._asked.streams.future(operation.stream, self._results, self.exception)

    def _source_rank(self) -> int:
        return self.operation.source

    def source_rank(self) -> int:
        """The rank of the group that a message comes from; -1 for other operations."""
        return self.operation.source

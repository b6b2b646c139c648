"""Streams of work that a device runs in order, and events in them: what the NCCL transport needs of CUDA.

The interface is torch.cuda's, so that its streams and events are used as they are. A test double of NCCL brings
streams of its own.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from tritondt.comm.work import run_at_once
from tritondt.errors import TransportError

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
# torch has 33 to a priority and device, and those that programs bring.
_MAX_KNOWN = 256


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before the event has run."""
        ...


class Stream(Protocol):
    """Work that runs in order, beside the host and other streams."""

    @property
    def cuda_stream(self) -> int:
        """CUDA's handle of the stream, as NCCL takes it."""
        ...

    def record_event(self) -> Event:
        """The point that the stream has been filled to."""
        ...

    def wait_event(self, event: Any) -> None:
        """Puts a wait for `event` into the stream; the host does not wait."""
        ...

    def synchronize(self) -> None:
        """Returns when everything in the stream has run."""
        ...


class Streams(Protocol):
    """The streams of one device."""

    @property
    def device(self) -> torch.device:
        """The device whose tensors the streams work on."""
        ...

    @property
    def connects_late(self) -> bool:
        """Whether ranks connect in the first call of NCCL that needs it, where the host waits for it."""
        ...

    def current(self) -> Stream:
        """The stream that the calling thread's operators go to."""
        ...

    def make(self) -> Stream:
        """A new stream, of high priority: what others wait for comes before what is computed."""
        ...

    def record(self, stream: Any) -> Event:
        """The point that `stream` has been filled to."""
        ...

    def follow(self, stream: Any, other: Any) -> None:
        """Puts a wait for all that `other` has been given into `stream`; see `follow_in_graph`."""
        ...

    def on(self, stream: Any, before: Any = None) -> AbstractContextManager[object]:
        """Sends the operators of the calling thread to `stream`; `before` is its current stream, where that is known.

        It is asked for otherwise.
        """
        ...

    def launch(self, run: Callable[..., object], *arguments: object) -> None:
        """Calls `run(*arguments)`, which launches kernels on the current stream."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream only records what it is given, into a graph."""
        ...

    def bind_thread(self) -> None:
        """Makes the device the calling thread's."""
        ...

    def ignore_captures(self) -> None:
        """Lets the calling thread ask for events while another one captures a graph, which would spoil that graph."""
        ...

    def future(
        self, stream: Any, value: Sequence[torch.Tensor], error: Callable[[], BaseException | None]
    ) -> "torch.futures.Future[Any]":
        """A future of `value`, whose callbacks work on what `stream` has been given so far; `error` tells of failures.

        Where the host does not wait for streams, it is there at once.
        """
        ...


def follow_in_graph(stream: Any, other: Any) -> None:
    """Puts a wait for all that `other` has been given into `stream`, while a graph may be made of them.

    An event of a graph is the graph's, and is never used again.
    """
    stream.wait_event(other.record_event())


def answered(ask: Callable[[], bool]) -> bool:
    """The answer of a device; False where it does not answer any more, which raises where its result is needed."""
    try:
        return ask()
    except RuntimeError:
        return False


def driver_function(name: str, path: str = "libcuda.so.1") -> Any:
    """A function of CUDA's driver; TransportError where the driver or the function is missing.

    The driver's library has one name everywhere, the runtime's a name for each version.
    """
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        rocm = getattr(torch.version, "hip", None)
        why = f"this torch is built for ROCm {rocm}, and AMD's GPUs have no {path}" if rocm else str(error)
        raise TransportError(
            f"{name} of CUDA's driver was asked for, and {path} cannot be loaded ({why}); a transport for GPUs takes "
            "an NVIDIA GPU with its driver"
        ) from error
    if not hasattr(library, name):
        raise TransportError(
            f"{name} was asked for, and the driver {path} lacks it; a transport for GPUs takes a driver of CUDA 10.1 "
            "or newer"
        )
    return getattr(library, name)


def _call_driver(name: str, *arguments: Any) -> None:
    """Calls a function of CUDA's driver, which torch has not; TransportError where it fails."""
    status = driver_function(name)(*arguments)
    if status != 0:
        raise TransportError(f"{name} was called and returned {status}; it must return 0")


class CudaStreams:
    """The streams of one GPU.

    torch.cuda makes an object for every question about the current stream, which takes longer than what CUDA does;
    here they are kept by CUDA's handles.
    """

    connects_late = True
    _latest_on: "_On | None" = None

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._number = self.device.index
        self._known: dict[int, Stream] = {}
        self._spare: list[Any] = []  # events that nobody looks at any more

    def current(self) -> Stream:
        """The calling thread's current stream."""
        found = self._known.get(torch._C._cuda_getCurrentRawStream(self._number))
        return self._met() if found is None else found

    def _met(self) -> Stream:
        """The current stream's object, kept by its handle from now on."""
        found: Stream = torch.cuda.current_stream(self.device)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[found.cuda_stream] = found
        return found

    def make(self) -> Stream:
        """A stream of the highest priority there is, of nobody else's: torch has 32, which it gives again and again.

        Two communicators that shared one would wait for each other's peers. It is never destroyed: torch's allocator
        may keep events for memory that was used on it.
        """
        torch.cuda.current_stream(self.device).synchronize()  # makes the device's context, where there is none yet
        made: Stream = torch.cuda.ExternalStream(self._new_stream(), self.device)
        return made

    def _new_stream(self) -> int:
        """CUDA's handle of a new stream."""
        least, greatest, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        with torch.cuda.device(self.device):
            _call_driver("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
            _call_driver("cuStreamCreateWithPriority", ctypes.byref(handle), _NON_BLOCKING, greatest)
        assert handle.value is not None, "a stream of CUDA's"
        return handle.value

    def record(self, stream: Any) -> Event:
        """The point that `stream` has been filled to: an event without the calls that torch's class adds."""
        made: Event = torch._C._CudaEventBase()
        made.record(stream)  # type: ignore[attr-defined]
        return made

    def follow(self, stream: Any, other: Any) -> None:
        """Puts a wait for all that `other` has been given into `stream`, by an event that is used again.

        Not while a graph is made of them: that is `follow_in_graph`.
        """
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch._C._CudaEventBase()
        event.record(other)
        event.wait(stream)
        self._spare.append(event)

    def on(self, stream: Any, before: Any = None) -> AbstractContextManager[object]:
        """Sends the operators of the calling thread to `stream`, and those without a stream to its device."""
        if torch._C._cuda_getDevice() != self._number:
            return torch.cuda.stream(stream)
        if before is None:
            before = self.current()
        if stream is before:
            return _NOTHING
        latest = self._latest_on
        if latest is None or latest.stream is not stream or latest.before is not before:
            latest = self._latest_on = _On(before, stream)
        return latest

    launch = staticmethod(run_at_once)  # kernels go to the current stream by themselves

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being made of the current stream."""
        capturing: bool = torch._C._cuda_isCurrentStreamCapturing()
        return capturing

    def bind_thread(self) -> None:
        """Makes the GPU the calling thread's."""
        torch.cuda.set_device(self.device)

    def ignore_captures(self) -> None:
        """Makes the calling thread's capture mode relaxed: the default lets a capture reach into all threads."""
        _call_driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))

    def future(
        self, stream: Any, value: Sequence[torch.Tensor], error: Callable[[], BaseException | None]
    ) -> "torch.futures.Future[Any]":
        """A future with an event of `stream`, for which the waiters' streams and the callbacks' streams wait."""
        made: torch.futures.Future[Any] = torch.futures.Future(devices=[self.device])
        with self.on(stream):
            made.set_result(list(value))
        return made


_NOTHING = nullcontext()


class _On:
    """Context in which the calling thread's operators go to a stream of its current device, and not to `before`."""

    __slots__ = ("_back", "_there", "before", "stream")

    def __init__(self, before: Any, stream: Any) -> None:
        self.before, self.stream = before, stream
        self._back, self._there = _set_stream_to(before), _set_stream_to(stream)

    def __enter__(self) -> None:
        torch._C._cuda_setStream(*self._there)  # as torch.cuda.set_stream does, in half of its time

    def __exit__(self, *_: object) -> None:
        torch._C._cuda_setStream(*self._back)


def _set_stream_to(stream: Any) -> tuple[int, int, int]:
    """Arguments of `torch._C._cuda_setStream` for a stream."""
    return stream.stream_id, stream.device_index, stream.device_type

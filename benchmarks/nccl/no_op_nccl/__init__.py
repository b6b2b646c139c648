"""NCCL, its streams and the kernels around it, all of which do nothing: what is timed over them is the host's work.

They are doubles, for benchmarks of host time: no result is right, and nothing of a device is measured. Tensors are on
the CPU; tables are those of CUDA devices, up to the launch of their kernels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.nccl.compiled_library import compiled_library
from tests.harness.doubled import doubled
from tritondt._C import NcclLibrary
from tritondt.comm.member import ProcessContext
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.comm.work import run_at_once
from tritondt.kernels.gpu import copy_boxes, reduce_slots
from tritondt.kernels.tables import TritonMaker
from tritondt.process_group.stream import NcclDevice

_REPOSITORY = Path(__file__).parents[3]


def build() -> Path:
    """The library, compiled where it is older than its source: the tests' that records calls, which records none."""
    source = _REPOSITORY / "tests" / "csrc" / "nccl" / "recording_nccl.cpp"
    library = _REPOSITORY / "build" / "no_op_nccl" / "libnccl.so.2"
    return compiled_library(source, library, f"-I{_REPOSITORY / 'csrc'}", "-DRECORDING_NOTHING")


class NoOpEvent:
    """A point in a stream that has always been passed."""

    def query(self) -> bool:
        """Yes."""
        return True


class NoOpStream:
    """A stream that runs nothing."""

    cuda_stream = 0
    _event = NoOpEvent()

    def record_event(self) -> NoOpEvent:
        """One event for all."""
        return self._event

    def wait_event(self, event: Any) -> None:
        """Does not."""

    def synchronize(self) -> None:
        """Does not wait."""


class NoOpStreams:
    """Streams of the CPU that run nothing."""

    device = torch.device("cpu")
    connects_late = False

    def __init__(self) -> None:
        self._stream, self._nothing = NoOpStream(), nullcontext()

    def current(self) -> NoOpStream:
        """The caller's, whoever calls."""
        return self._stream

    def make(self) -> NoOpStream:
        """Another one."""
        return NoOpStream()

    def on(self, stream: Any, before: Any = None) -> AbstractContextManager[object]:
        """Nothing changes."""
        return self._nothing

    def record(self, stream: Any) -> Any:
        """As the stream itself."""
        return stream.record_event()

    def follow(self, stream: Any, other: Any) -> None:
        """Everything has run."""

    launch = staticmethod(run_at_once)  # as on a GPU

    def is_capturing(self) -> bool:
        """No."""
        return False

    def bind_thread(self) -> None:
        """There is one device."""

    def ignore_captures(self) -> None:
        """There are no captures."""

    def future(self, stream: Any, value: Sequence[torch.Tensor], error: Callable[[], BaseException | None]) -> Any:
        """One that is there."""
        made: torch.futures.Future[Any] = torch.futures.Future()
        made.set_result(list(value))
        return made


class NoOpKernel:
    """A kernel of Triton's that nobody compiles and that launches nothing."""

    __module__ = "no-op interpreter"  # tables take kernels of the interpreter for the CPU, and no others

    def warmup(self, *arguments: object, **options: object) -> None:
        """Compiles nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return _launch


def _launch(*arguments: object) -> None: ...


@contextmanager
def carried_by_nothing() -> Iterator[None]:
    """Within, this process's tensors on the CPU go by NCCL, in our transport and our backend, and nothing moves."""
    library = NcclLibrary(str(build()), None)
    kernels = copy_boxes.copy_kernel, reduce_slots.reduce_kernel

    def transport(member: ProcessContext) -> NcclCommunicator:
        return NcclCommunicator(member, library, NoOpStreams())

    def nccl_device(device: torch.device) -> NcclDevice:
        return NcclDevice(library, NoOpStreams())

    copy_boxes.copy_kernel = reduce_slots.reduce_kernel = NoOpKernel()
    try:
        with doubled("cpu", transport=transport, nccl_device=nccl_device, table_maker=TritonMaker()):
            yield
    finally:
        copy_boxes.copy_kernel, reduce_slots.reduce_kernel = kernels

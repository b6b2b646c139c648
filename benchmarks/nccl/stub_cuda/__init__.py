"""CUDA as the host sees it: a stub of its driver, and of torch's extension around it, whose calls take their time.

Real parts are the library's streams (`CudaStreams`) and launches, torch's Python around streams, kernels compiled for
sm_90, Triton's driver and its launcher, which finds the stub as libcuda.so.1. Doubles are the driver itself, torch's
C++ around it, memory (tensors are on the CPU, each allocation also takes the time of CUDA's), NCCL.
Nothing runs on a device, and no result is right.
"""

import ctypes
import importlib.util
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from benchmarks.nccl.compiled_library import compiled_library
from benchmarks.nccl.no_op_nccl import NoOpStreams
from benchmarks.nccl.no_op_nccl import build as build_nccl
from tests.harness.doubled import doubled, keep
from tritondt._C import NcclLibrary
from tritondt.comm.nccl.streams import CudaStreams, Stream
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.kernels import memory
from tritondt.kernels.tables import TritonMaker
from tritondt.process_group.stream import NcclDevice

_REPOSITORY = Path(__file__).parents[3]
_NAME = "libcuda.so.1"


def build() -> Path:
    """The library, compiled where it is older than its source."""
    import triton.backends.nvidia as nvidia

    source = Path(__file__).parent / "stub_cuda.cpp"
    library = _REPOSITORY / "build" / "stub_cuda" / _NAME
    includes = [sysconfig.get_path("include"), str(Path(nvidia.__file__).parent / "include")]
    return compiled_library(source, library, f"-Wl,-soname,{_NAME}", *(f"-I{path}" for path in includes))


def load() -> Any:
    """The stub as a module of Python; RuntimeError where the process has another libcuda, whose calls would be taken.

    Code that asks for libcuda.so.1 from now on gets the stub, as that is its name.
    """
    path = str(build())
    try:
        found = ctypes.CDLL(_NAME, os.RTLD_NOLOAD)
    except OSError:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    else:
        if not hasattr(found, "PyInit_stub_cuda"):
            raise RuntimeError(f"this process has loaded a {_NAME} already; the stub must be the only one")
    loader = ExtensionFileLoader("stub_cuda", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("stub_cuda", loader))
    loader.exec_module(module)
    return module


class StubStreams(CudaStreams):
    """The library's own streams of a GPU, over streams and events of the stub; memory is the CPU's."""

    connects_late = False

    def __init__(self, cuda: Any, make: Callable[[int], Stream]) -> None:
        self.device = torch.device("cpu")
        self._number, self._known, self._spare = cuda.device_number(), {}, []
        self._cuda, self._make = cuda, make

    def _met(self) -> Stream:
        handle = self._cuda.raw_stream(None)
        return self._known.setdefault(handle, self._make(handle))

    def make(self) -> Stream:
        """A stream of its own."""
        handle = self._cuda.new_stream()
        return self._known.setdefault(handle, self._make(handle))

    def bind_thread(self) -> None:
        """There is one device."""

    def future(self, stream: Any, value: Sequence[torch.Tensor], error: Callable[[], BaseException | None]) -> Any:
        """One that is there."""
        return NoOpStreams.future(self, stream, value, error)  # type: ignore[arg-type]


def _classes(cuda: Any) -> tuple[type[Any], type[Any]]:
    """Classes of streams and of events over those of the stub.

    They are none of torch.cuda's: where torch was built for CUDA, its extension makes these, and asks the driver.
    """

    class StubEvent:
        __slots__ = ()
        record, wait, query = cuda.event_record, cuda.event_wait, cuda.event_query

    class StubStream:
        __slots__ = ("cuda_stream", "device_index", "device_type", "stream_id")
        record_event, wait_event = torch.cuda.Stream.record_event, torch.cuda.Stream.wait_event

        def __init__(self, handle: int) -> None:
            self.cuda_stream = self.stream_id = handle
            self.device_index = self.device_type = 0

        def synchronize(self) -> None: ...

    return StubStream, StubEvent


def _maker(cuda: Any) -> TritonMaker:
    """Tables as on a CUDA device with number 0; their cells are on the CPU."""

    class Maker(TritonMaker):
        def copy_table(self, *arguments: Any) -> Any:
            return on_device(super().copy_table(*arguments))

        def reduce_table(self, *arguments: Any) -> Any:
            return on_device(super().reduce_table(*arguments))

    def on_device(table: Any) -> Any:
        table._number = cuda.device_number()
        return table

    return Maker()


def carry_by_stub(costs_ns: Mapping[str, int]) -> Any:
    """Lets this process's tensors on the CPU go by NCCL as on a GPU, over calls that take `costs_ns` each, for good.

    Gives the stub: its `take_counts()` are the calls since the last time, by name; `set_costs` sets other costs.
    """
    import triton.backends.nvidia.driver as nvidia
    from triton import knobs
    from triton.runtime.driver import driver

    from tritondt.kernels.gpu import device_table

    cuda = load()
    cuda.set_costs(dict(costs_ns))
    cuda.set_empty(torch.empty, memory.makers[torch.device("cpu")])
    stream_class, event_class = _classes(cuda)

    class LaunchOnDevice(device_table.Launch):
        """A launch as on a CUDA device, of which torch need not be told that its streams read the cells."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._device = torch.device("cuda", 0)
            self._cells._streams = _All()

    for place, name, stub in (
        (torch._C, "_cuda_getCurrentRawStream", cuda.raw_stream),
        (torch._C, "_cuda_isCurrentStreamCapturing", cuda.is_capturing),
        (torch._C, "_cuda_getDevice", cuda.device_number),
        (torch._C, "_cuda_setStream", cuda.set_stream),
        (torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", cuda.is_capturing),
        (torch.cuda, "current_device", cuda.device_number),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch._C, "_CudaEventBase", event_class),
        (torch.cuda, "Event", event_class),
        (torch.cuda.streams, "Event", event_class),
        (torch, "empty", cuda.empty),
        (memory._guards, "_empty_strided_cuda", cuda.empty_strided),
        (device_table, "resolved", lambda device, _: device),
        (device_table, "Launch", LaunchOnDevice),
        (knobs.nvidia, "libcuda_path", str(build().parent)),
    ):
        setattr(place, name, stub)
    memory.makers[torch.device("cpu")] = memory._maker_on(torch.device("cuda", 0))
    driver.set_active(nvidia.CudaDriver())
    library = NcclLibrary(str(build_nccl()), None)
    keep(
        doubled(
            "cpu",
            transport=lambda member: NcclCommunicator(member, library, StubStreams(cuda, stream_class)),
            nccl_device=lambda _: NcclDevice(library, StubStreams(cuda, stream_class)),
            table_maker=_maker(cuda),
        )
    )
    return cuda


class _All(set[int]):
    """Every stream's handle."""

    def __contains__(self, handle: object) -> bool:
        return True

"""The same bodies of tests over NCCL on a GPU, and over its test double on the host.

    with start("host", 2) as ranks:         # or "gpu": processes on the backend "tritondt"
        ranks.run(body, "host")             # body(rank, where): device = device_of(where)

Over the double the mistakes of a body show on any machine; what it says about NCCL shows on a GPU.
"""

import ctypes
import functools
import json
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

import tritondt._C
from tests.doubles.fake_nccl.library import Gate, build, load
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import fake_streams, use_fake_backend, use_fake_nccl
from tests.nccl.libraries import check_shared, libraries, sharing_library, variables_for
from tests.nccl.traces import Kernel, kernels_of
from tritondt import environment
from tritondt._C import NcclLibrary
from tritondt.comm.nccl.library import nccl_library
from tritondt.comm.nccl.streams import CudaStreams, Streams

Run = Callable[[], object]

# What two ranks need to share a GPU: they take turns, and a kernel that waits for the other rank must leave it room.
SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_MAX_P2P_NCHANNELS": "4",
}
# What ranks of one machine need to meet, whatever other networks it has.
ON_ONE_MACHINE = {"NCCL_SOCKET_IFNAME": "lo"}


class NcclDevice(Protocol):
    """What tests need to know of where they run."""

    kind: str
    library: NcclLibrary
    streams: Streams

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Bytes that can be registered, zeroed."""
        ...

    def recorded(self, run: Run) -> Run:
        """`run` as one that was recorded and can be replayed on the same memory; it runs meanwhile or not."""
        ...

    def hold_up(self, stream: Any, seconds: float) -> None:
        """Lets what is put into a stream next wait so long, and not the host."""
        ...

    def synchronize(self) -> None:
        """Returns when nothing is left to run."""
        ...

    def kernels(self, run: Run) -> list[Kernel]:
        """What ran on the device, as torch's profiler saw it, from `run` until nothing is left to run."""
        ...


class HostDevice:
    """The double. It has no graphs: what is recorded runs, by CUDA's rules, and is called again; and no kernels."""

    kind = "cpu"

    def __init__(self) -> None:
        path = build()
        self.library = NcclLibrary(str(path), None)
        self._fakes = fake_streams(load(path))
        self.streams: Streams = self._fakes

    def memory(self, num_bytes: int) -> torch.Tensor:
        address = self.library.allocate(num_bytes)
        found = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
        return found.zero_()

    def recorded(self, run: Run) -> Run:
        run()
        with self._fakes.capturing():
            run()

        def replay() -> object:
            return run()

        weakref.finalize(replay, self._fakes.destroy_graphs)  # as a graph goes with what replays it
        return replay

    def hold_up(self, stream: Any, seconds: float) -> None:
        threading.Timer(seconds, Gate(stream._stream).open).start()

    def synchronize(self) -> None:
        self._fakes.synchronize()

    def kernels(self, run: Run) -> list[Kernel]:
        run()
        self.synchronize()
        return []


class GpuDevice:
    """GPU 0, whichever rank this is."""

    kind = "cuda"
    _CYCLES_PER_S = 2e9  # about the clock of a GPU

    def __init__(self) -> None:
        self.library = nccl_library()
        self.streams: Streams = CudaStreams(torch.device("cuda", 0))

    def memory(self, num_bytes: int) -> torch.Tensor:
        pool, _ = self._pool
        with torch.cuda.use_mem_pool(pool):
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.kind)

    @functools.cached_property
    def _pool(self) -> tuple[Any, Any]:
        """The pool, and the allocator that must live as long."""
        names = self.library.serve_pool()
        allocator: Any = torch.cuda.memory.CUDAPluggableAllocator(tritondt._C.__file__, *names)
        return torch.cuda.MemPool(allocator.allocator()), allocator

    def recorded(self, run: Run) -> Run:
        run()  # what is made on first use cannot be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay: Run = graph.replay
        return replay

    def hold_up(self, stream: Any, seconds: float) -> None:
        with self.streams.on(stream):
            torch.cuda._sleep(int(seconds * self._CYCLES_PER_S))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def kernels(self, run: Run) -> list[Kernel]:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            return kernels_of(json.loads(Path(file.name).read_text()))


@functools.cache
def device_of(where: str) -> NcclDevice:
    """That of a rank's process: "host" or "gpu"."""
    return HostDevice() if where == "host" else GpuDevice()


def use_host() -> None:
    """The preparation of a rank over the double: meshes and the backend "tritondt" for tensors of the CPU."""
    use_fake_nccl()
    use_fake_backend()


def use_gpu() -> None:
    """The preparation of a rank on GPU 0, whose NCCL must be torch's."""
    check_shared(nccl_library())
    torch.cuda.set_device(0)


def start(where: str, size: int, **variables: str) -> GlooRanks:
    """Ranks on the backend "tritondt", over the double or on the one GPU, where two share it."""
    if where == "host":
        return GlooRanks(size, variables, prepare=use_host, backend="tritondt")
    path = sharing_library() if size > 1 else environment.nccl_path()
    told = {**ON_ONE_MACHINE, **(SHARED if size > 1 else {}), **(variables_for(path) if path else {}), **variables}
    return GlooRanks(size, told, prepare=use_gpu, backend="tritondt", fresh=True)


def why_not(where: str, size: int) -> str | None:
    """What is missing to start such ranks."""
    if where == "host":
        return None
    if not torch.cuda.is_available():
        return f"needs a CUDA device; torch {torch.__version__} sees none"
    if size > 1 and sharing_library() == "":
        found = ", ".join(f"{library.version} ({library.path})" for library in libraries()) or "none"
        return (
            f"{size} ranks on one GPU need NCCL 2.30.7 or later, and found is {found}; name one with TRITONDT_NCCL_SO, "
            "or put it into a folder of NCCL_LIBRARIES"
        )
    return None

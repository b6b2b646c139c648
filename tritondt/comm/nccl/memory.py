"""Memory that NCCL has allocated (ncclMemAlloc), fit for registered buffers and windows."""

import ctypes
import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tritondt._C import NcclLibrary
from tritondt.comm.nccl.library import nccl_library
from tritondt.errors.arguments import checked

# Windows begin at a multiple of 4096 bytes; a device maps memory in pages of 2 MiB, which torch's pool cuts otherwise.
_PAGE_BYTES = 1 << 21
_pools: dict[str, tuple[Any, Any]] = {}


@checked
def memory_pool(library: NcclLibrary | None = None) -> Any:
    """A torch.cuda.MemPool whose memory NCCL has allocated (ncclMemAlloc), fit for buffers and windows; NCCL 2.19.

    Not collective. `library` is that of the process by default. The first library that serves a pool serves all pools
    of this process; another one raises NcclError. Source: NCCL's documentation of ncclMemAlloc, torch's of MemPool.

    An example that needs a GPU:

    >>> with torch.cuda.use_mem_pool(memory_pool()):  # doctest: +SKIP
    ...     tensor = torch.zeros(1024, device="cuda")
    """
    found = nccl_library() if library is None else library
    if found.path not in _pools:
        allocator: Any = torch.cuda.memory.CUDAPluggableAllocator(
            str(sys.modules[NcclLibrary.__module__].__file__), *found.serve_pool()
        )
        _pools[found.path] = torch.cuda.MemPool(allocator.allocator()), allocator
    return _pools[found.path][0]  # the allocator beside it must live as long


@checked
def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, library: NcclLibrary | None = None
) -> torch.Tensor:
    """Makes an uninitialized tensor in memory that NCCL allocated (ncclMemAlloc), for buffers and windows; NCCL 2.19.

    Not collective. On a GPU the memory comes from `memory_pool`. On the CPU, which only a double of NCCL supports, the
    library allocates it, and it is freed with the tensor. Raises NcclUnsupportedError where NCCL is older.

    An example that needs a GPU:

    >>> tensor = empty((4, 256), torch.float32, "cuda")  # doctest: +SKIP
    """
    found = nccl_library() if library is None else library
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type == "cuda":
        with torch.cuda.use_mem_pool(memory_pool(found)):
            memory = torch.empty(-(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES, dtype=torch.uint8, device=device)
    else:
        memory = _on_host(found, max(num_bytes, 1))
    return memory[:num_bytes].view(dtype).view(tuple(shape))


def _on_host(library: NcclLibrary, num_bytes: int) -> torch.Tensor:
    """Bytes of the library's allocation, which are given back with the last tensor on them."""
    address = library.allocate(num_bytes)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(memory, library.free, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)

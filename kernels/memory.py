"""Memory for results and messages."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from tritondt._C import advise_huge_pages
from tritondt.kernels.memory_pool import MemoryPool

# glibc gives blocks of 32 MB and more back to the kernel when they are freed, so each new one is mapped page by
# page as it is written: 62 ms for 64 MB on a virtual machine with 4 kB pages, 13 ms with huge ones.
_HUGE_BYTES = 16 << 20
# Four results of 64 MB.
_POOL_BYTES = 256 << 20
# Share of the machine's memory that is available below which nothing idle is kept.
_LEAST_AVAILABLE = 1 / 16

# Of this process: all large results come from here.
pool = MemoryPool(_POOL_BYTES)
os.register_at_fork(after_in_child=pool.after_fork)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """A dense tensor of undefined values; on the CPU a large one lies where one did that is gone, or on huge pages."""
    # torch reads lengths one by one in 0.4 us less than a tuple of them, a third of the call
    made = torch.empty(*shape, dtype=dtype, device=device) if shape else torch.empty((), dtype=dtype, device=device)
    if made.is_cpu and made.nbytes >= _HUGE_BYTES:
        _place(made)
    return made


def _place(made: torch.Tensor) -> None:
    """Gives a new tensor, whose own memory is not mapped before it is written, memory that is, where there is some."""
    storage = pool.take(made.nbytes)
    if storage is not None:
        made.set_(storage, 0, made.shape, made.stride())
        return
    advise_huge_pages(made.data_ptr(), made.nbytes)
    if available_share() < _LEAST_AVAILABLE:
        pool.empty()
    else:
        pool.follow(made.untyped_storage())


def available_share(path: Path = Path("/proc/meminfo")) -> float:
    """Share of the machine's memory that the kernel could give out; 1 where it does not say."""
    try:
        with path.open() as file:
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
        return sizes["MemAvailable"] / sizes["MemTotal"]
    except (OSError, KeyError):
        return 1.0


def empty_cache() -> int:
    """Number of bytes given back to the system: memory of large results that are gone, which next ones would get.

    The rest is freed with its last tensor. TRITONDT_POOL_MB bounds what is kept.

    >>> import tritondt as T
    >>> freed_bytes = T.empty_cache()
    >>> T.empty_cache()
    0
    """
    return pool.empty()


def reallocate(tensor: torch.Tensor, num_bytes: int) -> None:
    """Gives the storage of a tensor new memory of `num_bytes`, of undefined values; 0 frees it.

    Tensors that share the storage read the new memory, and count nothing as written.
    """
    storage = tensor.untyped_storage()
    storage.resize_(num_bytes)
    if num_bytes >= _HUGE_BYTES and tensor.is_cpu:
        advise_huge_pages(storage.data_ptr(), num_bytes)

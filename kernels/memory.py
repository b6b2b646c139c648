"""Memory for results and messages."""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from tritondt._C import advise_huge_pages
from tritondt.kernels.memory_pool import MemoryPool

# glibc gives blocks of 32 MB and more back to the kernel when they are freed, so each new one is mapped page by
# page as it is written: 62 ms for 64 MB on a virtual machine with 4 kB pages, 13 ms with huge ones.
_HUGE_BYTES = 16 << 20
# Of 4 MB a rank, results took 0.94 ms or 2.6 ms in one run or another: as memory that was free was trimmed, or not.
_POOLED_BYTES = 1 << 20
# Four results of 64 MB.
_POOL_BYTES = 256 << 20
# Share of the machine's memory that is available below which nothing idle is kept.
_LEAST_AVAILABLE = 1 / 16

# Of this process: all large results come from here.
pool = MemoryPool(_POOL_BYTES)
os.register_at_fork(after_in_child=pool.after_fork)

_num_modes = torch._C._len_torch_dispatch_stack
_guards: Any = torch._C._dynamo.guards

# Tensors of a graph that torch traces.
_WITHOUT_MEMORY = (FakeTensor, FunctionalTensor)

# A tensor of lengths, strides and a dtype.
Make = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds values; a tensor that stands for one while torch traces a graph does not."""
    return type(tensor) is torch.Tensor or not isinstance(tensor, _WITHOUT_MEMORY)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """A dense tensor of undefined values; on the CPU a large one lies where one did that is gone, or on huge pages."""
    make = None if _num_modes() else makers[device]
    if make is None:
        made = torch.empty(shape, dtype=dtype, device=device)
    else:
        lengths = tuple(shape)
        made = make(lengths, _dense_strides(lengths), dtype)
    if made.is_cpu and made.nbytes >= _POOLED_BYTES:
        _place(made)
    return made


class Shape(NamedTuple):
    """Lengths, dense strides and dtype of a tensor that will be made, and its bytes."""

    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


def shape_of(lengths: tuple[int, ...], dtype: torch.dtype) -> Shape:
    """The shape of a dense tensor, found once for many that are made.

    >>> shape_of((2, 3), torch.int16)
    Shape(lengths=(2, 3), strides=(3, 1), dtype=torch.int16, num_bytes=12)
    """
    return Shape(lengths, _dense_strides(lengths), dtype, prod(lengths) * dtype.itemsize)


def allocate_all(shapes: Sequence[Shape], device: torch.device) -> list[torch.Tensor]:
    """Dense tensors as `allocate` makes them, with half of its Python for each.

    >>> [tuple(made.shape) for made in allocate_all([shape_of((2, 3), torch.int16)] * 2, torch.device("cpu"))]
    [(2, 3), (2, 3)]
    """
    make = None if _num_modes() else makers[device]
    if make is None:
        return [allocate(lengths, dtype, device) for lengths, _, dtype, _ in shapes]
    found = [make(lengths, strides, dtype) for lengths, strides, dtype, _ in shapes]
    if device.type == "cpu":
        for made, (_, _, _, num_bytes) in zip(found, shapes, strict=True):
            if num_bytes >= _POOLED_BYTES:
                _place(made)
    return found


class _Makers(dict[torch.device | None, Make | None]):
    """Functions that make the tensors of a device; None for those of a device that has nothing but torch.empty.

    Torch's compiled graphs call them for their results, without the dispatcher: torch.empty takes 1.3 us where they
    take 0.5. Modes that watch operators would not see them, and no mode fills what they give.
    """

    def __missing__(self, device: torch.device | None) -> Make | None:
        found = self[device] = None if device is None else _maker_on(device)
        return found


def _maker_on(device: torch.device) -> Make | None:
    """The function that makes tensors on a device, where torch has one.

    That for GPUs takes the one of the calling thread; torch.empty is there for others.
    """
    strided: Make | None = getattr(_guards, f"_empty_strided_{device.type}", None)
    number = device.index
    if strided is None or device.type == "cpu":
        return strided
    if device.type != "cuda" or number is None:
        return None

    def make(lengths: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if torch._C._cuda_getDevice() != number:
            return torch.empty(lengths, dtype=dtype, device=device)
        return strided(lengths, strides, dtype)

    return make


makers = _Makers()


@lru_cache(maxsize=4096)
def _dense_strides(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense row-major tensor, as torch.empty gives it."""
    return torch.empty(lengths, device="meta").stride()


def _place(made: torch.Tensor) -> None:
    """Gives a new tensor, whose own memory is not mapped before it is written, memory that is, where there is some."""
    storage = pool.take(made.nbytes)
    if storage is not None:
        made.set_(storage, 0, made.shape, made.stride())
        return
    num_bytes = made.nbytes
    if num_bytes >= _HUGE_BYTES:
        advise_huge_pages(made.data_ptr(), num_bytes)
    if not _has_room(num_bytes):
        pool.empty()
    else:
        pool.follow(made.untyped_storage())


class _Room:
    """Whether the machine has memory to spare, as it was found lately."""

    has_some = True
    unseen_bytes = _HUGE_BYTES  # that were allocated since


def _has_room(num_bytes: int) -> bool:
    """Whether idle memory may be kept; asked of the kernel, in 30 us, once for so much new memory."""
    _Room.unseen_bytes += num_bytes
    if _Room.unseen_bytes >= _HUGE_BYTES or not _Room.has_some:
        _Room.unseen_bytes = 0
        _Room.has_some = available_share() >= _LEAST_AVAILABLE
    return _Room.has_some


def available_share(path: Path = Path("/proc/meminfo")) -> float:
    """Share of the machine's memory that the kernel could give out; 1 where it does not say."""
    try:
        with path.open() as file:
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
        return sizes["MemAvailable"] / sizes["MemTotal"]
    except (OSError, KeyError):
        return 1.0


def empty_cache() -> int:
    """Gives the memory kept for later large results back to the system, and returns its number of bytes.

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

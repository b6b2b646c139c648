"""Storages that messages under way are reading, so that nothing is written there meanwhile.

Messages are sent from the tensors themselves where they lie in one run: without a guard an in-place operator tears
them. Distributed tensors are guarded by their storage, so that views and parameters that share it are guarded too.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritondt.kernels.memory import has_memory

# How to wait for whoever reads a storage, by its address; empty whenever nothing is under way.
readers: dict[int, tuple[Callable[[], None], ...]] = {}
_changing = threading.Lock()


def begin(tensors: Iterable[torch.Tensor], wait: Callable[[], None]) -> Collection[int]:
    """Notes that the storages of `tensors` are being read until `end` is called with what this returns."""
    addresses: list[int] = []
    with _changing:
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            # Empty storages are all at address 0, those of other communicators and rank threads too: nothing is read.
            if address and address not in addresses:
                addresses.append(address)
                readers[address] = (*readers.get(address, ()), wait)
    return addresses


def end(addresses: Collection[int], wait: Callable[[], None]) -> None:
    """Ends the reading that `begin` noted, of storages at `addresses`."""
    with _changing:
        for address in addresses:
            found = readers[address]
            if len(found) == 1:
                del readers[address]
            else:
                readers[address] = tuple([other for other in found if other != wait])


def wait_before_writing(tensors: Iterable[torch.Tensor]) -> None:
    """Returns when nobody reads these tensors' storages any more; raises none of the readers' errors."""
    for tensor in tensors:
        for address in _addresses(tensor):
            for wait in readers.get(address, ()):
                wait()


def _addresses(tensor: torch.Tensor) -> Iterator[int]:
    """Addresses of storages that hold a tensor's values; a class without memory keeps them in tensors of its own."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _addresses(getattr(tensor, name))
    elif has_memory(tensor) and tensor.data_ptr():
        yield tensor.untyped_storage().data_ptr()


def _after_fork() -> None:
    """Forgets all readers in a forked child, which has its own copy of the memory."""
    global _changing
    _changing = threading.Lock()
    readers.clear()


os.register_at_fork(after_in_child=_after_fork)

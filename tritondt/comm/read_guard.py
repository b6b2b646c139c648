"""Storages that messages under way are reading, so that nothing is written there meanwhile.

Messages are sent from the tensors themselves where they lie in one run: without a guard an in-place operator tears
them. Distributed tensors are guarded by their storage, so that views and parameters that share it are guarded too.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterable

import torch

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
        for wait in readers.get(tensor.untyped_storage().data_ptr(), ()):
            wait()


def _after_fork() -> None:
    """Forgets all readers in a forked child, which has its own copy of the memory."""
    global _changing
    _changing = threading.Lock()
    readers.clear()


os.register_at_fork(after_in_child=_after_fork)

"""Memory of large tensors that are gone, kept for the next ones of the same length.

The C library gives blocks of 32 MB and more back to the kernel when they are freed, and the kernel fills each new one
with zeros, which is as much work as the messages that then fill it.
"""

import sys
import threading
from typing import Any, NamedTuple

import torch


class _Block(NamedTuple):
    """A storage that the pool follows, with the place and length that its memory had when it came in."""

    storage: Any
    address: int
    num_bytes: int


def _num_references(block: _Block) -> int:
    return sys.getrefcount(block.storage)


# Of a storage that nothing in Python but its block holds.
_IDLE_REFERENCES = _num_references(_Block(torch.UntypedStorage(0), 0, 0))


class MemoryPool:
    """Storages of CPU tensors, each handed out again once no tensor and nothing else holds it.

    The pool follows at most `most_bytes` of memory, in use or idle. Older blocks are forgotten for newer ones, the idle
    first, and are freed with their last tensor as all memory is. Threads may share it.

    >>> pool = MemoryPool(most_bytes=100)
    >>> first = torch.zeros(20, dtype=torch.uint8).untyped_storage()
    >>> pool.follow(first)
    >>> pool.take(20) is None, pool.idle_bytes  # `first` is still held here
    (True, 0)
    >>> del first
    >>> pool.idle_bytes, pool.take(20).nbytes()
    (20, 20)
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._blocks: list[_Block] = []  # what was handed out longest ago comes first
        self._changing = threading.Lock()

    def take(self, num_bytes: int) -> Any:
        """An idle storage of exactly this length, of undefined values; None where there is none."""
        with self._changing:
            for place, block in enumerate(self._blocks):
                if block.num_bytes == num_bytes and _is_idle(block) and _is_in_place(block):
                    self._blocks.append(self._blocks.pop(place))
                    # Notes that others made at the storage were about tensors that are gone.
                    vars(block.storage).clear()
                    return block.storage
        return None

    def follow(self, storage: Any) -> None:
        """Hands the storage of a new tensor out again later, where it is no longer than the bound."""
        num_bytes = storage.nbytes()
        if num_bytes > self.most_bytes:
            return
        with self._changing:
            forgotten = self._forget(down_to=self.most_bytes - num_bytes)
            self._blocks.append(_Block(storage, storage.data_ptr(), num_bytes))
        del forgotten  # frees memory, without the lock

    def empty(self) -> int:
        """Number of idle bytes, all of which are freed."""
        with self._changing:
            idle = [block for block in self._blocks if _is_idle(block)]
            self._keep_all_but(idle)
        return sum(block.num_bytes for block in idle)

    @property
    def idle_bytes(self) -> int:
        """Number of bytes that nothing but the pool holds."""
        with self._changing:
            return sum(block.num_bytes for block in self._blocks if _is_idle(block))

    def after_fork(self) -> None:
        """A lock for a forked child that no thread of its parent holds."""
        self._changing = threading.Lock()

    def _forget(self, down_to: int) -> list[_Block]:
        """Blocks that the pool follows no longer, so that the others have at most so many bytes."""
        forgotten = [block for block in self._blocks if not _is_in_place(block)]
        self._keep_all_but(forgotten)
        excess = sum(block.num_bytes for block in self._blocks) - down_to
        for block in sorted(self._blocks, key=_is_idle, reverse=True):
            if excess <= 0:
                break
            excess -= block.num_bytes
            forgotten.append(block)
        self._keep_all_but(forgotten)
        return forgotten

    def _keep_all_but(self, gone: list[_Block]) -> None:
        identities = {id(block) for block in gone}
        self._blocks = [block for block in self._blocks if id(block) not in identities]


def _is_idle(block: _Block) -> bool:
    """Whether nothing but the pool holds a storage: no tensor, and nothing in Python."""
    is_alone: bool = torch._C._storage_Use_Count(block.storage._cdata) == 1
    return is_alone and _num_references(block) == _IDLE_REFERENCES


def _is_in_place(block: _Block) -> bool:
    """Whether a storage still has the memory with which it came; resize_() and share_memory_() give it another."""
    return bool(block.storage.data_ptr() == block.address and block.storage.nbytes() == block.num_bytes)

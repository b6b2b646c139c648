"""Memory of large tensors that are gone, kept for the next ones of the same length.

The C library gives blocks of 32 MB and more back to the kernel when they are freed, and shorter ones where they are at
the end of its memory. The kernel fills each new page with zeros, which is as much work as the messages that fill it.
"""

import sys
import threading
from collections import defaultdict
from itertools import islice
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


# While new blocks fill the bound once, all are looked at so many times, whether they still have their memory.
_LOOKS = 16
# Blocks of which an idle one is forgotten first: to look at 256 takes as long as to copy 1 MB.
_NUM_OLDEST = 8


class MemoryPool:
    """Storages of CPU tensors, each handed out again once no tensor and nothing else holds it.

    The pool follows at most `most_bytes` of memory, in use or idle. Older blocks are forgotten for newer ones, the idle
    of the oldest first, and are freed with their last tensor as all memory is. Threads may share it.

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
        self._blocks: dict[int, _Block] = {}  # by address; what was handed out longest ago comes first
        self._of_length: dict[int, list[_Block]] = defaultdict(list)
        self._num_bytes, self._unseen_bytes = 0, 0
        self._changing = threading.Lock()

    def take(self, num_bytes: int) -> Any:
        """An idle storage of exactly this length, of undefined values; None where there is none."""
        with self._changing:
            for block in self._of_length.get(num_bytes, ()):
                if _is_idle(block) and _is_in_place(block):
                    self._blocks[block.address] = self._blocks.pop(block.address)
                    # Notes that others made at the storage were about tensors that are gone.
                    vars(block.storage).clear()
                    return block.storage
        return None

    def follow(self, storage: Any) -> None:
        """Hands the storage of a new tensor out again later, where it is no longer than the bound."""
        num_bytes, forgotten = storage.nbytes(), list[_Block]()
        if num_bytes > self.most_bytes:
            return
        with self._changing:
            block = _Block(storage, storage.data_ptr(), num_bytes)
            if block.address in self._blocks:  # of a storage that has other memory now
                forgotten.append(self._forget(self._blocks[block.address]))
            self._unseen_bytes += num_bytes
            if self._unseen_bytes * _LOOKS > self.most_bytes:
                self._unseen_bytes = 0
                forgotten += [self._forget(each) for each in list(self._blocks.values()) if not _is_in_place(each)]
            while self._num_bytes + num_bytes > self.most_bytes:
                forgotten.append(self._forget(self._least_needed()))
            self._blocks[block.address] = block
            self._of_length[num_bytes].append(block)
            self._num_bytes += num_bytes
        del forgotten  # frees memory, without the lock

    def empty(self) -> int:
        """Number of idle bytes, all of which are freed."""
        with self._changing:
            idle = [block for block in self._blocks.values() if _is_idle(block)]
            for block in idle:
                self._forget(block)
        return sum(block.num_bytes for block in idle)

    @property
    def idle_bytes(self) -> int:
        """Number of bytes that nothing but the pool holds."""
        with self._changing:
            return sum(block.num_bytes for block in self._blocks.values() if _is_idle(block))

    def after_fork(self) -> None:
        """A lock for a forked child that no thread of its parent holds."""
        self._changing = threading.Lock()

    def _least_needed(self) -> _Block:
        """The first idle one of the oldest blocks, or the oldest."""
        oldest = list(islice(self._blocks.values(), _NUM_OLDEST))
        return next((block for block in oldest if _is_idle(block)), oldest[0])

    def _forget(self, block: _Block) -> _Block:
        del self._blocks[block.address]
        of_length = self._of_length[block.num_bytes]
        of_length[:] = [each for each in of_length if each is not block]
        if not of_length:
            del self._of_length[block.num_bytes]
        self._num_bytes -= block.num_bytes
        return block


def _is_idle(block: _Block) -> bool:
    """Whether nothing but the pool holds a storage: no tensor, and nothing in Python."""
    is_alone: bool = torch._C._storage_Use_Count(block.storage._cdata) == 1
    return is_alone and _num_references(block) == _IDLE_REFERENCES


def _is_in_place(block: _Block) -> bool:
    """Whether a storage still has the memory with which it came; resize_() and share_memory_() give it another."""
    return bool(block.storage.data_ptr() == block.address and block.storage.nbytes() == block.num_bytes)

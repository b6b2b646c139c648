"""Where messages may start in memory: each rank's own decision, which changes no message and no result."""

from collections.abc import Sequence
from typing import NamedTuple

# Buffers lie in one block of memory, each where an allocator of CUDA's or glibc's could have put it.
STAGING_ALIGNMENT = 512


class Alignment(NamedTuple):
    """Alignment of the starts of messages, in bytes.

    A message in a buffer starts at a multiple of `buffered`. One of at least `large_bytes` that is one run of a tensor
    is sent from there, and lands there, only where it starts at a multiple of `in_place`; else it goes by the buffer.
    """

    buffered: int
    in_place: int
    large_bytes: int

    def start(self, filled: int, itemsize: int) -> int:
        """First byte of the next message in a buffer that is filled so far.

        >>> NCCL_ALIGNMENT.start(130, 4), DENSE.start(130, 4)
        (256, 132)
        """
        step = max(self.buffered, itemsize)
        return -(-filled // step) * step

    def behind(self, pointers: Sequence[int]) -> tuple[int, ...]:
        """Bytes by which tensors start behind multiples of `in_place`.

        >>> NCCL_ALIGNMENT.behind([4096, 8200])
        (0, 8)
        """
        return tuple([pointer % self.in_place for pointer in pointers])

    def keeps_in_place(self, start: int, num_bytes: int) -> bool:
        """Whether a message of one run, at byte `start` from a multiple of 16, goes without the buffer.

        >>> [NCCL_ALIGNMENT.keeps_in_place(8, num_bytes) for num_bytes in (1 << 10, 1 << 20)]
        [True, False]
        """
        return start % self.in_place == 0 or num_bytes < self.large_bytes


# The CPU copies from any address alike, and a socket too.
DENSE = Alignment(1, 1, 0)
# NCCL moves 16 bytes at a time where all pointers are multiples of 16, and else byte by byte (common_kernel.h, 2.30.7);
# a line of a GPU's cache has 128. A small message takes the latency of its launch either way, and a pack adds another.
NCCL_ALIGNMENT = Alignment(128, 16, 1 << 15)

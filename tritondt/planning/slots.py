"""Slots of shared memory: where ranks of one machine pack messages, which the others read there.

An arena is a board of announcements, whole pages of it, and two slots that rounds of exchanges take in turns. A message
of any length goes through them in chunks, one a round, which both of its sides cut alike.

On a GPU it is the receiver's arena that a message is packed into, whole. Every other rank of the host has two slots
there, and for each slot two words: one in which it counts the messages that it has packed, and one in which it counts
those that it has unpacked from this rank's slot in its own arena. The messages of a pair take the slots in turns, by
counts that are in the GPUs' memory: a message is packed while the one before it is still read, and a CUDA graph that is
replayed counts on, beside exchanges that nobody captured.
"""

from typing import NamedTuple

# Of messages in a slot; no two of them share a line of the cache.
ALIGNMENT = 64
# Of one message in a round, at most. On 4 ranks of 2 busy cores, collectives of 1 MB to 64 MB took 0.75 to 1.0 of the
# time with 256 KB, and no less processor time with 64 KB, where what is packed stays in the second-level cache.
CHUNK_BYTES = 512 << 10
_PAGE = 4096
# Written by the ranks of a core, from which on results go past its cache. With 4 ranks on 2 cores of 2 MB of cache, a
# redistribution took 0.55 to 0.85 of the time from 2 MB a core on; with a sum over the result behind it, 1.1 to 1.2 at
# 2 and 4 MB, and 0.8 to 1.0 from 8 MB on.
_PAST_CACHE_BYTES = 8 << 20
NUM_SLOTS = 2
# A line of a GPU's cache; two ranks that poll write to none alike.
WORD_BYTES = 128
# Slots start where an allocator of CUDA's would have put them.
_SLOT_ALIGNMENT = 512
# Lines of a board: two bells and the progress of its rank, and two announcements for each rank.
_LINES, _LINES_OF_RANK = 3, 2


def slot_bytes(arena_bytes: int, num_ranks: int) -> int:
    """Bytes of a slot in an arena of `arena_bytes`; 0 where the board alone does not fit.

    >>> slot_bytes(1 << 20, 4)
    520192
    """
    board = -(-ALIGNMENT * (_LINES + _LINES_OF_RANK * num_ranks) // _PAGE) * _PAGE
    return max(arena_bytes - board, 0) // 2 // _PAGE * _PAGE


def in_lines(num_bytes: int) -> int:
    """Bytes that so many take in whole lines.

    >>> in_lines(65)
    128
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def chunk_bytes(num_ranks: int, slot_bytes: int) -> int:
    """Bytes of a message that go in one round, at most: so many for every peer fit a slot; 0 where none do.

    >>> chunk_bytes(5, 4096), chunk_bytes(4, 1 << 23)
    (1024, 524288)
    """
    return min(CHUNK_BYTES, slot_bytes // max(num_ranks - 1, 1) // ALIGNMENT * ALIGNMENT)


def goes_past_cache(written_bytes: int, num_ranks: int, num_cores: int) -> bool:
    """Whether results of `written_bytes` on each of a machine's ranks are not in its caches when all are written.

    >>> goes_past_cache(4 << 20, 4, 2), goes_past_cache(4 << 20, 4, 4)
    (True, False)
    """
    return written_bytes * num_ranks >= _PAST_CACHE_BYTES * min(num_cores, num_ranks)


class DeviceSlots(NamedTuple):
    """Slots of `slot_bytes` for each of `num_ranks` ranks of a host, in the arena of every one of them.

    Ranks are numbered within the host. All positions are bytes from an arena's start.
    """

    num_ranks: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of an arena."""
        return self._first_slot + NUM_SLOTS * self.num_ranks * self.slot_bytes

    @property
    def _first_slot(self) -> int:
        return _rounded_up(2 * NUM_SLOTS * self.num_ranks * WORD_BYTES)

    def start(self, sender: int, slot: int) -> int:
        """First byte of a sender's slot.

        >>> DeviceSlots(2, 1024).start(0, 0), DeviceSlots(2, 1024).start(1, 1)
        (1024, 4096)
        """
        return self._first_slot + (NUM_SLOTS * sender + slot) * self.slot_bytes

    def packed_word(self, sender: int, slot: int) -> int:
        """Where `sender` counts the messages that it has packed into its slot of this arena.

        >>> DeviceSlots(2, 1024).packed_word(1, 0), DeviceSlots(2, 1024).unpacked_word(0, 0)
        (256, 512)
        """
        return (NUM_SLOTS * sender + slot) * WORD_BYTES

    def unpacked_word(self, receiver: int, slot: int) -> int:
        """Where `receiver` counts the messages of this arena's rank that it has unpacked from its own arena."""
        return (NUM_SLOTS * (self.num_ranks + receiver) + slot) * WORD_BYTES


def device_slots(arena_bytes: int, num_ranks: int) -> DeviceSlots:
    """The longest slots of so many ranks in an arena of at most `arena_bytes`; of 0 bytes where none fit.

    >>> device_slots(16 << 20, 8).slot_bytes, device_slots(1024, 8).slot_bytes
    (1048064, 0)
    """
    left = arena_bytes - DeviceSlots(num_ranks, 0).num_bytes
    slot_bytes = max(left, 0) // (NUM_SLOTS * num_ranks) // _SLOT_ALIGNMENT * _SLOT_ALIGNMENT
    return DeviceSlots(num_ranks, slot_bytes)


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT

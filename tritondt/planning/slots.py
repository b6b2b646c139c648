"""Slots of shared memory: where ranks of one machine pack messages, which the others read there.

An arena is a board of announcements, whole pages of it, and two slots that rounds of exchanges take in turns. A message
of any length goes through them in chunks, one a round, which both of its sides cut alike.
"""

from tritondt.planning.cost import CostTable

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


def chunk_of(costs: CostTable, num_ranks: int) -> int:
    """Bytes of a chunk between `num_ranks`, by their table; 0 where they share no memory.

    >>> chunk_of(CostTable(arena_bytes=1 << 20, ranks_per_host=4), 4), chunk_of(CostTable(), 4)
    (173376, 0)
    """
    if not costs.shares_memory(num_ranks):
        return 0
    return chunk_bytes(num_ranks, slot_bytes(costs.arena_bytes, num_ranks))

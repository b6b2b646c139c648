"""Slots of shared memory: where ranks of one machine pack messages, which the others read there.

An arena is a board of announcements, whole pages of it, and two slots that exchanges take in turns. A message goes
through a slot where one of its length for every peer would fit; both of its sides see that by the length alone.
"""

from tritondt.planning.cost import CostTable

# Of messages in a slot; no two of them share a line of the cache.
ALIGNMENT = 64
_PAGE = 4096
# Lines of a board: two bells and the progress of its rank, and two announcements for each rank.
_LINES, _LINES_OF_RANK = 3, 2


def slot_bytes(arena_bytes: int, num_ranks: int) -> int:
    """Bytes of a slot in an arena of `arena_bytes`; 0 where the board alone does not fit.

    >>> slot_bytes(1 << 20, 4)
    520192
    """
    board = -(-ALIGNMENT * (_LINES + _LINES_OF_RANK * num_ranks) // _PAGE) * _PAGE
    return max(arena_bytes - board, 0) // 2 // _PAGE * _PAGE


def longest_message(num_ranks: int, slot_bytes: int) -> int:
    """Bytes of the longest message that goes through a slot: one of that length for every peer fits.

    >>> longest_message(5, 4096)
    1024
    """
    return slot_bytes // max(num_ranks - 1, 1) // ALIGNMENT * ALIGNMENT


def longest_of(costs: CostTable, num_ranks: int) -> int:
    """Bytes of the longest message through a slot between `num_ranks`, by their table; 0 where they share no memory.

    >>> longest_of(CostTable(arena_bytes=1 << 20, ranks_per_host=4), 4), longest_of(CostTable(), 4)
    (173376, 0)
    """
    if num_ranks > costs.ranks_per_host:
        return 0
    return longest_message(num_ranks, slot_bytes(costs.arena_bytes, num_ranks))

"""Copies of short rows to memory that they fill without gaps: pieces that are written in whole blocks of 16 bytes.

A pack fills one message with rows of one box; an unpack fills a tensor with rows of several, side by side. Written box
by box in units as wide as both sides allow, both take many instructions, and lines that two boxes share are written in
parts.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import gcd, prod
from typing import NamedTuple

from tritondt.kernels.gpu.loop_nest import LoopNest, Operand, coalesce, cut, span_bytes
from tritondt.kernels.gpu.pieces import WIDEST, Grain, Kind, Piece, run_pieces

# So that a block touches two rows at most.
_MIN_RUN_BYTES = WIDEST
# Fewer bytes are not worth pieces for the ends of a span.
_MIN_BYTES = 1024
# Beyond it a piece is left as it is.
_MAX_BYTES = 2**31 - 2**20
# A thread chooses among so many tensors; those who exchange have two: what came, and what was there.
MAX_SOURCES = 2
_MAX_PARTS = 64
# A row has as many of its shortest part at most: a table has a cell for each step of nearly that length.
_MAX_SHORTEST = 4096
# Units of words, of two bytes and of one.
_WIDEST_UNIT = 4


class Rows(NamedTuple):
    """A nest of two loops, in bytes: rows, and the bytes of one."""

    nest: LoopNest

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self.nest.lengths[0]

    @property
    def run(self) -> int:
        """Bytes of a row."""
        return self.nest.lengths[1]

    @property
    def target(self) -> Operand:
        """Where they go."""
        return self.nest.operands[0]


def gathers(nests: Iterable[LoopNest]) -> tuple[list[Piece], list[LoopNest]]:
    """Pieces of short rows that fill their target, and what of the nests these leave.

    >>> from tritondt.kernels.boxes import CopyBox
    >>> from tritondt.kernels.gpu.loop_nest import copy_nest
    >>> columns = [CopyBox(0, 0, 100 * k, 5 * k, 4, (100, 5), (5, 1), (10, 1)) for k in (0, 1)]
    >>> pieces, left = gathers([copy_nest(number, box) for number, box in enumerate(columns)])
    >>> [(piece.kind.value, piece.lengths, piece.ends) for piece in pieces], left
    ([('joined', (10, 100), (5, 10))], [])
    """
    pieces: list[Piece] = []
    left: list[LoopNest] = []
    beside: dict[tuple[int, int, int], list[Rows]] = defaultdict(list)
    for nest in nests:
        found = _short_rows(nest)
        if not found:
            left.append(nest)
        for rows in found:
            beside[rows.target.tensor, rows.num_rows, rows.target.strides[0]].append(rows)
    for (_, count, pitch), members in beside.items():
        members.sort(key=lambda rows: rows.target.offset)
        for group in _adjacent(members):
            if sum(rows.run for rows in group) == pitch and _is_worth_it(group, count * pitch):
                pieces += _filled(group)
            else:
                left += [rows.nest for rows in group]
    return pieces, left


def _short_rows(nest: LoopNest) -> list[Rows]:
    """A nest as rows of two loops each, none where it has none or too many."""
    nest = coalesce(nest)
    *outer, _, run = nest.lengths if len(nest.lengths) > 1 else (0, 0, 0)
    is_short = run >= _MIN_RUN_BYTES and nest.run_bytes == run
    if not is_short or prod(outer) > _MAX_PARTS or (outer and nest.num_bytes < _MIN_BYTES * prod(outer)):
        return []
    parts = [nest]
    for dim in range(len(outer)):
        parts = [cut(part, dim, index, index + 1) for part in parts for index in range(part.lengths[dim])]
    return [Rows(coalesce(part)) for part in parts]


def _adjacent(members: Sequence[Rows]) -> list[list[Rows]]:
    """Rows of one target in groups whose members lie side by side and make rows of their pitch at most."""
    groups: list[list[Rows]] = []
    for rows in members:
        last = groups[-1] if groups else []
        width = sum(each.run for each in last)
        if last and last[-1].target.offset + last[-1].run == rows.target.offset and width < rows.target.strides[0]:
            last.append(rows)
        else:
            groups.append([rows])
    return groups


def _is_worth_it(group: Sequence[Rows], num_bytes: int) -> bool:
    nests = [rows.nest for rows in group]
    spans = (span_bytes(nest, operand) for nest in nests for operand in nest.operands)
    sources = {nest.operands[1].tensor for nest in nests}
    return (
        _unit(group) <= WIDEST // 2
        and _MIN_BYTES <= num_bytes < _MAX_BYTES
        and _span_of_sources(group) + max(spans) < _MAX_BYTES
        and len(sources) <= MAX_SOURCES
        and sum(rows.run for rows in group) <= _MAX_SHORTEST * min(rows.run for rows in group)
    )


def _span_of_sources(group: Sequence[Rows]) -> int:
    offsets = [rows.nest.operands[1].offset for rows in group]
    return max(offsets) - min(offsets)


def _unit(group: Sequence[Rows]) -> int:
    """Bytes that divide all that is known of the rows."""
    numbers = (n for rows in group for each in rows.nest.operands for n in (each.offset, each.strides[0]))
    return gcd(WIDEST, *(rows.run for rows in group), *numbers)


def _filled(group: Sequence[Rows]) -> list[Piece]:
    """The piece of a group, whose whole blocks it moves, and those of what lies before and behind them."""
    first, last = group[0].nest, group[-1].nest
    unit, count = min(_unit(group), _WIDEST_UNIT), group[0].num_rows
    ends = tuple(accumulate(rows.run // unit for rows in group))
    operands = [first.operands[0], *(rows.nest.operands[1] for rows in group)]
    in_units = tuple(operand._replace(strides=(1, operand.strides[0] // unit)) for operand in operands)
    kind = Kind.GATHERED if len(group) == 1 else Kind.JOINED
    piece = Piece(kind, unit, (ends[-1], count), in_units, ends)
    start = piece.operands[0].offset
    head, tail = -start % WIDEST, (start + piece.num_bytes) % WIDEST
    run = group[-1].run
    return [piece, *_end(first, 0, 0, head), *_end(last, count - 1, run - tail, run)]


def _end(nest: LoopNest, row: int, start: int, stop: int) -> list[Piece]:
    """Some bytes of a row."""
    return list(run_pieces(cut(cut(nest, 0, row, row + 1), 1, start, stop), Grain())) if start < stop else []
